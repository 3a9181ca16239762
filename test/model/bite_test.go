package model

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/memstore"
	"github.com/outrider-dev/outrider/store"
	"github.com/outrider-dev/outrider/storetest"
)

// fault breaks a store in one way.
type fault struct {
	name string
	// want is part of what the model says of it.
	want []string

	params func(p *store.ClaimParams)
	claim  func(s *broken, p store.ClaimParams, c *store.Claim, err error) (*store.Claim, error)
	// outcome changes what is said of a claim's record i.
	outcome func(c *store.Claim, i int, o *store.Outcome)
	stale   bool // a commit that is refused is said to be done
	renew   func(r store.Renewal) store.Renewal
	ttl     time.Duration                     // of leases, whatever was asked for
	tx      func(x storetest.Tx) storetest.Tx // breaks transactions
}

// breakages are what a check of the model must find, and by which one.
var breakages = []fault{
	{name: "a record is lost", want: []string{"never came", "was delivered in front of"},
		claim: func(s *broken, p store.ClaimParams, c *store.Claim, err error) (*store.Claim, error) {
			if err != nil || len(c.Records) == 0 || p.Kind == store.Due || s.unanswered[c.Lease.ID] {
				return c, err
			}
			// Taken as published, and nobody has sent it.
			out := slices.Repeat([]store.Outcome{{State: store.Published}}, len(c.Records))
			if s.Session.Commit(context.Background(), store.CommitParams{Lease: c.Lease, Start: []*store.Claim{c}}) == nil {
				_ = s.Session.Commit(context.Background(), store.CommitParams{Lease: c.Lease, Settle: []store.Settlement{{Claim: c, Outcomes: out}}})
			}
			return &store.Claim{Lease: c.Lease, Kind: c.Kind, Driver: c.Driver}, nil
		}},
	{name: "waiting is taken for published", want: []string{"never came", "was delivered in front of", "waits until"},
		outcome: func(c *store.Claim, i int, o *store.Outcome) {
			if o.State == store.Waiting {
				*o = store.Outcome{State: store.Published}
			}
		}},
	{name: "published is taken for waiting", want: []string{"after it had been settled", "never comes to rest", "has sequence"},
		outcome: func(c *store.Claim, i int, o *store.Outcome) {
			last := !slices.ContainsFunc(c.Records[i+1:], func(r outrider.Record) bool { return r.Key == c.Records[i].Key })
			if o.State == store.Published && last {
				*o = store.Outcome{State: store.Waiting}
			}
		}},
	{name: "records of a claim are swapped", want: []string{"in a claim, their sequences are"}, claim: change(swap)},
	{name: "a transaction is written backwards", want: []string{"was delivered in front of"},
		tx: func(x storetest.Tx) storetest.Tx { return backwards{x} }},
	{name: "a record comes twice", want: []string{"twice in a claim", "a claim holds"},
		claim: change(func(c *store.Claim) { c.Records = append(c.Records, c.Records[0]) })},
	{name: "sequences stand still", want: []string{"has sequence"},
		claim: change(func(c *store.Claim) {
			for i := range c.Records {
				c.Records[i].Sequence = outrider.Sequence{Page: 1, Pos: 1}
			}
		})},
	{name: "a stale commit is said to be done", stale: true, want: []string{"which somebody else has"}},
	{name: "deaths are counted too often", want: []string{"is charged"},
		claim: change(func(c *store.Claim) { c.Records[0].Starts++ })},
	{name: "limits are ignored", want: []string{"asked for", "its share is"},
		params: func(p *store.ClaimParams) { p.MaxRecords, p.MaxBytes, p.KeyShare = p.MaxRecords+1, p.MaxBytes+1000, 0 }},
	{name: "leases expire early", want: []string{"which lives"}, ttl: time.Minute},
	{name: "what was rolled back is committed", want: []string{"was rolled back and seen"},
		tx: func(x storetest.Tx) storetest.Tx { return stubborn{x} }},
	{name: "retries are early", want: []string{"waits until"},
		outcome: func(_ *store.Claim, _ int, o *store.Outcome) { o.Due = 0 }},
	{name: "renewal loses leases", want: []string{"nobody has taken it"},
		renew: func(r store.Renewal) store.Renewal { r.Lost = append(r.Lost, 1, 2, 3, 4); return r }},
}

// change breaks claims with records.
func change(f func(*store.Claim)) func(*broken, store.ClaimParams, *store.Claim, error) (*store.Claim, error) {
	return func(_ *broken, _ store.ClaimParams, c *store.Claim, err error) (*store.Claim, error) {
		if err == nil && len(c.Records) > 0 {
			f(c)
		}
		return c, err
	}
}

