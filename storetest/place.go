package storetest

import (
	"slices"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// Sequences grow along a key, whatever is delayed, dies or is held back in
// between: a consumer that drops what is not above the highest one it has seen
// must not drop what it has never got. The ledger sees to it with each delivery.
var placeTests = []test{
	{"DelayedAtDeath", testDelayedAtDeath},
	{"DelayedBesideSuspects", testDelayedBesideSuspects},
	{"HeldAtDeath", testHeldAtDeath},
	{"ChargedIsWhoWasAlone", testChargedIsWhoWasAlone},
	{"PassedAtDeath", testPassedAtDeath},
	{"PassedAmongPieces", testPassedAmongPieces},
	{"PassedGivenBack", testPassedGivenBack},
	{"PassedJoined", testPassedJoined},
	{"ForgottenJoined", testForgottenJoined},
	{"DelayedAtDeathAgain", testDelayedAtDeathAgain},
	{"DelayedForgotten", testDelayedForgotten},
	{"DelayedBehindHead", testDelayedBehindHead},
	{"DelayedBehindSkipped", testDelayedBehindSkipped},
	{"BehindHeadWithNewer", testBehindHeadWithNewer},
}

// pass lets what is delayed by less than n short times fall due, where the clock
// can be set; elsewhere it takes its time.
func (b *bench) pass(n int) {
	if b.Advance != nil {
		for range n {
			b.Advance(b.short())
		}
	}
}

// An event is delayed when a page is read first, and due when it is read again
// after a death: others of its key that are later in the page got through before.
func testDelayedAtDeath(b *bench) {
	m := b.mortalOwner()
	e := events("a", "a", "a", "b")
	e[1].Delay = b.short()
	b.put(e...)
	m.deliver(m.hand())
	m.die()
	b.pass(2)
	m = b.heir()
	m.drain(len(e), nil)
	m.idle()
}

// A delayed event falls due while some of its key that was in hand at the end of
// a lease's owner is still to be sent again.
func testDelayedBesideSuspects(b *bench) {
	m := b.owner()
	e := events("x", "a", "b", "a")
	e[1].Delay = b.short()
	b.put(e...)
	m.params.MaxRecords = 1
	c := m.hand()
	m.finish(c)
	m.params.MaxRecords = 100
	c = m.hand()
	if slices.Contains(ids(c.Records), e[1].ID) {
		return // the clock is real, and was quicker
	}
	if _, err := m.s.Release(b.ctx, m.lease, 0); err != nil {
		b.t.Fatal(err)
	}
	b.pass(2)
	m.takeAll()
	m.params.MaxRecords = 1
	m.drain(len(e)-1, nil)
	m.idle()
}

// A key has more than its share, so that later ones are passed over and nobody
// has written that down when the owner dies. They are sent with the rest then.
func testHeldAtDeath(b *bench) {
	m := b.mortalOwner()
	m.params.KeyShare = 1
	one, two, other := events("a", "a"), event("a"), event("b")
	b.put(one...)
	c := m.fresh()
	b.put(two)
	if c := m.fresh(); len(c.Records) > 0 {
		b.t.Fatalf("of a key that has more than its share Fresh holds %v", ids(c.Records))
	}
	b.put(other)
	m.start(c, m.nextFresh())
	m.deliver(c)
	m.die()
	m = b.heir()
	m.drain(4, nil)
	m.idle()
}

// One was alone in hand at a death, and a delayed event in front of it is due
// by now: it is the former that is charged.
func testChargedIsWhoWasAlone(b *bench) {
	m := b.mortalOwner()
	e := events("a", "b")
	e[0].Delay = 100 * b.short()
	b.put(e...)
	m.hand()
	m.die()
	m = b.heir()
	m.piece(1)
	m.die()
	b.pass(200)
	m = b.heir()
	for len(b.ledger.Missing(mainDest)) > 0 {
		c := m.nextOf()
		for _, r := range c.Records {
			if want := len(ofKey([]outrider.Record{r}, "b")); r.Starts != want {
				b.t.Errorf("event %s of key %s is charged %d deaths, want %d", r.ID, r.Key, r.Starts, want)
			}
		}
		m.start(c)
		m.finish(c)
		if b.Advance == nil && c.Records[0].Key == "b" {
			break // the other one takes long
		}
	}
}

// dueBehind has a delayed event of key a fall due while another of the key is in
// hand. Who asks for it then has to wait, and so have later ones of the key that
// Fresh claims come to meanwhile: it may be written nowhere yet that they do.
func (m *member) dueBehind() *store.Claim {
	m.t.Helper()
	e := events("a", "b")
	e[0].Delay = m.b.short()
	m.b.put(e...)
	m.finish(m.hand())
	m.b.put(event("a"))
	c := m.hand()
	m.b.pass(2)
	if c := m.due(); len(c.Records) > 0 {
		m.s.Forget(c) // it waits for nothing here
	}
	return c
}

// drainAll sends what is left.
func (m *member) drainAll() {
	m.t.Helper()
	m.drain(len(m.b.ledger.Missing(mainDest)), nil)
	m.idle()
}

// The owner dies before it has asked again for what is due.
func testPassedAtDeath(b *bench) {
	m := b.mortalOwner()
	one := m.dueBehind()
	b.put(events("a", "b", "a")...)
	two := m.hand()
	m.finish(one)
	m.finish(two)
	m.die()
	b.heir().drainAll()
}

// So it does while what was in hand at an earlier death is sent again: what is
// due may have to wait for that.
func testPassedAmongPieces(b *bench) {
	m := b.mortalOwner()
	e := events("a", "x")
	e[0].Delay = b.short()
	b.put(e...)
	m.finish(m.hand())
	b.put(event("c"))
	m.settle(m.hand(), waiting(1, 0))
	m.start(m.nextDue())
	b.put(event("a"))
	m.hand()
	b.put(event("d"))
	m.hand()
	m.die()
	b.pass(2)
	m = b.heir()
	if _, err := m.round(store.Due, nil); err != nil {
		b.t.Fatal(err)
	}
	m.start(m.nextFresh())
	m.die()
	b.heir().drainAll()
}

// It gives its lease back then, having passed over the later ones without a
// word.
func testPassedGivenBack(b *bench) {
	m := b.owner()
	m.finish(m.dueBehind())
	b.put(events("a")...)
	m.s.Forget(m.fresh())
	if _, err := m.s.Release(b.ctx, m.lease, 0); err != nil {
		b.t.Fatal(err)
	}
	m.takeAll().drainAll()
}

// Or it joins the lease with another, and dies.
func testPassedJoined(b *bench) {
	m := b.joinMortal()
	if _, ok := m.s.(store.Merger); !ok {
		b.t.Skip("not a Merger")
	}
	a := store.LaneSet(1) << outrider.Lane("a")
	leases := append(m.acquire(32), m.acquire(32)...)
	if leases[1].Lanes&a != 0 {
		slices.Reverse(leases)
	}
	m.lease = leases[0]
	m.finish(m.dueBehind())
	b.put(event("a"))
	m.s.Forget(m.fresh())
	m.merge(leases, len(b.ledger.Missing(mainDest)))
	m.die()
	b.heir().drainAll()
}

// Leases are joined when Due claims of theirs were just forgotten: what those held
// comes in front of what was written since.
func testForgottenJoined(b *bench) {
	m := b.join()
	if _, ok := m.s.(store.Merger); !ok {
		b.t.Skip("not a Merger")
	}
	leases := append(m.acquire(32), m.acquire(32)...)
	b.put(spread(60, 30)...)
	outcomes := []store.Outcome{pending, waiting(1, 0)}
	for i, l := range leases {
		m.lease = l
		m.settleWith(m.hand(), func(outrider.Record) store.Outcome { return outcomes[i] })
	}
	for _, l := range leases {
		m.lease = l
		m.s.Forget(m.nextDue())
	}
	b.put(spread(60, 30)...)
	m.lease, _ = m.merge(leases, 120)
	m.drainAll()
}

// delayedTwice has a delayed event of key a fall due while a page with another
// one, that is not due yet, is in hand. Whether it comes to its end is the
// store's to say; the page's is not lost by that.
func (m *member) delayedTwice() *store.Claim {
	m.t.Helper()
	e := events("a", "a", "b", "c")
	e[0].Delay, e[1].Delay = m.b.short(), 5*m.b.short()
	m.b.put(e[0], e[3])
	m.finish(m.hand())
	m.b.put(e[1], e[2])
	c := m.fresh()
	m.b.pass(2)
	if _, err := m.round(store.Due, nil); err != nil {
		m.t.Fatal(err)
	}
	return c
}

// It dies, and the page is read again.
func testDelayedAtDeathAgain(b *bench) {
	m := b.mortalOwner()
	m.start(m.delayedTwice())
	m.die()
	b.heir().drainAll()
}

// It forgets the page, and reads it again.
func testDelayedForgotten(b *bench) {
	m := b.owner()
	m.s.Forget(m.delayedTwice())
	m.drainAll()
}

// A delayed event is in a page in hand when one of its key in front of it fails,
// and gets through when it is tried again. Then the owner dies.
func testDelayedBehindHead(b *bench) {
	m := b.mortalOwner()
	e := events("a", "a", "b")
	e[1].Delay = 5 * b.short()
	b.put(e[0])
	one := m.hand()
	b.put(e[1:]...)
	m.hand()
	m.settle(one, waiting(1, 0))
	if _, err := m.round(store.Due, nil); err != nil {
		b.t.Fatal(err)
	}
	b.put(event("c"))
	m.hand()
	m.die()
	b.heir().drainAll()
}

// A delayed event that is due waits for a head of its key, which is skipped while
// nobody holds the lease.
func testDelayedBehindSkipped(b *bench) {
	op := b.operator()
	m := b.owner()
	e := events("a", "a")
	e[0].Delay = b.short()
	b.put(e...)
	c := m.hand()
	if len(c.Records) > 1 {
		return // the clock is real, and was quicker
	}
	m.settle(c, waiting(4, forever))
	b.pass(2)
	m.idleDue()
	if _, err := m.s.Release(b.ctx, m.lease, 0); err != nil {
		b.t.Fatal(err)
	}
	b.operate("skip", func() (int, error) { return op.Skip(b.ctx, store.Target{ID: e[1].ID}) }, 1)
	b.ledger.GivenUp(mainDest, e[1].ID)
	m.takeAll().drainAll()
}

// What stands behind a head was in hand before a lease was given back, and keeps
// its place when it goes out again beside one that is new, and once more after a
// death.
func testBehindHeadWithNewer(b *bench) {
	m := b.mortalOwner()
	m.params.MaxRecords = 1
	b.put(events("a", "a")...)
	m.deliver(m.hand())
	m.deliver(m.hand())
	if _, err := m.s.Release(b.ctx, m.lease, 0); err != nil {
		b.t.Fatal(err)
	}
	m.takeAll()
	m.settle(m.hand(), waiting(1, 0))
	b.put(event("a"))
	for range 3 {
		m.fresh()
	}
	m.params.MaxRecords = 10
	c := m.nextDue()
	m.start(c)
	m.deliver(c)
	m.die()
	m = b.heir()
	for range 10 {
		for kind := store.Fresh; kind <= store.Due; kind++ {
			if _, err := m.round(kind, nil); err != nil {
				b.t.Fatal(err)
			}
		}
	}
	m.idle()
}
