package storetest

import (
	"slices"

	"github.com/outrider-dev/outrider"
)

// Sequences grow along a key, whatever is delayed, dies or is held back in
// between: a consumer that drops what is not above the highest one it has seen
// must not drop what it has never got. The ledger sees to it with each delivery.
var placeTests = []test{
	{"DelayedAtDeath", testDelayedAtDeath},
	{"DelayedBesideSuspects", testDelayedBesideSuspects},
	{"HeldAtDeath", testHeldAtDeath},
	{"ChargedIsWhoWasAlone", testChargedIsWhoWasAlone},
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
