package storetest

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

var retireTests = []test{
	{"Forgets", testRetireForgets},
	{"LeavesOthers", testRetireLeavesOthers},
	{"Served", testRetireServed},
	{"Fences", testRetireFences},
	{"FencesUnsure", testRetireFencesUnsure},
	{"Races", testRetireRaces},
}

func (b *bench) retirer() store.Retirer {
	r, ok := b.Store.(store.Retirer)
	if !ok {
		b.t.Skip("not a Retirer")
	}
	return r
}

// destinations are the names of those that are known.
func (b *bench) destinations() []string {
	b.t.Helper()
	s, err := b.inspector().Status(b.ctx)
	if err != nil {
		b.t.Fatal(err)
	}
	var out []string
	for _, d := range s.Destinations {
		out = append(out, d.Name)
	}
	slices.Sort(out)
	return out
}

// What was failed, waiting, held and done is forgotten, and whoever joins for
// it again begins anew.
func testRetireForgets(b *bench) {
	r := b.retirer()
	m := b.owner()
	e := b.sorts(m)
	if _, err := m.s.Release(b.ctx, m.lease, 0); err != nil {
		b.t.Fatal(err)
	}
	for _, dry := range []bool{true, true, false} {
		got, err := r.Retire(b.ctx, mainDest, dry)
		if err != nil || got.Failed.N != 1 || got.Pending.N < 4 || got.Pending.N > 6 {
			b.t.Fatalf("retire, dry %v: %+v, %v, want 1 failed and 6 pending, of which 2 are held", dry, got, err)
		}
		if known := b.destinations(); slices.Contains(known, mainDest) != dry {
			b.t.Fatalf("after retire, dry %v: %v are known", dry, known)
		}
	}
	if page, err := b.inspector().List(b.ctx, store.ListParams{Destination: mainDest}); err != nil || len(page.Entries) > 0 {
		b.t.Errorf("it is still listed: %+v, %v", page, err)
	}
	if _, err := r.Retire(b.ctx, mainDest, false); !errors.Is(err, store.ErrUnknownDestination) {
		b.t.Errorf("retired twice: %v", err)
	}
	m = b.owner()
	c := m.fresh()
	wantIDs(b.t, "anew", c.Records, slices.Concat(e[:5], e[6:])...)
	for _, x := range c.Records {
		if x.Attempts != 0 || x.Waited != 0 || c.Redelivery || c.Exclusive {
			b.t.Errorf("anew: %+v of %+v", x, c)
		}
	}
	m.s.Forget(c)
}

// Other destinations go on as if nothing had been.
func testRetireLeavesOthers(b *bench) {
	r := b.retirer()
	if !b.caps.FanOut {
		b.t.Skip("no FanOut")
	}
	m := b.to(mainDest, both(true)...)
	e := events("a", "a", "b")
	b.put(e...)
	m.settle(m.hand(), failed(1, false), pending, waiting(1, forever))
	if got, err := r.Retire(b.ctx, "second", false); err != nil || got.Pending.N != 3 || got.Failed.N != 0 {
		b.t.Fatalf("retire: %+v, %v", got, err)
	}
	if got := b.destinations(); !slices.Equal(got, []string{mainDest}) {
		b.t.Errorf("%v are known", got)
	}
	for _, x := range []outrider.Event{e[0], e[2]} {
		b.operate("retry", func() (int, error) { return b.operator().Retry(b.ctx, store.Target{ID: x.ID}) }, 1)
	}
	m.drain(3, nil)
	m.idle()
}

// A destination that somebody serves is not retired, and one that nobody knows
// is an error.
func testRetireServed(b *bench) {
	r := b.retirer()
	m := b.owner()
	e := spread(10, 5)
	b.put(e...)
	c := m.hand()
	for _, dry := range []bool{true, false} {
		if _, err := r.Retire(b.ctx, mainDest, dry); !errors.Is(err, store.ErrServed) || outrider.Hint(err) == "" {
			b.t.Errorf("retire of one that is served, dry %v: %v", dry, err)
		}
		if _, err := r.Retire(b.ctx, "other", dry); !errors.Is(err, store.ErrUnknownDestination) {
			b.t.Errorf("retire of one that is unknown, dry %v: %v", dry, err)
		}
	}
	m.finish(c)
	m.idle()
}

