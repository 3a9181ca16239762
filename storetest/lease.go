package storetest

import (
	"errors"
	"maps"
	"slices"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

var leaseTests = []test{
	{"AcquireOnce", testAcquireOnce},
	{"AcquireLost", testAcquireLost},
	{"AcquireSplits", testAcquireSplits},
	{"ReleaseAll", testReleaseAll},
	{"ReleaseKeeps", testReleaseKeeps},
	{"ReleaseInHand", testReleaseInHand},
	{"Expiry", testExpiry},
	{"Renewed", testRenewed},
	{"Relays", testRelays},
	{"Serving", testServing},
	{"ConnectionEnds", testConnectionEnds},
	{"SettleAfterTakeOver", testSettleAfterTakeOver},
	{"StartAfterTakeOver", testStartAfterTakeOver},
	{"StaleAfterRelease", testStaleAfterRelease},
	{"SameName", testSameName},
	{"Leave", testLeave},
}

// A lease that is held is acquired by nobody else, nor again by its holder.
func testAcquireOnce(b *bench) {
	one := b.owner()
	two := b.join()
	b.put(spread(10, 5)...)
	one.hand()
	for _, m := range []*member{one, two} {
		if got := m.acquire(64); len(got) > 0 {
			b.t.Errorf("acquired %+v, which is held", got)
		}
	}
}

// A lease that was acquired and whose answer was lost is found by its holder when
// it asks again, and not by whoever comes first once it has run out.
func testAcquireLost(b *bench) {
	if b.LoseAnswer == nil {
		b.t.Skip("answers cannot be lost")
	}
	m, other := b.join(), b.join()
	e := spread(10, 5)
	b.put(e...)
	b.LoseAnswer(b.t, m.s)
	p := store.AcquireParams{Destination: mainDest, Lanes: 64}
	if _, err := m.s.Acquire(b.ctx, p); err == nil {
		b.t.Fatal("no answer was lost")
	}
	var all store.LaneSet
	tries := 0
	b.until("lanes whose answer was lost are found again", func() bool {
		got, err := m.s.Acquire(b.ctx, p)
		for _, l := range got {
			m.lease = l
			all |= l.Lanes
		}
		if tries++; tries > 100 && b.Advance != nil {
			b.t.Fatal("time alone brings them back") // as it does in the end
		}
		return err == nil && len(got) > 0
	})
	if all != store.AllLanes {
		b.t.Errorf("found lanes %x", all)
	}
	if got := other.acquire(64); len(got) > 0 {
		b.t.Errorf("acquired %+v, which is held", got)
	}
	if n := len(m.drain(len(e), nil)); n != len(e) {
		b.t.Errorf("%d of %d events came", n, len(e))
	}
	m.idle()
}

// disjoint adds up leases that share no lane.
func disjoint(b *bench, leases ...store.Lease) store.LaneSet {
	b.t.Helper()
	var all store.LaneSet
	for _, l := range leases {
		if all&l.Lanes != 0 {
			b.t.Fatalf("two leases hold lanes %x: %+v", all&l.Lanes, leases)
		}
		all |= l.Lanes
	}
	return all
}

// A free lease that is larger than wanted is split; each part sends its own.
func testAcquireSplits(b *bench) {
	b.put(spread(200, 90)...)
	members := []*member{b.join(), b.join(), b.join()}
	var all []store.Lease
	if got := members[0].acquire(0); len(got) > 0 {
		b.t.Errorf("acquired %+v of 0 lanes", got)
	}
	for i, lanes := range []int{10, 20, 64} {
		got := members[i].acquire(lanes)
		want := min(lanes, 64-disjoint(b, all...).Len())
		if n := disjoint(b, got...).Len(); n != want {
			b.t.Fatalf("acquired %d lanes, want %d", n, want)
		}
		all = append(all, got...)
		members[i].lease = got[0]
		if len(got) != 1 {
			b.t.Fatalf("acquired %d leases of one", len(got))
		}
	}
	if disjoint(b, all...) != store.AllLanes {
		b.t.Errorf("lanes %x are held", disjoint(b, all...))
	}
	b.put(spread(200, 90)...)
	n := 0
	b.until("400 events are delivered", func() bool {
		for _, m := range members {
			got, err := m.round(store.Fresh, nil)
			if err != nil {
				b.t.Fatal(err)
			}
			n += len(got)
			for _, r := range got {
				if !m.lease.Lanes.Has(r.Lane) {
					b.t.Errorf("event of lane %d came under lanes %x", r.Lane, m.lease.Lanes)
				}
			}
		}
		return n == 400
	})
	for _, m := range members {
		m.idle()
	}
}

// A lease that is given back is free at once, and stale for whom had it.
func testReleaseAll(b *bench) {
	one, two := b.owner(), b.join()
	b.put(spread(10, 5)...)
	one.finish(one.hand())
	left, err := one.s.Release(b.ctx, one.lease, 0)
	if err != nil || left.Lanes != 0 {
		b.t.Fatalf("release: %+v, %v", left, err)
	}
	old := one.lease.Epoch
	two.takeAll()
	if two.lease.Epoch <= old {
		b.t.Errorf("epoch went from %d to %d", old, two.lease.Epoch)
	}
	two.idle()
	b.put(spread(10, 5)...)
	c := two.hand()
	if c.Exclusive || c.Redelivery {
		b.t.Errorf("after a clean release: %+v", c)
	}
	two.finish(c)
}

// Part of a lease is kept, the rest is free.
func testReleaseKeeps(b *bench) {
	one, two := b.owner(), b.join()
	b.put(spread(50, 40)...)
	keep := store.AllLanes.First(20)
	left, err := one.s.Release(b.ctx, one.lease, keep)
	if err != nil || left.Lanes != keep {
		b.t.Fatalf("release: %+v, %v", left, err)
	}
	one.lease = left
	got := two.acquire(64)
	if disjoint(b, got...) != store.AllLanes&^keep {
		b.t.Fatalf("acquired %+v", got)
	}
	two.lease = got[0]
	n := 0
	b.until("both have sent what is theirs", func() bool {
		for _, m := range []*member{one, two} {
			got, err := m.round(store.Fresh, nil)
			if err != nil {
				b.t.Fatal(err)
			}
			for _, r := range got {
				if !m.lease.Lanes.Has(r.Lane) {
					b.t.Errorf("event of lane %d came under lanes %x", r.Lane, m.lease.Lanes)
				}
			}
			n += len(got)
		}
		return n == 50
	})
	one.idle()
	two.idle()
}

// What was not settled under a lease that is given back is handed out again,
// in order and before the rest, and no death is counted.
func testReleaseInHand(b *bench) {
	one, two := b.owner(), b.join()
	one.params.MaxRecords = 20
	e := spread(50, 6)
	b.put(e...)
	first := one.hand()
	one.deliver(first)
	c := one.hand()
	one.deliver(c, 0, 1)
	one.fresh() // read, and not started
	if _, err := one.s.Release(b.ctx, one.lease, 0); err != nil {
		b.t.Fatal(err)
	}
	two.takeAll()
	var got []outrider.Record
	for len(got) < 40 {
		c := two.hand()
		if c.Exclusive || c.Alone || !c.Redelivery {
			b.t.Errorf("after a release with claims in hand: exclusive %v, alone %v, redelivery %v", c.Exclusive, c.Alone, c.Redelivery)
		}
		got = append(got, c.Records...)
		two.finish(c)
	}
	wantIDs(b.t, "what was in hand", got, e[:40]...)
	sameSequences(b.t, got, append(slices.Clone(first.Records), c.Records...))
	for _, r := range two.drain(10, nil) {
		if r.Starts != 0 {
			b.t.Errorf("starts are %d", r.Starts)
		}
	}
	two.idle()
}

// A lease that is not renewed is taken over; until then it is not.
func testExpiry(b *bench) {
	one := b.joinAs(terms{ttl: b.short()}).takeAll()
	b.put(spread(10, 5)...)
	c := one.hand()
	two := b.join()
	if b.Advance != nil {
		b.Advance(b.short() - 1)
		if got := two.acquire(64); len(got) > 0 {
			b.t.Fatalf("acquired %+v before its time", got)
		}
	}
	two.takeAll()
	r, err := one.s.Renew(b.ctx, []store.Lease{one.lease})
	if err != nil || !slices.Equal(r.Lost, []int64{one.lease.ID}) {
		b.t.Errorf("renew: %+v, %v, want lost %d", r, err, one.lease.ID)
	}
	one.fenced(store.CommitParams{Lease: one.lease, Settle: []store.Settlement{settlement(c, published)}})
	two.drain(10, nil)
	two.idle()
}

// A lease that is renewed lives on.
func testRenewed(b *bench) {
	if b.Advance == nil {
		b.t.Skip("the clock is real")
	}
	one := b.joinAs(terms{ttl: b.short()}).takeAll()
	two := b.join()
	for range 5 {
		b.Advance(b.short() - 1)
		r, err := one.s.Renew(b.ctx, []store.Lease{one.lease})
		if err != nil || len(r.Lost) > 0 {
			b.t.Fatalf("renew: %+v, %v", r, err)
		}
		if got := two.acquire(64); len(got) > 0 {
			b.t.Fatalf("acquired %+v, which is renewed", got)
		}
	}
	two.takeAll()
}

// Renew tells how many relays there are.
func testRelays(b *bench) {
	one := b.owner()
	relays := func() int {
		b.t.Helper()
		r, err := one.s.Renew(b.ctx, []store.Lease{one.lease})
		if err != nil || len(r.Lost) > 0 {
			b.t.Fatalf("renew: %+v, %v", r, err)
		}
		return r.Relays
	}
	if n := relays(); n != 1 {
		b.t.Errorf("%d relays, want 1", n)
	}
	two, three := b.join(), b.joinMortal()
	if n := relays(); n != 3 && b.caps.LiveTakeOver {
		b.t.Errorf("%d relays, want 3", n)
	}
	if err := two.s.Leave(b.ctx); err != nil {
		b.t.Fatal(err)
	}
	three.die()
	b.until("the others are gone", func() bool { return relays() == 1 })
}

// Renew tells how many relays serve each of the session's destinations: those
// that do not are counted as alive, and take no part in sharing it out.
func testServing(b *bench) {
	others := terms{dests: []store.Destination{}}
	if b.caps.FanOut {
		others.dests = []store.Destination{{Name: "third"}, {Name: "second"}}
	}
	one := b.owner()
	expect := func(what string, m *member, relays int, want map[string]int) {
		b.t.Helper()
		var r store.Renewal
		b.until(what, func() bool {
			var err error
			if r, err = m.s.Renew(b.ctx, nil); err != nil {
				b.t.Fatal(err)
			}
			return r.Relays <= relays // deaths take their time to be seen
		})
		if r.Relays != relays || !maps.Equal(r.Serving, want) {
			b.t.Errorf("%s: %d relays, %v, want %d, %v", what, r.Relays, r.Serving, relays, want)
		}
	}
	expect("it is alone", one, 1, map[string]int{mainDest: 1})
	two := b.joinAs(others)
	expect("one beside it serves others", one, 2, map[string]int{mainDest: 1})
	if !b.caps.FanOut {
		expect("one without destinations", two, 2, map[string]int{})
		three := b.join()
		expect("another serves the same", one, 3, map[string]int{mainDest: 2})
		expect("it and another serve the same", three, 3, map[string]int{mainDest: 2})
		return
	}
	expect("it serves others", two, 2, map[string]int{"second": 1, "third": 1})
	three := b.joinAs(terms{dests: both(true)})
	expect("a third serves one of each", three, 3, map[string]int{mainDest: 2, "second": 2})
	expect("one that shares main", one, 3, map[string]int{mainDest: 2})
	expect("one that shares second", two, 3, map[string]int{"second": 2, "third": 1})
	if b.caps.LiveTakeOver {
		three.die()
	} else if err := three.s.Leave(b.ctx); err != nil {
		b.t.Fatal(err)
	}
	expect("the third has gone", one, 2, map[string]int{mainDest: 1})
	expect("the third has gone", two, 2, map[string]int{"second": 1, "third": 1})
	if err := one.s.Leave(b.ctx); err != nil {
		b.t.Fatal(err)
	}
	expect("the first has left", two, 1, map[string]int{"second": 1, "third": 1})
}

// A lease outlives its owner's connection by the grace, or until it expires.
func testConnectionEnds(b *bench) {
	one := b.joinAs(terms{grace: forever}).takeAll()
	two := b.joinAs(terms{grace: forever})
	one.die()
	for range 5 {
		if got := two.acquire(64); len(got) > 0 {
			b.t.Fatalf("acquired %+v within its grace", got)
		}
		b.pause()
	}
	if _, err := two.s.Renew(b.ctx, nil); err != nil {
		b.t.Errorf("renew of nothing: %v", err)
	}

	other := "other"
	if !b.caps.FanOut {
		other = mainDest
	}
	three := b.joinAs(terms{dests: []store.Destination{{Name: other, FromEarliest: true}}})
	if other == mainDest {
		return // the only lease is taken
	}
	acquire := func(m *member) []store.Lease {
		got, err := m.s.Acquire(b.ctx, store.AcquireParams{Destination: other, Lanes: 64})
		if err != nil {
			b.t.Fatal(err)
		}
		return got
	}
	if got := acquire(three); len(got) != 1 {
		b.t.Fatalf("acquired %+v", got)
	}
	three.die()
	four := b.joinAs(terms{dests: []store.Destination{{Name: other}}})
	if b.caps.LiveTakeOver {
		b.until("the lease is taken over after the grace", func() bool { return len(acquire(four)) > 0 })
		return
	}
	for range 20 {
		if got := acquire(four); len(got) > 0 {
			b.t.Fatalf("acquired %+v, without LiveTakeOver, before it expired", got)
		}
		b.pause()
	}
}

// standing is what people see of an event.
func (b *bench) standing(id string) []store.Entry {
	b.t.Helper()
	in, ok := b.Store.(store.Inspector)
	if !ok {
		return nil
	}
	d, err := in.Show(b.ctx, id)
	if err != nil || len(d) != 1 {
		b.t.Fatalf("show %s: %+v, %v", id, d, err)
	}
	for i := range d[0].Entries {
		d[0].Entries[i].DueIn = 0 // it passes
	}
	return d[0].Entries
}

// A settlement that comes when the lease has changed hands changes nothing,
// neither what the new owner has in hand nor what it has settled.
func testSettleAfterTakeOver(b *bench) {
	one := b.mortalOwner()
	e := events("a", "b", "c", "c")
	b.put(e...)
	c := one.hand()
	one.deliver(c)
	one.die()
	two := b.join().takeAll()
	stale := []store.CommitParams{
		{Lease: one.lease, Settle: []store.Settlement{settlement(c, published)}},
		{Lease: one.lease, Settle: []store.Settlement{settlement(c, waiting(7, 0), failed(8, false), inHand, pending)}},
	}
	try := func() {
		b.t.Helper()
		var before [][]store.Entry
		for _, x := range e {
			before = append(before, b.standing(x.ID))
		}
		for _, p := range stale {
			one.fenced(p)
		}
		for i, x := range e {
			if now := b.standing(x.ID); !slices.Equal(now, before[i]) {
				b.t.Errorf("a stale commit changed %+v to %+v", before[i], now)
			}
		}
	}
	try()
	for n := 0; n < 4; {
		c := two.nextOf()
		two.start(c)
		try()
		two.deliver(c)
		outcomes := make([]store.Outcome, len(c.Records))
		for i, r := range c.Records {
			outcomes[i] = published
			if r.ID == e[1].ID {
				outcomes[i] = waiting(1, forever)
			}
		}
		two.settle(c, outcomes...)
		try()
		n += len(c.Records)
	}
	two.idle()
	try()
	// Nor when the event is in hand again.
	if op, ok := b.Store.(store.Operator); ok {
		if n, err := op.Retry(b.ctx, store.Target{ID: e[1].ID}); n != 1 || err != nil {
			b.t.Fatalf("retry: %d, %v", n, err)
		}
		c := two.nextDue()
		two.start(c)
		try()
		two.finish(c)
		try()
	}
	two.idle()
}

// A claim that was read before the lease changed hands cannot be started.
func testStartAfterTakeOver(b *bench) {
	one := b.mortalOwner()
	e := spread(20, 3)
	b.put(e...)
	one.params.MaxRecords = 5
	first := one.hand()
	second := one.fresh()
	one.die()
	two := b.join().takeAll()
	one.fenced(store.CommitParams{Lease: one.lease, Start: []*store.Claim{second}})
	one.fenced(store.CommitParams{
		Lease: one.lease, Settle: []store.Settlement{settlement(first, published)}, Start: []*store.Claim{second},
	})
	var c *store.Claim
	var err error
	for range 100 {
		p := one.params
		p.Lease = one.lease
		if c, err = one.s.Claim(b.ctx, p); err == nil || errors.Is(err, store.ErrFenced) {
			break
		}
	}
	switch {
	case err == nil && len(c.Records) > 0:
		one.fenced(store.CommitParams{Lease: one.lease, Start: []*store.Claim{c}})
	case err != nil && !errors.Is(err, store.ErrFenced):
		b.t.Errorf("stale claim: %v", err)
	}
	two.drain(20, nil)
	two.idle()
}

// What was given back is not the giver's any more.
func testStaleAfterRelease(b *bench) {
	one := b.owner()
	b.put(spread(10, 3)...)
	c := one.hand()
	if _, err := one.s.Release(b.ctx, one.lease, 0); err != nil {
		b.t.Fatal(err)
	}
	settle := store.CommitParams{Lease: one.lease, Settle: []store.Settlement{settlement(c, published)}}
	one.fenced(settle)
	if _, err := one.s.Release(b.ctx, one.lease, 0); !errors.Is(err, store.ErrFenced) {
		b.t.Errorf("second release: %v, want ErrFenced", err)
	}
	old := one.lease
	one.takeAll()
	one.fenced(settle)
	if r, err := one.s.Renew(b.ctx, []store.Lease{old, one.lease}); err != nil || len(r.Lost) != 1 {
		b.t.Errorf("renew of a lease given back and the one held: %+v, %v", r, err)
	}
	one.drain(10, nil)
	one.idle()
}

// A relay that died and is started again under its name is another one: it
// gets what its forerunner had in hand when it is its turn, and no sooner.
func testSameName(b *bench) {
	one := b.joinMortal()
	one.takeAll()
	b.put(spread(5, 2)...)
	one.hand()
	one.die()
	two := b.joinAs(terms{name: "relay"}).takeAll()
	for _, r := range two.drain(5, nil) {
		if r.Starts != 0 {
			b.t.Errorf("starts are %d", r.Starts)
		}
	}
	two.idle()
	// Beside a living one of the name too.
	three := b.joinAs(terms{name: "relay"})
	if got := three.acquire(64); len(got) > 0 {
		b.t.Errorf("acquired %+v, held by another of the name", got)
	}
}

// Leaving gives leases up at once, and counts nothing when nothing was in hand.
func testLeave(b *bench) {
	one, two := b.owner(), b.join()
	b.put(spread(30, 4)...)
	one.params.MaxRecords = 10
	c := one.hand()
	one.finish(c)
	one.fresh() // read, and not started
	if err := one.s.Leave(b.ctx); err != nil {
		b.t.Fatal(err)
	}
	if got := two.acquire(64); len(got) != 1 {
		b.t.Fatalf("acquired %+v of a relay that has left", got)
	} else {
		two.lease = got[0]
	}
	c = two.hand()
	if c.Exclusive || c.Redelivery {
		b.t.Errorf("after a clean leave: exclusive %v, redelivery %v", c.Exclusive, c.Redelivery)
	}
	two.finish(c)
	two.drain(20-len(c.Records), nil)
	two.idle()
}
