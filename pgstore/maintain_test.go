package pgstore_test

import (
	"context"
	"database/sql"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/relay"
	"github.com/outrider-dev/outrider/store"
)

func partitions(t testing.TB, db *sql.DB) []string {
	t.Helper()
	rows, err := db.Query(`select pg_get_expr(c.relpartbound, c.oid) from pg_inherits i join pg_class c on c.oid = i.inhrelid
		where i.inhparent = 'outbox_events'::regclass order by c.oid`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var out []string
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			t.Fatal(err)
		}
		out = append(out, s)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

// The last partition is split ahead of the sequence, the next one while there
// are rows, and reading goes on over the border.
func TestMaintainMakesPartitionsAhead(t *testing.T) {
	ctx := context.Background()
	s, db := open(t, pgstore.Config{PartitionSize: 1000})
	for n := 1; n <= 4; n++ {
		if _, err := db.Exec(`insert into outbox_events (aggregate_type, aggregate_id, event_type, payload, event_key)
			select 'order', '1', 'Placed', '{}', null from generate_series(1, 700)`); err != nil {
			t.Fatal(err)
		}
		for range 2 { // the second time there is nothing to do
			if err := s.Maintain(ctx); err != nil {
				t.Fatal(err)
			}
		}
	}
	got := partitions(t, db)
	if len(got) < 3 || !strings.HasSuffix(got[len(got)-1], "TO (MAXVALUE)") {
		t.Fatalf("partitions are %q", got)
	}
	if n := readEverything(t, s); n != 4*700 {
		t.Errorf("read %d events, want %d", n, 4*700)
	}
}

// A partition that is made ahead has the settings that the first has: without
// them an insert-only table waits for vacuum until it is frozen, and vacuum cuts
// its end off under a strong lock.
func TestPartitionsAheadHaveVacuumSettings(t *testing.T) {
	s, db := open(t, pgstore.Config{PartitionSize: 1000})
	if _, err := db.Exec(`select setval('outbox_events_id_seq', 600)`); err != nil {
		t.Fatal(err)
	}
	if err := s.Maintain(context.Background()); err != nil {
		t.Fatal(err)
	}
	var n int
	var settings string
	if err := db.QueryRow(`select count(*), string_agg(distinct array_to_string(c.reloptions, ' '), '; ')
		from pg_inherits i join pg_class c on c.oid = i.inhrelid where i.inhparent = 'outbox_events'::regclass`).Scan(&n, &settings); err != nil {
		t.Fatal(err)
	}
	if n != 2 || settings != "autovacuum_vacuum_insert_scale_factor=0.05 vacuum_truncate=off" {
		t.Errorf("%d partitions with the settings %q", n, settings)
	}
}

// NUM-01: partitions are made ahead beyond every border of numbers, events fit
// them, and the end of all numbers is said before it comes.
func TestMaintainLargeIDs(t *testing.T) {
	ctx := context.Background()
	s, db := open(t, pgstore.Config{PartitionSize: 1000})
	set := func(id int64) {
		t.Helper()
		if _, err := db.Exec(`select setval('outbox_events_id_seq', $1, false)`, id); err != nil {
			t.Fatal(err)
		}
	}
	insert := func(n int) (last int64) {
		t.Helper()
		if err := db.QueryRow(`with e as (insert into outbox_events (aggregate_type, aggregate_id, event_type, payload, event_key)
			select 'order', '1', 'Placed', '{}', null from generate_series(1, $1::int) returning id) select max(id) from e`, n).Scan(&last); err != nil {
			t.Fatal(err)
		}
		return last
	}
	parts := 1
	for _, at := range []int64{1<<31 - 5, 1<<32 - 5, 1<<53 - 5, 1<<63 - 2_000_000_000} {
		set(at)
		insert(10)
		for range 2 { // the second time there is nothing to do
			if err := s.Maintain(ctx); err != nil {
				t.Fatalf("at %d: %v", at, err)
			}
		}
		parts++
		got := partitions(t, db)
		want := fmt.Sprintf("FOR VALUES FROM ('%d') TO (MAXVALUE)", at+9+1000)
		if len(got) != parts || got[len(got)-1] != want {
			t.Fatalf("at %d: partitions are %q, want %d of which the last is %q", at, got, parts, want)
		}
		if last := insert(1500); last != at+1509 { // over the border
			t.Errorf("the last id is %d, want %d", last, at+1509)
		}
	}
	for _, left := range []int64{900_000_000, 100} {
		set(math.MaxInt64 - left)
		insert(10)
		err := s.Maintain(ctx)
		if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("run out: the sequence outbox_events_id_seq stands at %d, %d are left", math.MaxInt64-left+9, left-9)) || outrider.Hint(err) == "" {
			t.Errorf("with %d ids left: %v, hint %q", left, err, outrider.Hint(err))
		}
	}
	if got := partitions(t, db); len(got) != parts {
		t.Errorf("partitions are %q", got)
	}
	if last := insert(91); last != math.MaxInt64 {
		t.Errorf("the last of all ids is %d", last)
	}
	if n := readEverything(t, s); n != 4*1510+2*10+91 {
		t.Errorf("read %d events, want %d", n, 4*1510+2*10+91)
	}
}

