package relay

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrider-dev/outrider/store"
)

// worker serves one lease. Its goroutine, run, owns all fields but those that
// say otherwise; reads, commits and calls of the sink have goroutines of their
// own, which send it what came of them and poke it.
type worker struct {
	relay *Relay
	dest  *destination
	sess  store.Session
	lease store.Lease

	// ctx ends with the lease or the relay: nothing is to be done any more.
	// pub ends earlier: calls of the sink are cut off.
	ctx     context.Context
	pub     context.Context
	end     context.CancelFunc
	cutOff  context.CancelFunc
	drained func(*worker) // tells the manager that nothing is in hand
	watched bool          // the store tells of new events

	// Claims in hand.
	fresh []*work // in order, until first settled
	due   *work
	aside []*work // settled but for records that were set aside
	calls []*call // of the sink, in the order in which they began

	spare      []*work
	spareCalls []*call
	all        []*work // of inHand

	held    map[string]*hold
	parked  map[string]*park
	unswept bool
	turn    int64 // grows when more may have become sendable
	seen    int64 // failures that have been looked at

	// Reading.
	reading   *reading
	seq       int64
	wantFresh bool
	wantDue   bool
	pollAfter time.Duration // delay of the next poll
	pollAt    time.Duration // 0: none
	dueAt     time.Duration
	readAt    [2]time.Duration // by kind: not before, after an error
	readFails [2]int

	// Settling.
	commit    *commit
	lingerAt  time.Duration // since when a settlement waits for company
	dueToSend bool          // whose turn it is to be sent
	run       int           // messages of a key in one call
	probes    int           // chosen so far
	putOff    int           // messages put off since something was delivered
	putOffAt  uint64

	draining bool // the manager wants nothing in hand
	leaving  bool // for good
	told     bool // it has been told that nothing is
	cutting  bool // what ends now ends because of the relay
	givingUp bool
	nextAt   time.Duration // when step has something to do by itself

	news   chan struct{} // poked
	done   chan struct{} // closed when main has ended
	undone int           // events left in hand then

	// Written by others.
	lapsed   atomic.Bool  // the lease is not held any more
	failures atomic.Int64 // results that were not Delivered
	woken    atomic.Bool
	away     atomic.Bool  // the database, for the commit that is under way
	lanes    atomic.Int64 // for Health
	quiet    atomic.Bool  // nothing to read and nothing in hand

	mu       sync.Mutex
	orders   []order
	readDone []*reading
	commits  []*commit
	over     bool // main has ended
}

// order is what the manager wants of a worker.
type order struct {
	drain  bool         // have nothing in hand, and say so
	resume *store.Lease // go on, with this lease
	leave  bool         // have nothing in hand, and end
	cut    bool         // cut calls of the sink off
	giveUp bool         // settle what is known, without what is not
}

func (r *Relay) newWorker(d *destination, sess store.Session, l store.Lease, drained func(*worker)) *worker {
	w := &worker{
		relay: r, dest: d, sess: sess, lease: l, drained: drained,
		held: map[string]*hold{}, parked: map[string]*park{},
		wantFresh: true, wantDue: true, pollAfter: r.cfg.PollMin,
		run: startRun, news: make(chan struct{}, 1), done: make(chan struct{}),
	}
	if !d.ordered {
		w.run = 1
	}
	_, w.watched = r.cfg.Store.(store.Watcher)
	w.ctx, w.end = context.WithCancel(context.Background())
	w.pub, w.cutOff = context.WithCancel(w.ctx)
	w.lanes.Store(int64(l.Lanes.Len()))
	return w
}

// poke makes the worker look around. Anybody may call it.
func (w *worker) poke() {
	select {
	case w.news <- struct{}{}:
	default:
	}
}

// wake tells that there may be new events. Anybody may call it.
func (w *worker) wake() {
	if !w.woken.Swap(true) {
		w.poke()
	}
}

// lapse ends the worker: its lease is not held any more. Anybody may call it.
func (w *worker) lapse() {
	w.lapsed.Store(true)
	w.end()
}

// order gives the worker an order. Anybody may call it.
func (w *worker) order(o order) {
	w.mu.Lock()
	w.orders = append(w.orders, o)
	w.mu.Unlock()
	w.poke()
}

