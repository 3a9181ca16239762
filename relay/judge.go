package relay

import (
	"errors"
	"fmt"
	"time"

	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

var (
	errWorkerDied  = errors.New("processes died while they had this event alone in hand")
	errPutOff      = errors.New("the destination, or the part of it that this event goes to, is down")
	errNotReported = errors.New("the sink returned without saying what became of the message")
)

// judge decides what one result means for its record. Costs: what was refused,
// was not sent, was throttled or fell into an outage has none; Retry costs an
// attempt; an unknown end costs one only if others got through meanwhile,
// because else it speaks of the destination and not of the message.
func (w *worker) judge(c *call, j int, f finding) {
	k, i, r := c.k, int(c.at[j]), &c.results[j]
	if k.state[i] == gone {
		k.state[i] = back // as the store has been told already
		return
	}
	key := k.rec(i).Key
	if key != "" && k.state[i] == out && w.overtook(k, i, key, r) {
		return
	}
	if r.Status == sink.Delivered {
		k.finish(i, store.Outcome{State: store.Published})
		k.receipts.add(r.Receipt)
		return
	}
	w.parkKey(k, i)
	switch r.Status {
	case sink.Reject:
		w.count(k, i)
		w.fail(k, i, r.Class, r.Err)
	case sink.Retry:
		w.judgeRetry(k, i, r, f)
	case sink.NotSent:
		w.judgeNotSent(c, k, i, r, f)
	default:
		k.again[i] = true
		switch {
		case w.cutting:
			w.wait(k, i, r)
		case f.down || !f.through:
			w.keep(k, i, r) // a few of these in a row open the breaker
		default:
			w.count(k, i)
			w.failed(k, i, r)
		}
	}
}

// overtook deals with results behind a failure of the same key. Where the
// relay has the key back, the record goes back too, whatever the sink has made
// of it: one that was delivered all the same is delivered again, in its place.
func (w *worker) overtook(k *work, i int, key string, r *sink.Result) bool {
	p := w.parked[key]
	h, parked := w.heldBy(k, i), p != nil && p.later(k.seq, i)
	held := h != nil
	if !held && !parked {
		return false
	}
	switch {
	case r.Status == sink.Delivered && !parked && h.slow: // behind one that took long, not one that failed
	case r.Status == sink.Delivered:
		w.brokenPromise("delivered a message behind one of its key that had failed")
	case r.Status == sink.NotSent:
	default:
		k.again[i] = true
	}
	switch {
	case held:
		k.giveBack(i)
	case r.Status == sink.Delivered || r.Status == sink.NotSent:
		k.set(i, todo)
	default:
		return false // it has failed by itself
	}
	return true
}

// judgeRetry is judge for a refusal that may pass.
func (w *worker) judgeRetry(k *work, i int, r *sink.Result, f finding) {
	switch {
	case r.Class == sink.ClassThrottled:
		w.throttled(k, i, r, f)
	case r.Class == sink.ClassUnreachable && f.down:
		w.keep(k, i, r)
	case r.Class == sink.ClassUnreachable:
		w.wait(k, i, r)
	default:
		w.count(k, i)
		if r.RetryAfter == 0 && k.state[i] == out && !w.cutting && k.attempts(i) <= w.dest.Retry.Immediate &&
			k.attempts(i) < w.dest.Retry.MaxAttempts {
			k.set(i, todo)
			return
		}
		w.failed(k, i, r)
	}
}

// judgeNotSent is judge for what has not left.
func (w *worker) judgeNotSent(c *call, k *work, i int, r *sink.Result, f finding) {
	switch {
	case r.Class == sink.ClassThrottled:
		w.throttled(k, i, r, f)
	case f.down && !w.cutting:
		w.keep(k, i, r)
	case r.Class == sink.ClassHeld && (c.stale.Load() || w.puzzled(k, i)):
		w.keep(k, i, r)
	case r.Class == sink.ClassStopped && !w.cutting:
		w.keep(k, i, r) // the call's time was over
	default:
		w.wait(k, i, r)
	}
}

// puzzled reports whether a message that the sink holds back for a reason of
// its own, such as to send it without its neighbours, is offered again at once.
func (w *worker) puzzled(k *work, i int) bool {
	k.refused[i]++
	return k.refused[i] <= 3 && !w.cutting
}

// throttled deals with a message that the destination has no room for now.
func (w *worker) throttled(k *work, i int, r *sink.Result, f finding) {
	if f.slow && k.state[i] == out && !w.cutting {
		k.set(i, todo) // the destination rests as a whole
		return
	}
	o := w.waiting(k, i, w.dest.Retry.after(1, r.RetryAfter), r.Class, r.Err)
	w.end1(k, i, o)
}

// keep has a message sent again, in its place, as soon as the destination can.
func (w *worker) keep(k *work, i int, r *sink.Result) {
	if k.state[i] != out {
		w.wait(k, i, r)
		return
	}
	k.set(i, todo)
}

// wait has a message tried again later, at no cost.
func (w *worker) wait(k *work, i int, r *sink.Result) {
	due := time.Duration(0)
	if !w.cutting {
		due = w.dest.Retry.after(1, r.RetryAfter)
	}
	w.end1(k, i, w.waiting(k, i, due, r.Class, r.Err))
}

// count counts an attempt that has failed.
func (w *worker) count(k *work, i int) { k.tries[i]++ }

// failed is what follows a counted failure: another try later, or the end.
func (w *worker) failed(k *work, i int, r *sink.Result) {
	p, n := &w.dest.Retry, k.attempts(i)
	if n >= p.MaxAttempts {
		w.fail(k, i, r.Class, r.Err)
		return
	}
	if p.MaxAge > 0 {
		waited := k.rec(i).Waited
		if waited -= w.dest.brk.wasOpen(waited); waited >= p.MaxAge {
			w.fail(k, i, sink.ClassExpired, fmt.Errorf("retried for longer than %v; last: %s: %w", p.MaxAge, r.Class, r.Err))
			return
		}
	}
	w.end1(k, i, w.waiting(k, i, p.after(n-p.Immediate, r.RetryAfter), r.Class, r.Err))
}

// fail gives a message up.
func (w *worker) fail(k *work, i int, class sink.Class, err error) {
	w.end1(k, i, store.Outcome{State: store.Failed, Attempts: k.attempts(i), Class: string(class),
		Message: text(err), Free: w.dest.Order == Skip})
}

// end1 ends a record with an outcome that may hold its key back.
func (w *worker) end1(k *work, i int, o store.Outcome) {
	was := k.state[i]
	k.finish(i, o)
	if was != aside && !(o.State == store.Failed && o.Free) {
		w.holdKey(k, i)
	}
}
