package relay

import (
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// giveUp ends what is in hand when the worker has to leave and the rest will
// not come, or cannot be sent because the destination is down. What is known is
// settled; what is not is to be sent again, at no cost. Claims of which nothing
// is known are left as they are: whoever gets the lease finds them.
func (w *worker) giveUp() {
	if !w.givingUp && !(w.leaving && w.nothingMoves()) {
		return
	}
	w.cutting = true
	for _, c := range w.calls {
		c.dead.Store(true)
		w.takeResults(c, false)
		w.endCall(c)
	}
	w.calls = nil
	last := -1
	for i, k := range w.fresh {
		if k.stage >= started && k.known() {
			last = i
		}
	}
	keep := w.fresh[:0]
	for i, k := range w.fresh {
		if k.stage == started && i > last {
			w.letGo(k)
			continue
		}
		if k.stage == started {
			w.endAll(k)
		}
		keep = append(keep, k)
	}
	w.fresh = keep
	if k := w.due; k != nil && k.stage == started {
		if k.known() {
			w.endAll(k)
		} else {
			w.letGo(k)
			w.due = nil
		}
	}
	for _, k := range w.aside {
		w.endAside(k)
	}
}

// nothingMoves reports whether the only thing to be waited for is the
// destination's return.
func (w *worker) nothingMoves() bool {
	return len(w.calls) == 0 && w.dest.brk.isOpen()
}

// known reports whether an outcome of the claim is worth being settled.
func (k *work) known() bool {
	for i := range k.outcomes {
		if s := k.outcomes[i].State; s == store.Published || s == store.Failed || s == store.InHand {
			return true
		}
	}
	return false
}

// endAll gives every record an outcome: the first of a key that has none is
// tried again, those behind it go back.
func (w *worker) endAll(k *work) {
	for i, s := range k.state {
		switch {
		case s != todo && s != out:
		case w.isHeld(k, i):
			k.giveBack(i)
		default:
			w.end1(k, i, w.waiting(k, i, 0, sink.ClassStopped, nil))
		}
	}
}

func (w *worker) endAside(k *work) {
	for i, s := range k.state {
		if s == aside {
			w.end1(k, i, w.waiting(k, i, 0, sink.ClassStopped, nil))
		}
	}
}
