// Package sinktest is the conformance suite of package sink: what a driver
// declares is tested, and what it does not declare is tested to be absent.
//
// A driver's test is the wiring of one Harness:
//
//	sinktest.Run(t, sinktest.Harness{New: func(t *testing.T) sinktest.Env {
//		return sinktest.Env{Open: ..., Place: ..., Read: ...}
//	}})
//
// The same suite runs on a fake and on the real server.
package sinktest

import (
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"hash/fnv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/sink"
)

// Patience is how long the suite waits for anything before it gives up. It is
// a limit for broken drivers and never part of a result.
const Patience = 60 * time.Second

// Harness is how the suite reaches a driver and its destination.
type Harness struct {
	// New makes an Env of its own for one test: nobody else writes to its
	// places. Servers may be shared.
	New func(t *testing.T) Env
}

// Env is a destination with room for one test.
type Env struct {
	// Open makes a sink to the destination; the suite closes it.
	Open func(t *testing.T) sink.Sink

	// Place exists and is empty. OtherPlace is a second one; "" skips what
	// needs two.
	Place, OtherPlace string

	// Missing is a place that does not exist; "" where every place exists.
	Missing string

	// Make makes the place that is missing. nil: not tested.
	Make func(t *testing.T)

	// Read gives what a place holds, in the order of arrival per key, as soon
	// as it is at least n messages.
	Read func(t *testing.T, place string, n int) []Arrived

	// MaxBytes is a payload size that is certain to be too large for the
	// destination, and Fits one that is certain to be taken, with the suite's
	// keys and headers. 0: no limit is known; then MaxBytes is not tested and
	// 1 MB less 16 KB has to fit.
	MaxBytes, Fits int

	// Poison turns a message into one that the driver sends and the
	// destination refuses for good. nil: not tested.
	Poison func(m *sink.Message)

	// Stall makes the destination fall silent: it answers nothing until the
	// returned function is called, and then everything. nil: not tested.
	Stall func(t *testing.T) (release func())

	// Left waits until something has left the driver since Stall. nil: calls
	// are cut without regard to it.
	Left func(t *testing.T)

	// Break takes the destination away, and the returned function brings it
	// back. nil: not tested.
	Break func(t *testing.T) (mend func())

	// Headers are what has to arrive for a message besides its payload. nil:
	// Headers of this package.
	Headers func(m sink.Message) map[string]string

	// NoHeaders: the destination carries none.
	NoHeaders bool
}

// Arrived is one message as the destination holds it.
type Arrived struct {
	Place   string
	ID      string
	Key     string // "" for none
	HasKey  bool   // false where there is none, as opposed to an empty one
	Headers map[string]string
	Payload []byte
}

// Headers are the headers that a sink makes of a message by convention, and
// the message's own.
func Headers(m sink.Message) map[string]string {
	h := map[string]string{}
	for name, v := range m.Headers {
		switch name {
		case "id", "type", "aggregate_type", "aggregate_id", "content_type", "traceparent", "sequence", "key":
			name = "header." + name // the sink's own go first
		}
		h[name] = v
	}
	h["id"], h["type"] = m.ID, m.Type
	h["aggregate_type"], h["aggregate_id"] = m.AggregateType, m.AggregateID
	h["content_type"] = m.ContentType
	if m.Traceparent != "" {
		h["traceparent"] = m.Traceparent
	}
	if !m.Sequence.IsZero() {
		h["sequence"] = m.Sequence.String()
	}
	return h
}

// Run runs the whole suite.
func Run(t *testing.T, h Harness) {
	t.Helper()
	for _, c := range []struct {
		name string
		test func(t *suite)
	}{
		{"Empty", testEmpty},
		{"Content", testContent},
		{"Thousands", testThousands},
		{"Concurrent", testConcurrent},
		{"Places", testPlaces},
		{"NoTarget", testNoTarget},
		{"TargetMadeLater", testTargetMadeLater},
		{"Oversize", testOversize},
		{"Poison", testPoison},
		{"Stop", testStop},
		{"Overlap", testOverlap},
		{"OverlapStop", testOverlapStop},
		{"Stale", testStale},
		{"StaleRace", testStaleRace},
		{"CancelBefore", testCancelBefore},
		{"Cancel", testCancel},
		{"Unreachable", testUnreachable},
		{"Outage", testOutage},
		{"Deduplicates", testDeduplicates},
		{"Goroutines", testGoroutines},
	} {
		t.Run(c.name, func(t *testing.T) {
			env := h.New(t)
			if env.Headers == nil {
				env.Headers = Headers
			}
			if env.Fits == 0 {
				env.Fits = 1<<20 - 16<<10
			}
			c.test(&suite{T: t, Env: env})
		})
	}
}

