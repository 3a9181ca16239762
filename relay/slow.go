package relay

import (
	"time"

	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// Bounds of what is set aside. Slow messages are exceptions in the store, so
// when nothing gets through at all, which is an outage that nobody has noticed
// yet, hardly any are made.
const (
	asideFew  = 16  // of one claim, or a tenth of it
	asideDark = 32  // of a lease, while nothing gets through
	asideMost = 512 // of a lease
)

// setAside settles claims without the few messages that are slow, so that they
// hold up no key but their own.
func (w *worker) setAside() {
	if w.cutting {
		return
	}
	if !w.dest.inFlight {
		w.loosen()
	}
	if len(w.fresh) > 0 {
		w.setAsideOf(w.fresh[0])
	}
	if w.due != nil {
		w.setAsideOf(w.due)
	}
}

// loosen lets the next call begin beside one of which only a few messages are
// slow, with other keys than theirs.
func (w *worker) loosen() {
	for _, c := range w.calls {
		if c.loose || c.seen == len(c.msgs) {
			continue
		}
		if at := c.began + w.dest.SlowAfter; w.relay.now() < at {
			w.at(at)
			continue
		}
		if !w.few(len(c.msgs)-c.seen, len(c.msgs), c.through) {
			w.at(w.relay.now() + w.dest.SlowAfter/4)
			continue
		}
		c.loose = true
		for j, i := range c.at {
			key := c.k.rec(int(i)).Key
			if c.flags[j].Load() != c.flag(flagSeen) && key != "" && w.parked[key] == nil {
				w.parked[key] = &park{}
			}
		}
		w.recount()
		w.turn++
	}
}

func (w *worker) setAsideOf(k *work) {
	w.makeRoom(k)
	if k.stage != started || k.left == 0 || k.left == k.todo {
		return
	}
	began, through := w.oldestCall(k)
	if began == 0 {
		return
	}
	if at := began + w.dest.SlowAfter; w.relay.now() < at {
		w.at(at)
		return
	}
	if !w.fewAreSlow(k, through) {
		w.at(w.relay.now() + w.dest.SlowAfter/4)
		return
	}
	w.putAside(k)
}

// oldestCall is when the longest of the claim's open calls began, or 0 while
// one of them may still be handed over.
func (w *worker) oldestCall(k *work) (began time.Duration, through uint64) {
	for _, c := range w.calls {
		if c.k == k && c.seen < len(c.msgs) && (began == 0 || c.began < began) {
			began, through = c.began, c.through
		}
	}
	return began, through
}

// overdue reports whether a call has results to be looked at because it is
// slow.
func (w *worker) overdue(c *call) bool {
	return w.relay.now() >= c.began+w.dest.SlowAfter && int(c.left.Load()) < len(c.msgs)-c.seen
}

// fewAreSlow reports whether a claim may be settled without what is out: a
// small part, of keys that nothing else of the claim is to be sent of.
func (w *worker) fewAreSlow(k *work, through uint64) bool {
	if !w.few(k.left-k.todo, len(k.state), through) {
		return false
	}
	if k.todo == 0 {
		return true
	}
	slow := map[string]bool{}
	for i, s := range k.state {
		switch key := k.rec(i).Key; {
		case s == out && key != "":
			slow[key] = true
		case s == todo && !(slow[key] || w.parked[key] != nil):
			return false // it is still to be sent
		}
	}
	return true
}

// few reports whether n of so many messages are few enough to go on without.
func (w *worker) few(n, of int, through uint64) bool {
	total := n
	for _, o := range w.aside {
		total += o.asides
	}
	return n <= max(asideFew, of/10) && total <= asideMost &&
		(total <= asideDark || w.dest.brk.delivered.Load() > through)
}

// putAside makes InHand of the first message of each key that is out, and lets
// the others of the key go back.
func (w *worker) putAside(k *work) {
	k.marred = true
	for i, s := range k.state {
		if s != out && s != todo {
			continue
		}
		switch {
		case w.isHeld(k, i) && s == out:
			k.giveBack(i)
			k.state[i] = gone
		case w.isHeld(k, i):
			k.giveBack(i)
		case s == out:
			k.outcomes[i] = store.Outcome{State: store.InHand}
			k.set(i, aside)
			k.asides++
			w.holdKey(k, i)
			if h := w.held[k.rec(i).Key]; h != nil && h.seq == k.seq && h.pos == i {
				h.slow = true
			}
		default: // failed before, and its turn to be sent again has not come
			w.end1(k, i, w.waiting(k, i, 0, sink.ClassHeld, nil))
		}
	}
}

// makeRoom puts off what an outage keeps in hand, after a probe, so that other
// messages come in hand and are tried: if only a part of the destination is
// down, that part would else block the rest. For a Due claim it costs nothing,
// it was made of exceptions. For the last few of a Fresh one it costs the store
// an exception for each key, and is done with no more than some until something
// has been delivered: in a real outage the page stays as it is. One that has to
// be alone in hand makes room for everybody, and waits for no probe.
func (w *worker) makeRoom(k *work) {
	if k.stage != started || k.todo == 0 || k.left != k.todo || !w.dest.brk.isOpen() {
		return
	}
	if w.probes == k.probes && !(k.claim.Alone && k.sent) {
		return
	}
	if k.claim.Kind == store.Fresh && !k.claim.Alone {
		if n := w.dest.brk.delivered.Load(); n != w.putOffAt {
			w.putOffAt, w.putOff = n, 0
		}
		n := k.keysToDo()
		full := k.claim.Exclusive || len(w.fresh) >= w.relay.cfg.InFlightClaims-1
		if !full || n > max(asideFew, len(k.state)/10) || w.putOff+n > asideDark {
			return
		}
		w.putOff += n
	}
	r := sink.Result{Class: sink.ClassUnreachable, Err: errPutOff}
	for i, s := range k.state {
		switch {
		case s != todo:
		case w.isHeld(k, i):
			k.giveBack(i)
		default:
			w.wait(k, i, &r)
		}
	}
}

// keysToDo counts the keys of what is to be sent, and what has none.
func (k *work) keysToDo() int {
	n, seen := 0, map[string]bool{}
	for i := k.from; i < len(k.state); i++ {
		if key := k.rec(i).Key; k.state[i] == todo && !seen[key] {
			n++
			seen[key] = key != ""
		}
	}
	return n
}
