package sqlitestore_test

import (
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
)

// Leases of which something is in hand are not joined: nobody would know of it
// any more. Not even if that has no key, or is a slow one alone.
func TestMergeWaitsForWhatIsInHand(t *testing.T) {
	for _, set := range []migrate.Set{migrate.Stream, migrate.Rows} {
		t.Run(string(set), func(t *testing.T) {
			ctx := t.Context()
			db := makeDB(t, set)
			s := open(t, set, sqlitestore.Config{Path: db.path})
			ses := join(t, s, 24*time.Hour)
			leases := make([]store.Lease, 2)
			for i := range leases {
				got, err := ses.Acquire(ctx, store.AcquireParams{Destination: "main", Lanes: 32})
				if err != nil || len(got) != 1 {
					t.Fatalf("acquired %v, %v", got, err)
				}
				leases[i] = got[0]
			}
			l, other := leases[0], leases[1]
			x := db.begin(t)
			x.Add(t, outrider.Event{AggregateType: "t", AggregateID: "a", Type: "T", Payload: []byte("{}"), Unordered: true})
			x.Commit(t)
			if !l.Lanes.Has(1) { // of what has no key the id decides
				l, other = other, l
			}
			next := func(kind store.Kind) *store.Claim {
				t.Helper()
				c, err := ses.Claim(ctx, store.ClaimParams{Lease: l, Kind: kind, MaxRecords: 10, MaxBytes: 1 << 20})
				if err != nil || len(c.Records) != 1 {
					t.Fatalf("claimed %v, %v", c, err)
				}
				if err := ses.Commit(ctx, store.CommitParams{Lease: l, Start: []*store.Claim{c}}); err != nil {
					t.Fatal(err)
				}
				return c
			}
			settle := func(c *store.Claim, o store.Outcome) {
				t.Helper()
				err := ses.Commit(ctx, store.CommitParams{Lease: l, Settle: []store.Settlement{{Claim: c, Outcomes: []store.Outcome{o}}}})
				if err != nil {
					t.Fatal(err)
				}
			}
			joins := func() bool {
				t.Helper()
				_, ok, err := ses.(store.Merger).Merge(ctx, l, other)
				if err != nil {
					t.Fatal(err)
				}
				return ok
			}
			settle(next(store.Fresh), store.Outcome{State: store.Waiting, Attempts: 1})
			c := next(store.Due)
			if joins() {
				t.Fatal("joined, with a Due claim in hand")
			}
			settle(c, store.Outcome{State: store.InHand})
			if joins() {
				t.Fatal("joined, with a slow message in hand")
			}
			settle(c, store.Outcome{State: store.Published})
			for n := 0; !joins(); n++ { // they may have to come to one place first
				if n == 10 {
					t.Fatal("not joined, with nothing in hand")
				}
				for _, x := range leases {
					got, err := ses.Claim(ctx, store.ClaimParams{Lease: x, MaxRecords: 10, MaxBytes: 1 << 20})
					if err != nil || len(got.Records) > 0 {
						t.Fatalf("claimed %v, %v", got, err)
					}
				}
			}
		})
	}
}
