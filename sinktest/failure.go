package sinktest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrider-dev/outrider/sink"
)

// outcome is what became of messages that were sent until each was settled.
type outcome struct {
	rejected map[string]sink.Result // by ID
	unknown  map[string]bool        // answered Unknown at least once
}

// settle does what a relay does: it sends again what was neither delivered nor
// rejected, keeping the order, until nothing is left.
func (s *suite) settle(ms []sink.Message, o *outcome) {
	s.Helper()
	if o.rejected == nil {
		o.rejected, o.unknown = map[string]sink.Result{}, map[string]bool{}
	}
	limit := time.Now().Add(Patience)
	for len(ms) > 0 {
		if time.Now().After(limit) {
			s.Fatalf("%d messages are not settled after %v", len(ms), Patience)
		}
		ms = s.rest(ms, s.publish(ms...), o)
	}
}

// rest is what has to be sent again after a call.
func (s *suite) rest(ms []sink.Message, rs []sink.Result, o *outcome) []sink.Message {
	var again []sink.Message
	for i, r := range rs {
		switch r.Status {
		case sink.Delivered:
			continue
		case sink.Reject:
			o.rejected[ms[i].ID] = r
			continue
		case sink.Unknown:
			o.unknown[ms[i].ID] = true
		}
		m := ms[i]
		m.Redelivery = r.Status == sink.Unknown || m.Redelivery
		again = append(again, m)
	}
	return again
}

// wantFirstDeliveries checks that Place holds each at least once, with first
// deliveries in the order of ms per key, and twice only what was once Unknown.
func (s *suite) wantFirstDeliveries(ms []sink.Message, o *outcome) {
	s.Helper()
	times := map[string]int{}
	first := map[string][]string{} // by key
	for _, a := range s.Read(s.T, s.Place, len(ms)) {
		if times[a.ID]++; times[a.ID] == 1 && a.Key != "" {
			first[a.Key] = append(first[a.Key], a.ID)
		}
		if strings.HasPrefix(string(a.Payload), "overwr") {
			s.Errorf("%s arrived with what the relay wrote after Publish had returned", a.ID)
		}
	}
	for i := range ms {
		m := &ms[i]
		switch n := times[m.ID]; {
		case n == 0:
			s.Errorf("message %d (%s) did not arrive", i, m.ID)
			continue
		case n > 1 && !o.unknown[m.ID] && !s.caps.Deduplicates:
			s.Errorf("message %d (%s) arrived %d times and was never Unknown", i, m.ID, n)
		}
		delete(times, m.ID)
		if m.Key == "" || !s.caps.Order {
			continue
		}
		if ids := first[m.Key]; ids[0] != m.ID {
			s.Errorf("key %s: %s arrived before %s", m.Key, ids[0], m.ID)
		} else {
			first[m.Key] = ids[1:]
		}
	}
	for id := range times {
		s.Errorf("%s arrived and should not have", id)
	}
}

// testNoTarget: a message to a place that does not exist is refused by itself,
// and not for good.
func testNoTarget(s *suite) {
	if s.Missing == "" {
		s.Skip("every place exists")
	}
	s.open()
	ms := []sink.Message{s.message("a", "1"), s.message("b", "2"), s.message("c", "3"), s.message("", "4")}
	ms[1].To = s.Missing
	rs := s.publish(ms...)
	s.want("to a place that does not exist", rs[1], sink.Retry, sink.ClassNoTarget)
	s.wantDelivered([]sink.Result{rs[0], rs[2], rs[3]})
	s.wantArrived(s.Place, []sink.Message{ms[0], ms[2], ms[3]})
}

// testTargetMadeLater: a place that is made is found, by the sink that has
// missed it.
func testTargetMadeLater(s *suite) {
	if s.Make == nil {
		s.Skip("places are not made")
	}
	s.open()
	ms := []sink.Message{s.message("a", "1"), s.message("", "2")}
	for i := range ms {
		ms[i].To = s.Missing
	}
	for range 3 { // what is not there is remembered
		for _, r := range s.publish(ms...) {
			s.want("to a place that does not exist", r, sink.Retry, sink.ClassNoTarget)
		}
	}
	s.Make(s.T)
	left := ms
	for begin := time.Now(); len(left) > 0; <-time.After(10 * time.Millisecond) {
		var again []sink.Message
		for i, r := range s.publish(left...) {
			switch {
			case r.Status == sink.Delivered:
			case r.Status == sink.Reject, time.Since(begin) > Patience:
				s.Fatalf("to the place that was made: %v %q %v", r.Status, r.Class, r.Err)
			default:
				again = append(again, left[i])
			}
		}
		left = again
	}
	s.wantArrived(s.Missing, ms)
}

