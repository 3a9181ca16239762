package storetest

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

var claimTests = []test{
	{"Limits", testLimits},
	{"MaxBytes", testMaxBytes},
	{"MaxBytesDue", testMaxBytesDue},
	{"MaxExceptions", testMaxExceptions},
	{"IdleExceptions", testIdleExceptions},
	{"KeyShare", testKeyShare},
	{"KeyShareForgotten", testKeyShareForgotten},
	{"KeyShareBehindHead", testKeyShareBehindHead},
	{"Pipeline", testPipeline},
	{"PipelineFails", testPipelineFails},
	{"PipelineReadAhead", testPipelineReadAhead},
	{"Forget", testForget},
	{"ForgetDue", testForgetDue},
	{"DueBesideFresh", testDueBesideFresh},
	{"DueOnce", testDueOnce},
}

// A claim holds what was asked for at most, and says whether there is more.
func testLimits(b *bench) {
	m := b.owner()
	m.params.MaxRecords = 3
	if c := m.fresh(); len(c.Records) > 0 || c.More {
		b.t.Errorf("claim of an empty store: %d records, More %v", len(c.Records), c.More)
	}
	b.put(spread(7, 7)...)
	for i, want := range []int{3, 3, 1} {
		c := m.hand()
		if len(c.Records) != want || i < 2 && !c.More {
			b.t.Errorf("claim %d: %d records, More %v", i, len(c.Records), c.More)
		}
		if c.Exclusive || c.Alone || c.Redelivery {
			b.t.Errorf("claim %d of new events: %+v", i, c)
		}
		m.settle(c, waiting(1, 0))
	}
	for i, want := range []int{3, 3, 1} {
		c := m.nextDue()
		if len(c.Records) != want || i < 2 && !c.More {
			b.t.Errorf("Due claim %d: %d records, More %v", i, len(c.Records), c.More)
		}
		m.start(c)
		m.finish(c)
	}
	m.idle()
	if c := m.fresh(); c.More {
		b.t.Error("there is nothing more, and More is true")
	}
	if c := m.due(); c.More {
		b.t.Error("nothing more is due, and More is true")
	}
}

func large(key string, size int) outrider.Event {
	e := event(key)
	e.Payload = fmt.Appendf(nil, "%q", bytes.Repeat([]byte("x"), size-2))
	return e
}

// Payloads and headers together stay under MaxBytes, but one is handed out however large.
func testMaxBytes(b *bench) {
	m := b.owner()
	m.params.MaxBytes = 10_000
	var all []outrider.Event
	for _, size := range []int{4000, 4000, 4000, 1_000_000, 100, 10_001, 10_000, 100, 9_900, 2} {
		all = append(all, large("a", size))
	}
	for range 5 { // headers count as well
		e := large("a", 100)
		e.Headers = map[string]string{"h": strings.Repeat("x", 6000)}
		all = append(all, e)
	}
	b.put(all...)
	var got []outrider.Record
	for len(got) < len(all) {
		c := m.hand()
		if n := size(c.Records); n > m.params.MaxBytes && len(c.Records) > 1 {
			b.t.Errorf("%d records have %d bytes", len(c.Records), n)
		}
		if len(got)+len(c.Records) < len(all) && !c.More {
			b.t.Error("More is false, with more to come")
		}
		got = append(got, c.Records...)
		m.finish(c)
	}
	wantIDs(b.t, "all", got, all...)
	for i, r := range got {
		if !bytes.Equal(r.Payload, all[i].Payload) {
			b.t.Errorf("payload %d of %d bytes is %d bytes", i, len(all[i].Payload), len(r.Payload))
		}
	}
}

func size(records []outrider.Record) int {
	n := 0
	for _, r := range records {
		n += r.Size()
	}
	return n
}