// Somebody who holds the table makes it give up and say so; the next round does
// it.
func TestMaintainGivesWay(t *testing.T) {
	ctx := context.Background()
	s, db := open(t, pgstore.Config{PartitionSize: 100})
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback() // ends it if the test failed
	if _, err := tx.Exec(`insert into outbox_events (aggregate_type, aggregate_id, event_type, payload, event_key)
		select 'order', '1', 'Placed', '{}', null from generate_series(1, 60)`); err != nil {
		t.Fatal(err)
	}
	if err := s.Maintain(ctx); err == nil || outrider.Hint(err) == "" {
		t.Fatalf("maintain beside an open transaction: %v, want an error with a hint", err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	if err := s.Maintain(ctx); err != nil {
		t.Fatal(err)
	}
	if got := partitions(t, db); len(got) != 2 {
		t.Errorf("partitions are %q", got)
	}
}

func TestMaintainMissesTheLastPartition(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	if _, err := db.Exec(`alter table outbox_events detach partition outbox_events_p0`); err != nil {
		t.Fatal(err)
	}
	err := s.Maintain(context.Background())
	if err == nil || !strings.Contains(outrider.Hint(err), "maxvalue") {
		t.Errorf("maintain: %v, hint %q", err, outrider.Hint(err))
	}
}

// A cluster or a sequence that went back is noticed before anything is sent.
func TestJoinNoticesRestore(t *testing.T) {
	ctx := context.Background()
	for what, sql := range map[string]string{
		"another cluster":      `update outbox_source set system_identifier = '1'`,
		"transaction ids went": `update outbox_source set seen_xid = '9000000000000'`,
		"outbox_events_id_seq": `update outbox_source set seen_id = 1000`,
	} {
		s, db := open(t, pgstore.Config{})
		p := store.JoinParams{Relay: "a", TTL: 1e9, Grace: 1e8, Destinations: []store.Destination{{Name: "d"}}}
		ses, err := s.Join(ctx, p)
		if err != nil {
			t.Fatal(err)
		}
		if err := ses.Leave(ctx); err != nil {
			t.Fatal(err)
		}
		if _, err := db.Exec(sql); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Join(ctx, p); err == nil || !strings.Contains(err.Error(), what) || outrider.Hint(err) == "" {
			t.Errorf("join: %v, want %q with a hint", err, what)
		}
		if err := s.Maintain(ctx); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("maintain: %v, want %q", err, what)
		}
	}
}

// A sequence that is set back under a running relay loses nothing: positions are
// snapshots, not ids. It is said, since new events sort before old ones.
func TestSequenceSetBackUnderARelay(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	ctx := context.Background()
	fill := func(n int) {
		t.Helper()
		if _, err := db.Exec(`insert into outbox_events (aggregate_type, aggregate_id, event_type, payload)
			select 'a', 'a' || i % 50, 'T', '{}' from generate_series(1, $1::int) i`, n); err != nil {
			t.Fatal(err)
		}
	}
	sk := memsink.New(memsink.Config{})
	r, _ := relaying(t, s, sk, relay.Config{MaintainEvery: 50 * time.Millisecond})
	fill(1000)
	arrive(t, sk, 1000, "before")
	for _, q := range []string{`update outbox_source set seen_id = 1000`, `delete from outbox_events`, `alter sequence outbox_events_id_seq restart with 1`} {
		if _, err := db.ExecContext(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	fill(5)
	for end := time.Now().Add(time.Minute); !strings.Contains(r.Health().MaintainError, "outbox_events_id_seq went back"); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it says %q", r.Health().MaintainError)
		}
	}
	fill(1995)
	arrive(t, sk, 3000, "since the sequence was set back")
	ids := map[string]bool{}
	for _, m := range sk.Messages() {
		ids[m.ID] = true
	}
	if len(ids) != 3000 {
		t.Errorf("%d of 3000 events arrived", len(ids))
	}
}

// readEverything delivers what there is, and counts it.
func readEverything(t *testing.T, s *pgstore.Store) int {
	t.Helper()
	ctx := context.Background()
	ses, err := s.Join(ctx, store.JoinParams{Relay: "r", TTL: 1e10, Grace: 1e9, Destinations: []store.Destination{{Name: "d", FromEarliest: true}}})
	if err != nil {
		t.Fatal(err)
	}
	defer ses.Leave(ctx) //nolint:errcheck // the database goes with the test
	l := acquire(t, ses)
	n := 0
	for {
		c, err := ses.Claim(ctx, store.ClaimParams{Lease: l, MaxRecords: 333, MaxBytes: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		if len(c.Records) == 0 {
			return n
		}
		out := make([]store.Outcome, len(c.Records))
		for i := range out {
			out[i].State = store.Published
		}
		for _, p := range []store.CommitParams{{Start: []*store.Claim{c}}, {Settle: []store.Settlement{{Claim: c, Outcomes: out}}}} {
			p.Lease = l
			if err := ses.Commit(ctx, p); err != nil {
				t.Fatal(err)
			}
		}
		n += len(c.Records)
	}
}

// What a dead relay leaves goes once it owns nothing; one that lives keeps its
// place however late it is.
func TestMaintainBuriesDeadRelays(t *testing.T) {
	ctx := context.Background()
	s, db := open(t, pgstore.Config{})
	sessions := map[string]store.Session{}
	for _, name := range []string{"dead", "late", "owner"} {
		ses, err := s.Join(ctx, store.JoinParams{Relay: name, TTL: time.Hour, Grace: time.Millisecond,
			Destinations: []store.Destination{{Name: "d"}}})
		if err != nil {
			t.Fatal(err)
		}
		sessions[name] = ses
	}
	defer pgstore.Kill(sessions["late"])
	acquire(t, sessions["owner"])
	pgstore.Kill(sessions["dead"])
	pgstore.Kill(sessions["owner"])
	names := func() string {
		t.Helper()
		if err := s.Maintain(ctx); err != nil {
			t.Fatal(err)
		}
		var out string
		if err := db.QueryRow(`select string_agg(relay, ' ' order by relay) from outbox_relays`).Scan(&out); err != nil {
			t.Fatal(err)
		}
		return out
	}
	if got := names(); got != "dead late owner" { // it may only have lost its connection
		t.Errorf("before their time is over: %s", got)
	}
	if _, err := db.Exec(`update outbox_relays set expires_at = clock_timestamp() - interval '1 second'`); err != nil {
		t.Fatal(err)
	}
	// A server process notices the end of its connection a little later.
	deadline := time.Now().Add(time.Minute)
	for got := names(); got != "late owner"; got = names() {
		if time.Now().After(deadline) {
			t.Fatalf("left: %s", got)
		}
	}
	acquire(t, sessions["late"])
	if got := names(); got != "late" {
		t.Errorf("once its lease is taken over: %s", got)
	}
}
