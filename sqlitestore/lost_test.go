package sqlitestore_test

import (
	"errors"
	"fmt"
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

// lostMove is an outbox with an event in each of many lanes, and a relay.
type lostMove struct {
	*testDB
	s   store.Store
	ses store.Session
}

func forLostMoves(t *testing.T, f func(t *testing.T, o *lostMove)) {
	t.Helper()
	for name, set := range map[string]migrate.Set{"Stream": migrate.Stream, "Rows": migrate.Rows} {
		t.Run(name, func(t *testing.T) {
			db := makeDB(t, set)
			s := open(t, set, sqlitestore.Config{Path: db.path})
			f(t, &lostMove{db, s, join(t, s, 24*time.Hour)})
		})
	}
}

func (o *lostMove) put(t *testing.T) {
	t.Helper()
	x := o.begin(t)
	for n := range 100 {
		x.Add(t, outrider.Event{AggregateType: "t", AggregateID: fmt.Sprint("k", n), Type: "T", Payload: []byte("{}")})
	}
	x.Commit(t)
}

func (o *lostMove) acquire(t *testing.T, ses store.Session, lanes int) store.Lease {
	t.Helper()
	l, err := ses.Acquire(t.Context(), store.AcquireParams{Destination: "main", Lanes: lanes})
	if err != nil || len(l) != 1 {
		t.Fatalf("acquired %v, %v", l, err)
	}
	return l[0]
}

// drain sends what is left of a lease, and says how many events that were.
func (o *lostMove) drain(t *testing.T, ses store.Session, l store.Lease) (n int) {
	t.Helper()
	for {
		c, err := ses.Claim(t.Context(), store.ClaimParams{Lease: l, MaxRecords: 1000, MaxBytes: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		if len(c.Records) == 0 {
			return n
		}
		if err := ses.Commit(t.Context(), store.CommitParams{Lease: l, Start: []*store.Claim{c}}); err != nil {
			t.Fatal(err)
		}
		outcomes := slices.Repeat([]store.Outcome{{State: store.Published}}, len(c.Records))
		if err := ses.Commit(t.Context(), store.CommitParams{Lease: l, Settle: []store.Settlement{{Claim: c, Outcomes: outcomes}}}); err != nil {
			t.Fatal(err)
		}
		n += len(c.Records)
	}
}

// Lanes are given back, and the answer is lost: each of them has one lease still,
// and what comes next is of those that were kept.
func TestLostAnswerOfARelease(t *testing.T) {
	forLostMoves(t, func(t *testing.T, o *lostMove) {
		o.put(t)
		l := o.acquire(t, o.ses, 64)
		sqlitestore.LoseAnswer(o.ses)
		kept, err := o.ses.Release(t.Context(), l, l.Lanes.First(32))
		if err != nil { // it goes on, and tries again
			if kept, err = o.ses.Release(t.Context(), l, l.Lanes.First(32)); err != nil {
				t.Fatal(err)
			}
		}
		other := join(t, o.s, 24*time.Hour)
		rest := o.acquire(t, other, 64)
		if kept.Lanes&rest.Lanes != 0 || kept.Lanes|rest.Lanes != store.AllLanes {
			t.Errorf("kept are %x, given back %x", kept.Lanes, rest.Lanes)
		}
		if more, err := other.Acquire(t.Context(), store.AcquireParams{Destination: "main", Lanes: 64}); err != nil || len(more) > 0 {
			t.Errorf("and there are %v, %v", more, err)
		}
		if n := o.drain(t, o.ses, kept) + o.drain(t, other, rest); n != 100 {
			t.Errorf("%d of 100 events came", n)
		}
	})
}

// All of a lease is given back, and the answer is lost: it is gone.
func TestLostAnswerOfAWholeRelease(t *testing.T) {
	forLostMoves(t, func(t *testing.T, o *lostMove) {
		l := o.acquire(t, o.ses, 64)
		sqlitestore.LoseAnswer(o.ses)
		if _, err := o.ses.Release(t.Context(), l, 0); err != nil && !errors.Is(err, store.ErrFenced) {
			t.Errorf("an answer that can be told all the same: %v", err)
		}
		o.acquire(t, join(t, o.s, 24*time.Hour), 64)
	})
}

// Leases are joined, and the answer is lost: nothing of either is passed over.
func TestLostAnswerOfAMerge(t *testing.T) {
	forLostMoves(t, func(t *testing.T, o *lostMove) {
		a, b := o.acquire(t, o.ses, 32), o.acquire(t, o.ses, 32)
		sqlitestore.LoseAnswer(o.ses)
		joined, ok, err := o.ses.(store.Merger).Merge(t.Context(), a, b)
		if err != nil { // it goes on with both
			joined = a
		} else if !ok || joined.Lanes != store.AllLanes {
			t.Fatalf("joined are %x, %v", joined.Lanes, ok)
		}
		o.put(t)
		n := o.drain(t, o.ses, joined)
		if n += o.drain(t, o.ses, joined); n != 100 {
			t.Errorf("%d of 100 events came", n)
		}
	})
}

// Where nobody can tell even then what became of it, the lease is not the
// session's any more.
func TestLostMoveIsFenced(t *testing.T) {
	forLostMoves(t, func(t *testing.T, o *lostMove) {
		a, b := o.acquire(t, o.ses, 32), o.acquire(t, o.ses, 32)
		sqlitestore.LoseAnswer(o.ses)
		sqlitestore.CloseReader(t, o.s)
		if _, _, err := o.ses.(store.Merger).Merge(t.Context(), a, b); err == nil {
			t.Error("joined, and nobody could tell")
		}
		for _, l := range []store.Lease{a, b} {
			if _, err := o.ses.Claim(t.Context(), store.ClaimParams{Lease: l, MaxRecords: 10, MaxBytes: 1 << 20}); !errors.Is(err, store.ErrFenced) {
				t.Errorf("claim of lease %d: %v, want ErrFenced", l.ID, err)
			}
		}
	})
}