// The same holds for what is due.
func testMaxBytesDue(b *bench) {
	m := b.owner()
	m.params.MaxBytes = 10_000
	all := []outrider.Event{large("a", 50_000), large("a", 6000), large("a", 6000), large("b", 6000), large("c", 20_000)}
	b.put(all...)
	m.params.MaxBytes = 1 << 20
	m.settle(m.hand(), waiting(1, 0), pending, pending, waiting(1, 0), waiting(1, 0))
	m.params.MaxBytes = 10_000
	for n := 0; n < len(all); {
		c := m.nextDue()
		if s := size(c.Records); s > m.params.MaxBytes && len(c.Records) > 1 {
			b.t.Errorf("%d records have %d bytes", len(c.Records), s)
		}
		m.start(c)
		m.finish(c)
		n += len(c.Records)
	}
	m.idle()
}

// From a number of exceptions on nothing new is read.
func testMaxExceptions(b *bench) {
	m := b.owner()
	m.params.MaxExceptions = 10
	wait := func(n int, due time.Duration) {
		b.t.Helper()
		for range n {
			b.put(event(fmt.Sprint("waits-", eventCount.Load())))
		}
		for n > 0 {
			c := m.nextFresh()
			m.start(c)
			m.settle(c, waiting(1, due))
			n -= len(c.Records)
		}
	}
	wait(4, forever)
	b.put(event("a"))
	m.drain(1, nil)
	wait(6, 0)
	b.put(event("b"))
	for range 3 {
		if c := m.fresh(); len(c.Records) > 0 {
			b.t.Fatalf("with 10 exceptions of 10 came %v", ids(c.Records))
		}
	}
	// What is due goes on, and then so does the rest.
	if got := m.drain(7, nil); got[6].Key != "b" {
		b.t.Errorf("last came key %q", got[6].Key)
	}
	m.idle()
}

// What waits for somebody or for its time alone, and holds no key, is not counted,
// however much of it there is.
func testIdleExceptions(b *bench) {
	m := b.owner()
	m.params.MaxExceptions = 10
	fail := func(what string, o store.Outcome, es ...outrider.Event) {
		b.t.Helper()
		b.put(es...)
		for n := 0; n < len(es); {
			c := m.nextFresh()
			m.start(c)
			m.settle(c, o)
			n += len(c.Records)
		}
		e := event("behind-" + what)
		b.put(e)
		if got := m.drain(1, nil); got[0].ID != e.ID {
			b.t.Errorf("behind %s came %v", what, ids(got))
		}
	}
	var delayed, loose, keyed []outrider.Event
	for i := range 25 {
		e := event(fmt.Sprint("delayed-", i))
		e.Delay = forever
		delayed = append(delayed, e)
		loose = append(loose, event(""))
		keyed = append(keyed, event(fmt.Sprint("keyed-", i)))
	}
	b.put(delayed...)
	fail("unordered ones that failed", failed(1, false), loose...)
	fail("keys that go on without their failed ones", failed(1, true), keyed...)
	m.idle()
}

// What a burst has beyond its share comes as Due claims, a share in each, in
// order; other keys pass it, and in the end it is a key as any other.
func testKeyShare(b *bench) {
	m := b.owner()
	m.params.KeyShare = 4
	var burst []outrider.Event
	for range 30 {
		burst = append(burst, event("burst"))
	}
	b.put(burst...)
	b.put(events("a", "b", "a")...)
	c := m.hand()
	if n := len(ofKey(c.Records, "burst")); n != 4 {
		b.t.Fatalf("%d of the burst in a Fresh claim, want 4", n)
	}
	if n := len(c.Records); n != 7 {
		b.t.Fatalf("%d records in a Fresh claim, want 7", n)
	}
	// While they are in hand nothing of the burst is handed out.
	m.idle()
	m.finish(c)
	got := ofKey(c.Records, "burst")
	for len(got) < 20 {
		b.put(event("a"))
		f := m.nextFresh()
		if n := len(ofKey(f.Records, "burst")); n > 0 {
			b.t.Fatalf("%d of the burst in a Fresh claim behind", n)
		}
		m.start(f)
		m.finish(f)
		d := m.nextDue()
		if n := len(d.Records); n != 4 {
			b.t.Fatalf("%d of the burst in a Due claim, want 4", n)
		}
		m.start(d)
		m.finish(d)
		got = append(got, d.Records...)
	}
	more := events("burst", "burst")
	b.put(more...)
	got = append(got, m.drain(12, nil)...)
	wantIDs(b.t, "the burst", got, append(burst, more...)...)
	m.idle()
	next := event("burst")
	b.put(next)
	wantIDs(b.t, "a Fresh claim", m.nextFresh().Records, next)
}

