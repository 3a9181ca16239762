package storetest

import "github.com/outrider-dev/outrider"

// What of a claim has to outlive its reader although it was never sent.
var intentTests = []test{
	{"DelayedBetweenClaims", testDelayedBetween},
	{"HeldBetweenClaims", testHeldBetween},
	{"PieceOnlyRead", testPieceOnlyRead},
}

// Delayed events fill a page between two that are in hand at a death. Nothing
// of theirs was ever sent or settled, and they come all the same.
func testDelayedBetween(b *bench) {
	m := b.mortalOwner()
	m.params.MaxRecords = 2
	e := events("a", "b", "c", "d", "e", "f")
	e[2].Delay, e[3].Delay = 4*b.short(), 4*b.short()
	b.put(e...)
	m.hand()
	m.hand()
	m.die()
	m = b.heir()
	m.drain(len(e), nil)
	m.idle()
}

// The same of events whose key is held back.
func testHeldBetween(b *bench) {
	m := b.mortalOwner()
	head := event("held")
	b.put(head)
	m.settle(m.hand(), waiting(1, 4*b.short()))
	m.params.MaxRecords = 2
	e := events("a", "b", "held", "held", "c", "d")
	b.put(e...)
	m.hand()
	m.hand()
	m.die()
	m = b.heir()
	got := m.drain(1+len(e), nil)
	wantIDs(b.t, "the key held back", ofKey(got, "held"), head, e[2], e[3])
	m.idle()
}

// A piece of what was in hand at a death is read and not started; something
// else is settled meanwhile, and the reader dies too. It comes in pieces still.
func testPieceOnlyRead(b *bench) {
	m := b.mortalOwner()
	b.put(event("waits"))
	m.settle(m.hand(), waiting(1, 0))
	e := spread(40, 9)
	b.put(e...)
	m.hand()
	m.die()
	m = b.heir()
	due := m.nextDue()
	m.start(due)
	if c := m.fresh(); !c.Redelivery || len(c.Records) > 2 {
		b.t.Errorf("of a death %d events are read at once, redelivery %v", len(c.Records), c.Redelivery)
	}
	m.finish(due)
	m.die()
	m = b.heir()
	var got []outrider.Record
	for len(got) < len(e) {
		c := m.piece(2)
		got = append(got, c.Records...)
		m.finish(c)
	}
	wantIDs(b.t, "in hand at the death", got, e...)
	m.idle()
}
