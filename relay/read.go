package relay

import (
	"context"
	"errors"
	"time"

	"github.com/outrider-dev/outrider/store"
)

// reading is a Claim under way.
type reading struct {
	kind  store.Kind
	seq   int64
	share share
	claim *store.Claim
	err   error
	took  time.Duration
}

// read asks for the next claim if one is wanted and there is room. A lease has
// one Claim under way at most.
func (w *worker) read() {
	now := w.relay.now()
	w.poll(now)
	if w.draining || w.reading != nil || w.exclusive() || !w.relay.keeper.fresh() {
		return
	}
	// Due events first: there is one claim of them at most, and while it is in
	// hand new ones are read.
	switch {
	case w.wantDue && w.due == nil && !w.pauses(store.Due, now):
		w.startReading(store.Due)
	case w.wantFresh && w.room() && !w.pauses(store.Fresh, now):
		w.startReading(store.Fresh)
	}
}

// pauses reports whether claims of a kind wait after an error. One kind can fail
// alone, as when a table cannot be read.
func (w *worker) pauses(kind store.Kind, now time.Duration) bool {
	if now >= w.readAt[kind] {
		return false
	}
	w.at(w.readAt[kind])
	return true
}

// poll finds out by the clock that something should be looked for.
func (w *worker) poll(now time.Duration) {
	if w.pollAt != 0 && !w.wantFresh {
		if now >= w.pollAt {
			w.wantFresh, w.pollAt = true, 0
			w.relay.wokeUp("poll")
		} else {
			w.at(w.pollAt)
		}
	}
	if w.dueAt != 0 && !w.wantDue {
		if now >= w.dueAt {
			w.wantDue, w.dueAt = true, 0
			w.relay.wokeUp("due")
		} else {
			w.at(w.dueAt)
		}
	}
}

// exclusive reports whether a claim is in hand that bears no other.
func (w *worker) exclusive() bool {
	for _, k := range w.inHand() {
		if k.claim.Exclusive || k.claim.Alone {
			return true
		}
	}
	return false
}

// room reports whether another Fresh claim may be in hand; those that only wait
// to be settled do not count. One is read ahead while there is a backlog;
// without one it would only be read before what is to come has arrived.
func (w *worker) room() bool {
	n, open := w.relay.cfg.InFlightClaims, 0
	for _, k := range w.fresh {
		if k.stage < settling && !k.resolved() {
			open++
		}
	}
	if !w.backlog() {
		n--
	}
	return open < n && len(w.fresh) <= n+1
}

// backlog reports whether the latest claim has left more to be read.
func (w *worker) backlog() bool {
	return len(w.fresh) > 0 && w.fresh[len(w.fresh)-1].claim.More
}

func (w *worker) startReading(kind store.Kind) {
	cfg, b := &w.relay.cfg, w.dest.budget
	n := cfg.InFlightClaims
	got, ok := b.take(w, share{min(cfg.MaxRecords, (b.maxRecords+n-1)/n), min(cfg.MaxBytes, (b.maxBytes+n-1)/n)})
	if !ok {
		return
	}
	w.seq++
	rd := &reading{kind: kind, seq: w.seq, share: got}
	p := store.ClaimParams{
		Lease: w.lease, Kind: kind,
		MaxRecords: got.records, MaxBytes: got.bytes, KeyShare: cfg.KeyShare,
		MaxExceptions: cfg.MaxExceptions,
	}
	w.reading = rd
	if kind == store.Fresh {
		w.wantFresh, w.pollAt = false, 0
	} else {
		w.wantDue, w.dueAt = false, 0
	}
	w.relay.asking.Go(func() { w.claim(rd, p) })
}

// claim asks the store, in a goroutine of its own.
func (w *worker) claim(rd *reading, p store.ClaimParams) {
	from := w.relay.now()
	ctx, cancel := context.WithTimeout(w.ctx, w.relay.cfg.LeaseTTL)
	rd.claim, rd.err = w.sess.Claim(ctx, p)
	cancel()
	rd.took = w.relay.now() - from
	w.mu.Lock()
	over := w.over
	w.readDone = append(w.readDone, rd)
	w.mu.Unlock()
	if over {
		w.dest.budget.give(rd.share)
	}
	w.poke()
}

