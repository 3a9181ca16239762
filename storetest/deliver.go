package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

var deliverTests = []test{
	{"Once", testOnce},
	{"Interleaved", testInterleaved},
	{"LateLowerID", testLateLowerID},
	{"LateAmongPages", testLateAmongPages},
	{"RolledBack", testRolledBack},
	{"OrderOverPages", testOrderOverPages},
	{"Content", testContent},
	{"Binary", testBinary},
	{"SameIDTwice", testSameIDTwice},
	{"LargeIDs", testLargeIDs},
	{"Watch", testWatch},
}

// Everything that was committed comes out once.
func testOnce(b *bench) {
	var all []outrider.Event
	for i := range 30 {
		e := spread(1+i%4, 5)
		e = append(e, event(""))
		b.put(e...)
		all = append(all, e...)
	}
	m := b.owner()
	got := m.drain(len(all), nil)
	m.idle()
	g, w := ids(got), idsOf(all)
	slices.Sort(g)
	slices.Sort(w)
	if !slices.Equal(g, w) {
		b.t.Errorf("%d events came out, want %d", len(g), len(w))
	}
}

// Transactions that overlap commit their ids in any order while a relay reads.
func testInterleaved(b *bench) {
	if b.harness.OneWriter {
		b.t.Skip("one writer")
	}
	for _, page := range []int{1, 7, 40} {
		m := b.join()
		m.takeAll()
		m.params.MaxRecords = page
		total := 0
		var open []*tx
		for i := range 60 {
			x := b.begin()
			for j := range 1 + i%3 {
				x.add(event(fmt.Sprintf("key-%d", (i+j)%6)))
			}
			open = append(open, x)
			// End one of those that are open, not the oldest.
			if len(open) > 4 {
				n := 1 + i%3
				if i%7 == 0 {
					open[n].rollback()
				} else {
					open[n].commit()
				}
				open = slices.Delete(open, n, n+1)
			}
			if i%2 == 0 {
				got, err := m.round(store.Kind(i/2%2), nil)
				if err != nil {
					b.t.Fatal(err)
				}
				total += len(got)
			}
		}
		for _, x := range slices.Backward(open) {
			x.commit()
		}
		m.drain(len(b.ledger.Missing(mainDest)), nil)
		m.idle()
		if left := b.ledger.Missing(mainDest); len(left) > 0 {
			b.t.Fatalf("pages of %d: lost %v", page, idsOf(left))
		}
		if err := m.s.Leave(b.ctx); err != nil {
			b.t.Fatal(err)
		}
	}
}

// A row with a lower id that commits late is not passed over, and does not
// hold up the ones that have committed.
func testLateLowerID(b *bench) {
	if b.harness.OneWriter {
		b.t.Skip("one writer")
	}
	m := b.owner()
	first := b.begin()
	first.add(event("a"), event("b"))
	b.put(event("a"), event("c"))
	m.drain(2, nil)
	m.idle()
	b.put(event("d"))
	m.drain(1, nil)
	first.commit()
	m.drain(2, nil)
	m.idle()
}

// The same while a backlog is read in pages, so that the late row lies in what
// has been read, and others commit behind it.
func testLateAmongPages(b *bench) {
	if b.harness.OneWriter {
		b.t.Skip("one writer")
	}
	for _, page := range []int{1, 7, 40} {
		m := b.owner()
		m.params.MaxRecords = page
		b.put(spread(20, 4)...)
		late := b.begin()
		late.add(spread(10, 4)...)
		b.put(spread(30, 4)...)
		later := b.begin()
		later.add(spread(10, 4)...)
		b.put(spread(30, 4)...)
		n := 0
		for range 3 {
			got, err := m.round(store.Fresh, nil)
			if err != nil {
				b.t.Fatal(err)
			}
			n += len(got)
		}
		late.commit()
		got, err := m.round(store.Fresh, nil)
		if err != nil {
			b.t.Fatal(err)
		}
		b.put(spread(10, 4)...)
		n += len(got)
		m.drain(100-n, nil)
		later.commit()
		m.drain(10, nil)
		m.idle()
		if err := m.s.Leave(b.ctx); err != nil {
			b.t.Fatal(err)
		}
	}
}

