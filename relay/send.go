package relay

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// call is one Publish. Results come in from any goroutine: one writes its
// place in results, then raises its flag; the worker reads flags only. A call is
// used again, and a sink that keeps no promise may still report to the use before:
// a flag says of which use it is, so that a look and the swap are one step.
type call struct {
	w       *worker
	k       *work
	msgs    []sink.Message
	at      []int32 // record of each message
	results []sink.Result
	flags   []atomic.Uint32

	left     atomic.Int64  // not reported yet
	bad      atomic.Int64  // reported as anything but Delivered
	accepted atomic.Uint32 // twice its use, and one more once the sink has said so
	fate     atomic.Int32
	stale    atomic.Bool // the sink was told to leave it
	dead     atomic.Bool // nobody listens any more

	ticket  ticket
	began   time.Duration
	through uint64 // delivered to the destination before
	seen    int    // results that were looked at
	seenBad int64
	sum     tally
	pass    pass          // through the gate
	loose   bool          // slow, and the next one does not wait for it
	gen     atomic.Uint32 // counts its uses
}

// handle is what a sink has of a call: of this use of it.
type handle struct {
	c       *call
	gen     uint32
	flags   []atomic.Uint32
	results []sink.Result
	known   int64 // worker.failures that the choice of messages knew of
}

// What becomes of a call.
const (
	isOpen int32 = iota
	hasReturned
	isHung // given up because it did not return in time
)

// States of a flag, beside the use in its other bits.
const (
	flagNone uint32 = iota
	flagWriting
	flagSet
	flagSeen
	flagUse // the first bit of the use
)

// flag is a state in the use that a worker is at.
func (c *call) flag(state uint32) uint32 { return c.gen.Load()*flagUse | state }

// flag is a state in the use that a sink was given.
func (h *handle) flag(state uint32) uint32 { return h.gen*flagUse | state }

// maxCalls bounds the calls of one lease that are open at once, as retries
// beside slow messages make them.
const maxCalls = 16

// maxHung is how many calls that do not return are borne before a destination
// is left alone.
const maxHung = 8

// startRun is how many messages of a key a call begins with where the sink
// keeps no order over calls; see worker.adapt.
const startRun = 64

// send begins what calls of the sink may begin now. New and due events take
// turns.
func (w *worker) send() {
	for w.maySend() {
		a, b := w.nextFresh(), w.nextDue()
		if w.dueToSend {
			a, b = b, a
		}
		if !w.sendOf(a) && !w.sendOf(b) {
			return
		}
	}
}

// maySend reports whether another call may begin.
func (w *worker) maySend() bool {
	if w.pub.Err() != nil || w.away.Load() || len(w.calls) >= maxCalls || w.dest.hung.Load() >= maxHung || !w.relay.keeper.fresh() {
		return false
	}
	for _, c := range w.calls {
		if w.dest.inFlight {
			if !c.isAccepted() && c.fate.Load() == isOpen {
				return false
			}
		} else if c.waitedFor() {
			return false
		}
	}
	return true
}

// waitedFor reports whether the next call waits for this one: it has results
// to come, and not only of records that were set aside.
func (c *call) waitedFor() bool {
	if c.loose || c.seen == len(c.msgs) {
		return false
	}
	for j, i := range c.at {
		if c.flags[j].Load() != c.flag(flagSeen) && c.k.state[i] == out {
			return true
		}
	}
	return false
}

// nextFresh is the first claim of new events of which something may be sent.
// Later ones wait for it, so that no key is overtaken.
func (w *worker) nextFresh() *work {
	for _, k := range w.fresh {
		if k.stage == started && k.todo > 0 && k.stuck != w.turn {
			return k
		}
	}
	return nil
}

func (w *worker) nextDue() *work {
	if k := w.due; k != nil && k.stage == started && k.todo > 0 && k.stuck != w.turn {
		return k
	}
	return nil
}

// sendOf begins a call with records of a claim, if it can.
func (w *worker) sendOf(k *work) bool {
	if k == nil {
		return false
	}
	c := w.newCall(k)
	if !w.enters(c, k) {
		w.recycleCall(c)
		return false
	}
	t, wait := w.dest.brk.take(w, k.todo)
	if t.n == 0 {
		if wait > 0 {
			w.at(w.relay.now() + wait)
		}
		w.recycleCall(c)
		return false
	}
	if t.state == CircuitOpen {
		k = w.chooseProbe(c)
	} else {
		w.choose(c, k, t.n)
	}
	c.ticket = w.dest.brk.unused(w, t, t.n-len(c.msgs))
	if len(c.msgs) == 0 {
		w.recycleCall(c)
		if k != nil {
			k.stuck = w.turn
			return k.left == 0 || w.nextFresh() != nil
		}
		return false
	}
	w.dueToSend = k.claim.Kind == store.Fresh
	w.begin(c)
	return true
}

