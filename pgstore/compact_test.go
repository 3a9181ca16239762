package pgstore

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider/store"
)

// atWork is a session with a lease that is at work.
func atWork(ctx context.Context, t *testing.T, s *Store) (*session, store.Lease) {
	t.Helper()
	ses, err := s.Join(ctx, store.JoinParams{Relay: "r", TTL: time.Hour, Grace: time.Second,
		Destinations: []store.Destination{{Name: "d", FromEarliest: true}}})
	if err != nil {
		t.Fatal(err)
	}
	leases, err := ses.Acquire(ctx, store.AcquireParams{Destination: "d", Lanes: 64})
	if err != nil || len(leases) != 1 {
		t.Fatalf("acquired %+v, %v", leases, err)
	}
	return ses.(*session), leases[0]
}

// Beside an old snapshot vacuum can remove nothing; what a relay writes again
// and again is cut down all the same, under a session that is at work, which
// goes on with the rows that it had. A transaction that reads the table holds
// that up and is not held up.
func TestMaintainCutsOffDeadVersions(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s := openStore(t)
	other := func(sql string) *pgx.Conn {
		t.Helper()
		conn, err := pgx.Connect(ctx, s.cfg.DSN)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close(context.Background()) })
		if _, err := conn.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	exec := func(sql string) {
		t.Helper()
		if _, err := s.pool.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	other(`begin isolation level repeatable read; select count(*) from pg_class`)
	ses, lease := atWork(ctx, t, s)
	exec(`insert into outbox_exceptions (destination, id, lane, event_key, event_id, event_type, state, created_at)
		values ('d', 7, 7, 'k', '00000000-0000-7000-8000-000000000007', 'T', 'FAILED', now())`)
	const limit = 128 << 10
	for i := range hot {
		was := hot[i].bytes
		hot[i].bytes = limit
		defer func() { hot[i].bytes = was }()
	}
	size := func(table string) (n int64) {
		t.Helper()
		if err := s.pool.QueryRow(ctx, `select pg_relation_size($1::text::regclass)`, table).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	rows := func(table string) (text string) {
		t.Helper()
		if err := s.pool.QueryRow(ctx, `select coalesce(string_agg(r::text, E'\n' order by r::text), '') from `+table+` r`).Scan(&text); err != nil {
			t.Fatal(err)
		}
		return text
	}
	before := map[string]string{}
	for table, column := range map[string]string{"outbox_leases": "hi", "outbox_relays": "relay", "outbox_exceptions": "message"} {
		for range 3000 {
			exec(`update ` + table + ` set ` + column + ` = ` + column)
		}
		exec(`vacuum ` + table)
		if n := size(table); n <= limit {
			t.Fatalf("%s has %d bytes: the snapshot held nothing", table, n)
		}
		before[table] = rows(table)
	}
	dump := other(`begin; lock table outbox_leases in access share mode`) // as a dump does with all tables
	if err := s.Maintain(ctx); err != nil {
		t.Fatal(err)
	}
	if n := size("outbox_leases"); n <= limit {
		t.Errorf("outbox_leases was rewritten beside a dump, to %d bytes", n)
	}
	if _, err := dump.Exec(ctx, `rollback`); err != nil {
		t.Fatal(err)
	}
	for table, was := range before {
		for n := size(table); n > limit/4; n = size(table) { // autovacuum may be in the way for a moment
			if err := s.Maintain(ctx); err != nil {
				t.Fatalf("%s still has %d bytes: %v", table, n, err)
			}
		}
		if got := rows(table); got != was {
			t.Errorf("%s has changed from\n%s\nto\n%s", table, was, got)
		}
	}
	// The session goes on under its lease.
	if r, err := ses.Renew(ctx, []store.Lease{lease}); err != nil || len(r.Lost) > 0 {
		t.Errorf("renewed: %+v, %v", r, err)
	}
	exec(`insert into outbox_events (aggregate_type, aggregate_id, event_type, payload) values ('a', 'k2', 'T', '{}')`)
	c, err := ses.Claim(ctx, store.ClaimParams{Lease: lease, MaxRecords: 10, MaxBytes: 1 << 20})
	if err != nil || len(c.Records) != 1 {
		t.Fatalf("claimed %+v, %v", c, err)
	}
	for _, p := range []store.CommitParams{
		{Lease: lease, Start: []*store.Claim{c}},
		{Lease: lease, Settle: []store.Settlement{{Claim: c, Outcomes: []store.Outcome{{State: store.Published}}}}},
	} {
		if err := ses.Commit(ctx, p); err != nil {
			t.Fatal(err)
		}
	}
}

// A table that is large by right is left as it is, whatever statistics say.
func TestFullTablesAreNotRewritten(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s := openStore(t)
	_, err := s.pool.Exec(ctx, `insert into outbox_exceptions (destination, id, lane, event_key, event_id, event_type, state, created_at)
		select 'd', g, 7, '', '00000000-0000-7000-8000-000000000007', 'T', 'FAILED', now() from generate_series(1, $1) g`, compactRows+1)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.rewrite(ctx, "outbox_exceptions"); err != errFull { //nolint:errorlint // as it is
		t.Errorf("rewriting %d rows: %v", compactRows+1, err)
	}
}

// A renewal that finds a lease written more often than it looked for asks again
// by the lease's id, and takes nothing for lost that is held.
func TestRenewalFarBehind(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s := openStore(t)
	ses, lease := atWork(ctx, t, s)
	for _, c := range []struct {
		sql  string
		lost int
	}{
		{`update outbox_leases set writes = writes + 1000`, 0},
		{`update outbox_leases set epoch = epoch + 1, owner_lock = null`, 1},
	} {
		if _, err := s.pool.Exec(ctx, c.sql); err != nil {
			t.Fatal(err)
		}
		if r, err := ses.Renew(ctx, []store.Lease{lease}); err != nil || len(r.Lost) != c.lost {
			t.Errorf("after %s renewed: %+v, %v, want %d lost", c.sql, r, err, c.lost)
		}
	}
}
