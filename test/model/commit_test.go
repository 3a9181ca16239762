package model

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"pgregory.net/rapid"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// commit settles what has an end, and starts what was claimed.
func (m *machine) commit(t *rapid.T) {
	h := pick(t, "lease", m.busy())
	if h.lost != nil {
		m.try(h, h.lost, false)
		return
	}
	c := m.gather(t, h)
	if len(c.p.Settle)+len(c.p.Start) == 0 {
		t.SkipNow()
	}
	m.try(h, c, m.lose != nil && !c.frees() && chance(t, "lose answer", 8))
}

// frees reports whether a key goes on without a record by the commit. Should
// its answer be lost and the relay die, nobody can tell whether it has.
func (c *commit) frees() bool {
	return slices.ContainsFunc(c.p.Settle, func(s store.Settlement) bool {
		return slices.ContainsFunc(s.Outcomes, func(o store.Outcome) bool { return o.Free })
	})
}

// busy are leases of which something may have to be written.
func (m *machine) busy() []*holding {
	var out []*holding
	for _, h := range m.held() {
		if len(h.inHand()) > 0 && h.moving == nil {
			out = append(out, h)
		}
	}
	return out
}

// gather draws what a commit writes.
func (m *machine) gather(t *rapid.T, h *holding) *commit {
	c := &commit{p: store.CommitParams{Lease: h.lease}}
	n := rapid.IntRange(0, 3).Draw(t, "settle")
	for _, w := range h.fresh {
		if n == 0 || !w.settle(t, c) {
			break
		}
		n--
	}
	for _, w := range h.due {
		if chance(t, "settle due", 2) {
			w.settle(t, c)
		}
	}
	for _, w := range h.aside {
		if slices.Contains(w.state, ended) {
			c.endAside(w)
		}
	}
	n = rapid.IntRange(0, 3).Draw(t, "start")
	for _, w := range h.fresh {
		if w.started {
			continue
		}
		if n == 0 || !w.mayStart(c) {
			break
		}
		c.add(w)
		n--
	}
	for _, w := range h.due {
		if !w.started && w.mayStart(c) && chance(t, "start due", 2) {
			c.add(w)
		}
	}
	return c
}

func (c *commit) add(w *work) {
	c.start = append(c.start, w)
	c.p.Start = append(c.p.Start, w.claim)
}

// settle adds the first settlement of a claim, if all of it has an end or is
// slow.
func (w *work) settle(t *rapid.T, c *commit) bool {
	if !w.started {
		return false
	}
	slows := []int{}
	blocked := map[string]bool{}
	for i, s := range w.state {
		key := w.claim.Records[i].Key
		switch {
		case s == slow:
			slows = append(slows, i)
			blocked[key] = key != ""
		case s == todo && !blocked[key]:
			return false
		}
	}
	if len(slows) > 0 && chance(t, "wait for the slow", 2) {
		return false
	}
	for _, i := range slows {
		w.state[i], w.outcomes[i] = set, store.Outcome{State: store.InHand}
		w.stop(i)
	}
	c.first = append(c.first, w)
	c.p.Settle = append(c.p.Settle, store.Settlement{Claim: w.claim, Outcomes: slices.Clone(w.outcomes), Receipts: []string{"main/0@1"}})
	return true
}

// endAside adds a later settlement of a claim.
func (c *commit) endAside(w *work) {
	out := make([]store.Outcome, len(w.outcomes))
	for i, s := range w.state {
		if s == ended {
			out[i] = w.outcomes[i]
		}
	}
	c.later = append(c.later, w)
	c.p.Settle = append(c.p.Settle, store.Settlement{Claim: w.claim, Outcomes: out})
}

// mayStart reports whether a claim may be in hand beside the others, once the
// commit is done.
func (w *work) mayStart(c *commit) bool {
	for _, h := range w.h.r.holdings {
		for _, x := range h.inHand() {
			if x == w || h.over {
				continue
			}
			in := x.started && !(slices.Contains(c.first, x) && !slices.Contains(x.state, set)) || slices.Contains(c.start, x)
			same := x.h == w.h
			if in && (same && (w.claim.Exclusive || x.claim.Exclusive) || w.claim.Alone || x.claim.Alone) {
				return false
			}
		}
	}
	return true
}

// try asks the store, and takes note of its answer.
func (m *machine) try(h *holding, c *commit, lose bool) {
	m.t.Helper()
	if h.lost == nil {
		c.at = m.now
		for _, s := range c.p.Settle {
			c.ledger = append(c.ledger, m.ledger.Settle(s.Claim, s.Outcomes))
		}
	}
	m.logf("  %s lease %d: %v, lose %v", h.r.name, h.lease.ID, c, lose)
	if lose {
		m.lose(h.r.s)
	}
	err := h.r.s.Commit(m.ctx, c.p)
	if m.calm != nil {
		m.calm()
	}
	switch {
	case errors.Is(err, store.ErrFenced):
		h.findTaken()
	case err == nil && h.lost == nil: // else it may have taken effect before
		h.unsure = false
	}
	switch {
	case err == nil && h.taken && h.lost != nil:
		// It took effect before the lease was taken.
		h.drop()
	case err == nil && h.taken:
		m.fatalf("%s: commit under lease %d, which somebody else has", h.r.name, h.lease.ID)
	case err == nil:
		m.committed(h, c)
	case lose && !errors.Is(err, store.ErrFenced):
		m.logf("    %v", err)
		h.lost = c
	default:
		m.refused(h, "commit", err)
	}
}

