package relay

import (
	"slices"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// collect takes over the results that have come in.
func (w *worker) collect() {
	// Read before the flags: a failure counted here has its flag up.
	failures := w.failures.Load()
	for _, c := range w.calls {
		w.collectCall(c)
	}
	w.seen = failures
	w.calls = slices.DeleteFunc(w.calls, func(c *call) bool {
		if c.seen < len(c.msgs) || c.fate.Load() == isOpen {
			w.at(w.hangsAt(c))
			return false
		}
		w.endCall(c)
		w.adapt(c)
		if c.left.Load() == 0 && c.fate.Load() == hasReturned {
			w.recycleCall(c)
		}
		return true
	})
}

// endCall lets go of what a call had.
func (w *worker) endCall(c *call) {
	w.dest.brk.done(w, c)
	w.relay.cfg.Gate.leave(&c.pass)
}

// hangsAt is when a call that has not returned is given up. The sink has been
// told long before, by the call's context.
func (w *worker) hangsAt(c *call) time.Duration {
	return c.began + w.dest.PublishTimeout + w.relay.cfg.SettleTimeout
}

// collectCall looks at a call if there is reason to: all is in, something has
// failed, or it has ended.
func (w *worker) collectCall(c *call) {
	returned, left, bad := c.fate.Load() != isOpen, c.left.Load(), c.bad.Load()
	if !returned && w.relay.now() >= w.hangsAt(c) {
		w.dest.hung.Add(1)
		if c.fate.CompareAndSwap(isOpen, isHung) {
			c.dead.Store(true)
			w.brokenPromise("did not return although its context had ended")
		} else {
			w.dest.hung.Add(-1)
		}
		returned = true
	}
	if c.seen == len(c.msgs) || !returned && left > 0 && bad == c.seenBad && !w.overdue(c) {
		return
	}
	c.seenBad = bad
	if left == 0 && bad == 0 && c.seen == 0 && len(w.held)+len(w.parked) == 0 {
		w.allDelivered(c)
		return
	}
	w.takeResults(c, returned && left > 0)
}

// takeResults looks at all results of a call that are there.
func (w *worker) takeResults(c *call, ended bool) {
	var fresh []int
	for j := range c.flags {
		if c.flags[j].Load() == c.flag(flagSet) {
			c.flags[j].Store(c.flag(flagSeen))
			fresh = append(fresh, j)
		}
	}
	if ended {
		fresh = w.missing(c, fresh)
	}
	w.judgeAll(c, fresh)
}

// missing fills in what a sink has not reported although it has returned.
func (w *worker) missing(c *call, fresh []int) []int {
	for j := range c.flags {
		if c.flags[j].CompareAndSwap(c.flag(flagNone), c.flag(flagSeen)) {
			c.results[j] = sink.Result{Status: sink.Unknown, Class: sink.ClassOther, Err: errNotReported}
			fresh = append(fresh, j)
			w.brokenPromise("did not report a message")
		}
	}
	slices.Sort(fresh)
	return fresh
}

// allDelivered is the way that almost all messages go.
func (w *worker) allDelivered(c *call) {
	k := c.k
	for _, i := range c.at {
		if k.state[i] != out {
			k.finish(int(i), store.Outcome{State: store.Published})
			continue
		}
		k.state[i] = done
		k.outcomes[i].State = store.Published
		k.left--
	}
	for j := range c.results {
		if r := c.results[j].Receipt; r != "" {
			k.receipts.add(r)
		}
	}
	c.seen = len(c.msgs)
	c.sum = tally{delivered: c.seen}
	w.dest.brk.feed(c, c.sum, c.sum)
	w.tellDelivered(c, nil)
	w.turn++
}

// judgeAll decides about results, given by their place in the call.
func (w *worker) judgeAll(c *call, fresh []int) {
	if len(fresh) == 0 {
		return
	}
	var t tally
	for _, j := range fresh {
		if r := &c.results[j]; !(w.cutting && r.Status != sink.Delivered) {
			t.count(r)
		}
	}
	c.seen += len(fresh)
	c.sum.add(t)
	f := w.dest.brk.feed(c, t, c.sum)
	for _, j := range fresh {
		w.judge(c, j, f)
	}
	w.tellDelivered(c, fresh)
	w.recount()
	w.turn++
}

// tellDelivered has the hook told of what was delivered; nil means all.
func (w *worker) tellDelivered(c *call, fresh []int) {
	f := w.relay.cfg.Hooks.Event
	if f == nil {
		return
	}
	at := time.Now()
	tell := func(j int) {
		if c.results[j].Status == sink.Delivered {
			rec := c.k.rec(int(c.at[j]))
			f(w.dest.Name, rec, EventOutcome{Outcome: Published, Latency: at.Sub(rec.CreatedAt)})
		}
	}
	if fresh == nil {
		for j := range c.msgs {
			tell(j)
		}
		return
	}
	for _, j := range fresh {
		tell(j)
	}
}

func (w *worker) tellEvent(rec *outrider.Record, o EventOutcome) {
	if f := w.relay.cfg.Hooks.Event; f != nil {
		f(w.dest.Name, rec, o)
	}
}

// eventOutcome is a stored outcome as hooks are told of it.
func eventOutcome(o *store.Outcome) EventOutcome {
	e := EventOutcome{Outcome: Retried, Class: sink.Class(o.Class)}
	if o.State == store.Failed {
		e.Outcome = Failed
	}
	return e
}

// brokenPromise notes that a sink did what it must not.
func (w *worker) brokenPromise(what string) {
	if f := w.relay.cfg.Hooks.Broken; f != nil {
		f(w.dest.Name)
	}
	w.relay.log.seldom("broken "+w.dest.Name+what, "the sink breaks a promise of its interface",
		"destination", w.dest.Name, "what", what)
}

// adapt finds how many messages of a key a call should hold where the next
// call waits for it: long runs are fast where the destination is, but hold up
// other keys where it is slow.
func (w *worker) adapt(c *call) {
	if w.dest.inFlight || !w.dest.ordered || c.sum.delivered == 0 {
		return
	}
	switch took := w.relay.now() - c.began; {
	case took > w.dest.SlowAfter/2:
		w.run = max(1, w.run/2)
	case took < w.dest.SlowAfter/8 && w.run < w.relay.cfg.MaxRecords:
		w.run *= 2
	}
}