// swap has the first two of a key change places. Of different keys they must
// not: the store would take the one's outcome for the other's and refuse it
// before the model has seen anything.
func swap(c *store.Claim) {
	first := map[string]int{}
	for i, r := range c.Records {
		if r.Unordered || r.Sequence.IsZero() {
			continue
		}
		if j, ok := first[r.Key]; ok {
			c.Records[i], c.Records[j] = c.Records[j], c.Records[i]
			return
		}
		first[r.Key] = i
	}
}

// broken is a session with a fault.
type broken struct {
	store.Session
	*fault
	// unanswered are the leases whose latest commit comes again: nothing else
	// may be committed before that.
	unanswered map[int64]bool
}

func (s *broken) Unwrap() store.Session { return s.Session }

func (s *broken) Claim(ctx context.Context, p store.ClaimParams) (*store.Claim, error) {
	asked := p
	if s.fault.params != nil {
		s.fault.params(&p)
	}
	c, err := s.Session.Claim(ctx, p)
	if s.fault.claim != nil {
		return s.fault.claim(s, asked, c, err)
	}
	return c, err
}

func (s *broken) Commit(ctx context.Context, p store.CommitParams) error {
	if s.outcome != nil {
		p.Settle = slices.Clone(p.Settle)
		for i := range p.Settle {
			x := &p.Settle[i]
			x.Outcomes = slices.Clone(x.Outcomes)
			for j := range x.Outcomes {
				s.outcome(x.Claim, j, &x.Outcomes[j])
			}
		}
	}
	err := s.Session.Commit(ctx, p)
	s.unanswered[p.Lease.ID] = err != nil
	if s.stale && errors.Is(err, store.ErrFenced) {
		return nil
	}
	return err
}

func (s *broken) Renew(ctx context.Context, l []store.Lease) (store.Renewal, error) {
	r, err := s.Session.Renew(ctx, l)
	if s.renew != nil && len(l) > 0 {
		r = s.fault.renew(r)
	}
	return r, err
}

// brokenStore is a memstore with a fault, still an operator's.
type brokenStore struct {
	*memstore.Store
	*fault
}

func (s *brokenStore) Join(ctx context.Context, p store.JoinParams) (store.Session, error) {
	if s.ttl != 0 {
		p.TTL = s.ttl
	}
	ses, err := s.Store.Join(ctx, p)
	if err != nil {
		return nil, err
	}
	return &broken{ses, s.fault, map[int64]bool{}}, nil
}

// stubborn is a transaction that commits whatever it is told.
type stubborn struct{ storetest.Tx }

func (x stubborn) Rollback(t testing.TB) { t.Helper(); x.Commit(t) }

// backwards is a transaction whose events get their ids in the wrong order. The
// store does nothing wrong then, so that nothing else of it can be noticed.
type backwards struct{ storetest.Tx }

func (x backwards) Add(t testing.TB, events ...outrider.Event) {
	t.Helper()
	events = slices.Clone(events)
	slices.Reverse(events)
	x.Tx.Add(t, events...)
}

// witness takes down what a run reports, instead of failing.
type witness struct {
	*testing.T
	said   []string
	failed bool
}

func (w *witness) Errorf(format string, args ...any) {
	w.failed, w.said = true, append(w.said, fmt.Sprintf(format, args...))
}
func (w *witness) Logf(string, ...any) {}
func (w *witness) Log(...any)          {}
func (w *witness) Failed() bool        { return false }

// Each check of the model finds what it is there for: the store is broken on
// purpose, and a run says so in the right words.
func TestBites(t *testing.T) {
	n := "800"
	if testing.Short() {
		n = "4000" // a fifth of them is run
	}
	checks(t, n)
	unshrunk(t)
	for _, f := range breakages {
		t.Run(strings.ReplaceAll(f.name, " ", "_"), func(t *testing.T) {
			w := &witness{T: t}
			make := inMemory(memstore.Config{}, func(s store.Store) store.Store {
				return &brokenStore{s.(*memstore.Store), &f}
			})
			rapid.Check(w, func(rt *rapid.T) {
				sub := make(t)
				if begin := sub.begin; f.tx != nil {
					sub.begin = func(t testing.TB) storetest.Tx { return f.tx(begin(t)) }
				}
				run(t, rt, sub)
			})
			said := strings.Join(w.said, "\n")
			if !w.failed {
				t.Fatal("no run has found it")
			}
			if !slices.ContainsFunc(f.want, func(s string) bool { return strings.Contains(said, s) }) {
				t.Fatalf("found, but not by the check that is there for it, which says one of %q:\n%s", f.want, said)
			}
		})
	}
}