// committed notes what a commit has done.
func (m *machine) committed(h *holding, c *commit) {
	h.lost = nil
	for _, s := range c.ledger {
		s.Done()
	}
	for _, s := range c.p.Settle {
		for i, o := range s.Outcomes {
			if id := s.Claim.Records[i].ID; !slices.Contains(c.past, id) {
				h.view().settled(id, o, c.at)
			}
		}
	}
	for _, w := range c.first {
		w.settled = true
		for key, x := range h.holds {
			if x == w {
				delete(h.holds, key)
			}
		}
		h.fresh = slices.DeleteFunc(h.fresh, func(x *work) bool { return x == w })
		h.due = slices.DeleteFunc(h.due, func(x *work) bool { return x == w })
		if slices.ContainsFunc(w.state, func(s state) bool { return s == set || s == ended }) {
			h.aside = append(h.aside, w)
		}
	}
	for _, w := range c.later {
		for i, s := range c.p.Settle[slices.IndexFunc(c.p.Settle, func(s store.Settlement) bool { return s.Claim == w.claim })].Outcomes {
			if s.State != store.Unchanged {
				w.state[i] = decided
			}
		}
		if !slices.ContainsFunc(w.state, func(s state) bool { return s == set || s == ended }) {
			h.aside = slices.DeleteFunc(h.aside, func(x *work) bool { return x == w })
		}
	}
	for _, w := range c.start {
		w.started = true
		m.ledger.Started(w.claim)
	}
}

// workOn takes one lease a whole round on: claim, start, send, settle.
func (m *machine) workOn(t *rapid.T) {
	h := m.lease(t)
	if h.lost != nil {
		m.try(h, h.lost, false)
		return
	}
	kind := store.Fresh
	if chance(t, "due", 2) {
		kind = store.Due
	}
	bad := rapid.SampledFrom([]int{0, 0, 4, 12}).Draw(t, "one in how many fails")
	if len(h.fresh)+len(h.due) > 0 {
		t.SkipNow()
	}
	w := m.claimOf(h, params(t, kind))
	if w == nil {
		return
	}
	c := &commit{p: store.CommitParams{Lease: h.lease}}
	if !w.mayStart(c) {
		return
	}
	c.add(w)
	m.try(h, c, false)
	if h.over {
		return
	}
	for range 100 {
		if !slices.Contains(w.state, todo) {
			break
		}
		m.sendOf(w, 100, func(outrider.Record) sent { return draw(t, bad) })
		if slices.Contains(w.state, slow) {
			break
		}
	}
	c = &commit{p: store.CommitParams{Lease: h.lease}}
	if w.settle(t, c) {
		m.try(h, c, false)
	}
}

// String is a claim for the trace of a run.
func (w *work) String() string {
	var b strings.Builder
	c := w.claim
	fmt.Fprintf(&b, "%s claim", [...]string{"fresh", "due"}[c.Kind])
	for _, f := range []struct {
		on   bool
		name string
	}{{c.Exclusive, "exclusive"}, {c.Alone, "alone"}, {c.Redelivery, "again"}, {c.More, "more"}} {
		if f.on {
			b.WriteString(" " + f.name)
		}
	}
	for _, r := range c.Records {
		fmt.Fprintf(&b, " %s:%s/%d", r.Key, short(r.ID), r.Sequence.Page)
	}
	return b.String()
}

// String is a commit for the trace of a run.
func (c *commit) String() string {
	var b strings.Builder
	b.WriteString("commit")
	for _, s := range c.p.Settle {
		b.WriteString(" settle [")
		for i, o := range s.Outcomes {
			fmt.Fprintf(&b, " %s:%s", short(s.Claim.Records[i].ID), word(o))
		}
		b.WriteString(" ]")
	}
	for _, x := range c.p.Start {
		fmt.Fprintf(&b, " start [")
		for _, r := range x.Records {
			b.WriteString(" " + short(r.ID))
		}
		b.WriteString(" ]")
	}
	return b.String()
}

func word(o store.Outcome) string {
	switch {
	case o.State == store.Waiting:
		return fmt.Sprintf("waits %v", o.Due)
	case o.State == store.Failed && o.Free:
		return "failed, free"
	default:
		return strings.ToLower(o.State.String())
	}
}

// String is what became of a message, for the trace of a run.
func (s sent) String() string {
	switch {
	case s.slow:
		return "slow"
	case s.arrived && s.State != store.Published:
		return word(s.Outcome) + ", but arrived"
	default:
		return word(s.Outcome)
	}
}