// suite is one test with its destination.
type suite struct {
	*testing.T
	Env
	sink sink.Sink
	caps sink.Capabilities
}

// open makes the test's sink and closes it at the end.
func (s *suite) open() {
	s.Helper()
	s.sink = s.Env.Open(s.T)
	s.caps = s.sink.Capabilities()
	if s.caps.OrderInFlight && !s.caps.Order {
		s.Error("OrderInFlight is declared without Order")
	}
	s.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), Patience)
		defer cancel()
		if err := s.sink.Close(ctx); err != nil {
			s.Errorf("Close: %v", err)
		}
	})
}

var serial atomic.Int64

// message makes one with an ID of its own. An empty key makes it unordered.
func (s *suite) message(key, payload string) sink.Message {
	n := serial.Add(1)
	aggregate := key
	if key == "" {
		aggregate = fmt.Sprint("free-", n)
	}
	return sink.Message{To: s.Place, Record: &outrider.Record{
		Event: outrider.Event{
			ID:            fmt.Sprintf("%08x-0000-7000-8000-%012x", fnv32(s.Name()), n),
			AggregateType: "order", AggregateID: aggregate, Type: "OrderPlaced",
			Key: key, Unordered: key == "",
			Payload: []byte(payload), ContentType: "application/json",
		},
		Row: fmt.Sprint(n), Lane: outrider.Lane(key), CreatedAt: time.Now().Truncate(time.Microsecond),
	}}
}

func fnv32(s string) uint32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(s))
	return h.Sum32()
}

// many makes n messages over some keys, interleaved; every seventh is
// unordered. Without Order no key comes twice.
func (s *suite) many(n, keys int) []sink.Message {
	if !s.caps.Order {
		keys = n
	}
	ms := make([]sink.Message, n)
	for i := range ms {
		key := fmt.Sprintf("key-%d", i%keys)
		if i%7 == 6 {
			key = ""
		}
		ms[i] = s.message(key, fmt.Sprintf(`{"n":%d}`, i))
	}
	return ms
}

// call is one Publish under way.
type call struct {
	s        *suite
	ms       []sink.Message
	results  []sink.Result
	reported []atomic.Int32
	accepted atomic.Int32
	inHand   chan struct{} // closed by Accepted
	done     chan struct{} // closed when Publish has returned
	onReport func(i int, r sink.Result)
}

// start begins a call.
func (s *suite) start(ctx context.Context, ms []sink.Message, onReport ...func(int, sink.Result)) *call {
	s.Helper()
	return s.startStale(ctx, ms, nil, onReport...)
}

// startStale begins a call that can be asked whether it is stale.
func (s *suite) startStale(ctx context.Context, ms []sink.Message, stale func() bool, onReport ...func(int, sink.Result)) *call {
	s.Helper()
	c := &call{
		s: s, ms: ms, results: make([]sink.Result, len(ms)), reported: make([]atomic.Int32, len(ms)),
		inHand: make(chan struct{}), done: make(chan struct{}),
	}
	if len(onReport) > 0 {
		c.onReport = onReport[0]
	}
	go func() {
		s.sink.Publish(ctx, sink.Batch{Messages: ms, Report: c.report, Accepted: c.accept, Stale: stale})
		close(c.done)
	}()
	return c
}

func (c *call) report(i int, r sink.Result) {
	select {
	case <-c.done:
		c.s.Errorf("message %d was reported after Publish had returned", i)
	default:
	}
	if c.reported[i].Add(1) == 1 {
		c.results[i] = r
		if c.onReport != nil {
			c.onReport(i, r)
		}
	}
}

func (c *call) accept() {
	if !c.s.caps.OrderInFlight {
		c.s.Error("Accepted was called by a sink without OrderInFlight")
	}
	if c.accepted.Add(1) == 1 {
		close(c.inHand)
	}
}

// await waits for a channel, with the suite's patience.
func (s *suite) await(ch <-chan struct{}, what string) {
	s.Helper()
	select {
	case <-ch:
	case <-time.After(Patience):
		s.Fatalf("%s has not happened within %v", what, Patience)
	}
}

// wait waits until Publish has returned and checks what holds for every call.
func (c *call) wait() []sink.Result {
	c.s.Helper()
	c.s.await(c.done, "the return of Publish")
	for i := range c.reported {
		if n := c.reported[i].Load(); n != 1 {
			c.s.Errorf("message %d was reported %d times", i, n)
		}
	}
	if n := c.accepted.Load(); c.s.caps.OrderInFlight && n != 1 {
		c.s.Errorf("Accepted was called %d times", n)
	}
	stopped := map[string]sink.Status{}
	for i, r := range c.results {
		c.checkResult(i, r)
		key := c.ms[i].Key
		if key == "" {
			continue
		}
		first, ok := stopped[key]
		switch {
		case !ok && r.Status != sink.Delivered:
			stopped[key] = r.Status
		case ok && r.Status != sink.NotSent && (r.Status != sink.Unknown || first != sink.Unknown):
			c.s.Errorf("message %d of key %s is %v behind one that is %v", i, key, r.Status, first)
		}
	}
	return c.results
}