// What was rolled back is never seen.
func testRolledBack(b *bench) {
	m := b.owner()
	for i := range 20 {
		x := b.begin()
		x.add(event("a"), event("b"))
		if i%2 == 0 {
			x.rollback()
		} else {
			x.commit()
		}
	}
	m.drain(20, nil)
	m.idle()
}

// Keys keep their order over pages of any size, with claims beside each other.
func testOrderOverPages(b *bench) {
	for _, page := range []int{1, 7, 40, 100} {
		m := b.owner()
		m.params.MaxRecords = page
		for range 4 {
			b.put(spread(50, 7)...)
		}
		var beside []*store.Claim
		n := 0
		for n < 200 || len(beside) > 0 {
			c := m.fresh()
			if len(c.Records) > page {
				b.t.Fatalf("%d records, asked for %d", len(c.Records), page)
			}
			if n += len(c.Records); len(c.Records) > 0 {
				if n < 200 && !c.More {
					b.t.Errorf("page of %d: More is false after %d of 200", page, n)
				}
				m.start(c)
				m.deliver(c)
				beside = append(beside, c)
			}
			if len(beside) == 2 || len(c.Records) == 0 {
				if len(beside) == 0 {
					b.t.Fatalf("nothing more to claim after %d of 200", n)
				}
				m.settle(beside[0], published)
				beside = beside[1:]
			}
		}
		m.idle()
		if err := m.s.Leave(b.ctx); err != nil {
			b.t.Fatal(err)
		}
	}
}

// What an event says is carried to the last byte.
func testContent(b *bench) {
	plain := event("plain")
	plain.Key, plain.AggregateID = "", "42"
	exact := event("exact")
	exact.Payload = []byte(" {\"b\":1.0, \"a\" : 1e2,\r\n\t\"b\":2, \"u\":\"\\u00fc ü 🚀\", \"big\":12345678901234567890.10}")
	exact.ContentType = "application/vnd.order+json; charset=\"utf-8\""
	exact.Headers = map[string]string{
		"tenant": "ü 🚀", "Tenant": "other", "empty": "", "quote": `"\'{}$1?:x --;`, "lines": "a\nb\tc",
	}
	exact.Traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	empty := event("empty")
	empty.Payload = nil
	null := event("null")
	null.Payload = []byte("null")
	loose := event("")
	loose.AggregateID = "loose"
	past := event("past")
	past.AvailableAt = time.Date(2001, 2, 3, 4, 5, 6, 789000000, time.UTC)
	all := []outrider.Event{plain, exact, empty, null, loose, past}
	for _, key := range []string{" ", "ключ", `a"b'c\d`, "%_$1", "A", "a", "a ", strings.Repeat("long", 100)} {
		all = append(all, event(key))
	}
	b.put(all...)

	m := b.owner()
	got := map[string]outrider.Record{}
	rows := map[string]bool{}
	for _, r := range m.drain(len(all), nil) {
		got[r.ID] = r
		rows[r.Row] = true
	}
	if len(rows) != len(all) || rows[""] {
		b.t.Errorf("%d rows of %d events: %v", len(rows), len(all), rows)
	}
	for _, e := range all {
		r := got[e.ID]
		same := func(what string, g, w any) {
			b.t.Helper()
			if fmt.Sprint(g) != fmt.Sprint(w) {
				b.t.Errorf("event of key %q: %s is %q, want %q", e.Key, what, g, w)
			}
		}
		same("aggregate type", r.AggregateType, e.AggregateType)
		same("aggregate id", r.AggregateID, e.AggregateID)
		same("type", r.Type, e.Type)
		same("key", r.Key, keyOf(e))
		same("unordered", r.Unordered, e.Unordered)
		same("traceparent", r.Traceparent, e.Traceparent)
		same("delay", r.Delay, time.Duration(0))
		same("attempts", r.Attempts, 0)
		same("starts", r.Starts, 0)
		same("waited", r.Waited, time.Duration(0))
		if !bytes.Equal(r.Payload, e.Payload) {
			b.t.Errorf("event of key %q: payload is %q, want %q", e.Key, r.Payload, e.Payload)
		}
		if e.ContentType == "" {
			e.ContentType = "application/json"
		}
		same("content type", r.ContentType, e.ContentType)
		if len(r.Headers)+len(e.Headers) > 0 && !maps.Equal(r.Headers, e.Headers) {
			b.t.Errorf("event of key %q: headers are %q, want %q", e.Key, r.Headers, e.Headers)
		}
		if !e.AvailableAt.Equal(r.AvailableAt) && !e.AvailableAt.IsZero() {
			b.t.Errorf("event of key %q: available at %v, want %v", e.Key, r.AvailableAt, e.AvailableAt)
		}
		if r.CreatedAt.IsZero() {
			b.t.Errorf("event of key %q: no time of creation", e.Key)
		}
		if e.Unordered {
			if r.Lane < 0 || r.Lane >= outrider.Lanes {
				b.t.Errorf("unordered event: lane %d", r.Lane)
			}
		} else {
			same("lane", r.Lane, outrider.Lane(keyOf(e)))
		}
		if r.Sequence.IsZero() == b.caps.Sequences {
			b.t.Errorf("event of key %q: sequence %v, capability %v", e.Key, r.Sequence, b.caps.Sequences)
		}
	}
}