// testOversize: one message that is too large does not fail the others.
func testOversize(s *suite) {
	if s.MaxBytes == 0 {
		s.Skip("no limit is known")
	}
	s.open()
	ms := s.many(100, 100)
	ms[50].Payload = []byte(big(s.MaxBytes))
	ms[51].Payload = []byte(big(s.Fits))
	rs := s.publish(ms...)
	s.want("an oversize message", rs[50], sink.Reject, sink.ClassOversize)
	rest := append(ms[:50:50], ms[51:]...)
	s.wantDelivered(append(rs[:50:50], rs[51:]...))
	s.wantArrived(s.Place, rest)
}

// testPoison: a message that the destination refuses ends rejected, and
// nothing else does, whatever it was sent with.
func testPoison(s *suite) {
	if s.Env.Poison == nil {
		s.Skip("the destination refuses nothing")
	}
	s.open()
	ms := s.many(200, 20)
	s.Env.Poison(&ms[100])
	var o outcome
	s.settle(ms, &o)
	if r, ok := o.rejected[ms[100].ID]; !ok {
		s.Error("the poisoned message was delivered")
	} else if r.Status != sink.Reject {
		s.Errorf("the poisoned message ended %v %q", r.Status, r.Class)
	}
	delete(o.rejected, ms[100].ID)
	for id, r := range o.rejected {
		s.Errorf("%s was rejected for another's fault: %q, %v", id, r.Class, r.Err)
	}
	s.wantArrived(s.Place, append(ms[:100:100], ms[101:]...))
}

// testStop: a key stops at its first failure, and no other key does.
func testStop(s *suite) {
	spoil, status := func(m *sink.Message) { m.To = s.Missing }, sink.Retry
	if s.Missing == "" {
		status = sink.Reject
		spoil = func(m *sink.Message) { m.Payload = []byte(big(s.MaxBytes)) }
		if s.MaxBytes == 0 {
			s.Skip("there is no message that fails at once")
		}
	}
	s.open()
	if !s.caps.Order {
		s.Skip("the driver is never given two messages of a key")
	}
	var ms []sink.Message
	for i := range 6 { // a b c free, six times, interleaved
		for _, key := range []string{"a", "b", "c", ""} {
			ms = append(ms, s.message(key, fmt.Sprint(i)))
		}
	}
	spoil(&ms[2*4])   // the third of a
	spoil(&ms[5*4+1]) // the last of b
	spoil(&ms[3])     // the first unordered one
	rs := s.publish(ms...)
	var arrived []sink.Message
	for i, r := range rs {
		what := fmt.Sprintf("message %d of key %q", i/4, ms[i].Key)
		switch {
		case i == 2*4 || i == 5*4+1 || i == 3:
			if r.Status != status {
				s.Errorf("%s: got %v, want %v", what, r.Status, status)
			}
		case ms[i].Key == "a" && i > 2*4:
			s.want(what, r, sink.NotSent, sink.ClassHeld)
		default:
			s.want(what, r, sink.Delivered, sink.ClassNone)
			arrived = append(arrived, ms[i])
		}
	}
	s.wantArrived(s.Place, arrived)
	later := []sink.Message{ms[3*4], ms[4*4], s.message("b", "later")}
	s.wantDelivered(s.publish(later...)) // a stop does not outlast its call
	s.wantArrived(s.Place, append(arrived, later...))
}

// testOverlap: calls that overlap keep order, claimed; else none is accepted
// before it has ended.
func testOverlap(s *suite) {
	s.open()
	var all []sink.Message
	var calls []*call
	for range 30 {
		ms := s.many(150, 10)
		all = append(all, ms...)
		c := s.start(context.Background(), ms)
		if s.caps.OrderInFlight {
			s.await(c.inHand, "the call of Accepted")
		} else {
			s.await(c.done, "the return of Publish")
		}
		calls = append(calls, c)
	}
	for _, c := range calls {
		s.wantDelivered(c.wait())
	}
	s.wantArrived(s.Place, all)
}

