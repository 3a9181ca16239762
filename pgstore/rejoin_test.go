package pgstore_test

import (
	"context"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/store"
)

// TestRejoinBesideCommit has a key rejoin its lease while a commit, planned
// before, is on its way: the key's row must go with the next commit. It stayed,
// and whoever came next sent again all that the key had had since.
func TestRejoinBesideCommit(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s, db := open(t, pgstore.Config{})
	ses, err := s.Join(ctx, store.JoinParams{Relay: "r", TTL: time.Hour, Grace: time.Second,
		Destinations: []store.Destination{{Name: "d", FromEarliest: true}}})
	if err != nil {
		t.Fatal(err)
	}
	lease := acquire(t, ses)
	outbox, err := outrider.New(outrider.Config{Dialect: outrider.Postgres})
	if err != nil {
		t.Fatal(err)
	}
	add := func(keys ...string) {
		t.Helper()
		for _, k := range keys {
			if err := outbox.Add(ctx, db, outrider.Event{AggregateType: "a", AggregateID: k, Type: "T"}); err != nil {
				t.Fatal(err)
			}
		}
	}
	claim := func(kind store.Kind, want int) *store.Claim {
		t.Helper()
		c, err := ses.Claim(ctx, store.ClaimParams{Lease: lease, Kind: kind, MaxRecords: 10, MaxBytes: 1 << 20, KeyShare: 1})
		if err != nil {
			t.Fatal(err)
		}
		if len(c.Records) != want {
			t.Fatalf("a claim of %d records, want %d", len(c.Records), want)
		}
		return c
	}
	commit := func(p store.CommitParams) {
		t.Helper()
		p.Lease = lease
		if err := ses.Commit(ctx, p); err != nil {
			t.Fatal(err)
		}
	}
	published := store.Outcome{State: store.Published}
	settle := func(c *store.Claim, outcomes ...store.Outcome) store.CommitParams {
		return store.CommitParams{Settle: []store.Settlement{{Claim: c, Outcomes: outcomes}}}
	}

	// Key a has more than its share, so that it is held; b waits.
	add("a", "a", "b")
	c := claim(store.Fresh, 2)
	commit(store.CommitParams{Start: []*store.Claim{c}})
	commit(settle(c, published, store.Outcome{State: store.Waiting, Attempts: 1, Due: time.Hour}))
	c = claim(store.Due, 1)
	commit(settle(c, published)) // a has nothing left
	if _, err := db.Exec(`update outbox_exceptions set due_at = clock_timestamp()`); err != nil {
		t.Fatal(err)
	}
	c = claim(store.Due, 1)

	// The commit that settles b waits for the lease's row, while a rejoins.
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.Exec(`select from outbox_leases for update`); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		p := settle(c, published)
		p.Lease = lease
		done <- ses.Commit(ctx, p)
	}()
	for waiting := 0; waiting == 0; {
		if err := db.QueryRowContext(ctx, `select count(*) from pg_stat_activity
			where datname = current_database() and wait_event_type = 'Lock'`).Scan(&waiting); err != nil {
			t.Fatal(err)
		}
	}
	add("a")
	fresh := claim(store.Fresh, 1)
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	commit(store.CommitParams{Start: []*store.Claim{fresh}})
	commit(settle(fresh, published))

	var n int
	if err := db.QueryRow(`select count(*) from outbox_held_keys where event_key = 'a'`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	if n != 0 {
		t.Error("the key is still held")
	}
	left, err := ses.Release(ctx, lease, 0)
	if err != nil || left.Lanes != 0 {
		t.Fatal(left, err)
	}
	lease = acquire(t, ses)
	claim(store.Fresh, 0)
	claim(store.Due, 0) // nothing is sent again
}

// TestHoldBesideClaim has a key fail while a claim with its next record is handed
// out beside the commit that says so. That record is given back and must come
// by its key later. It was lost: what the key had passed over was noted before
// the claim was there.
func TestHoldBesideClaim(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s, db := open(t, pgstore.Config{})
	ses, err := s.Join(ctx, store.JoinParams{Relay: "r", TTL: time.Hour, Grace: time.Second,
		Destinations: []store.Destination{{Name: "d", FromEarliest: true}}})
	if err != nil {
		t.Fatal(err)
	}
	lease := acquire(t, ses)
	claim := func(kind store.Kind) *store.Claim {
		t.Helper()
		c, err := ses.Claim(ctx, store.ClaimParams{Lease: lease, Kind: kind, MaxRecords: 10, MaxBytes: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	commit := func(p store.CommitParams) error {
		p.Lease = lease
		return ses.Commit(ctx, p)
	}
	settle := func(c *store.Claim, o store.Outcome) store.CommitParams {
		out := make([]store.Outcome, len(c.Records))
		for i := range out {
			out[i] = o
		}
		return store.CommitParams{Settle: []store.Settlement{{Claim: c, Outcomes: out}}}
	}
	if _, err := db.Exec(oneEvent); err != nil {
		t.Fatal(err)
	}
	first := claim(store.Fresh)
	if err := commit(store.CommitParams{Start: []*store.Claim{first}}); err != nil {
		t.Fatal(err)
	}

	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.Exec(`select from outbox_leases for update`); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		done <- commit(settle(first, store.Outcome{State: store.Waiting, Attempts: 1, Class: "refused"}))
	}()
	for waiting := 0; waiting == 0; {
		if err := db.QueryRowContext(ctx, `select count(*) from pg_stat_activity
			where datname = current_database() and wait_event_type = 'Lock'`).Scan(&waiting); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := db.Exec(oneEvent); err != nil {
		t.Fatal(err)
	}
	second := claim(store.Fresh)
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if len(second.Records) == 1 {
		if err := commit(store.CommitParams{Start: []*store.Claim{second}}); err != nil {
			t.Fatal(err)
		}
		if err := commit(settle(second, store.Outcome{State: store.Pending})); err != nil {
			t.Fatal(err)
		}
	}
	var rows []string
	for range 20 {
		for _, kind := range []store.Kind{store.Fresh, store.Due} {
			c := claim(kind)
			if len(c.Records) == 0 {
				continue
			}
			for i := range c.Records {
				rows = append(rows, c.Records[i].Row)
			}
			for _, p := range []store.CommitParams{{Start: []*store.Claim{c}}, settle(c, store.Outcome{State: store.Published})} {
				if err := commit(p); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if len(rows) != 2 || rows[0] != "1" || rows[1] != "2" {
		t.Errorf("rows %v came, want 1 and 2", rows)
	}
}
