package sqlitestore_test

import (
	"slices"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
)

// A Due claim marks what it holds, and its answer is lost: nobody has it. What it
// holds is due again, of heads, of what is behind them and of loose ones.
func TestLostAnswerOfAClaim(t *testing.T) {
	for name, set := range map[string]migrate.Set{"Stream": migrate.Stream, "Rows": migrate.Rows} {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			db := makeDB(t, set)
			s := open(t, set, sqlitestore.Config{Path: db.path})
			x := db.begin(t)
			e := outrider.Event{AggregateType: "t", AggregateID: "a", Type: "T", Payload: []byte("{}")}
			loose := e
			loose.Unordered = true
			x.Add(t, e, e, loose)
			x.Commit(t)
			ses := join(t, s, 24*time.Hour)
			l := acquire(t, ses)
			due := func() (*store.Claim, error) {
				return ses.Claim(ctx, store.ClaimParams{Lease: l, Kind: store.Due, MaxRecords: 10, MaxBytes: 1 << 20})
			}
			commit := func(c *store.Claim, outcomes ...store.Outcome) {
				t.Helper()
				if err := ses.Commit(ctx, store.CommitParams{Lease: l, Start: []*store.Claim{c}}); err != nil {
					t.Fatal(err)
				}
				if err := ses.Commit(ctx, store.CommitParams{Lease: l, Settle: []store.Settlement{{Claim: c, Outcomes: outcomes}}}); err != nil {
					t.Fatal(err)
				}
			}
			waits, published := store.Outcome{State: store.Waiting, Attempts: 1}, store.Outcome{State: store.Published}
			commit(claim(t, ses, l, 10), waits, store.Outcome{State: store.Pending}, waits)
			sqlitestore.LoseAnswer(ses)
			if c, err := due(); err == nil {
				t.Fatalf("no answer was lost: %v", c.Records)
			}
			var rows []string
			for n := 0; len(rows) < 3; n++ {
				if n == 10 {
					t.Fatalf("of three events that are due came %v", rows)
				}
				c, err := due()
				if err != nil {
					t.Fatal(err)
				}
				if len(c.Records) == 0 {
					continue
				}
				for _, r := range c.Records {
					rows = append(rows, r.Row)
				}
				commit(c, slices.Repeat([]store.Outcome{published}, len(c.Records))...)
			}
			if slices.Sort(rows); !slices.Equal(rows, []string{"1", "2", "3"}) {
				t.Errorf("came %v", rows)
			}
		})
	}
}
