package storetest

import (
	"slices"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// Until it is due a delayed event holds nothing back. From then on it may hold
// its key, as any other in front does, so that it has a place in its order: until
// it got through, and no longer. What it does to other keys is nothing.
var delayedTests = []test{
	{"Fails", func(b *bench) { testDelayedFails(b, waiting(1, 0)) }},
	{"FailsForGood", func(b *bench) { testDelayedFails(b, failed(1, false)) }},
	{"FailsAndLetsGo", func(b *bench) { testDelayedFails(b, failed(1, true)) }},
	{"IsNotSent", func(b *bench) { testDelayedFails(b, pending) }},
	{"FailsAndDies", testDelayedFailsAndDies},
	{"FailsBesideItsKey", testDelayedFailsBesideItsKey},
	{"FailsUnheard", testDelayedFailsUnheard},
	{"IsSkipped", testDelayedIsSkipped},
}

// delayedInHand has a delayed event of key a in hand, when one that was inserted
// later has got through, with more of the key behind it.
func (m *member) delayedInHand() (e outrider.Event, c *store.Claim) {
	m.t.Helper()
	e = event("a")
	e.Delay = m.b.short()
	m.b.put(e, event("a"))
	c = m.hand()
	if slices.Contains(ids(c.Records), e.ID) {
		return e, nil // the clock is real, and was quicker
	}
	m.finish(c)
	m.b.pass(2)
	c = m.nextDue()
	m.b.put(events("a", "b")...)
	m.start(c)
	return e, c
}

// failDelayed settles a claim of delayedInHand.
func (m *member) failDelayed(e outrider.Event, c *store.Claim, o store.Outcome) {
	m.t.Helper()
	wantHead(m.t, "due", c.Records, e)
	m.settle(c, o, pending)
	if o.Free {
		m.b.ledger.GivenUp(mainDest, e.ID)
	}
}

// A delayed event fails. Another key goes on, and so does its own when it is over:
// at once if it lets it, else when it has got through.
func testDelayedFails(b *bench, o store.Outcome) {
	m := b.owner()
	e, c := m.delayedInHand()
	if c == nil {
		return
	}
	m.failDelayed(e, c, o)
	var other bool
	b.until("another key goes on", func() bool {
		for _, kind := range []store.Kind{store.Fresh, store.Due} {
			got, err := m.round(kind, nil)
			if err != nil {
				b.t.Fatal(err)
			}
			other = other || len(ofKey(got, "b")) > 0
		}
		return other
	})
	if o.State == store.Failed && !o.Free {
		op := b.operator()
		b.operate("retry", func() (int, error) { return op.Retry(b.ctx, store.Target{ID: e.ID}) }, 1)
		b.ledger.Retried(mainDest, e.ID)
	}
	m.drainAll()
	b.put(event("a"))
	m.drainAll()
}

// So it does where its owner dies.
func testDelayedFailsAndDies(b *bench) {
	m := b.mortalOwner()
	e, c := m.delayedInHand()
	if c == nil {
		return
	}
	m.failDelayed(e, c, waiting(1, 0))
	m.die()
	m = b.heir()
	m.drainAll()
	b.put(event("a"))
	m.drainAll()
}

// What comes next of its key may have been read by then, and not been sent when
// the owner dies: it comes all the same, and in front of what is later.
func testDelayedFailsBesideItsKey(b *bench) {
	m := b.mortalOwner()
	e, c := m.delayedInHand()
	if c == nil {
		return
	}
	m.fresh()
	m.failDelayed(e, c, waiting(1, 0))
	m.die()
	b.put(event("a"))
	m = b.heir()
	m.drainAll()
	b.put(event("a"))
	m.drainAll()
}

// What comes next of its key is read while nobody knows yet that it has failed: it
// is in hand once.
func testDelayedFailsUnheard(b *bench) {
	if b.LoseAnswer == nil {
		b.t.Skip("answers cannot be lost")
	}
	m := b.owner()
	e, c := m.delayedInHand()
	if c == nil {
		return
	}
	wantHead(b.t, "due", c.Records, e)
	settle := []store.Settlement{settlement(c, waiting(1, 0), pending)}
	done := m.note(settle, nil)
	commit := func() error { return m.s.Commit(b.ctx, store.CommitParams{Lease: m.lease, Settle: settle}) }
	b.LoseAnswer(b.t, m.s)
	if commit() == nil {
		b.t.Fatal("no answer was lost")
	}
	fresh := m.fresh()
	if err := commit(); err != nil {
		b.t.Fatal(err)
	}
	done()
	b.put(event("a"))
	inHand := append(ids(fresh.Records), ids(m.fresh().Records)...)
	due := m.due()
	for _, id := range ids(due.Records) {
		if slices.Contains(inHand, id) {
			b.t.Errorf("event %s is in two claims: %v, %v", id, inHand, ids(due.Records))
		}
	}
	m.s.Forget(due)
	m.s.Forget(fresh)
	m.drainAll()
}

// One that has failed for good is skipped.
func testDelayedIsSkipped(b *bench) {
	op := b.operator()
	m := b.owner()
	e, c := m.delayedInHand()
	if c == nil {
		return
	}
	m.failDelayed(e, c, failed(1, false))
	b.operate("skip", func() (int, error) { return op.Skip(b.ctx, store.Target{ID: e.ID}) }, 1)
	b.ledger.GivenUp(mainDest, e.ID)
	m.drainAll()
	b.put(event("a"))
	m.drainAll()
}
