package pgstore

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider/store"
)

// PGO-01: beside a snapshot that is older than all work, a claim touches as many
// pages as without it, however many commits have left dead rows since: it reads
// rows that never change, and its lease by the last few versions. What waits to
// be tried again is read past dead rows, a page in ten commits at most.
func TestOldSnapshotCostsClaimsNothing(t *testing.T) {
	const rounds = 300
	ctx := context.Background()
	free := pagesAfter(t, openStore(t), rounds)
	s := openStore(t)
	conn, err := pgx.Connect(ctx, s.cfg.DSN)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx) // the database goes with the test
	if _, err := conn.Exec(ctx, `begin isolation level repeatable read; select count(*) from pg_class`); err != nil {
		t.Fatal(err)
	}
	held := pagesAfter(t, s, rounds)
	for what, pages := range held {
		more := 3 // a page may have split
		if what == dueRead {
			more += 4 * rounds / 10
		}
		if pages > free[what]+more && what != leaseRead {
			t.Errorf("%s touches %d pages, %d without the snapshot", what, pages, free[what])
		}
	}
	if held[leaseRead] < rounds/20 {
		t.Errorf("the snapshot held nothing: reading a lease by its id alone touches %d pages", held[leaseRead])
	}
	t.Logf("free %v, held %v", free, held)
}

const (
	leaseRead = "all versions of a lease"
	dueRead   = "due exceptions"
)

// pagesAfter counts what statements touch after rounds of an event that is
// retried once, four commits each.
func pagesAfter(t *testing.T, s *Store, rounds int) map[string]int {
	t.Helper()
	ctx := context.Background()
	ses, err := s.Join(ctx, store.JoinParams{Relay: "r", TTL: time.Hour, Grace: time.Second,
		Destinations: []store.Destination{{Name: "d", FromEarliest: true}}})
	if err != nil {
		t.Fatal(err)
	}
	defer ses.Leave(ctx) //nolint:errcheck // the database goes with the test
	leases, err := ses.Acquire(ctx, store.AcquireParams{Destination: "d", Lanes: 64})
	if err != nil || len(leases) != 1 {
		t.Fatalf("acquired %+v, %v", leases, err)
	}
	turn := func(kind store.Kind, o store.Outcome) {
		var c *store.Claim
		for range 100 { // now and then a claim is refused so that keys can rejoin their lease
			var err error
			if c, err = ses.Claim(ctx, store.ClaimParams{Kind: kind, Lease: leases[0], MaxRecords: 100, MaxBytes: 1 << 20}); err != nil {
				t.Fatal(err)
			}
			if len(c.Records) > 0 {
				break
			}
		}
		if len(c.Records) != 1 {
			t.Fatalf("claimed %+v", c)
		}
		for _, p := range []store.CommitParams{
			{Start: []*store.Claim{c}},
			{Settle: []store.Settlement{{Claim: c, Outcomes: []store.Outcome{o}}}},
		} {
			p.Lease = leases[0]
			if err := ses.Commit(ctx, p); err != nil {
				t.Fatal(err)
			}
		}
	}
	var xmax uint64 // of the last round
	for i := range rounds {
		if err := s.pool.QueryRow(ctx, `
			insert into outbox_events (aggregate_type, aggregate_id, event_type, payload, event_key)
			values ('order', $1, 'Placed', '{}', null) returning tx_id`, itoa(int64(i))).Scan(&xmax); err != nil {
			t.Fatal(err)
		}
		turn(store.Fresh, store.Outcome{State: store.Waiting, Attempts: 1})
		turn(store.Due, store.Outcome{State: store.Published})
	}
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	n := int64(rounds)
	l := ses.(*session).lease(leases[0])
	var snap string
	if err := conn.QueryRow(ctx, `select pg_current_snapshot()::text`).Scan(&snap); err != nil {
		t.Fatal(err)
	}
	out := map[string]int{}
	for _, analyzed := range []bool{false, true} {
		if analyzed {
			if _, err := conn.Exec(ctx, `analyze`); err != nil { // as autovacuum does at any time
				t.Fatal(err)
			}
		}
		for _, c := range []struct{ what, sql, args string }{
			{"highest id", s.sql.now, ``},
			{"idle poll", s.sql.fresh, fmt.Sprintf(`-1, 4096, '%d', 101`, xmax+1)},
			{"poll with one event", s.sql.fresh, fmt.Sprintf(`-1, 4096, '%d', 101`, xmax)},
			{"late rows", s.sql.late, fmt.Sprintf(`-1, 4096, '{%d,%d}', 101`, xmax, xmax+1)},
			{"fresh page", s.sql.newer, fmt.Sprintf(`-1, 4096, %d, %d, '%s', 101`, n-100, n, snap)},
			{"a key's successors", s.sql.key, fmt.Sprintf(`-1, 4096, '7', 0, '%s', '3:3:', 101`, snap)},
			{dueRead, s.sql.due, `-1, 4096, 'd', '{}', 100, '{}'`},
			{leaseRead, `select from outbox_leases where lease = $1`, `1`},
			{"a lease's update", `update outbox_leases set writes = writes where lease = $1 and epoch = $2 and writes = $3 and gen = $3::bigint >> 5`,
				fmt.Sprintf(`1, %d, %d`, l.Epoch, l.writes)},
			{"a renewal", heldSQL, fmt.Sprintf(`'{1}', '{%d}', 1, 1000`, l.writes>>5)},
		} {
			_, pages := explain(t, conn.Conn(), c.sql, c.args)
			out[c.what] = max(out[c.what], pages)
		}
	}
	return out
}