// A claim with a share that is forgotten leaves nothing behind.
func testKeyShareForgotten(b *bench) {
	m := b.owner()
	m.params.KeyShare = 2
	e := events("a", "a", "a", "a", "b")
	b.put(e...)
	c := m.fresh()
	wantIDs(b.t, "Fresh", c.Records, e[0], e[1], e[4])
	m.s.Forget(c)
	c = m.hand()
	wantIDs(b.t, "Fresh again", c.Records, e[0], e[1], e[4])
	m.finish(c)
	wantIDs(b.t, "the rest", m.drain(2, nil), e[2], e[3])
	m.idle()
}

// A share whose records fail holds the rest of its key behind its head.
func testKeyShareBehindHead(b *bench) {
	m := b.owner()
	m.params.KeyShare = 2
	e := events("a", "a", "a", "a", "a")
	b.put(e...)
	m.settle(m.hand(), waiting(1, b.short()), pending)
	c := m.nextDue()
	wantHead(b.t, "due", c.Records, e[:2]...)
	m.start(c)
	m.finish(c)
	n := len(c.Records)
	wantIDs(b.t, "the rest", m.drain(5-n, nil), e[n:]...)
	m.idle()
}

// Two and three claims are in hand beside each other.
func testPipeline(b *bench) {
	for _, depth := range []int{2, 3} {
		m := b.owner()
		m.params.MaxRecords = 7
		all := spread(60, 4)
		b.put(all...)
		var open []*store.Claim
		n := 0
		for {
			c := m.fresh()
			if len(c.Records) > 0 {
				m.start(c)
				m.deliver(c)
				n += len(c.Records)
				open = append(open, c)
			}
			if len(open) == depth || len(c.Records) == 0 {
				if len(open) == 0 {
					break
				}
				m.settle(open[0], published)
				open = open[1:]
			}
		}
		if n != len(all) {
			b.t.Errorf("depth %d: %d events came, want %d", depth, n, len(all))
		}
		m.idle()
		if err := m.s.Leave(b.ctx); err != nil {
			b.t.Fatal(err)
		}
	}
}

// A head fails in the first of several claims in hand that have records of its
// key; those are settled unsent, and all come in order.
func testPipelineFails(b *bench) {
	for _, depth := range []int{2, 3} {
		m := b.owner()
		m.params.MaxRecords = 4
		var a, all []outrider.Event
		key := fmt.Sprint("a", depth)
		for range 2 * depth {
			x := event(key)
			a = append(a, x)
			all = append(all, x, event("b"))
		}
		b.put(all...)
		var open []*store.Claim
		for range depth {
			open = append(open, m.hand())
		}
		for i, c := range open {
			m.deliver(c, 1, 3)
			if i == 0 {
				m.settle(c, waiting(1, 0), published, pending, published)
				// What of the key is still in hand comes later than the head.
				m.idle1(c.Records, a[0])
			} else {
				m.settle(c, pending, published, pending, published)
			}
		}
		wantIDs(b.t, fmt.Sprintf("depth %d: key a", depth), m.drain(len(a), nil), a...)
		m.idle()
		if err := m.s.Leave(b.ctx); err != nil {
			b.t.Fatal(err)
		}
	}
}

// idle1 looks at what is due now: nothing, or the given records' head with
// those that are not in hand elsewhere.
func (m *member) idle1(given []outrider.Record, head outrider.Event) {
	m.t.Helper()
	c := m.due()
	if len(c.Records) == 0 {
		return
	}
	if c.Records[0].ID != head.ID {
		m.t.Errorf("due is %v while a claim with later ones is in hand, head %s", ids(c.Records), head.ID)
	}
	for _, r := range c.Records {
		if !slices.Contains(ids(given), r.ID) {
			m.t.Errorf("due is %s while a claim with earlier ones is in hand", r.ID)
		}
	}
	m.s.Forget(c)
}

