package kafkasink

import (
	"context"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrider-dev/outrider/sink"
)

// call is one Publish.
type call struct {
	s   *Sink
	ctx context.Context
	b   sink.Batch
	seq uint64 // its number among all calls

	client *client
	// The client's counts when the hand-over began.
	writes, answers, lost int64

	*buffers
	left     atomic.Int64 // messages not reported
	inClient atomic.Int64 // messages whose callback is to come
	wasCut   bool         // the client may hold on to the buffers
	done     chan struct{}
	promise  func(*kgo.Record, error)
}

// Publish implements sink.Sink.
func (s *Sink) Publish(ctx context.Context, b sink.Batch) {
	c, stale := s.begin(ctx, b)
	if stale {
		s.refuseStale(c)
		return
	}
	select {
	case s.turn <- struct{}{}:
		s.handOver(c) //nolint:contextcheck // the client is cleared for all calls, whatever becomes of this one
		<-s.turn
	case <-ctx.Done():
		s.refuseAll(c, sink.Result{Status: sink.NotSent, Class: sink.ClassStopped, Err: errStopped})
	}
	if b.Accepted != nil {
		b.Accepted()
	}
	timer := time.NewTimer(s.cfg.DeliveryTimeout)
	defer timer.Stop()
	select {
	case <-c.done:
	case <-ctx.Done():
		s.cut(c, sink.Result{Status: sink.Unknown, Class: sink.ClassStopped, Err: errCut})
	case <-timer.C:
		s.expire(c)
	}
	<-c.done
	s.end(c)
}

// refuseStale answers a call that was made without knowledge of a failure.
func (s *Sink) refuseStale(c *call) {
	for i := range c.slots {
		c.report(i, sink.Result{Status: sink.NotSent, Class: sink.ClassHeld, Err: errStale})
	}
	if c.b.Accepted != nil {
		c.b.Accepted()
	}
	s.end(c)
}

// begin registers a call. Failures are reported under the same lock, so that
// the call either is held up by them or is asked whether it knows of them.
func (s *Sink) begin(ctx context.Context, b sink.Batch) (c *call, stale bool) {
	c = &call{s: s, ctx: ctx, b: b, buffers: pool.Get().(*buffers), done: make(chan struct{})} //nolint:errcheck // the pool holds nothing else
	c.promise = c.answer
	c.left.Store(int64(len(b.Messages)))
	if len(b.Messages) == 0 {
		close(c.done)
	}
	c.take(c, len(b.Messages))
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begun++
	c.seq = s.begun
	s.active[c] = struct{}{}
	return c, b.Stale != nil && b.Stale()
}

// end takes a call out and forgets the stops that held up no later one.
func (s *Sink) end(c *call) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.active, c)
	if !c.wasCut && c.inClient.Load() == 0 {
		c.release()
	}
	if len(s.stops) == 0 {
		return
	}
	oldest := s.begun + 1
	for a := range s.active {
		oldest = min(oldest, a.seq)
	}
	for key, stop := range s.stops {
		if stop.last < oldest {
			delete(s.stops, key)
		}
	}
	s.mark()
}

// mark sets marked. s.mu is held.
func (s *Sink) mark() {
	s.marked.Store(len(s.stops)+len(s.late)+len(s.alone) > 0)
}

// report answers a message. Its state has been moved on by the caller, so that
// nobody else does.
func (c *call) report(i int, r sink.Result) {
	c.b.Report(i, r)
	if c.left.Add(-1) == 0 {
		close(c.done)
	}
}

// refuseAll answers every message of a call that was not handed over.
func (s *Sink) refuseAll(c *call, r sink.Result) {
	for i := range c.slots {
		s.refuse(&c.slots[i], r)
	}
}