// retireExpired retires the main destination once its owner has expired.
func (b *bench) retireExpired(r store.Retirer) {
	b.t.Helper()
	b.until("the owner expires", func() bool {
		_, err := r.Retire(b.ctx, mainDest, false)
		if err != nil && !errors.Is(err, store.ErrServed) {
			b.t.Fatal(err)
		}
		return err == nil
	})
}

// An owner that has expired is fenced off, and whoever had joined is told.
func testRetireFences(b *bench) {
	r := b.retirer()
	one, two := b.joinAs(terms{ttl: b.short()}).takeAll(), b.join()
	b.put(spread(10, 5)...)
	c := one.hand()
	b.retireExpired(r)
	one.fenced(store.CommitParams{Lease: one.lease, Settle: []store.Settlement{settlement(c, published)}})
	if got, err := one.s.Renew(b.ctx, []store.Lease{one.lease}); err != nil || !slices.Equal(got.Lost, []int64{one.lease.ID}) {
		b.t.Errorf("renew: %+v, %v", got, err)
	}
	got, err := two.s.Acquire(b.ctx, store.AcquireParams{Destination: mainDest, Lanes: 64})
	if !errors.Is(err, store.ErrUnknownDestination) || outrider.Hint(err) == "" {
		b.t.Errorf("acquired %+v of a retired destination: %v", got, err)
	}
	three := b.owner()
	one.fenced(store.CommitParams{Lease: one.lease, Settle: []store.Settlement{settlement(c, published)}})
	if n := len(three.fresh().Records); n != 10 {
		b.t.Errorf("%d events anew, want 10", n)
	}
}

// So is one that has yet to find out what became of its last commit.
func testRetireFencesUnsure(b *bench) {
	r := b.retirer()
	if b.LoseAnswer == nil {
		b.t.Skip("answers cannot be lost")
	}
	m := b.joinAs(terms{ttl: b.short()}).takeAll()
	b.put(spread(10, 5)...)
	p := store.CommitParams{Lease: m.lease, Start: []*store.Claim{m.fresh()}}
	b.LoseAnswer(b.t, m.s)
	if err := m.s.Commit(b.ctx, p); err == nil {
		b.t.Fatal("the answer was to be lost")
	}
	b.retireExpired(r)
	m.fenced(p)
}

// A relay that joins and an operator who retires do not both succeed: who holds
// a lease can work under it, and who does not is told.
func testRetireRaces(b *bench) {
	r := b.retirer()
	if !b.caps.FanOut {
		b.t.Skip("no FanOut")
	}
	for i := range 20 {
		name := fmt.Sprintf("race-%d", i)
		dests := []store.Destination{{Name: name, FromEarliest: true}}
		if err := b.joinAs(terms{dests: dests}).s.Leave(b.ctx); err != nil {
			b.t.Fatal(err)
		}
		b.put(event("a"))
		var acquired []store.Lease
		var acquireErr, retireErr error
		m := b.joinAs(terms{dests: dests})
		var both sync.WaitGroup
		both.Go(func() {
			acquired, acquireErr = m.s.Acquire(b.ctx, store.AcquireParams{Destination: name, Lanes: 64})
		})
		both.Go(func() { _, retireErr = r.Retire(b.ctx, name, false) })
		both.Wait()
		known := slices.Contains(b.destinations(), name)
		switch {
		case acquireErr == nil && len(acquired) == 1 && errors.Is(retireErr, store.ErrServed) && known:
			m.lease = acquired[0]
			m.start(m.fresh())
		case errors.Is(acquireErr, store.ErrUnknownDestination) && retireErr == nil && !known:
		default:
			b.t.Errorf("acquired %+v, %v; retired: %v; known: %v", acquired, acquireErr, retireErr, known)
		}
		if err := m.s.Leave(b.ctx); err != nil {
			b.t.Fatal(err)
		}
	}
}
