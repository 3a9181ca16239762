package storetest

import (
	"slices"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

var deathTests = []test{
	{"Pieces", testPieces},
	{"PiecesOfSeveralClaims", testPiecesOfSeveral},
	{"PiecesMove", testPiecesMove},
	{"Poison", testPoison},
	{"PoisonDue", testPoisonDue},
	{"PoisonFew", testPoisonFew},
	{"LeaveInHand", testLeaveInHand},
	{"NotStarted", testDeathNotStarted},
	{"Settled", testDeathSettled},
	{"SlowInHand", testDeathSlow},
	{"LateBehindPieces", testLateBehindPieces},
	{"DueInHand", testDeathDue},
	{"AloneThenReleased", testAloneReleased},
	{"TriedAgain", testTriedAgain},
	{"BehindHead", testDeathBehindHead},
	{"HeadGivenBack", testHeadGivenBack},
}

// heir waits until it can take over from one that died.
func (b *bench) heir() *member {
	b.t.Helper()
	return b.joinMortal().takeAll()
}

// piece takes what is handed out of what was in hand at a death.
func (m *member) piece(largest int) *store.Claim {
	m.t.Helper()
	c := m.nextOf()
	if n := len(c.Records); n > largest {
		m.t.Errorf("%d events are sent again at once, want %d at most", n, largest)
	}
	if !c.Exclusive || !c.Redelivery || c.Alone != (largest == 1) {
		m.t.Errorf("events of a death: exclusive %v, redelivery %v, alone %v", c.Exclusive, c.Redelivery, c.Alone)
	}
	m.start(c)
	return c
}

// What was in hand at a death is sent again in twentieths, in order, before
// anything else, and is charged nothing.
func testPieces(b *bench) {
	m := b.mortalOwner()
	e := spread(100, 9)
	b.put(e...)
	c := m.hand()
	m.deliver(c, 0, 1, 2)
	later := spread(20, 9)
	b.put(later...)
	m.die()
	m = b.heir()
	var got []outrider.Record
	for len(got) < 100 {
		c := m.piece(5)
		got = append(got, c.Records...)
		m.finish(c)
	}
	wantIDs(b.t, "in hand at the death", got, e...)
	sameSequences(b.t, got, c.Records)
	c = m.nextFresh()
	wantIDs(b.t, "behind", c.Records, later...)
	if c.Exclusive || c.Alone || c.Redelivery {
		b.t.Errorf("events behind a death: %+v", c)
	}
	m.start(c)
	m.finish(c)
	for _, r := range append(got, c.Records...) {
		if r.Starts != 0 || r.Attempts != 0 {
			b.t.Errorf("event %s was charged %d starts, %d attempts", r.ID, r.Starts, r.Attempts)
		}
	}
	m.idle()
}

// All claims in hand count together.
func testPiecesOfSeveral(b *bench) {
	m := b.mortalOwner()
	m.params.MaxRecords = 20
	e := spread(80, 9)
	b.put(e...)
	first := m.hand()
	m.hand()
	m.hand()
	m.finish(first)
	m.die()
	m = b.heir()
	var got []outrider.Record
	for len(got) < 40 {
		c := m.piece(2)
		got = append(got, c.Records...)
		m.finish(c)
	}
	wantIDs(b.t, "in hand at the death", got, e[20:60]...)
	m.drain(20, nil)
	m.idle()
}

// A lease that is given back, split and joined in the middle of it keeps what
// is still to be sent in pieces.
func testPiecesMove(b *bench) {
	m := b.mortalOwner()
	b.put(spread(100, 40)...)
	m.hand()
	m.die()
	m = b.heir()
	m.finish(m.piece(5))
	left, err := m.s.Release(b.ctx, m.lease, store.AllLanes.First(32))
	if err != nil {
		b.t.Fatal(err)
	}
	two := b.join()
	two.lease = two.acquire(64)[0]
	m.lease = left
	n := 5
	for _, x := range []*member{m, two} {
		for {
			c := x.fresh()
			if len(c.Records) == 0 {
				break
			}
			if !c.Exclusive || len(c.Records) > 5 {
				b.t.Errorf("%d events of a death at once, exclusive %v", len(c.Records), c.Exclusive)
			}
			x.start(c)
			x.finish(c)
			n += len(c.Records)
		}
		x.idle()
	}
	if n != 100 {
		b.t.Errorf("%d came, want 100", n)
	}
}

// poison runs relays that die whenever they have a certain event in hand,
// until it has been given up after its starts, alone; it returns the one that
// lives on and the number of deaths. Nobody else is charged.
func (b *bench) poison(m *member, id string, total int) (*member, int) {
	b.t.Helper()
	deaths, done, alone := 0, 0, 0
	b.until("everything has come to an end", func() bool {
		c := m.fresh()
		if len(c.Records) == 0 {
			c = m.due()
		}
		if len(c.Records) == 0 {
			return false
		}
		outcomes := make([]store.Outcome, len(c.Records))
		bad := -1
		for i, r := range c.Records {
			outcomes[i] = published
			if r.ID == id {
				bad = i
			} else if r.Starts != 0 {
				b.t.Errorf("innocent event %s has %d starts", r.ID, r.Starts)
			}
		}
		m.start(c)
		if bad >= 0 {
			r := c.Records[bad]
			if r.Starts != alone {
				b.t.Errorf("%d starts after %d deaths alone", r.Starts, alone)
			}
			if r.Starts < 3 {
				deaths++
				if c.Alone {
					alone++
				}
				m.die()
				m = b.heir()
				return false
			}
			outcomes[bad] = failed(0, true)
		}
		for i := range c.Records {
			if i != bad {
				m.deliver(c, i)
			}
		}
		m.settle(c, outcomes...)
		done += len(c.Records)
		return done == total
	})
	m.idle()
	return m, deaths
}

// An event that kills its process is found, in few deaths, and ends; nothing
// innocent is charged.
func testPoison(b *bench) {
	m := b.mortalOwner()
	e := spread(100, 7)
	b.put(e...)
	// 100, 5 in hand; then alone, three times.
	if _, n := b.poison(m, e[57].ID, 100); n < 4 || n > 5 {
		b.t.Errorf("%d deaths, want 5", n)
	}
}

// So is one that is tried again, among others that are.
func testPoisonDue(b *bench) {
	m := b.mortalOwner()
	e := append(spread(20, 10), events("", "")...)
	b.put(e...)
	c := m.hand()
	outcomes := m.outcomes(c, func(outrider.Record) store.Outcome { return waiting(1, 0) })
	m.settle(c, outcomes...)
	if _, n := b.poison(m, e[3].ID, len(e)); n < 3 || n > 5 {
		b.t.Errorf("%d deaths, want 4", n)
	}
}

// Among few each is alone at once.
func testPoisonFew(b *bench) {
	m := b.mortalOwner()
	e := events("a", "a", "b")
	b.put(e...)
	m, n := b.poison(m, e[1].ID, 3)
	if n != 4 {
		b.t.Errorf("%d deaths, want 4", n)
	}
	// One that was in hand by itself, but not sent alone, is charged nothing
	// by the first death.
	one := event("c")
	b.put(one)
	if _, n := b.poison(m, one.ID, 1); n != 4 {
		b.t.Errorf("%d deaths, want 4", n)
	}
}

// To leave with something in hand is to die.
func testLeaveInHand(b *bench) {
	m := b.owner()
	e := spread(40, 4)
	b.put(e...)
	m.hand()
	if err := m.s.Leave(b.ctx); err != nil {
		b.t.Fatal(err)
	}
	m = b.join()
	if got := m.acquire(64); len(got) != 1 {
		b.t.Fatalf("acquired %+v of a relay that has left", got)
	} else {
		m.lease = got[0]
	}
	var got []outrider.Record
	for len(got) < 40 {
		c := m.piece(2)
		got = append(got, c.Records...)
		m.finish(c)
	}
	wantIDs(b.t, "in hand at the end", got, e...)
	m.idle()
}

// What was read and not started was not in hand.
func testDeathNotStarted(b *bench) {
	m := b.mortalOwner()
	e := spread(30, 4)
	b.put(e...)
	m.fresh()
	m.die()
	m = b.heir()
	c := m.nextFresh()
	wantIDs(b.t, "Fresh", c.Records, e...)
	if c.Exclusive || c.Redelivery {
		b.t.Errorf("claim of what was not started: exclusive %v, redelivery %v", c.Exclusive, c.Redelivery)
	}
	m.start(c)
	m.finish(c)
	m.idle()
}

// What was settled is settled.
func testDeathSettled(b *bench) {
	m := b.mortalOwner()
	m.params.MaxRecords = 20
	e := spread(60, 4)
	b.put(e...)
	one, two := m.hand(), m.hand()
	m.finish(one)
	m.die()
	m = b.heir()
	var got []outrider.Record
	for len(got) < 20 {
		c := m.piece(1)
		got = append(got, c.Records...)
		m.finish(c)
	}
	wantIDs(b.t, "in hand at the death", got, e[20:40]...)
	_ = two
	m.drain(20, nil)
	m.idle()
}

// A slow record that was set apart was in hand too.
func testDeathSlow(b *bench) {
	m := b.mortalOwner()
	e := events("a", "b", "a", "c", "a")
	b.put(e...)
	c := m.hand()
	m.deliver(c, 0, 1, 3)
	m.settle(c, inHand, published, pending, published, pending)
	m.die()
	m = b.heir()
	c = m.piece(1)
	wantIDs(b.t, "slow at the death", c.Records, e[0])
	m.finish(c)
	wantIDs(b.t, "behind it", m.drain(2, nil), e[2], e[4])
	m.idle()
}

// An event that commits while the pieces are sent, with a lower id, comes
// behind what was in hand of its key.
func testLateBehindPieces(b *bench) {
	if b.harness.OneWriter {
		b.t.Skip("one writer")
	}
	m := b.mortalOwner()
	late := b.begin()
	late.add(events("a", "b", "c")...)
	e := events("a", "a", "b", "b", "c")
	b.put(e...)
	c := m.hand()
	m.deliver(c, 2, 3) // the others may be on their way
	late.commit()
	m.die()
	m = b.heir()
	// The head of one key fails on the way, so its rest is read by key.
	m.drain(8, func(r outrider.Record) store.Outcome {
		if r.ID == e[0].ID && r.Attempts == 0 {
			return waiting(1, 0)
		}
		return published
	})
	m.idle()
}

// Heads and successors in a Due claim at a death come again in order, with
// their counts.
func testDeathDue(b *bench) {
	m := b.mortalOwner()
	e := events("a", "a", "b", "a", "")
	b.put(e...)
	c := m.hand()
	m.settle(c, waiting(2, 0), pending, waiting(3, 0), pending, waiting(4, 0))
	var hand []outrider.Record
	b.until("all heads are in hand", func() bool {
		c := m.due()
		if len(c.Records) > 0 {
			m.start(c)
			m.deliver(c)
			hand = append(hand, c.Records...)
		}
		return len(ofKey(hand, "a")) > 0 && len(ofKey(hand, "b")) > 0 && len(ofKey(hand, "")) > 0
	})
	m.die()
	m = b.heir()
	var got []outrider.Record
	for len(got) < len(hand) {
		c := m.piece(1)
		got = append(got, c.Records...)
		m.finish(c)
	}
	for _, r := range got {
		i := slices.Index(ids(hand), r.ID)
		if i < 0 || r.Attempts != hand[i].Attempts || r.Starts != 0 {
			b.t.Errorf("event %s came with %d attempts and %d starts", r.ID, r.Attempts, r.Starts)
		}
	}
	got = append(got, m.drain(5-len(got), nil)...)
	wantIDs(b.t, "key a", ofKey(got, "a"), e[0], e[1], e[3])
	m.idle()
}

// One that is sent alone and given back by its owner is charged nothing.
func testAloneReleased(b *bench) {
	m := b.mortalOwner()
	b.put(events("a", "b")...)
	m.hand()
	m.die()
	m = b.heir()
	m.piece(1)
	if _, err := m.s.Release(b.ctx, m.lease, 0); err != nil {
		b.t.Fatal(err)
	}
	m = b.heir()
	for _, r := range m.drain(2, nil) {
		if r.Starts != 0 {
			b.t.Errorf("starts are %d", r.Starts)
		}
	}
	m.idle()
}

// What was sent again after a death, and failed while its process lived on,
// is as innocent as any other.
func testTriedAgain(b *bench) {
	m := b.mortalOwner()
	e := events("a", "b", "")
	b.put(e...)
	m.hand()
	m.die()
	m = b.heir()
	for range e {
		m.settle(m.piece(1), waiting(1, 0))
	}
	n := 0
	b.until("all are tried again", func() bool {
		c := m.due()
		if c.Exclusive || c.Alone {
			b.t.Errorf("%v are tried again: exclusive %v, alone %v", ids(c.Records), c.Exclusive, c.Alone)
		}
		if len(c.Records) > 0 {
			m.start(c)
			m.finish(c)
		}
		n += len(c.Records)
		return n == len(e)
	})
	m.idle()
}

// A head has failed under one claim when a death ends another with later
// events of its key: what is between them was not sent, and goes first.
func testDeathBehindHead(b *bench) {
	m := b.mortalOwner()
	e := events("a", "a", "a", "a", "b", "a")
	b.put(e...)
	m.params.MaxRecords = 2
	one := m.hand()
	m.params.MaxRecords = 100
	m.hand()
	m.settle(one, waiting(1, 0), pending)
	m.die()
	m = b.heir()
	got := m.drain(6, nil)
	wantIDs(b.t, "key a", ofKey(got, "a"), e[0], e[1], e[2], e[3], e[5])
	m.idle()
}

// A head among what was in hand at the end of its owner waits, is given back
// unsent, and still goes before the rest.
func testHeadGivenBack(b *bench) {
	m := b.owner()
	e := events("a", "a", "a")
	b.put(e...)
	m.hand()
	if _, err := m.s.Release(b.ctx, m.lease, 0); err != nil {
		b.t.Fatal(err)
	}
	m.takeAll()
	m.settle(m.hand(), waiting(1, 0), pending)
	m.params.MaxRecords = 1
	for range 2 {
		c := m.nextDue()
		wantIDs(b.t, "due", c.Records, e[0])
		m.start(c)
		m.settle(c, pending)
	}
	wantIDs(b.t, "key a", m.drain(3, nil), e...)
	m.idle()
}
