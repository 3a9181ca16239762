package outrider

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// recorder is a database that keeps what it is told.
type recorder struct {
	calls []call
	err   error
}

type call struct {
	query string
	args  []any
}

func (r *recorder) ExecContext(_ context.Context, query string, args ...any) (sql.Result, error) {
	r.calls = append(r.calls, call{query, args})
	return driver.RowsAffected(1), r.err
}

func newOutbox(t testing.TB, cfg Config) *Outbox {
	t.Helper()
	o, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func TestStatements(t *testing.T) {
	const id = "0190163d-8694-739b-aea5-966c26f8ad91"
	at := time.Date(2026, 1, 2, 3, 4, 5, 6001, time.FixedZone("", 3600))
	plain := placed()
	plain.ID = strings.ToUpper(id)
	full := Event{
		ID: id, AggregateType: "order", AggregateID: "42", Type: "OrderPlaced", Key: "k", ContentType: "text/plain",
		Headers: map[string]string{"b": "<", "a": "ü"}, Traceparent: parent, AvailableAt: at,
	}
	delayed := plain
	delayed.Unordered, delayed.Delay, delayed.ContentType = true, time.Microsecond+1, "application/json"
	for _, c := range []struct {
		name   string
		cfg    Config
		events []Event
		query  string
		args   []any
	}{
		{
			"one", Config{Dialect: Postgres}, []Event{plain},
			`INSERT INTO "outbox_events" (event_id, aggregate_type, aggregate_id, event_type, payload) VALUES ($1::uuid, $2, $3, $4, $5::bytea)`,
			[]any{id, "order", "42", "OrderPlaced", []byte("{}")},
		},
		{
			"json", Config{Dialect: Postgres, Payload: PayloadJSON, Table: "app.events"}, []Event{plain},
			`INSERT INTO "app"."events" (event_id, aggregate_type, aggregate_id, event_type, payload) VALUES ($1::uuid, $2, $3, $4, $5::json)`,
			[]any{id, "order", "42", "OrderPlaced", "{}"},
		},
		{
			"all columns", Config{Dialect: Postgres}, []Event{plain, full, delayed},
			`INSERT INTO "outbox_events" (event_id, aggregate_type, aggregate_id, event_type, payload, event_key, content_type, headers, available_at) VALUES ` +
				`($1::uuid, $2, $3, $4, $5::bytea, $6, $7, $8::json, $9::timestamptz), ` +
				`($10::uuid, $11, $12, $13, $14::bytea, $15, $16, $17::json, $18::timestamptz), ` +
				`($19::uuid, $20, $21, $22, $23::bytea, $24, $25, $26::json, clock_timestamp() + $27::bigint * interval '1 microsecond')`,
			[]any{
				id, "order", "42", "OrderPlaced", []byte("{}"), nil, "application/json", nil, nil,
				id, "order", "42", "OrderPlaced", nil, "k", "text/plain", `{"a":"ü","b":"<","traceparent":"` + parent + `"}`, time.Date(2026, 1, 2, 2, 4, 5, 7000, time.UTC),
				id, "order", "42", "OrderPlaced", []byte("{}"), "", "application/json", nil, int64(2),
			},
		},
		{
			"sqlite", Config{Dialect: SQLite}, []Event{full, delayed},
			`INSERT INTO "outbox_events" (event_id, aggregate_type, aggregate_id, event_type, payload, event_key, content_type, headers, available_at) VALUES ` +
				`(?, ?, ?, ?, ?, ?, ?, ?, ?), (?, ?, ?, ?, ?, ?, ?, ?, ` + sqliteNow + ` + ?)`,
			[]any{
				id, "order", "42", "OrderPlaced", nil, "k", "text/plain", `{"a":"ü","b":"<","traceparent":"` + parent + `"}`, time.Date(2026, 1, 2, 2, 4, 5, 7000, time.UTC).UnixMicro(),
				id, "order", "42", "OrderPlaced", []byte("{}"), "", "application/json", nil, int64(2),
			},
		},
	} {
		db := &recorder{}
		if err := newOutbox(t, c.cfg).Add(t.Context(), db, c.events...); err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if len(db.calls) != 1 || db.calls[0].query != c.query || !reflect.DeepEqual(db.calls[0].args, c.args) {
			t.Errorf("%s: got\n%v\nwant\n{%s %v}", c.name, db.calls, c.query, c.args)
		}
	}
}

// The caller's events are read only.
func TestAddLeavesEventsAlone(t *testing.T) {
	e := placed()
	e.Headers = map[string]string{"x": "y"}
	e.Traceparent = parent
	if err := newOutbox(t, Config{Dialect: Postgres}).Add(t.Context(), &recorder{}, e); err != nil {
		t.Fatal(err)
	}
	if e.ID != "" || len(e.Headers) != 1 {
		t.Errorf("changed to %+v", e)
	}
}

// Every event stands in exactly one statement, in order; no statement is beyond a
// bound, unless one event alone is; and no two neighbours would fit into one.
func TestSplitting(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o, err := New(Config{Dialect: Postgres, MaxPayload: -1})
		if err != nil {
			t.Fatal(err)
		}
		o.maxParams = rapid.IntRange(9, 60).Draw(t, "params")
		o.maxBytes = rapid.IntRange(1, 2000).Draw(t, "bytes")
		events := rapid.SliceOfN(rapid.Custom(drawEvent), 1, 40).Draw(t, "events")
		for i := range events {
			events[i].ID = fmt.Sprintf("00000000-0000-7000-8000-%012d", i+1)
		}
		db := &recorder{}
		if err := o.Add(context.Background(), db, events...); err != nil {
			t.Fatal(err)
		}
		next := 0
		var before []Event
		for _, c := range db.calls {
			n := strings.Count(c.query, "::uuid")
			if next+n > len(events) {
				t.Fatalf("more rows than events: %v", db.calls)
			}
			these := events[next : next+n]
			checkStatement(t, o, c, these)
			if before != nil && fits(o, append(before[:len(before):len(before)], these[0])) {
				t.Fatalf("event %d could have gone with those before it", next)
			}
			before, next = these, next+n
		}
		if next != len(events) {
			t.Fatalf("%d of %d events in %v", next, len(events), db.calls)
		}
	})
}