// main is the worker's goroutine. It returns when the manager has told it to
// leave and nothing is in hand, or when ctx has ended.
func (w *worker) main() {
	w.relay.workers.add(w)
	defer w.finish()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		w.step()
		if w.ctx.Err() != nil || w.leaving && w.told {
			return
		}
		d := time.Hour
		if w.nextAt != 0 {
			d = max(0, w.nextAt-w.relay.now())
		}
		timer.Reset(d)
		select {
		case <-w.news:
		case <-timer.C:
		case <-w.ctx.Done():
		}
	}
}

// finish lets go of everything.
func (w *worker) finish() {
	w.end()
	w.relay.workers.remove(w)
	for _, c := range w.calls {
		c.dead.Store(true)
	}
	w.awaitCalls()
	for _, c := range w.calls {
		w.endCall(c)
	}
	w.undone = w.unfinished()
	for _, k := range w.inHand() {
		w.letGo(k)
	}
	w.mu.Lock()
	late := w.readDone
	w.over = true
	w.mu.Unlock()
	for _, rd := range late {
		w.dest.budget.give(rd.share)
	}
	w.relay.forgetErrors(w.dest.Name)
	w.relay.cfg.Gate.forget(w)
	w.dest.budget.forget(w)
	w.dest.brk.forget(w)
	close(w.done)
}

// awaitCalls gives calls that were cut off, because the lease was lost, time
// to return, so that the lanes' next owner, should it be this relay, does not
// send beside them.
func (w *worker) awaitCalls() {
	if !w.lapsed.Load() {
		return
	}
	limit := time.NewTimer(w.relay.cfg.SettleTimeout)
	defer limit.Stop()
	for slices.ContainsFunc(w.calls, func(c *call) bool { return c.fate.Load() == isOpen }) {
		select {
		case <-w.news:
		case <-limit.C:
			return
		}
	}
}

// letGo returns what a claim has of the relay's bounds.
func (w *worker) letGo(k *work) {
	w.relay.cfg.Gate.leave(&k.alone)
	w.dest.budget.give(k.share)
	w.dest.held.Add(-int64(len(k.claim.Records)))
	k.share = share{}
}

// step does all that can be done now, and sets nextAt to when there may be
// more to do without anything having happened.
func (w *worker) step() {
	w.nextAt = 0
	w.obey()
	w.takeReads()
	w.takeCommits()
	w.collect()
	w.setAside()
	w.giveUp()
	w.yieldGate()
	w.send()
	w.read()
	w.sweep()
	w.settle() // behind read, so that it knows of company to come
	w.settled()
}

// at has step called again in time.
func (w *worker) at(t time.Duration) {
	if w.nextAt == 0 || t < w.nextAt {
		w.nextAt = t
	}
}

// obey takes the manager's orders.
func (w *worker) obey() {
	w.mu.Lock()
	orders := w.orders
	w.orders = nil
	w.mu.Unlock()
	for _, o := range orders {
		switch {
		case o.resume != nil:
			w.lease = *o.resume
			w.lanes.Store(int64(w.lease.Lanes.Len()))
			w.draining, w.told = false, false
			w.wantFresh, w.wantDue = true, true
		case o.leave:
			w.draining, w.leaving, w.told = true, true, false
		case o.drain:
			w.draining, w.told = true, false
		case o.cut:
			w.cutting = true // before a call can answer that it was cut off
			w.cutOff()
		case o.giveUp:
			w.cutting, w.givingUp = true, true
		}
	}
	if w.woken.Swap(false) {
		w.wantFresh = true
	}
}

// settled tells the manager that nothing is in hand, if it wants to know.
func (w *worker) settled() {
	if w.draining {
		w.forgetUnstarted()
	}
	empty := len(w.fresh) == 0 && w.due == nil && len(w.aside) == 0 && len(w.calls) == 0 &&
		w.reading == nil && w.commit == nil
	w.quiet.Store(empty && !w.wantFresh)
	if w.draining && empty && !w.told {
		w.told = true
		w.drained(w)
	}
}

// forgetUnstarted abandons claims that were read only.
func (w *worker) forgetUnstarted() {
	if w.reading != nil {
		return // one that comes may be forgotten with those before it
	}
	for i, k := range w.fresh {
		if k.stage == isRead {
			w.forget(w.fresh[i:])
			w.fresh = w.fresh[:i]
			w.wantFresh = true
			break
		}
	}
	if w.due != nil && w.due.stage == isRead {
		w.forget([]*work{w.due})
		w.due, w.wantDue = nil, true
	}
}

// forget abandons claims in order, the later ones by the first.
func (w *worker) forget(ks []*work) {
	w.sess.Forget(ks[0].claim)
	for _, k := range ks {
		w.letGo(k)
		w.recycle(k)
	}
	w.release()
}