// testOverlapStop: a key that fails in one call is held in the calls that were
// accepted behind it, and in none that begins after the failure was reported.
func testOverlapStop(s *suite) {
	if s.Env.Stall == nil || s.Env.Poison == nil {
		s.Skip("needs Stall and Poison")
	}
	s.open()
	if !s.caps.OrderInFlight {
		s.Skip("order over calls is not claimed")
	}
	warm := s.message("warm", "{}")
	s.wantDelivered(s.publish(warm))
	ms := map[string]sink.Message{}
	for _, name := range []string{"a1", "a2", "a3", "a4", "a5", "b1", "b2", "b3"} {
		ms[name] = s.message(name[:1], name)
	}
	poisoned := ms["a2"]
	s.Env.Poison(&poisoned)
	release := s.Env.Stall(s.T)
	var calls []*call
	for _, batch := range [][]sink.Message{{ms["a1"], poisoned, ms["b1"]}, {ms["a3"], ms["b2"]}, {ms["a4"], ms["b3"]}} {
		c := s.start(context.Background(), batch)
		s.await(c.inHand, "the call of Accepted")
		calls = append(calls, c)
	}
	release()
	arrived := []sink.Message{warm}
	var rest []sink.Message
	o := outcome{rejected: map[string]sink.Result{}, unknown: map[string]bool{}}
	failed := map[string]bool{}
	for n, c := range calls {
		for i, r := range c.wait() {
			m := c.ms[i]
			switch {
			case m.ID == poisoned.ID && r.Status == sink.Delivered:
				s.Error("the poisoned message was delivered")
			case m.ID != poisoned.ID && r.Status != sink.NotSent && r.Status != sink.Delivered:
				s.Errorf("call %d: %s is %v (%v)", n, m.Payload, r.Status, r.Err)
			case failed[m.Key] && r.Status != sink.NotSent:
				s.Errorf("call %d: %s is %v behind a failure of its key", n, m.Payload, r.Status)
			}
			failed[m.Key] = failed[m.Key] || r.Status != sink.Delivered
			if r.Status == sink.Delivered {
				arrived = append(arrived, m)
			}
		}
		rest = append(rest, s.rest(c.ms, c.results, &o)...)
	}
	s.wantArrived(s.Place, arrived)
	s.settle(append(rest, ms["a5"]), &o)
	if _, ok := o.rejected[poisoned.ID]; !ok || len(o.rejected) != 1 {
		s.Errorf("want the poisoned message rejected and no other, got %v", o.rejected)
	}
	s.wantArrived(s.Place, []sink.Message{warm,
		ms["a1"], ms["a3"], ms["a4"], ms["a5"], ms["b1"], ms["b2"], ms["b3"]})
}

// testStale: a batch that has gone stale is not sent, and one that has not is.
func testStale(s *suite) {
	s.open()
	if !s.caps.OrderInFlight {
		s.Skip("order over calls is not claimed")
	}
	ms := s.many(50, 5)
	for i, r := range s.startStale(context.Background(), ms, func() bool { return true }).wait() {
		s.want(fmt.Sprint("message ", i, " of a stale batch"), r, sink.NotSent, sink.ClassHeld)
	}
	s.wantDelivered(s.startStale(context.Background(), ms, func() bool { return false }).wait())
	s.wantArrived(s.Place, ms)
}

// testStaleRace: a call that comes in while an earlier message of its key
// fails is either asked after the failure was reported, or held up by it.
func testStaleRace(s *suite) {
	if s.Env.Poison == nil {
		s.Skip("needs Poison")
	}
	s.open()
	if !s.caps.OrderInFlight {
		s.Skip("order over calls is not claimed")
	}
	warm := s.message("warm", "{}")
	s.wantDelivered(s.publish(warm))
	for n := range 30 {
		poisoned, behind := s.message(fmt.Sprint("k", n), "1"), s.message(fmt.Sprint("k", n), "2")
		s.Env.Poison(&poisoned)
		var failed atomic.Bool
		first := s.start(context.Background(), []sink.Message{poisoned}, func(int, sink.Result) { failed.Store(true) })
		s.await(first.inHand, "the call of Accepted")
		second := s.startStale(context.Background(), []sink.Message{behind}, failed.Load)
		if r := first.wait()[0]; r.Status == sink.Delivered {
			s.Error("the poisoned message was delivered")
		}
		s.want("behind a failure", second.wait()[0], sink.NotSent, sink.ClassHeld)
	}
	s.wantArrived(s.Place, []sink.Message{warm})
}

// testCancelBefore: a call whose context has ended sends nothing.
func testCancelBefore(s *suite) {
	s.open()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for i, r := range s.start(ctx, s.many(50, 5)).wait() {
		if r.Status != sink.NotSent {
			s.Errorf("message %d: got %v, want not-sent", i, r.Status)
		}
	}
	ms := s.many(50, 5)
	s.wantDelivered(s.publish(ms...))
	s.wantArrived(s.Place, ms)
}