func drawEvent(t *rapid.T) Event {
	e := placed()
	e.Payload = make([]byte, rapid.IntRange(0, 700).Draw(t, "payload"))
	if rapid.Bool().Draw(t, "keyed") {
		e.Key = "k"
	}
	if rapid.IntRange(0, 3).Draw(t, "typed") == 0 {
		e.ContentType = "text/plain"
	}
	if rapid.IntRange(0, 3).Draw(t, "headers") == 0 {
		e.Headers = map[string]string{"x": strings.Repeat("y", rapid.IntRange(0, 100).Draw(t, "value"))}
	}
	if rapid.IntRange(0, 3).Draw(t, "delayed") == 0 {
		e.Delay = time.Second
	}
	return e
}

var numbered = regexp.MustCompile(`\$(\d+)`)

func checkStatement(t *rapid.T, o *Outbox, c call, events []Event) {
	if len(events) > 1 && !fits(o, events) {
		t.Fatalf("beyond a bound: %v", c)
	}
	if got := len(numbered.FindAllString(c.query, -1)); got != len(c.args) {
		t.Fatalf("%d parameters, %d arguments: %v", got, len(c.args), c)
	}
	for i, m := range numbered.FindAllStringSubmatch(c.query, -1) {
		if m[1] != fmt.Sprint(i+1) {
			t.Fatalf("parameter %d is %s: %v", i+1, m[0], c)
		}
	}
	width := len(c.args) / len(events)
	for i, e := range events {
		if c.args[i*width] != e.ID || !reflect.DeepEqual(c.args[i*width+4], any(e.Payload)) {
			t.Fatalf("row %d of %v is not %+v", i, c, e)
		}
	}
}

