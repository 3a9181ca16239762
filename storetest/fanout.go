package storetest

import (
	"slices"

	"github.com/outrider-dev/outrider/store"
)

var fanOutTests = []test{
	{"OneAlone", testOneAlone},
	{"Independent", testIndependent},
	{"FromEarliest", testFromEarliest},
	{"FromNow", testFromNow},
	{"LeasesApart", testLeasesApart},
	{"JoinTwice", testJoinTwice},
	{"JoinRefuses", testJoinRefuses},
}

func both(earliest bool) []store.Destination {
	return []store.Destination{{Name: mainDest, FromEarliest: true}, {Name: "second", FromEarliest: earliest}}
}

// to makes a member of one destination's lanes.
func (b *bench) to(name string, dests ...store.Destination) *member {
	b.t.Helper()
	m := b.joinAs(terms{dests: dests})
	b.until("all lanes are acquired", func() bool {
		leases, err := m.s.Acquire(b.ctx, store.AcquireParams{Destination: name, Lanes: 64})
		if err != nil {
			b.t.Fatalf("acquire: %v", err)
		}
		if len(leases) > 0 {
			m.lease = leases[0]
		}
		return len(leases) > 0
	})
	if m.lease.Lanes != store.AllLanes || m.lease.Destination != name {
		b.t.Fatalf("acquired %+v", m.lease)
	}
	return m
}

// A store without FanOut refuses a second destination, together or later, and
// begins with the oldest event in any case.
func testOneAlone(b *bench) {
	if b.caps.FanOut {
		b.t.Skip("FanOut")
	}
	p := store.JoinParams{Relay: "relay", TTL: forever, Grace: forever / 2, Destinations: both(true)}
	slices.Reverse(p.Destinations)
	if _, err := b.Store.Join(b.ctx, p); err == nil {
		b.t.Error("joined with two destinations")
	}
	slices.Reverse(p.Destinations)
	b.put(spread(5, 2)...)
	m := b.to(mainDest, store.Destination{Name: mainDest})
	m.drain(5, nil)
	m.idle()
	p.Destinations = p.Destinations[1:]
	if _, err := b.Store.Join(b.ctx, p); err == nil {
		b.t.Error("joined with another destination")
	}
}

// Each destination gets everything, and one that never settles, fails or has
// nobody to serve it holds up no other.
func testIndependent(b *bench) {
	if !b.caps.FanOut {
		b.t.Skip("no FanOut")
	}
	dests := append(both(true), store.Destination{Name: "idle", FromEarliest: true})
	one := b.to(mainDest, dests...)
	two := b.to("second", dests...)
	two.params.MaxRecords = 10
	total := 0
	put := func(n int) {
		b.put(spread(n, 7)...)
		total += n
	}
	put(30)
	stuck := two.hand()
	one.drain(30, nil)
	put(30)
	one.drain(30, nil)
	one.idle()
	two.deliver(stuck, 0)
	two.settle(stuck, published, failed(1, true), waiting(1, forever), waiting(1, forever), waiting(1, 0),
		waiting(1, 0), waiting(1, 0), pending, pending, pending)
	put(30)
	one.drain(30, nil)
	// Of two keys the head waits for long, of the others all comes.
	n := 0
	for i := range total {
		if k := i % 30 % 7; k != 2 && k != 3 {
			n++
		}
	}
	two.drain(n-2, nil)
	two.idle()
	one.idle()
	three := b.to("idle", dests...)
	three.drain(total, nil)
	three.idle()
	for _, d := range []string{mainDest, "idle"} {
		if left := b.ledger.Missing(d); len(left) > 0 {
			b.t.Errorf("%s lacks %v", d, idsOf(left))
		}
	}
}

// A destination that comes later begins with the oldest event if told so.
func testFromEarliest(b *bench) {
	if !b.caps.FanOut {
		b.t.Skip("no FanOut")
	}
	one := b.owner()
	b.put(spread(20, 3)...)
	one.drain(20, nil)
	b.put(spread(5, 3)...)
	two := b.to("second", both(true)...)
	b.put(spread(10, 3)...)
	two.drain(35, nil)
	one.drain(15, nil)
	one.idle()
	two.idle()
}

// Otherwise it begins with the next one, and knows its place afterwards.
func testFromNow(b *bench) {
	if !b.caps.FanOut {
		b.t.Skip("no FanOut")
	}
	one := b.owner()
	old := spread(20, 3)
	b.put(old...)
	one.params.MaxRecords = 10
	one.finish(one.hand())
	var open *tx
	if !b.harness.OneWriter {
		open = b.begin()
		open.add(event("open"))
	}
	b.ledger.GivenUp("second", idsOf(old)...)
	s := b.joinAs(terms{dests: both(false)})
	if err := s.s.Leave(b.ctx); err != nil {
		b.t.Fatal(err)
	}
	next := spread(10, 3)
	b.put(next...)
	n := len(next)
	if open != nil {
		open.commit()
		n++
	}
	two := b.to("second", both(true)...) // known already
	got := two.drain(n, nil)
	for _, e := range next {
		if !slices.Contains(ids(got), e.ID) {
			b.t.Errorf("event %s did not come", e.ID)
		}
	}
	two.idle()
	one.drain(10+n, nil)
}

// A lease is one destination's: to hold or to lose it says nothing of others.
func testLeasesApart(b *bench) {
	if !b.caps.FanOut {
		b.t.Skip("no FanOut")
	}
	one := b.to(mainDest, both(true)...)
	two := b.to("second", both(true)...)
	if one.lease.ID == two.lease.ID {
		b.t.Fatalf("both destinations have lease %d", one.lease.ID)
	}
	b.put(spread(10, 3)...)
	c := one.hand()
	if err := two.s.Leave(b.ctx); err != nil {
		b.t.Fatal(err)
	}
	r, err := one.s.Renew(b.ctx, []store.Lease{one.lease})
	if err != nil || len(r.Lost) > 0 {
		b.t.Errorf("renew: %+v, %v", r, err)
	}
	one.finish(c)
	one.idle()
	b.to("second").drain(10, nil)
}

// To join again changes nothing of what is known.
func testJoinTwice(b *bench) {
	one := b.owner()
	b.put(spread(10, 3)...)
	one.params.MaxRecords = 5
	one.finish(one.hand())
	for _, earliest := range []bool{true, false} {
		b.joinAs(terms{dests: []store.Destination{{Name: mainDest, FromEarliest: earliest}}})
	}
	one.drain(5, nil)
	one.idle()
}

// What is needed is asked for.
func testJoinRefuses(b *bench) {
	for _, p := range []store.JoinParams{{Grace: forever}, {TTL: forever}, {TTL: -1, Grace: forever}} {
		p.Destinations = []store.Destination{{Name: mainDest}}
		if s, err := b.Store.Join(b.ctx, p); err == nil {
			b.t.Errorf("joined with %+v", p)
			_ = s.Leave(b.ctx)
		}
	}
	m := b.join()
	if l, err := m.s.Acquire(b.ctx, store.AcquireParams{Destination: "unknown", Lanes: 1}); err == nil && len(l) > 0 {
		b.t.Errorf("acquired %+v of a destination that nobody knows", l)
	}
}
