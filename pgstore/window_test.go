package pgstore_test

import (
	"context"
	"testing"
	"time"

	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/store"
)

func TestSmoke(t *testing.T) {
	ctx := context.Background()
	s, db := open(t, pgstore.Config{})
	ses, err := s.Join(ctx, store.JoinParams{Relay: "a", Destinations: []store.Destination{{Name: "d", FromEarliest: true}}, TTL: 10 * time.Second, Grace: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer ses.Leave(ctx)
	if _, err := db.Exec(`insert into outbox_events (aggregate_type, aggregate_id, event_type, payload, event_key)
		select 'order', (g % 10)::text, 'T', '{}', null from generate_series(1, 10000) g`); err != nil {
		t.Fatal(err)
	}
	leases, err := ses.Acquire(ctx, store.AcquireParams{Destination: "d", Lanes: 64})
	if err != nil || len(leases) != 1 {
		t.Fatal(leases, err)
	}
	l := leases[0]
	n := 0
	for range 30 {
		c, err := ses.Claim(ctx, store.ClaimParams{Lease: l, MaxRecords: 700, MaxBytes: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		if len(c.Records) == 0 {
			continue
		}
		if err := ses.Commit(ctx, store.CommitParams{Lease: l, Start: []*store.Claim{c}}); err != nil {
			t.Fatal(err)
		}
		out := make([]store.Outcome, len(c.Records))
		for i := range out {
			out[i].State = store.Published
		}
		if err := ses.Commit(ctx, store.CommitParams{Lease: l, Settle: []store.Settlement{{Claim: c, Outcomes: out}}}); err != nil {
			t.Fatal(err)
		}
		n += len(c.Records)
	}
	if n != 10000 {
		t.Fatal(n)
	}
}
