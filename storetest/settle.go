package storetest

import (
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

var settleTests = []test{
	{"HeadBlocksItsKeyAlone", testHeadBlocks},
	{"HeadAloneBlocks", testHeadAlone},
	{"WaitingIsDueInTime", testWaitingDue},
	{"WaitsLong", testWaitsLong},
	{"Attempts", testAttempts},
	{"Message", testMessage},
	{"FailedBlocks", testFailedBlocks},
	{"FailedFree", testFailedFree},
	{"Unordered", testUnorderedOutcomes},
	{"SlowInHand", testSlow},
	{"SlowFails", testSlowFails},
	{"GivenBack", testGivenBack},
	{"GivenBackLate", testGivenBackLate},
	{"Scheduled", testScheduled},
	{"ScheduledHoldsNothing", testScheduledHoldsNothing},
	{"ScheduledBehindHead", testScheduledBehindHead},
	{"ScheduledBesideClaim", testScheduledBesideClaim},
	{"SettleAndStart", testSettleAndStart},
	{"LateBehindHead", testLateBehindHead},
	{"LostAnswer", testLostAnswer},
}

// A head that waits holds back what is behind it in its claim and what comes
// later, and no other key; then all of it comes in order.
func testHeadBlocks(b *bench) {
	m := b.owner()
	a := events("a", "a", "a")
	b.put(a[0], event("b"), a[1], event("b"), event(""))
	c := m.hand()
	m.deliver(c, 1, 3, 4)
	m.settle(c, waiting(1, b.short()), published, pending, published, published)
	b.put(a[2], event("b"))
	got, err := m.round(store.Fresh, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	if len(got) != 1 || got[0].Key != "b" {
		b.t.Errorf("beside a waiting head came %v", ids(got))
	}
	wantIDs(b.t, "key a", m.drain(3, nil), a...)
	m.idle()
	// The key is as any other again.
	next := event("a")
	b.put(next)
	wantIDs(b.t, "a Fresh claim", m.nextFresh().Records, next)
}

// So does a head that had nothing behind it when it failed.
func testHeadAlone(b *bench) {
	m := b.owner()
	e := events("a", "b", "a", "b")
	b.put(e[:2]...)
	m.settle(m.hand(), waiting(1, b.short()), failed(1, false))
	b.put(e[2:]...)
	c := m.fresh()
	if len(c.Records) > 0 {
		b.t.Errorf("behind a head came %v", ids(c.Records))
	}
	m.s.Forget(c)
	wantIDs(b.t, "key a", m.drain(2, nil), e[0], e[2])
	m.idle()
}

// What waits comes after its time and not before.
func testWaitingDue(b *bench) {
	m := b.owner()
	e := event("a")
	b.put(e)
	c := m.hand()
	begin := time.Now()
	m.settle(c, waiting(1, b.short()))
	if b.Advance != nil {
		m.idle()
		next := m.due().NextDue
		if next != b.short() {
			b.t.Errorf("NextDue is %v, want %v", next, b.short())
		}
		b.Advance(next - time.Nanosecond)
		m.idle()
		b.Advance(time.Nanosecond)
	} else if next := m.due(); len(next.Records) == 0 && (next.NextDue <= 0 || next.NextDue > b.short()) {
		b.t.Errorf("NextDue is %v, want up to %v", next.NextDue, b.short())
	}
	c = m.nextDue()
	if d := time.Since(begin); b.Advance == nil && d < b.short() {
		b.t.Errorf("came after %v, want %v", d, b.short())
	}
	wantIDs(b.t, "due", c.Records, e)
	if w := c.Records[0].Waited; w <= 0 {
		b.t.Errorf("waited %v", w)
	}
	m.start(c)
	m.finish(c)
	m.idle()
}

// What waits for long is not handed out, nor when its lease moves.
func testWaitsLong(b *bench) {
	m := b.mortalOwner()
	b.put(event("a"), event("a"))
	m.settle(m.hand(), waiting(1, forever), pending)
	m.idle()
	m.die()
	m = b.joinMortal().takeAll()
	m.idle()
	if next := m.due().NextDue; next <= forever/2 || next > forever {
		b.t.Errorf("NextDue is %v", next)
	}
}

// Attempts are what the caller counted, over many rounds and take-overs.
func testAttempts(b *bench) {
	m := b.mortalOwner()
	e := events("a", "a")
	b.put(e...)
	c := m.hand()
	for i := range 4 {
		m.settle(c, waiting(i+1, 0), pending)
		if i == 2 {
			m.die()
			m = b.joinMortal().takeAll()
		}
		c = m.nextDue()
		wantHead(b.t, "due", c.Records, e...)
		if n := c.Records[0].Attempts; n != i+1 {
			b.t.Errorf("attempts are %d, want %d", n, i+1)
		}
		if len(c.Records) > 1 && c.Records[1].Attempts != 0 {
			b.t.Errorf("attempts of a successor are %d", c.Records[1].Attempts)
		}
		m.start(c)
	}
	// Not every failure counts.
	m.settle(c, waiting(4, 0), pending)
	c = m.nextDue()
	if n := c.Records[0].Attempts; n != 4 {
		b.t.Errorf("attempts are %d, want 4", n)
	}
	m.start(c)
	m.finish(c)
	m.drain(2-len(c.Records), nil)
	m.idle()
}

// Evidence is kept as it fits, and whatever bytes it holds.
func testMessage(b *bench) {
	in, ok := b.Store.(store.Inspector)
	if !ok {
		b.t.Skip("not an Inspector")
	}
	m := b.owner()
	for _, text := range []string{
		"", "short", strings.Repeat("x", store.MaxMessage), strings.Repeat("x", store.MaxMessage+1),
		strings.Repeat("ü", store.MaxMessage), "x" + strings.Repeat("🚀", store.MaxMessage),
		"bad \xff\xfe bytes", "a\x00b", strings.Repeat("\xff", 3*store.MaxMessage), `'";--\`,
	} {
		e := event("")
		b.put(e)
		o := failed(3, false)
		o.Message = text
		m.settle(m.hand(), o)
		d, err := in.Show(b.ctx, e.ID)
		if err != nil || len(d) != 1 || len(d[0].Entries) != 1 {
			b.t.Fatalf("show: %+v, %v", d, err)
		}
		got := d[0].Entries[0]
		if got.Class != o.Class || got.Attempts != 3 || got.State != store.Failed {
			b.t.Errorf("entry is %+v", got)
		}
		if len(got.Message) > store.MaxMessage || !utf8.ValidString(got.Message) {
			b.t.Errorf("message of %d bytes is kept as %d bytes %q", len(text), len(got.Message), got.Message)
		}
		if !utf8.ValidString(text) || strings.Contains(text, "\x00") {
			continue
		}
		want := text
		for len(want) > store.MaxMessage {
			_, n := utf8.DecodeLastRuneInString(want)
			want = want[:len(want)-n]
		}
		if got.Message != want {
			b.t.Errorf("message of %d bytes is kept as %d bytes, want %d", len(text), len(got.Message), len(want))
		}
	}
}

// A failed head blocks its key, over a take-over too.
func testFailedBlocks(b *bench) {
	m := b.mortalOwner()
	b.put(events("a", "b", "a")...)
	c := m.hand()
	m.deliver(c, 1)
	m.settle(c, failed(1, false), published, pending)
	b.put(events("a", "b")...)
	m.drain(1, nil)
	m.idle()
	m.die()
	m = b.joinMortal().takeAll()
	b.put(events("a", "b")...)
	m.drain(1, nil)
	m.idle()
}

// A failed event with Free is out of its key's way.
func testFailedFree(b *bench) {
	m := b.owner()
	a := events("a", "a", "a")
	b.put(a...)
	c := m.hand()
	b.ledger.GivenUp(mainDest, a[0].ID)
	m.deliver(c, 1, 2)
	m.settle(c, failed(1, true), published, published)
	next := event("a")
	b.put(next)
	wantIDs(b.t, "a Fresh claim", m.drain(1, nil), next)
	m.idle()

	// So is one that waited before.
	a = events("b", "b")
	b.put(a...)
	m.settle(m.hand(), waiting(1, 0), pending)
	c = m.nextDue()
	wantHead(b.t, "due", c.Records, a...)
	m.start(c)
	b.ledger.GivenUp(mainDest, a[0].ID)
	m.deliver(c, 1)
	m.settle(c, failed(2, true), published)
	m.drain(2-len(c.Records), nil)
	m.idle()
}

// Unordered events hold back nothing and are held back by nothing.
func testUnorderedOutcomes(b *bench) {
	m := b.owner()
	e := events("", "", "", "", "")
	b.put(e...)
	c := m.hand()
	wantIDs(b.t, "Fresh", c.Records, e...)
	m.deliver(c, 1)
	m.settle(c, waiting(1, forever), published, failed(1, false), pending, waiting(1, 0))
	more := events("", "")
	b.put(more...)
	got := map[string]bool{}
	for _, r := range m.drain(4, nil) {
		got[r.ID] = true
	}
	for _, w := range append(more, e[3], e[4]) {
		if !got[w.ID] {
			b.t.Errorf("event %s did not come", w.ID)
		}
	}
	m.idle()
}

// A slow record is set apart: its key waits for it, the rest is settled.
func testSlow(b *bench) {
	m := b.owner()
	a := events("a", "a", "a")
	b.put(a[0], event("b"), a[1], event("c"))
	c := m.hand()
	m.deliver(c, 1)
	m.settle(c, inHand, published, pending, inHand)
	behind := event("c")
	b.put(a[2], event("b"), behind)
	got := m.drain(1, nil)
	if got[0].Key != "b" {
		b.t.Errorf("beside a slow record came %v", ids(got))
	}
	m.idle()
	// Each of the two ends by itself.
	m.deliver(c, 3)
	m.settle(c, unchanged, unchanged, unchanged, published)
	wantIDs(b.t, "behind the other slow one", m.drain(1, nil), behind)
	m.idle()
	m.deliver(c, 0)
	m.settle(c, published, unchanged)
	wantIDs(b.t, "behind the slow one", m.drain(2, nil), a[1:]...)
	m.idle()
	next := event("a")
	b.put(next)
	wantIDs(b.t, "a Fresh claim", m.nextFresh().Records, next)
}

// A slow record may fail as any other.
func testSlowFails(b *bench) {
	m := b.owner()
	a := events("a", "a")
	b.put(a[0], event("b"), a[1])
	c := m.hand()
	m.settle(c, inHand, inHand, pending)
	m.settle(c, waiting(1, 0), failed(1, true), unchanged)
	wantIDs(b.t, "behind the slow one", m.drain(2, nil), a...)
	m.idle()
}

// What a relay gives back unsent comes again, in order, with nothing counted.
func testGivenBack(b *bench) {
	m := b.owner()
	all := append(spread(10, 3), events("", "")...)
	b.put(all...)
	m.settle(m.hand(), pending)
	later := spread(5, 3)
	b.put(later...)
	for _, r := range m.drain(len(all)+len(later), nil) {
		if r.Attempts != 0 || r.Starts != 0 || r.Waited != 0 {
			b.t.Errorf("event %s was charged: %+v", r.ID, r)
		}
	}
	m.idle()
}

// What is given back, and an event that was written before it and committed
// after it, come with sequences that grow.
func testGivenBackLate(b *bench) {
	if b.harness.OneWriter {
		b.t.Skip("one writer")
	}
	m := b.owner()
	late := b.begin()
	late.add(events("a", "b")...)
	b.put(events("a", "b", "a")...)
	m.settle(m.hand(), pending)
	late.commit()
	m.drain(5, nil)
	m.idle()
}

// A delayed event comes when it is due and not before, once.
func testScheduled(b *bench) {
	m := b.mortalOwner()
	soon, late, at := event("a"), event("b"), event("")
	soon.Delay = b.short()
	late.Delay = forever
	if b.Advance == nil {
		at.AvailableAt = time.Now().Add(forever)
	} else {
		at.Delay = forever
	}
	begin := time.Now()
	b.put(soon, late, at)
	if b.Advance != nil {
		m.idle()
		b.Advance(b.short() - time.Nanosecond)
		m.idle()
		b.Advance(time.Nanosecond)
	}
	c := m.nextOf()
	if d := time.Since(begin); b.Advance == nil && d < b.short() {
		b.t.Errorf("came after %v, want %v", d, b.short())
	}
	wantIDs(b.t, "when due", c.Records, soon)
	m.start(c)
	m.finish(c)
	m.idle()
	m.die()
	m = b.joinMortal().takeAll()
	m.idle()
}

// nextOf waits for records, Fresh or Due.
func (m *member) nextOf() *store.Claim {
	m.t.Helper()
	var c *store.Claim
	m.b.until("there is something to send", func() bool {
		if c = m.fresh(); len(c.Records) == 0 {
			c = m.due()
		}
		return len(c.Records) > 0
	})
	return c
}

// A delayed event does not hold its key.
func testScheduledHoldsNothing(b *bench) {
	m := b.owner()
	e := event("a")
	e.Delay = forever
	b.put(e)
	b.put(events("a", "a")...)
	m.idleDue()
	c := m.nextFresh()
	if len(c.Records) != 2 {
		b.t.Fatalf("Fresh holds %v", ids(c.Records))
	}
	m.start(c)
	m.finish(c)
	b.put(event("a"))
	c = m.nextFresh()
	m.start(c)
	m.finish(c)
	m.idle()
}

func (m *member) idleDue() {
	m.t.Helper()
	if c := m.due(); len(c.Records) > 0 {
		m.t.Errorf("due is %v", ids(c.Records))
	}
}

// A delayed event that is due while a head of its key waits stays behind it.
func testScheduledBehindHead(b *bench) {
	m := b.owner()
	e := events("a", "a")
	e[1].Delay = b.short()
	b.put(e...)
	c := m.hand()
	wantIDs(b.t, "Fresh", c.Records, e[0])
	m.settle(c, failed(1, false))
	other := event("b")
	other.Delay = 2 * b.short()
	b.put(other)
	// When the other one has come, the delayed one of key a was due.
	wantIDs(b.t, "due", m.drain(1, nil), other)
	m.idle()
	op, ok := b.Store.(store.Operator)
	if !ok {
		return
	}
	if n, err := op.Retry(b.ctx, store.Target{Key: "a"}); n != 1 || err != nil {
		b.t.Fatalf("retry: %d, %v", n, err)
	}
	wantIDs(b.t, "when the head is tried again", m.drain(2, nil), e...)
}

// A delayed event that falls due while later ones of its key are in hand has a
// sequence that grows over whatever is delivered before it.
func testScheduledBesideClaim(b *bench) {
	m := b.owner()
	e := event("a")
	e.Delay = b.short()
	other := event("b")
	other.Delay = b.short()
	b.put(e, other)
	m.idle()
	b.put(event("a"))
	c := m.nextFresh() // read, and not started
	sent := 0
	b.until("the delayed ones are due", func() bool {
		d := m.due()
		if len(d.Records) > 0 {
			m.start(d)
			m.finish(d)
			sent += len(d.Records)
			return len(ofKey(d.Records, "b")) > 0
		}
		return false
	})
	m.start(c)
	m.finish(c)
	b.put(event("a"))
	m.drain(4-sent-1, nil)
	m.idle()
}

// The outcomes of one claim and the start of the next go in one commit.
func testSettleAndStart(b *bench) {
	m := b.owner()
	m.params.MaxRecords = 5
	b.put(spread(50, 3)...)
	c := m.hand()
	n := 0
	for len(c.Records) > 0 {
		m.deliver(c)
		n += len(c.Records)
		next := m.fresh()
		var start []*store.Claim
		if len(next.Records) > 0 {
			start = append(start, next)
		}
		if err := m.commit([]store.Settlement{settlement(c, published)}, start...); err != nil {
			b.t.Fatal(err)
		}
		c = next
	}
	if n != 50 {
		b.t.Errorf("%d events came, want 50", n)
	}
	m.idle()
}

// An event that commits late, with a lower id than the head that waits, is
// neither lost nor a reason for disorder.
func testLateBehindHead(b *bench) {
	if b.harness.OneWriter {
		b.t.Skip("one writer")
	}
	m := b.owner()
	late := b.begin()
	late.add(event("a"))
	e := events("a", "a")
	b.put(e...)
	m.settle(m.hand(), waiting(1, b.short()), pending)
	late.commit()
	b.put(event("a"))
	m.drain(4, nil)
	m.idle()
}

// A commit that took effect and whose answer was lost is recognised when it is
// repeated, and done once.
func testLostAnswer(b *bench) {
	if b.LoseAnswer == nil {
		b.t.Skip("answers cannot be lost")
	}
	m := b.owner()
	m.params.MaxRecords = 4
	e := events("a", "b", "a", "c", "d", "e")
	b.put(e...)
	lost := func(settle []store.Settlement, start ...*store.Claim) {
		b.t.Helper()
		b.LoseAnswer(b.t, m.s)
		p := store.CommitParams{Lease: m.lease, Settle: settle, Start: start}
		done := m.note(settle, start)
		if err := m.s.Commit(b.ctx, p); err == nil {
			b.t.Fatal("no answer was lost")
		}
		for range 2 {
			if err := m.s.Commit(b.ctx, p); err != nil {
				b.t.Fatalf("repeated commit: %v", err)
			}
		}
		done()
	}
	c := m.fresh()
	lost(nil, c)
	m.deliver(c, 1)
	next := m.fresh()
	wantIDs(b.t, "the next claim", next.Records, e[4:]...)
	lost([]store.Settlement{settlement(c, waiting(1, 0), published, pending, inHand)}, next)
	m.deliver(c, 3)
	lost([]store.Settlement{settlement(c, unchanged, unchanged, unchanged, published)})
	m.deliver(next)
	lost([]store.Settlement{settlement(next, published)})
	got := m.drain(2, func(r outrider.Record) store.Outcome {
		if r.ID == e[0].ID && r.Attempts != 1 {
			b.t.Errorf("attempts are %d, want 1", r.Attempts)
		}
		return published
	})
	wantIDs(b.t, "due", got, e[0], e[2])
	m.idle()
	b.put(spread(9, 2)...)
	if n := len(m.drain(9, nil)); n != 9 {
		b.t.Error(fmt.Sprint(n, " came"))
	}
}
