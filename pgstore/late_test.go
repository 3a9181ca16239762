package pgstore

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// A commit whose answer did not come in time may reach the database late, when
// what the session has written since stands there: it must not change anything.
func TestLateWriteChangesNothing(t *testing.T) {
	s := openStore(t)
	ctx := t.Context()
	ses, err := s.Join(ctx, store.JoinParams{Relay: "relay", TTL: time.Hour, Grace: time.Hour,
		Destinations: []store.Destination{{Name: "main", FromEarliest: true}}})
	if err != nil {
		t.Fatal(err)
	}
	defer ses.Leave(ctx) //nolint:errcheck // the database goes with the test
	leases, err := ses.Acquire(ctx, store.AcquireParams{Destination: "main", Lanes: outrider.Lanes})
	if err != nil || len(leases) != 1 {
		t.Fatalf("acquired %v, %v", leases, err)
	}
	insertThings(t, s, 1, 10)
	c, err := ses.Claim(ctx, store.ClaimParams{Lease: leases[0], MaxRecords: 10, MaxBytes: 1 << 20})
	if err != nil || len(c.Records) != 1 {
		t.Fatalf("claimed %+v, %v", c, err)
	}
	commit := func(p store.CommitParams) {
		t.Helper()
		p.Lease = leases[0]
		if err := ses.Commit(ctx, p); err != nil {
			t.Fatal(err)
		}
	}
	settle := func(state store.State) store.CommitParams {
		return store.CommitParams{Settle: []store.Settlement{{Claim: c, Outcomes: []store.Outcome{{State: state}}}}}
	}
	commit(store.CommitParams{Start: []*store.Claim{c}})

	// What is on its way, in the session's own words.
	l := ses.(*session).lease(leases[0])
	l.mu.Lock()
	pl := newPlan(l)
	err = pl.build(settle(store.Waiting))
	l.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	first, others, err := pl.statements()
	if err != nil {
		t.Fatal(err)
	}
	var late pgx.Batch
	late.Queue(`begin`)
	first(&late)
	for _, o := range others {
		o(&late)
	}
	late.Queue(`commit`)

	commit(settle(store.Published))
	if err := s.pool.SendBatch(ctx, &late).Close(); err != nil {
		t.Fatal(err)
	}
	var writes int64
	var exceptions, held int
	if err := s.pool.QueryRow(ctx, `select (select writes from outbox_leases), (select count(*) from outbox_exceptions),
		(select count(*) from outbox_held_keys)`).Scan(&writes, &exceptions, &held); err != nil {
		t.Fatal(err)
	}
	if writes != l.writes {
		t.Errorf("the lease was written %d times, not %d", writes, l.writes)
	}
	if exceptions != 0 || held != 0 {
		t.Errorf("%d exceptions and %d held keys came of a late write", exceptions, held)
	}
}

// insertThings writes n events with payloads of a size.
func insertThings(t *testing.T, s *Store, n, size int) {
	t.Helper()
	_, err := s.pool.Exec(t.Context(), `insert into outbox_events (aggregate_type, aggregate_id, event_type, payload)
		select 'thing', i::text, 'Happened', convert_to(repeat('x', $2), 'UTF8') from generate_series(1, $1::int) i`, n, size)
	if err != nil {
		t.Fatal(err)
	}
}

// A payload beyond a page's average is not read with its row: a page's memory
// would else be bounded by what was written and by nothing else.
func TestLargePayloadsAreLeftOutOfThePage(t *testing.T) {
	s := openStore(t)
	insertThings(t, s, 3, 20<<10)
	insertThings(t, s, 1, 10)
	res, err := s.pool.Query(t.Context(), s.sql.fresh, int64(-1), 4<<10, uint64(3), 100)
	if err != nil {
		t.Fatal(err)
	}
	var found batch
	err = newReader().rows(res, &found, 1<<30, 0)
	rows := found.rows
	if err != nil || len(rows) != 4 {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	for i, r := range rows {
		if large := r.size > 4<<10; r.large != large || large != (r.rec.Payload == nil) {
			t.Errorf("row %d of %d bytes came with a payload of %d, left out %v", i, r.size, len(r.rec.Payload), r.large)
		}
	}
	if err := s.fetchLarge(t.Context(), rows); err != nil {
		t.Fatal(err)
	}
	for i, r := range rows {
		if len(r.rec.Payload) != r.size {
			t.Errorf("row %d has a payload of %d bytes, not %d", i, len(r.rec.Payload), r.size)
		}
	}
}