// fits says whether events may share a statement, reckoned apart from the code.
func fits(o *Outbox, events []Event) bool {
	names := map[string]bool{}
	size := 0
	for _, e := range events {
		size += len(e.Payload) + 36 + len(e.AggregateType) + len(e.AggregateID) + len(e.Type) + len(e.Key) + len(e.ContentType)
		if e.Key != "" {
			names["event_key"] = true
		}
		if e.ContentType != "" {
			names["content_type"] = true
		}
		if e.Headers != nil {
			names["headers"] = true
			size += len(headersJSON(&e))
		}
		if e.Delay != 0 {
			names["available_at"] = true
		}
	}
	return len(events)*(5+len(names)) <= o.maxParams && size <= o.maxBytes
}

// The bounds as they are in force.
func TestStatementBounds(t *testing.T) {
	for _, c := range []struct {
		dialect Dialect
		columns int // 5 or 7
		events  int
		payload int
		want    int
	}{
		{Postgres, 5, 13107, 0, 1},
		{Postgres, 5, 13108, 0, 2},
		{SQLite, 5, 6553, 0, 1},
		{SQLite, 5, 6554, 0, 2},
		{SQLite, 7, 4680, 0, 1},
		{SQLite, 7, 4681, 0, 2},      // by one parameter
		{Postgres, 5, 8, 1 << 20, 2}, // texts count too
		{Postgres, 5, 7, 1 << 20, 1},
	} {
		events := make([]Event, c.events)
		for i := range events {
			events[i] = placed()
			events[i].Payload = make([]byte, c.payload)
			if c.columns == 7 {
				events[i].Key, events[i].ContentType = "k", "text/plain"
			}
		}
		db := &recorder{}
		if err := newOutbox(t, Config{Dialect: c.dialect}).Add(t.Context(), db, events...); err != nil || len(db.calls) != c.want {
			t.Errorf("%+v: %d statements, %v", c, len(db.calls), err)
		}
	}
}

func TestNothingToDo(t *testing.T) {
	o := newOutbox(t, Config{Dialect: Postgres})
	db := &recorder{}
	if err := o.Add(t.Context(), db); err != nil || len(db.calls) != 0 {
		t.Errorf("no events: %v, %d calls", err, len(db.calls))
	}
	if err := o.Add(t.Context(), nil, placed()); err == nil || !strings.Contains(err.Error(), "transaction is nil") {
		t.Errorf("no transaction: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := o.Add(ctx, db, placed()); !errors.Is(err, context.Canceled) || len(db.calls) != 0 {
		t.Errorf("ended context: %v, %d calls", err, len(db.calls))
	}
}

type stateError string

func (e stateError) Error() string    { return "state " + string(e) }
func (e stateError) SQLState() string { return string(e) }

func TestDatabaseErrors(t *testing.T) {
	for state, hint := range map[string]string{
		"42P01": "outrider migrate up", "3F000": "search_path", "42703": "migrate status",
		"42804": "Config.Payload (bytea)", "42501": "INSERT", "25P02": "earlier statement", "40001": "",
	} {
		cause := stateError(state)
		err := newOutbox(t, Config{Dialect: Postgres}).Add(t.Context(), &recorder{err: cause}, placed(), placed())
		if !errors.Is(err, cause) || !strings.Contains(err.Error(), `insert events 0 to 1 into "outbox_events"`) {
			t.Errorf("%s: %v", state, err)
		}
		if got := Hint(err); !strings.Contains(got, hint) || hint == "" && got != "" {
			t.Errorf("%s: hint %q", state, got)
		}
	}
	for _, busy := range []string{"database is locked (5) (SQLITE_BUSY)", "database table is locked"} {
		cause := errors.New(busy)
		err := newOutbox(t, Config{Dialect: SQLite}).Add(t.Context(), &recorder{err: cause}, placed())
		if got := Hint(err); !errors.Is(err, cause) || !strings.Contains(got, "_txlock=immediate") || !strings.Contains(got, "busy_timeout") {
			t.Errorf("%v with hint %q", err, got)
		}
	}
	plain := errors.New("broken")
	if err := newOutbox(t, Config{Dialect: SQLite}).Add(t.Context(), &recorder{err: plain}, placed()); !errors.Is(err, plain) || !strings.Contains(err.Error(), "insert event 0 into") {
		t.Errorf("got %v", err)
	}
}
