package relay

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/outrider-dev/outrider/store"
)

// commit is a Commit under way.
type commit struct {
	p      store.CommitParams
	first  []*work // whose first settlement it writes
	later  []*work // of which records set aside have ended
	starts []*work
	events int
	err    error
	took   time.Duration
}

// linger is how long a settlement waits for the start of a claim that is being
// read, so that one commit does both; lingerBacklog the same under a backlog,
// where claims are large and follow each other. Nothing waits when nothing is
// read.
const (
	linger        = 2 * time.Millisecond
	lingerBacklog = 30 * time.Millisecond
)

// settle begins a Commit if there is something to write.
func (w *worker) settle() {
	if w.commit != nil || w.ctx.Err() != nil {
		w.standAside()
		return
	}
	c := &commit{p: store.CommitParams{Lease: w.lease}}
	w.addSettlements(c)
	w.addStarts(c)
	if len(c.p.Settle)+len(c.p.Start) == 0 {
		w.lingerAt = 0
		return
	}
	if len(c.p.Start) == 0 && w.lingers() {
		return
	}
	w.lingerAt = 0
	for _, k := range c.first {
		k.stage = settling
		c.events += len(k.state)
	}
	for _, k := range c.later {
		clear(k.ended)
	}
	for _, k := range c.starts {
		k.stage = starting
	}
	w.commit = c
	w.relay.asking.Go(func() { w.write(c) })
}

// lingers reports whether settlements wait for company a little longer.
func (w *worker) lingers() bool {
	if w.reading == nil || w.reading.kind != store.Fresh || w.draining {
		return false
	}
	now := w.relay.now()
	if w.lingerAt == 0 {
		w.lingerAt = now + linger
		if w.backlog() {
			w.lingerAt = now + lingerBacklog
		}
	}
	if now >= w.lingerAt {
		return false
	}
	w.at(w.lingerAt)
	return true
}

// addSettlements gathers what has come to an end. Fresh claims are settled in
// order.
func (w *worker) addSettlements(c *commit) {
	for _, k := range w.fresh {
		if !k.resolved() {
			break
		}
		c.settleFirst(k)
	}
	if w.due != nil && w.due.resolved() {
		c.settleFirst(w.due)
	}
	for _, k := range w.aside {
		if len(k.ended) == 0 || k.stage != isSettled {
			continue
		}
		outcomes := make([]store.Outcome, len(k.state))
		for i, o := range k.ended {
			outcomes[i] = o
		}
		c.p.Settle = append(c.p.Settle, store.Settlement{Claim: k.claim, Outcomes: outcomes, Receipts: k.receipts.list()})
		c.later = append(c.later, k)
	}
}

func (c *commit) settleFirst(k *work) {
	c.p.Settle = append(c.p.Settle, store.Settlement{Claim: k.claim, Outcomes: k.outcomes, Receipts: k.receipts.list()})
	c.first = append(c.first, k)
}

// addStarts gathers the claims that may be started beside what is in hand.
func (w *worker) addStarts(c *commit) {
	if w.draining || !w.relay.keeper.fresh() {
		w.standAside()
		return
	}
	open := 0
	for _, k := range w.fresh {
		if k.stage != isRead && k.stage < settling && !slices.Contains(c.first, k) {
			open++
		}
	}
	for _, k := range w.fresh {
		if k.stage != isRead {
			continue
		}
		if open >= w.relay.cfg.InFlightClaims-1 || !w.mayStart(k) {
			break
		}
		c.start(k)
		open++
		if k.claim.Exclusive || k.claim.Alone {
			return
		}
	}
	if k := w.due; k != nil && k.stage == isRead && w.mayStart(k) {
		c.start(k)
	}
}

func (c *commit) start(k *work) {
	c.p.Start = append(c.p.Start, k.claim)
	c.starts = append(c.starts, k)
}

// mayStart reports whether a claim that was read may be in hand beside the
// others. One that has to be alone stands in line at the gate only while it
// could be sent: else it would keep everybody waiting, for nothing, or for
// itself.
func (w *worker) mayStart(k *work) bool {
	if !k.claim.Alone {
		return w.fits(k)
	}
	if !w.fits(k) || !w.couldSend() {
		w.relay.cfg.Gate.leave(&k.alone)
		return false
	}
	return w.relay.cfg.Gate.enter(w, &k.alone, true)
}

// fits reports whether a claim bears what else of the lease is in hand, and is
// borne by it.
func (w *worker) fits(k *work) bool {
	lone := k.claim.Exclusive || k.claim.Alone
	for _, o := range w.inHand() {
		if o != k && o.stage != isRead && (lone || o.claim.Exclusive || o.claim.Alone) {
			return false
		}
	}
	return true
}