// The same with the second claim read before and started after the failure,
// or not started at all.
func testPipelineReadAhead(b *bench) {
	m := b.owner()
	m.params.MaxRecords = 2
	e := events("a", "b", "a", "b", "a", "b")
	b.put(e...)
	one := m.hand()
	two := m.fresh()
	three := m.fresh()
	m.deliver(one, 1)
	m.settle(one, waiting(1, 0), published)
	m.start(two)
	m.deliver(two, 1)
	m.settle(two, pending, published)
	m.s.Forget(three)
	got := m.drain(4, nil)
	wantIDs(b.t, "key a", ofKey(got, "a"), e[0], e[2], e[4])
	m.idle()
}

// A forgotten claim is read again, with those behind it, and nothing is lost.
func testForget(b *bench) {
	m := b.owner()
	m.params.MaxRecords = 3
	e := spread(12, 2)
	b.put(e...)
	one := m.hand()
	two := m.fresh()
	three := m.fresh()
	wantIDs(b.t, "two", two.Records, e[3:6]...)
	wantIDs(b.t, "three", three.Records, e[6:9]...)
	m.s.Forget(two)
	m.params.MaxRecords = 5
	two = m.fresh()
	wantIDs(b.t, "two again", two.Records, e[3:8]...)
	three = m.fresh()
	m.s.Forget(three)
	m.start(two)
	m.deliver(one)
	m.settle(one, published)
	m.finish(two)
	m.drain(4, nil)
	m.idle()
}

// So is a Due claim.
func testForgetDue(b *bench) {
	m := b.owner()
	e := events("a", "a", "b")
	b.put(e...)
	m.settle(m.hand(), waiting(2, 0), pending, waiting(1, 0))
	for range 3 {
		c := m.nextDue()
		wantHead(b.t, "key a", ofKey(c.Records, "a"), e[:2]...)
		wantIDs(b.t, "key b", ofKey(c.Records, "b"), e[2])
		m.s.Forget(c)
	}
	m.drain(3, nil)
	m.idle()
}

// Due claims are in hand beside Fresh ones and settled in any order.
func testDueBesideFresh(b *bench) {
	m := b.owner()
	e := events("a", "a", "b")
	b.put(e...)
	c := m.hand()
	m.deliver(c, 2)
	m.settle(c, waiting(1, 0), pending, published)
	b.put(event("b"))
	f := m.hand()
	d := m.nextDue()
	wantHead(b.t, "due", d.Records, e[:2]...)
	m.start(d)
	b.put(event("b"))
	g := m.hand()
	m.deliver(f)
	m.finish(d)
	m.settle(f, published)
	m.finish(g)
	m.drain(2-len(d.Records), nil)
	m.idle()
}

// What is in a Due claim is in no other, and its key's rest waits for it.
func testDueOnce(b *bench) {
	m := b.owner()
	m.params.KeyShare = 2
	e := events("a", "a", "a", "", "")
	b.put(e...)
	c := m.hand()
	m.settle(c, waiting(1, 0), pending, waiting(1, 0), waiting(1, 0))
	seen := map[string]bool{}
	var open []*store.Claim
	m.params.MaxRecords = 2
	heads := func() bool { return seen[e[0].ID] && seen[e[3].ID] && seen[e[4].ID] }
	b.until("all heads are in hand", func() bool {
		c := m.due()
		if len(c.Records) == 0 {
			return heads()
		}
		m.start(c)
		for _, r := range c.Records {
			if seen[r.ID] {
				b.t.Fatalf("event %s is in hand twice", r.ID)
			}
			seen[r.ID] = true
		}
		open = append(open, c)
		return heads()
	})
	m.idle()
	for _, c := range open {
		m.finish(c)
	}
	rest := e[1:3]
	if seen[e[1].ID] {
		rest = e[2:3]
	}
	wantIDs(b.t, "the rest", m.drain(len(rest), nil), rest...)
	m.idle()
}