// Payloads that are no text.
func testBinary(b *bench) {
	if !b.harness.Binary {
		b.t.Skip("payloads are JSON")
	}
	e := event("a")
	for i := range 512 {
		e.Payload = append(e.Payload, byte(i))
	}
	b.put(e)
	if got := b.owner().drain(1, nil); !bytes.Equal(got[0].Payload, e.Payload) {
		b.t.Errorf("payload is %x", got[0].Payload)
	}
}

// An id that was given twice is delivered twice.
func testSameIDTwice(b *bench) {
	one := event("a")
	two := one
	two.Type = "Second"
	x := b.Begin(b.t)
	x.Add(b.t, one, two)
	x.Commit(b.t)
	m := b.owner()
	c := m.fresh()
	if len(c.Records) != 2 || c.Records[0].Type != "Happened" || c.Records[1].Type != "Second" {
		b.t.Fatalf("got %+v", c.Records)
	}
	if c.Records[0].Row == c.Records[1].Row {
		b.t.Error("both have one row")
	}
}

// Ids beyond 32 bits, beyond what a float keeps, and near the end.
func testLargeIDs(b *bench) {
	if b.SetNextID == nil {
		b.t.Skip("ids are not numbers")
	}
	m := b.mortalOwner()
	for _, from := range []int64{1<<31 - 3, 1<<32 - 3, 1<<53 - 3, 1<<63 - 200} {
		b.SetNextID(b.t, from)
		all := spread(8, 2)
		b.put(all...)
		m.params.MaxRecords = 3
		c := m.hand()
		for i, r := range c.Records {
			if want := fmt.Sprint(from + int64(i)); r.Row != want {
				b.t.Errorf("row %s, want %s", r.Row, want)
			}
		}
		// One waits, one is in hand at a death, the rest follows.
		m.deliver(c, 1)
		m.settle(c, waiting(1, 0), published, pending)
		m.start(m.nextDue())
		m.die()
		m = b.joinMortal().takeAll()
		m.drain(7, nil)
		m.idle()
		if op, ok := b.Store.(store.Inspector); ok {
			for i, e := range all {
				d, err := op.Show(b.ctx, fmt.Sprint(from+int64(i)))
				if err != nil || len(d) != 1 || d[0].Record.ID != e.ID {
					b.t.Errorf("show %d: %v, %v", from+int64(i), d, err)
				}
			}
		}
	}
}

// A commit is heard of, and so is one that came before anybody listened: it may
// have come behind a relay's look.
func testWatch(b *bench) {
	w, ok := b.Store.(store.Watcher)
	if !ok {
		b.t.Skip("not a Watcher")
	}
	b.owner()
	b.put(event("a"))
	ctx, cancel := context.WithCancel(b.ctx)
	heard := make(chan struct{}, 1)
	ended := make(chan error, 1)
	go func() {
		ended <- w.Watch(ctx, func() {
			select {
			case heard <- struct{}{}:
			default:
			}
		})
	}()
	hears := func() bool {
		select {
		case <-heard:
			return true
		default:
			return false
		}
	}
	b.until("what was committed before is heard of", hears)
	b.until("a commit is heard of", func() bool {
		b.put(event("a"))
		return hears()
	})
	cancel()
	select {
	case err := <-ended:
		if !errors.Is(err, context.Canceled) {
			b.t.Errorf("Watch ended with %v", err)
		}
	case <-b.ctx.Done():
		b.t.Error("Watch does not end")
	}
}