// testCancel: a call that is cut ends while its destination is silent, says
// nothing that it does not know, and leaves other calls alone.
func testCancel(s *suite) {
	if s.Env.Stall == nil {
		s.Skip("needs Stall")
	}
	s.open()
	warm := s.message("warm", "{}")
	s.wantDelivered(s.publish(warm))
	release := s.Env.Stall(s.T)
	released := false
	defer func() {
		if !released {
			release()
		}
	}()

	cut, others := s.many(100, 10), s.many(100, 10)
	for i := range others {
		if others[i].Key != "" {
			others[i].Key = "other-" + others[i].Key
		}
	}
	// The call gets payloads of its own, which are overwritten as soon as it
	// has returned: the relay's memory must not be kept.
	lent := slices.Clone(cut)
	for i := range lent {
		rec := *lent[i].Record
		rec.Payload = slices.Clone(rec.Payload)
		lent[i].Record = &rec
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	c := s.start(ctx, lent)
	if s.caps.OrderInFlight {
		s.await(c.inHand, "the call of Accepted")
	}
	if s.Env.Left != nil {
		s.Env.Left(s.T)
	}
	other := s.start(context.Background(), others)
	if s.caps.OrderInFlight {
		s.await(other.inHand, "the call of Accepted")
	}
	cancel()
	rs := c.wait() // still silent
	for i := range lent {
		copy(lent[i].Payload, "overwritten")
	}
	unknown := 0
	for i, r := range rs {
		if r.Status != sink.Unknown && r.Status != sink.NotSent {
			s.Errorf("message %d of the cut call: got %v", i, r.Status)
		}
		if r.Status == sink.Unknown {
			unknown++
		}
	}
	if s.Env.Left != nil && unknown == 0 {
		s.Error("messages have left, and of none it is said that it may have arrived")
	}
	release()
	released = true
	s.wantDelivered(other.wait())

	var o outcome
	o.rejected, o.unknown = map[string]sink.Result{}, map[string]bool{}
	s.settle(s.rest(cut, rs, &o), &o)
	all := append(append([]sink.Message{warm}, cut...), others...)
	s.wantFirstDeliveries(all, &o)
}

// testUnreachable: what was never sent is said to be so, and goes once the
// destination is back.
func testUnreachable(s *suite) {
	if s.Env.Break == nil {
		s.Skip("needs Break")
	}
	s.open()
	warm := s.message("warm", "{}")
	s.wantDelivered(s.publish(warm))
	mend := s.Env.Break(s.T)
	var o outcome
	o.rejected, o.unknown = map[string]sink.Result{}, map[string]bool{}
	ms := s.many(50, 5)
	for round := range 2 {
		for i, r := range s.publish(ms...) {
			switch {
			case r.Status == sink.NotSent && (r.Class == sink.ClassUnreachable || r.Class == sink.ClassHeld):
			case r.Status == sink.Unknown && (r.Class == sink.ClassUnreachable || r.Class == sink.ClassTimeout):
				o.unknown[ms[i].ID] = true
			default:
				s.Errorf("round %d, message %d: got %v %q (%v)", round, i, r.Status, r.Class, r.Err)
			}
		}
	}
	mend()
	s.settle(ms, &o)
	s.wantFirstDeliveries(append([]sink.Message{warm}, ms...), &o)
}

// testOutage: the destination goes away in the middle of many and comes back;
// nothing is lost, first deliveries keep their order, and only what was
// Unknown is sent twice.
func testOutage(s *suite) {
	if s.Env.Break == nil {
		s.Skip("needs Break")
	}
	s.open()
	var all, rest []sink.Message
	var calls []*call
	var mu sync.Mutex
	delivered := 0
	some := make(chan struct{})
	count := func(_ int, r sink.Result) {
		mu.Lock()
		defer mu.Unlock()
		if r.Status == sink.Delivered {
			if delivered++; delivered == 500 {
				close(some)
			}
		}
	}
	var mend func()
	for n := range 10 {
		ms := s.many(500, 50)
		all = append(all, ms...)
		if n == 5 {
			s.await(some, "the delivery of 500 messages")
			mend = s.Env.Break(s.T)
		}
		c := s.start(context.Background(), ms, count)
		calls = append(calls, c)
		if s.caps.OrderInFlight {
			s.await(c.inHand, "the call of Accepted")
		} else {
			s.await(c.done, "the return of Publish")
		}
	}
	o := outcome{rejected: map[string]sink.Result{}, unknown: map[string]bool{}}
	for _, c := range calls {
		rest = append(rest, s.rest(c.ms, c.wait(), &o)...)
	}
	if len(rest) == 0 {
		s.Error("the destination was not away")
	}
	mend()
	s.settle(rest, &o)
	if len(o.rejected) > 0 {
		s.Errorf("an outage made %d messages fail", len(o.rejected))
	}
	s.wantFirstDeliveries(all, &o)
}
