package sqlitestore_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
)

// A sweep finds a row below one that was read: such as the trigger that refuses
// ids given by hand, once it has been dropped, lets through.
func TestSweepFindsWhatWasPassedOver(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	db := makeDB(t, migrate.Stream)
	s := open(t, migrate.Stream, sqlitestore.Config{Path: db.path})
	ses, err := s.Join(ctx, store.JoinParams{Relay: "r", TTL: time.Hour, Grace: time.Hour,
		Destinations: []store.Destination{{Name: "d", FromEarliest: true}}})
	if err != nil {
		t.Fatal(err)
	}
	leases, err := ses.Acquire(ctx, store.AcquireParams{Destination: "d", Lanes: outrider.Lanes})
	if err != nil || len(leases) != 1 {
		t.Fatal(leases, err)
	}
	deliver := func() {
		t.Helper()
		c, err := ses.Claim(ctx, store.ClaimParams{Lease: leases[0], MaxRecords: 10, MaxBytes: 1 << 20})
		if err != nil || len(c.Records) == 0 {
			t.Fatal(c, err)
		}
		out := make([]store.Outcome, len(c.Records))
		for i := range out {
			out[i].State = store.Published
		}
		for _, p := range []store.CommitParams{{Start: []*store.Claim{c}}, {Settle: []store.Settlement{{Claim: c, Outcomes: out}}}} {
			p.Lease = leases[0]
			if err := ses.Commit(ctx, p); err != nil {
				t.Fatal(err)
			}
		}
	}
	sweep := func(want ...string) {
		t.Helper()
		got, err := ses.(store.Sweeper).Sweep(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if got.Found != len(want) || !slices.Equal(got.Rows, want) {
			t.Errorf("a sweep found %+v, want %v", got, want)
		}
	}
	insert := func(id int) {
		t.Helper()
		db.exec(t, `insert into outbox_events (id, aggregate_type, aggregate_id, event_type, payload) values (?, 'a', 'k', 'T', '{}')`, id)
	}
	for _, id := range []int{-5, 0} {
		if _, err := db.Exec(`insert into outbox_events (id, aggregate_type, aggregate_id, event_type) values (?, 'a', 'k', 'T')`, id); err == nil {
			t.Errorf("an id of %d was taken", id)
		}
	}
	sweep() // asks for a sample
	insert(10)
	insert(20)
	deliver()
	if _, err := db.Exec(`insert into outbox_events (id, aggregate_type, aggregate_id, event_type) values (15, 'a', 'k', 'T')`); err == nil ||
		!strings.Contains(err.Error(), "left to the database") {
		t.Errorf("an id below the highest: %v", err)
	}
	db.exec(t, `drop trigger outbox_events_id_ascends`)
	insert(15)
	sweep("d 15")
	insert(30)
	deliver()
	sweep()
}