// checkResult looks at one result by itself.
func (c *call) checkResult(i int, r sink.Result) {
	c.s.Helper()
	switch {
	case r.Status == sink.Delivered && (r.Err != nil || r.Class != sink.ClassNone):
		c.s.Errorf("message %d is delivered with %q, %v", i, r.Class, r.Err)
	case r.Status != sink.Delivered && (r.Err == nil || r.Class == sink.ClassNone):
		c.s.Errorf("message %d is %v without a class or an error: %q, %v", i, r.Status, r.Class, r.Err)
	}
}

// publish is a call from start to end.
func (s *suite) publish(ms ...sink.Message) []sink.Result {
	s.Helper()
	return s.start(context.Background(), ms).wait()
}

// want checks one result.
func (s *suite) want(what string, r sink.Result, status sink.Status, class sink.Class) {
	s.Helper()
	if r.Status != status || r.Class != class {
		s.Errorf("%s: got %v %q (%v), want %v %q", what, r.Status, r.Class, r.Err, status, class)
	}
}

// wantDelivered checks that all were.
func (s *suite) wantDelivered(rs []sink.Result) {
	s.Helper()
	for i, r := range rs {
		if r.Status != sink.Delivered {
			s.Fatalf("message %d: %v %q: %v", i, r.Status, r.Class, r.Err)
		}
	}
}

// wantArrived checks that Place holds exactly these, each once and unchanged,
// every key in order.
func (s *suite) wantArrived(place string, ms []sink.Message) {
	s.Helper()
	got := s.Read(s.T, place, len(ms))
	byID := make(map[string]Arrived, len(got))
	order := map[string][]string{}
	for _, a := range got {
		if _, twice := byID[a.ID]; twice {
			s.Errorf("%s arrived twice", a.ID)
		}
		byID[a.ID] = a
		if a.Key != "" {
			order[a.Key] = append(order[a.Key], a.ID)
		}
	}
	for i := range ms {
		m := &ms[i]
		a, ok := byID[m.ID]
		if !ok {
			s.Errorf("message %d (%s) did not arrive", i, m.ID)
			continue
		}
		delete(byID, m.ID)
		s.wantSame(place, m, &a)
		if m.Key == "" {
			continue
		}
		if ids := order[m.Key]; s.caps.Order && ids[0] != m.ID {
			s.Errorf("key %s: %s arrived before %s", m.Key, ids[0], m.ID)
		} else {
			order[m.Key] = ids[1:]
		}
	}
	for id := range byID {
		s.Errorf("%s arrived and should not have", id)
	}
}

// wantSame compares a message with what arrived of it.
func (s *suite) wantSame(place string, m *sink.Message, a *Arrived) {
	s.Helper()
	if a.Place != place {
		s.Errorf("%s arrived at %q, want %q", m.ID, a.Place, place)
	}
	if a.Key != m.Key || a.HasKey != (m.Key != "") {
		s.Errorf("%s arrived with key %q (%v), want %q", m.ID, a.Key, a.HasKey, m.Key)
	}
	if !bytes.Equal(a.Payload, m.Payload) {
		s.Errorf("%s arrived with a payload of %d bytes (%s), want %d bytes (%s)",
			m.ID, len(a.Payload), head(a.Payload), len(m.Payload), head(m.Payload))
	}
	if s.NoHeaders {
		return
	}
	want := s.Headers(*m)
	for name, v := range want {
		if got, ok := a.Headers[name]; !ok || got != v {
			s.Errorf("%s: header %s: got %q (%v), want %q", m.ID, name, got, ok, v)
		}
	}
	for name, v := range a.Headers {
		if _, ok := want[name]; !ok {
			s.Errorf("%s: header %s: %q arrived and was not sent", m.ID, name, v)
		}
	}
}

func head(b []byte) string {
	if len(b) > 16 {
		return hex.EncodeToString(b[:16]) + "..."
	}
	return hex.EncodeToString(b)
}

// big makes a payload of n bytes that does not compress to nothing.
func big(n int) string {
	var b strings.Builder
	b.Grow(n)
	x := uint32(1)
	for b.Len() < n {
		x ^= x << 13
		x ^= x >> 17
		x ^= x << 5
		b.WriteByte(byte(x))
	}
	return b.String()
}
