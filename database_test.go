package outrider_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
)

const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// stored is a row as it reads back.
type stored struct {
	ID                                                 int64
	EventID, AggregateType, AggregateID, Type, Content string
	Key                                                sql.NullString
	Payload                                            []byte
	Headers                                            map[string]string
	Available                                          sql.NullInt64 // microseconds
}

// readAll reads the table in order of ids.
func readAll(t fataler, db *sql.DB, d outrider.Dialect) []stored {
	t.Helper()
	query := "select id, event_id, aggregate_type, aggregate_id, event_type, content_type, event_key, payload, payload is null, coalesce(headers, 'null'), available_at from outbox_events order by id"
	if d == outrider.Postgres {
		query = "select id, event_id::text, aggregate_type, aggregate_id, event_type, content_type, event_key, payload, payload is null, coalesce(headers, 'null')::text, (extract(epoch from available_at) * 1000000)::bigint from outbox_events order by id"
	}
	rows, err := db.QueryContext(context.Background(), query)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var out []stored
	for rows.Next() {
		var s stored
		var headers string
		var null bool
		if err := rows.Scan(&s.ID, &s.EventID, &s.AggregateType, &s.AggregateID, &s.Type, &s.Content, &s.Key, &s.Payload, &null, &headers, &s.Available); err != nil {
			t.Fatal(err)
		}
		if !null && s.Payload == nil {
			s.Payload = []byte{} // how SQLite's driver gives an empty blob is its own affair
		}
		if err := json.Unmarshal([]byte(headers), &s.Headers); err != nil {
			t.Fatal(err)
		}
		out = append(out, s)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

// expected is how an event reads back; its id is not known if it had none.
func expected(e outrider.Event) stored {
	s := stored{
		EventID: strings.ToLower(e.ID), AggregateType: e.AggregateType, AggregateID: e.AggregateID, Type: e.Type,
		Content: e.ContentType, Key: sql.NullString{String: e.Key, Valid: e.Unordered || e.Key != ""}, Payload: e.Payload,
		Headers: maps.Clone(e.Headers),
	}
	if s.Content == "" {
		s.Content = "application/json"
	}
	if e.Traceparent != "" {
		if s.Headers == nil {
			s.Headers = map[string]string{}
		}
		s.Headers["traceparent"] = e.Traceparent
	}
	if len(s.Headers) == 0 {
		s.Headers = nil
	}
	if !e.AvailableAt.IsZero() {
		micros := e.AvailableAt.UnixMicro()
		if e.AvailableAt.Nanosecond()%1000 != 0 {
			micros++
		}
		s.Available = sql.NullInt64{Int64: micros, Valid: true}
	}
	return s
}

// testRoundTrip stores any events and reads back the very same.
func testRoundTrip(t *testing.T, db *sql.DB, cfg outrider.Config) {
	t.Helper()
	o := mustNew(t, cfg)
	rapid.Check(t, func(t *rapid.T) {
		if _, err := db.ExecContext(context.Background(), "delete from outbox_events"); err != nil {
			t.Fatal(err)
		}
		events := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) outrider.Event { return drawAny(t, cfg) }), 1, 6).Draw(t, "events")
		tx, err := db.BeginTx(context.Background(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if err := o.Add(context.Background(), tx, events...); err != nil {
			t.Fatal(err)
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		got := readAll(t, db, cfg.Dialect)
		if len(got) != len(events) {
			t.Fatalf("%d rows of %d events", len(got), len(events))
		}
		for i, e := range events {
			want := expected(e)
			want.ID = got[i].ID
			if want.EventID == "" {
				want.EventID = got[i].EventID
			}
			if !reflect.DeepEqual(got[i], want) || i > 0 && got[i].ID <= got[i-1].ID {
				t.Fatalf("event %d\ngot  %+v\nwant %+v", i, got[i], want)
			}
		}
	})
}

func drawAny(t *rapid.T, cfg outrider.Config) outrider.Event {
	text := rapid.Custom(func(t *rapid.T) string {
		return strings.ReplaceAll(rapid.StringN(0, 20, 200).Draw(t, "text"), "\x00", "")
	})
	needed := rapid.Custom(func(t *rapid.T) string { return "x" + text.Draw(t, "text") })
	e := outrider.Event{AggregateType: needed.Draw(t, "aggregate type"), AggregateID: needed.Draw(t, "aggregate id"), Type: needed.Draw(t, "type")}
	switch rapid.IntRange(0, 3).Draw(t, "key kind") {
	case 0:
		e.Unordered = true
	case 1:
		e.Key = text.Draw(t, "key")
	}
	if rapid.Bool().Draw(t, "with id") {
		e.ID = outrider.NewID()
	}
	if rapid.IntRange(0, 5).Draw(t, "with payload") > 0 {
		e.Payload = rapid.SliceOf(rapid.Byte()).Draw(t, "payload")
		if cfg.Payload == outrider.PayloadJSON {
			e.Payload = drawJSON(t)
		}
	}
	if rapid.IntRange(0, 3).Draw(t, "with content type") == 0 {
		e.ContentType = rapid.StringMatching(`[a-zü/;= ]{1,20}`).Draw(t, "content type")
	}
	if rapid.IntRange(0, 3).Draw(t, "with headers") == 0 {
		e.Headers = rapid.MapOfN(rapid.StringMatching(`x-[A-Za-zäλ"\\':-]{0,8}`), text, 0, 4).Draw(t, "headers")
	}
	if rapid.IntRange(0, 3).Draw(t, "with trace") == 0 {
		e.Traceparent = parent
	}
	if rapid.IntRange(0, 3).Draw(t, "with time") == 0 {
		// The first and the last instant that are allowed, and between.
		at := time.Unix(rapid.Int64Range(-62135596800, 253402300799).Draw(t, "seconds"), rapid.Int64Range(1, 999_999_000).Draw(t, "nanoseconds"))
		e.AvailableAt = at
	}
	return e
}

// drawJSON makes texts that a database which parses them is tempted to change:
// numbers, repeated members, spaces, escapes.
func drawJSON(t *rapid.T) []byte {
	return []byte(rapid.Custom(func(t *rapid.T) string {
		word, err := json.Marshal(rapid.String().Draw(t, "word"))
		if err != nil {
			t.Fatal(err)
		}
		number := rapid.SampledFrom([]string{"1.50", "1e400", "-0", "12345678901234567890.1", "0.1e-9"}).Draw(t, "number")
		shape := rapid.SampledFrom([]string{"%s", ` {"b" : %s,"a":[],  "b":null} `, "[%s ,%[1]s]\n", `{"\u0000\ud83d":%s}`}).Draw(t, "shape")
		return fmt.Sprintf(shape, rapid.SampledFrom([]string{string(word), number}).Draw(t, "value"))
	}).Draw(t, "json"))
}

// testDelay: what is stored is the delay from the insert by the database's clock,
// read before and after through query.
func testDelay(t *testing.T, db *sql.DB, cfg outrider.Config, query string) {
	t.Helper()
	clock := func(tx *sql.Tx) (micros int64) {
		t.Helper()
		if err := tx.QueryRowContext(t.Context(), query).Scan(&micros); err != nil {
			t.Fatal(err)
		}
		return micros
	}
	e := placed()
	delays := []time.Duration{1, time.Microsecond, 90 * time.Minute, 200 * 365 * 24 * time.Hour}
	var events []outrider.Event
	for _, d := range delays {
		e.Delay = d
		events = append(events, e)
	}
	e.Delay = 0
	events = append(events, e) // and none at all
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	before := clock(tx)
	if err := mustNew(t, cfg).Add(t.Context(), tx, events...); err != nil {
		t.Fatal(err)
	}
	after := clock(tx)
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	rows := readAll(t, db, cfg.Dialect)
	for i, d := range delays {
		micros := (int64(d) + 999) / 1000
		if got := rows[i].Available.Int64; got < before+micros || got > after+micros {
			t.Errorf("%s: %d microseconds after the clock before, %d after the one behind", d, got-before, got-after)
		}
	}
	if rows[len(delays)].Available.Valid {
		t.Error("an event without delay got one")
	}
}

// testAllOrNothing: with the last of so many events refused by the database, a
// *sql.DB keeps none of them.
func testAllOrNothing(t *testing.T, db *sql.DB, cfg outrider.Config, refuse string, perStatement int) {
	t.Helper()
	mustExec(t, db, refuse) // events of type "bad"
	o := mustNew(t, cfg)
	events := make([]outrider.Event, perStatement+1)
	for i := range events {
		events[i] = placed()
	}
	events[perStatement].Type = "bad"
	count := func() (n int) {
		t.Helper()
		if err := db.QueryRowContext(t.Context(), "select count(*) from outbox_events").Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	if err := o.Add(t.Context(), db, events...); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("insert event %d into", perStatement)) {
		t.Errorf("*sql.DB: %v", err)
	}
	if n := count(); n != 0 {
		t.Errorf("*sql.DB: %d rows are left", n)
	}
	type wrapped struct{ *sql.DB }
	if err := o.Add(t.Context(), wrapped{db}, events...); err == nil || count() != 0 {
		t.Errorf("wrapped *sql.DB: %v, %d rows are left", err, count())
	}
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	begin := func(s string) {
		t.Helper()
		if _, err := conn.ExecContext(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	// A connection may be in a transaction of the caller's.
	begin("begin")
	if err := o.Add(t.Context(), conn, events...); err == nil {
		t.Error("*sql.Conn: no error")
	}
	begin("rollback")
	if n := count(); n != 0 {
		t.Errorf("*sql.Conn, rolled back: %d rows are left", n)
	}
	if err := o.Add(t.Context(), conn, events...); err == nil || count() != perStatement {
		t.Errorf("*sql.Conn without a transaction: %v, %d rows", err, count())
	}
	mustExec(t, db, "delete from outbox_events")
	events[perStatement].Type = "good"
	if err := o.Add(t.Context(), db, events...); err != nil || count() != len(events) {
		t.Errorf("%d events: %v, %d rows", len(events), err, count())
	}
}

// testBasics: what holds in every dialect.
func testBasics(t *testing.T, db *sql.DB, cfg outrider.Config) {
	t.Helper()
	o := mustNew(t, cfg)
	ctx := t.Context()

	// An id given twice is stored twice.
	e := placed()
	e.ID = outrider.NewID()
	if err := o.Add(ctx, db, e, e); err != nil {
		t.Fatal(err)
	}
	if err := o.Add(ctx, db, e); err != nil {
		t.Fatal(err)
	}
	rows := readAll(t, db, cfg.Dialect)
	if len(rows) != 3 || rows[0].EventID != e.ID || rows[2].EventID != e.ID {
		t.Errorf("an id given three times: %+v", rows)
	}

	// Rolled back: never seen. Nothing is written for a context that has ended.
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := o.Add(ctx, tx, placed()); err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if err := o.Add(ended, db, placed()); !errors.Is(err, context.Canceled) {
		t.Errorf("ended context: %v", err)
	}
	if got := readAll(t, db, cfg.Dialect); len(got) != 3 {
		t.Errorf("%d rows, want the 3 of before", len(got))
	}

	// The INSERT of five columns is enough.
	mustExec(t, db, "delete from outbox_events")
	plain, err := migrate.PlainInsert(migrate.Options{Dialect: cfg.Dialect})
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []any{nil, "k", ""} {
		mustExec(t, db, plain, "order", "42", "OrderPlaced", []byte("{}"), key)
	}
	for i, s := range readAll(t, db, cfg.Dialect) {
		want := expected(placed())
		want.ID, want.EventID = s.ID, s.EventID
		want.Key = []sql.NullString{{}, {String: "k", Valid: true}, {Valid: true}}[i]
		if _, err := outrider.ParseID(s.EventID); err != nil || !reflect.DeepEqual(s, want) {
			t.Errorf("plain INSERT: %v\ngot  %+v\nwant %+v", err, s, want)
		}
	}

	// The largest key that can be configured goes into the indexes, and bytes
	// that don't compress are the worst case.
	wide := cfg
	wide.MaxKey = 2048
	random := rand.New(rand.NewPCG(1, 2))
	var b strings.Builder
	for b.Len()+4 <= wide.MaxKey {
		b.WriteRune(rune(0x10000 + random.IntN(0x80000)))
	}
	long := placed()
	long.AggregateID, long.Key = b.String(), b.String()
	if err := mustNew(t, wide).Add(ctx, db, long); err != nil {
		t.Errorf("a key of %d bytes: %v", b.Len(), err)
	}
}

func placed() outrider.Event {
	return outrider.Event{AggregateType: "order", AggregateID: "42", Type: "OrderPlaced", Payload: []byte(`{}`)}
}

func mustNew(t fataler, cfg outrider.Config) *outrider.Outbox {
	t.Helper()
	o, err := outrider.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func mustExec(t fataler, db *sql.DB, query string, args ...any) {
	t.Helper()
	if _, err := db.ExecContext(context.Background(), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// fataler is what *testing.T and *rapid.T have in common here.
type fataler interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}