// enters takes a call through the gate. A claim that has to be alone has passed
// before it was started, unless the gate had to be given back since.
func (w *worker) enters(c *call, k *work) bool {
	g := w.relay.cfg.Gate
	if !k.claim.Alone {
		return g.enter(w, &c.pass, false)
	}
	if !k.alone.held && !w.couldSend() {
		g.leave(&k.alone)
		return false
	}
	return g.enter(w, &k.alone, true)
}

// yieldGate gives the gate back when the lease has run out while the store is
// away: the claim may be somebody else's by now, and keeps all others of the
// process waiting for a database that is not theirs. Not while a call has it.
func (w *worker) yieldGate() {
	for _, k := range w.inHand() {
		switch {
		case k.alone.held && !w.called(k):
			if left := w.relay.keeper.left(); left > 0 {
				w.at(w.relay.now() + left)
				continue
			}
		case k.alone.waits && k.stage >= started && !w.maySend():
		default:
			continue
		}
		w.relay.cfg.Gate.leave(&k.alone)
	}
}

// called reports whether a call with something of a claim is under way.
func (w *worker) called(k *work) bool {
	return slices.ContainsFunc(w.calls, func(c *call) bool { return c.k == k })
}

// choose puts up to n records of a claim into a call, in order.
func (w *worker) choose(c *call, k *work, n int) {
	run := w.run
	var count map[string]int
	if w.dest.inFlight {
		run = 0
	} else {
		count = map[string]int{}
	}
	i := k.from
	for ; i < len(k.state) && len(c.msgs) < n; i++ {
		if k.state[i] != todo {
			continue
		}
		key := k.rec(i).Key
		if key != "" && !w.sendable(k, i, key) {
			continue
		}
		if run > 0 && key != "" {
			if count[key] >= run {
				continue
			}
			count[key]++
		}
		w.put(c, k, i)
	}
	for k.from < len(k.state) && k.state[k.from] != todo {
		k.from++
	}
}

// sendable reports whether a record's key is free.
func (w *worker) sendable(k *work, i int, key string) bool {
	if len(w.parked) > 0 && w.parked[key] != nil {
		return false
	}
	if w.isHeld(k, i) {
		k.giveBack(i)
		return false
	}
	return true
}

// put adds a record to a call, or finishes it if it is not to be sent.
func (w *worker) put(c *call, k *work, i int) {
	rec := k.rec(i)
	if rec.Starts >= w.relay.cfg.MaxStarts {
		w.fail(k, i, sink.ClassWorkerDied, errWorkerDied)
		return
	}
	if m := w.dest.Match; m != nil && !m(rec) {
		k.finish(i, store.Outcome{State: store.Published})
		w.tellEvent(rec, EventOutcome{Outcome: Skipped})
		return
	}
	to := ""
	if f := w.dest.To; f != nil {
		var err error
		if to, err = f(rec); err != nil {
			w.fail(k, i, sink.ClassNoTarget, err)
			return
		}
	}
	k.set(i, out)
	c.msgs = append(c.msgs, sink.Message{Record: rec, To: to,
		Redelivery: k.claim.Redelivery || len(k.again) > 0 && k.again[i]})
	c.at = append(c.at, int32(i))
}

// chooseProbe puts one record into a call: of those that are the first of
// their key in hand, a different one each time, so that a message which no
// destination survives cannot stand for all.
func (w *worker) chooseProbe(c *call) *work {
	type place struct {
		k *work
		i int
	}
	var places []place
	seen := map[string]bool{}
	for _, k := range append(slices.Clone(w.fresh), w.due) {
		if k == nil || k.stage != started || k.todo == 0 {
			continue
		}
		for i := k.from; i < len(k.state); i++ {
			if k.state[i] != todo {
				continue
			}
			key := k.rec(i).Key
			if key != "" && (seen[key] || !w.sendable(k, i, key)) {
				continue
			}
			seen[key] = true
			places = append(places, place{k, i})
		}
	}
	for range places {
		w.probes++
		p := places[w.probes%len(places)]
		if p.k.state[p.i] != todo {
			continue
		}
		c.k = p.k
		if w.put(c, p.k, p.i); len(c.msgs) > 0 {
			return p.k
		}
	}
	if len(places) == 0 {
		for _, k := range w.fresh {
			k.stuck = w.turn
		}
		if w.due != nil {
			w.due.stuck = w.turn
		}
	}
	return nil
}