// takeReads takes over what was read.
func (w *worker) takeReads() {
	w.mu.Lock()
	ready := w.readDone
	w.readDone = nil
	w.mu.Unlock()
	for _, rd := range ready {
		w.reading = nil
		w.takeRead(rd)
	}
}

func (w *worker) takeRead(rd *reading) {
	r := w.relay
	if rd.err != nil {
		w.dest.budget.give(rd.share)
		w.readFailed(rd)
		return
	}
	if w.readFails[rd.kind] > 0 {
		w.readFails[rd.kind] = 0
		r.claimError(w.dest.Name, rd.kind, nil)
	}
	c := rd.claim
	if r.cfg.Hooks.Claim != nil {
		r.cfg.Hooks.Claim(w.dest.Name, len(c.Records), rd.took)
	}
	w.schedule(rd)
	if len(c.Records) == 0 {
		w.dest.budget.give(rd.share)
		w.sess.Forget(c)
		w.release()
		return
	}
	bytes := 0
	for i := range c.Records {
		bytes += c.Records[i].Size()
	}
	used := share{len(c.Records), bytes}
	w.dest.budget.give(share{rd.share.records - used.records, rd.share.bytes - used.bytes})
	w.dest.held.Add(int64(len(c.Records)))
	k := w.newWork(c, rd.seq, used)
	if rd.kind == store.Due {
		w.due = k
	} else {
		w.fresh = append(w.fresh, k)
	}
	w.turn++
}

// schedule decides when to read next.
func (w *worker) schedule(rd *reading) {
	c, cfg, now := rd.claim, &w.relay.cfg, w.relay.now()
	if rd.kind == store.Due {
		w.wantDue = w.wantDue || c.More
		next := cfg.DuePoll
		if c.NextDue > 0 {
			next = min(next, c.NextDue)
		}
		w.dueBy(now + next)
		return
	}
	switch {
	case c.More:
		w.wantFresh = true
	case w.watched:
		w.pollAt = now + cfg.SafetyPoll
		return
	case len(c.Records) > 0:
		w.pollAfter = cfg.PollMin
	default:
		w.pollAfter = min(2*w.pollAfter, cfg.PollMax)
	}
	w.pollAt = now + w.pollAfter
}

// dueBy has due events looked for at a time, or earlier.
func (w *worker) dueBy(t time.Duration) {
	if w.dueAt == 0 || t < w.dueAt {
		w.dueAt = t
	}
}

// readFailed waits and tries again, or ends.
func (w *worker) readFailed(rd *reading) {
	if rd.kind == store.Due {
		w.wantDue = true
	} else {
		w.wantFresh = true
	}
	switch {
	case errors.Is(rd.err, store.ErrFenced):
		w.fenced()
	case w.ctx.Err() != nil:
	default:
		w.readFails[rd.kind]++
		w.readAt[rd.kind] = w.relay.now() + jitter(doubled(50*time.Millisecond, 5*time.Second, w.readFails[rd.kind]-1))
		w.relay.claimError(w.dest.Name, rd.kind, rd.err)
	}
}

// fenced ends the worker: the lease has gone to somebody else.
func (w *worker) fenced() {
	if w.ctx.Err() != nil {
		return
	}
	w.relay.log.seldom("fenced "+w.dest.Name, "a lease has gone to another relay; what was in hand is dropped",
		"destination", w.dest.Name, "lease", w.lease.ID, "events", w.unfinished())
	if w.relay.cfg.Hooks.Fenced != nil {
		w.relay.cfg.Hooks.Fenced(w.dest.Name)
	}
	w.lapse()
}

// unfinished counts the events in hand.
func (w *worker) unfinished() int {
	n := 0
	for _, k := range w.inHand() {
		n += len(k.claim.Records)
	}
	return n
}