// couldSend reports whether the destination would be sent something now.
func (w *worker) couldSend() bool {
	if w.dest.hung.Load() >= maxHung {
		w.at(w.relay.now() + w.dest.SlowAfter)
		return false
	}
	rests, wait := w.dest.brk.mayRest(w)
	if wait > 0 {
		w.at(w.relay.now() + wait)
	}
	return !rests
}

// standAside takes what waits to be alone out of the line at the gate, while it
// cannot be started.
func (w *worker) standAside() {
	for _, k := range w.inHand() {
		if k.claim.Alone && k.stage == isRead {
			w.relay.cfg.Gate.leave(&k.alone)
		}
	}
}

// write asks the store until it has answered. What it is given stays the same,
// so that an answer that was lost is recognised.
func (w *worker) write(c *commit) {
	from := w.relay.now()
	for try := 0; ; try++ {
		ctx, cancel := context.WithTimeout(w.ctx, w.relay.cfg.LeaseTTL)
		c.err = w.sess.Commit(ctx, c.p)
		cancel()
		if c.err == nil || errors.Is(c.err, store.ErrFenced) || w.ctx.Err() != nil {
			break
		}
		w.away.Store(true)
		w.relay.storeError(w.dest.Name, "settle", c.err)
		t := time.NewTimer(jitter(doubled(20*time.Millisecond, 5*time.Second, try)))
		select {
		case <-t.C:
		case <-w.ctx.Done():
		}
		t.Stop()
	}
	if w.away.Swap(false) && c.err == nil {
		w.relay.storeError(w.dest.Name, "settle", nil)
	}
	c.took = w.relay.now() - from
	w.mu.Lock()
	w.commits = append(w.commits, c)
	w.mu.Unlock()
	w.poke()
}

// takeCommits takes over what was written.
func (w *worker) takeCommits() {
	w.mu.Lock()
	ready := w.commits
	w.commits = nil
	w.mu.Unlock()
	for _, c := range ready {
		w.commit = nil
		if c.err != nil {
			if errors.Is(c.err, store.ErrFenced) {
				w.fenced()
			}
			return
		}
		w.committed(c)
	}
}

func (w *worker) committed(c *commit) {
	if f := w.relay.cfg.Hooks.Settle; f != nil {
		f(w.dest.Name, c.events, c.took)
	}
	for _, k := range c.starts {
		k.stage = started
	}
	for i, k := range c.first {
		k.stage = isSettled
		w.known(k.seq)
		w.tellOutcomes(k, c.p.Settle[i].Outcomes)
		if k == w.due {
			w.due = nil
			w.wantDue = true // what it has freed may be due
		} else {
			w.fresh = slices.Delete(w.fresh, 0, 1)
			w.wantDue = w.wantDue || k.claim.NextDue > 0 // what it held back
		}
		k.receipts.reset()
		if k.asides > 0 {
			w.aside = append(w.aside, k)
		} else {
			w.letGo(k)
			w.recycle(k)
		}
	}
	for i, k := range c.later {
		w.laterCommitted(k, c.p.Settle[len(c.first)+i].Outcomes)
	}
	if !w.watched && len(c.first) > 0 {
		w.wantFresh = true
	}
	w.release()
	w.turn++
}

// laterCommitted notes that records set aside have ended for the store.
func (w *worker) laterCommitted(k *work, outcomes []store.Outcome) {
	w.wantDue = true
	w.tellOutcomes(k, outcomes)
	for _, o := range outcomes {
		if o.State != store.Unchanged {
			k.asides--
		}
	}
	k.receipts.reset()
	if k.asides == 0 {
		i := slices.Index(w.aside, k)
		w.aside = slices.Delete(w.aside, i, i+1)
		w.letGo(k)
		w.recycle(k)
	}
}

// known says that the store knows what a claim holds back: claims that are
// asked for from now on do not contain it.
func (w *worker) known(seq int64) {
	for _, h := range w.held {
		if h.till == forever && h.head == seq {
			h.till = w.seq
		}
	}
}

// tellOutcomes has hooks told of what was not published, and sees to it that
// what waits is looked at in time.
func (w *worker) tellOutcomes(k *work, outcomes []store.Outcome) {
	if !k.marred {
		return
	}
	f := w.relay.cfg.Hooks.Event
	now := w.relay.now()
	for i := range outcomes {
		o := &outcomes[i]
		switch o.State {
		case store.Waiting:
			w.dueBy(now + o.Due)
		case store.Pending:
			// behind its head, which is waited for
		case store.Failed:
			if o.Free {
				w.wantDue = true
			}
			w.relay.failures.note(w.dest.Name, k.rec(i), o)
		default:
			continue
		}
		if f != nil && o.State != store.Pending {
			f(w.dest.Name, k.rec(i), eventOutcome(o))
		}
	}
}