// begin hands a call to the sink, in a goroutine of its own.
func (w *worker) begin(c *call) {
	n, h := len(c.msgs), c.open(w.seen)
	c.began, c.through = w.relay.now(), w.dest.brk.delivered.Load()
	ctx, cancel := context.WithTimeout(w.pub, w.dest.PublishTimeout)
	w.calls = append(w.calls, c)
	c.k.sent = true
	began := c.began // c is used anew once it has returned
	w.dest.calling.Add(1)
	go func() {
		w.dest.Sink.Publish(ctx, sink.Batch{Messages: c.msgs, Report: h.report, Accepted: h.accept, Stale: h.isStale})
		cancel()
		// All before the worker learns of it, which may let Run return.
		if f := w.relay.cfg.Hooks.Publish; f != nil {
			f(w.dest.Name, n, w.relay.now()-began)
		}
		w.dest.calling.Add(-1)
		if !c.fate.CompareAndSwap(isOpen, hasReturned) {
			w.dest.hung.Add(-1)
		}
		w.poke()
	}()
}

// open makes a call ready for the results of its messages.
func (c *call) open(known int64) *handle {
	n := len(c.msgs)
	c.results = slices.Grow(c.results[:0], n)[:n]
	clear(c.results)
	if cap(c.flags) < n {
		c.flags = make([]atomic.Uint32, max(n, 2*cap(c.flags)))
	}
	c.flags = c.flags[:n]
	for j := range c.flags {
		c.flags[j].Store(c.flag(flagNone))
	}
	c.left.Store(int64(n))
	return &handle{c, c.gen.Load(), c.flags, c.results, known}
}

// report is sink.Batch.Report.
func (h *handle) report(i int, r sink.Result) {
	c := h.c
	if c.dead.Load() {
		return
	}
	if !h.flags[i].CompareAndSwap(h.flag(flagNone), h.flag(flagWriting)) {
		c.w.brokenPromise("reported a message twice")
		return
	}
	if r.Status != sink.Delivered {
		var ok bool
		if r, ok = classed(r); !ok {
			c.w.brokenPromise("reported a class that does not exist")
		}
	}
	h.results[i] = r
	h.flags[i].Store(h.flag(flagSet))
	if r.Status != sink.Delivered {
		c.bad.Add(1)
		c.w.failures.Add(1)
		c.w.poke()
	}
	if c.left.Add(-1) == 0 {
		c.w.poke()
	}
}

// accept is sink.Batch.Accepted.
func (h *handle) accept() {
	if h.c.accepted.CompareAndSwap(h.gen*2, h.gen*2+1) {
		h.c.w.poke()
	}
}

// isAccepted reports whether the sink has said that the next call may begin.
func (c *call) isAccepted() bool { return c.accepted.Load() == c.gen.Load()*2+1 }

// isStale is sink.Batch.Stale.
func (h *handle) isStale() bool {
	c := h.c
	if c.w.failures.Load() == h.known && !c.dead.Load() {
		return false
	}
	if c.gen.Load() == h.gen { // a use too late, it has a message kept that could wait
		c.stale.Store(true)
	}
	return true
}

// newCall takes a used call if there is one.
func (w *worker) newCall(k *work) *call {
	n := len(w.spareCalls)
	if n == 0 {
		return &call{w: w, k: k}
	}
	c := w.spareCalls[n-1]
	w.spareCalls = w.spareCalls[:n-1]
	c.k = k
	return c
}

// recycleCall keeps a call that has returned, with all its results, for later.
// One that a sink may still hold on to is not used again.
func (w *worker) recycleCall(c *call) {
	w.relay.cfg.Gate.leave(&c.pass)
	if len(w.spareCalls) >= w.relay.cfg.InFlightClaims {
		return
	}
	c.gen.Add(1)
	clear(c.msgs)
	clear(c.results)
	c.msgs, c.at, c.k = c.msgs[:0], c.at[:0], nil
	c.accepted.Store(c.gen.Load() * 2)
	c.fate.Store(isOpen)
	c.stale.Store(false)
	c.bad.Store(0)
	c.seen, c.seenBad, c.sum, c.ticket, c.loose = 0, 0, tally{}, ticket{}, false
	w.spareCalls = append(w.spareCalls, c)
}