// refuse answers a message that did not get to the client, and stops its key.
func (s *Sink) refuse(sl *slot, r sink.Result) {
	sl.state.Store(answered)
	key := sl.message().Key
	if key == "" {
		sl.call.report(sl.i, r)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stop(key, sl, false)
	sl.call.report(sl.i, r)
}

// stop holds up a key in all calls that have begun, from a message on. It is
// called under the lock under which the failure is then reported, so that no
// call can have begun in between. s.mu is held.
func (s *Sink) stop(key string, sl *slot, unknown bool) {
	at, ok := s.stops[key]
	if ok && at.holdsUp(sl) {
		return
	}
	// A message with the client may fail after one behind it was refused.
	s.stops[key] = stop{seq: sl.call.seq, i: sl.i, last: s.begun, unknown: unknown}
	s.mark()
}

// answer is the client's callback for every record. It runs for one at a time,
// in the order of the log within a partition.
func (c *call) answer(rec *kgo.Record, err error) {
	sl := rec.Context.(*slot) //nolint:errcheck // fill has set it
	if err != nil {
		c.s.failed(sl, err)
		return
	}
	receipt := receipt(rec)
	if !sl.state.CompareAndSwap(held, answered) {
		c.s.settleLate(sl)
		return
	}
	c.inClient.Add(-1)
	c.report(sl.i, sink.Result{Status: sink.Delivered, Receipt: receipt})
}

// receipt is topic/partition@offset.
func receipt(rec *kgo.Record) string {
	var a [300]byte
	b := append(a[:0], rec.Topic...)
	b = append(b, '/')
	b = strconv.AppendInt(b, int64(rec.Partition), 10)
	b = append(b, '@')
	b = strconv.AppendInt(b, rec.Offset, 10)
	return string(b)
}

// settleLate notes that a message which was cut off is out of the client's
// hands.
func (s *Sink) settleLate(sl *slot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lessLate(string(sl.rec.Key))
}

// lessLate counts down the messages of a key that were cut off. s.mu is held.
func (s *Sink) lessLate(key string) {
	if key == "" {
		return
	}
	if s.late[key]--; s.late[key] <= 0 {
		delete(s.late, key)
		s.mark()
	}
}

// failed is the callback for a record that the client has given up.
func (s *Sink) failed(sl *slot, err error) {
	c := sl.call
	s.mu.Lock()
	defer s.mu.Unlock()
	if !sl.state.CompareAndSwap(held, answered) {
		s.lessLate(string(sl.rec.Key))
		return
	}
	c.inClient.Add(-1)
	r := s.judge(sl, err)
	if key := sl.message().Key; key != "" {
		// Behind a failure that is certain nothing has left: the library has
		// failed this one with it, or the fence has kept it back.
		if at, ok := s.stops[key]; ok && at.holdsUp(sl) && (!at.unknown || r.Status != sink.Unknown) {
			r = sink.Result{Status: sink.NotSent, Class: sink.ClassHeld, Err: errHeld}
		}
		s.stop(key, sl, r.Status == sink.Unknown)
	}
	c.report(sl.i, r)
}

// judge makes the result of a record that failed. s.mu is held.
func (s *Sink) judge(sl *slot, err error) sink.Result {
	c, cl := sl.call, sl.call.client
	if sl.alone != nil {
		cl = sl.alone
	}
	if isClosed(err) {
		if sl.alone != nil {
			return cl.timeoutResult()
		}
		return cl.closedResult(cl.writes.Load() != c.writes)
	}
	v := judge(err)
	if v.renew {
		cl.renew.Store(true)
	}
	if v.class == sink.ClassNoTarget || v.class == sink.ClassOversize || v.renew {
		s.topics.forget(sl.rec.Topic)
	}
	if sl.alone != nil {
		delete(s.alone, sl.message().ID)
		s.mark()
		return v.result(err, false)
	}
	if v.own {
		s.alone[sl.message().ID] = struct{}{}
		s.mark()
		v.status, v.class = sink.NotSent, sink.ClassHeld
		err = joined{errShared, err}
	}
	return v.result(err, cl.lost.Load() != c.lost)
}

// cut reports what has no answer. The client goes on with it; until it is
// through, its keys are held up.
func (s *Sink) cut(c *call, r sink.Result) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.wasCut = true
	for i := range c.slots {
		sl := &c.slots[i]
		if !sl.state.CompareAndSwap(held, cutOff) {
			continue
		}
		if key := sl.message().Key; key != "" {
			s.late[key]++
			s.stop(key, sl, true)
		}
		c.report(sl.i, r)
	}
	s.mark()
}

// expire ends a call whose time is over.
func (s *Sink) expire(c *call) {
	if c.client.answers.Load() != c.answers {
		s.cut(c, c.client.timeoutResult())
		return
	}
	// Nothing has been answered all the while: the client is given up with
	// all it holds, and says so message by message.
	s.replace(c.client)
	select {
	case <-c.done:
	case <-time.After(s.cfg.DeliveryTimeout):
		s.cut(c, c.client.timeoutResult())
	}
}
