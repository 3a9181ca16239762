package model

import (
	"maps"
	"slices"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// view is what a destination's consumers have seen, and what is known of its
// events from outcomes that were committed.
type view struct {
	name string

	// A consumer that remembers the highest sequence of each key and drops
	// what is not above it.
	highest  map[string]outrider.Sequence
	consumed map[string]bool
	seen     map[string]bool

	waiting, failed, free map[string]bool
	loose                 map[string]bool // given up once and their keys went on
	maybe                 map[string]bool // may have failed: that answer was lost
	dueAt                 map[string]time.Duration
	gone                  map[string]bool // discarded
	starts                map[string]int  // at most
}

func newView(name string) *view {
	v := &view{name: name, highest: map[string]outrider.Sequence{}, dueAt: map[string]time.Duration{}, starts: map[string]int{}}
	for _, s := range []*map[string]bool{&v.consumed, &v.seen, &v.waiting, &v.failed, &v.free, &v.gone, &v.loose, &v.maybe} {
		*s = map[string]bool{}
	}
	return v
}

// got is a delivery, which may be a late one of a relay that has lost its lease.
func (v *view) got(r outrider.Record) {
	v.seen[r.ID] = true
	if !r.Unordered && !r.Sequence.IsZero() {
		if r.Sequence.String() <= v.highest[r.Key].String() {
			return // dropped
		}
		v.highest[r.Key] = r.Sequence
	}
	v.consumed[r.ID] = true
}

// settled notes an outcome.
func (v *view) settled(id string, o store.Outcome, now time.Duration) {
	if o.State == store.Unchanged || o.State == store.Pending || o.State == store.InHand {
		return
	}
	delete(v.waiting, id)
	delete(v.failed, id)
	delete(v.dueAt, id)
	delete(v.maybe, id)
	switch {
	case o.State == store.Waiting:
		v.waiting[id] = true
		v.dueAt[id] = now + o.Due
	case o.State == store.Failed && o.Free:
		v.free[id] = true
	case o.State == store.Failed:
		v.failed[id] = true
	}
}

func (v *view) retried(id string) {
	if v.failed[id] {
		v.starts[id] = 0 // a waiting one is only hurried
	}
	delete(v.failed, id)
	delete(v.dueAt, id)
	v.waiting[id] = true
}

func (v *view) gaveUp(id string) {
	delete(v.failed, id)
	delete(v.waiting, id)
	v.gone[id] = true
}

// outside reports whether an event has no place in the order of its key.
func (v *view) outside(r outrider.Record) bool {
	return r.Unordered || !r.AvailableAt.IsZero() || v.loose[r.ID]
}

func (v *view) died(id string) { v.starts[id]++ }

// unhappy are the events that an operator may act on.
func (v *view) unhappy() []string {
	return slices.Sorted(maps.Keys(union(v.waiting, v.failed)))
}

func union(sets ...map[string]bool) map[string]bool {
	out := map[string]bool{}
	for _, s := range sets {
		maps.Copy(out, s)
	}
	return out
}

// verify is the check after each step.
func (m *machine) verify() {
	m.t.Helper()
	if err := m.ledger.Err(); err != nil {
		m.fatalf("%v", err)
	}
}

// checkClaim looks at what a claim holds.
func (m *machine) checkClaim(h *holding, p store.ClaimParams, c *store.Claim) {
	m.t.Helper()
	if h.taken && len(c.Records) > 0 && p.Kind == store.Due {
		m.fatalf("lease %d, which somebody else has, got due %v", h.lease.ID, &work{claim: c})
	}
	if c.Kind != p.Kind || c.Lease != h.lease {
		m.fatalf("claim of kind %v, lease %+v; asked for %v, %+v", c.Kind, c.Lease, p.Kind, h.lease)
	}
	if c.Alone && (!c.Exclusive || len(c.Records) != 1) {
		m.fatalf("claim with Alone has Exclusive %v and %d records", c.Exclusive, len(c.Records))
	}
	size, count := 0, map[string]int{}
	for _, r := range c.Records {
		size += len(r.Payload)
		if !h.view().outside(r) {
			count[r.Key]++
		}
		if !h.lease.Lanes.Has(r.Lane) {
			m.fatalf("event %s of lane %d is not one of lease %+v", short(r.ID), r.Lane, h.lease)
		}
		if n := h.view().starts[r.ID]; r.Starts > n {
			m.fatalf("event %s is charged %d deaths, it was alone in hand at %d", short(r.ID), r.Starts, n)
		}
		if at := h.view().dueAt[r.ID]; at > m.now+time.Minute && !h.taken {
			m.fatalf("event %s waits until %v, and was handed out at %v", short(r.ID), at, m.now)
		}
		if p.KeyShare > 0 && count[r.Key] > p.KeyShare {
			m.fatalf("a claim holds %d events of key %q, its share is %d", count[r.Key], r.Key, p.KeyShare)
		}
	}
	if len(c.Records) > p.MaxRecords || size > p.MaxBytes && len(c.Records) > 1 {
		m.fatalf("a claim holds %d records and %d bytes, asked for %d and %d", len(c.Records), size, p.MaxRecords, p.MaxBytes)
	}
	if !h.taken {
		m.checkBeside(h, c)
	}
	m.checkOrder(c)
}

// checkOrder makes sure that a claim has a key's records in the order of their
// sequences. Whether that is the right one is the ledger's to say.
func (m *machine) checkOrder(c *store.Claim) {
	m.t.Helper()
	last := map[string]outrider.Record{}
	for _, r := range c.Records {
		if r.Unordered || r.Sequence.IsZero() {
			continue
		}
		if x, ok := last[r.Key]; ok && r.Sequence.String() < x.Sequence.String() {
			m.fatalf("event %s of key %q comes behind %s in a claim, their sequences are %v and %v",
				short(r.ID), r.Key, short(x.ID), r.Sequence, x.Sequence)
		}
		last[r.Key] = r
	}
}

// checkBeside makes sure that nobody else holds a claim's records, and that a
// key is in hand in one way only.
func (m *machine) checkBeside(h *holding, c *store.Claim) {
	m.t.Helper()
	ids, ordered := map[string]bool{}, map[string]bool{}
	for _, r := range c.Records {
		if ids[r.ID] {
			m.fatalf("event %s is twice in a claim", short(r.ID))
		}
		ids[r.ID] = true
		if !h.view().outside(r) {
			ordered[r.Key] = true
		}
	}
	for x := range m.holdings() {
		if x.over || x.taken || x.lease.Destination != h.lease.Destination {
			continue
		}
		for _, w := range x.inHand() {
			if x.lost != nil && (slices.Contains(x.lost.first, w) || slices.Contains(x.lost.later, w)) {
				continue // it may have been settled
			}
			for i, r := range w.claim.Records {
				if w.settled && w.state[i] != set && w.state[i] != ended {
					continue
				}
				if ids[r.ID] {
					m.fatalf("event %s is in two claims: %v, %v", short(r.ID), &work{claim: c}, w)
				}
				if ordered[r.Key] && !h.view().outside(r) && (c.Kind == store.Due || w.claim.Kind == store.Due || w.settled) {
					m.fatalf("key %q is in two claims: %v, %v", r.Key, &work{claim: c}, w)
				}
			}
		}
	}
}

// drain ends a run: everybody goes, one relay takes all over, and all that was
// committed has to come.
func (m *machine) drain() {
	t := m.t
	for _, x := range m.txs {
		m.finish(x, !chance(t, "roll back", 4))
	}
	m.txs = nil
	for _, r := range m.alive() {
		if chance(t, "leaves", 2) {
			m.leaveOf(r)
		}
	}
	m.let(2 * ttl)
	r := m.join()
	for _, d := range m.dests {
		m.takeAll(r, d)
		m.settleDown(r, d)
		m.operate(r, d)
		m.checkEnd(d)
	}
	m.checkStatus()
}

// takeAll takes all lanes of a destination.
func (m *machine) takeAll(r *relay, d string) {
	m.t.Helper()
	for range 1000 {
		m.take(r, d, 64)
		var lanes store.LaneSet
		for _, h := range r.holdings {
			if h.lease.Destination == d {
				if lanes&h.lease.Lanes != 0 {
					m.fatalf("lanes %x of %s are in two leases", lanes&h.lease.Lanes, d)
				}
				lanes |= h.lease.Lanes
			}
		}
		if lanes == store.AllLanes {
			return
		}
		m.let(ttl / 10)
	}
	m.fatalf("not all lanes of %s can be taken", d)
}

// settleDown works until nothing comes any more.
func (m *machine) settleDown(r *relay, d string) {
	m.t.Helper()
	p := params(m.t, store.Fresh)
	p.MaxExceptions = 0
	for quiet, n := 0, 0; quiet < 5; n++ {
		if n > 5000 {
			m.fatalf("%s never comes to rest", d)
		}
		got := false
		for _, h := range r.holdings {
			if h.lease.Destination != d {
				continue
			}
			for p.Kind = store.Fresh; p.Kind <= store.Due; p.Kind++ {
				got = m.round(h, p) || got
			}
		}
		if quiet++; got {
			quiet = 0
			continue
		}
		m.let(ttl)
		m.renewOf(r)
	}
}

// round claims, delivers and settles.
func (m *machine) round(h *holding, p store.ClaimParams) bool {
	m.t.Helper()
	w := m.claimOf(h, p)
	if w == nil {
		return false
	}
	c := &commit{p: store.CommitParams{Lease: h.lease}}
	c.add(w)
	m.try(h, c, false)
	m.sendOf(w, len(w.state), func(outrider.Record) sent { return published })
	c = &commit{p: store.CommitParams{Lease: h.lease}, first: []*work{w}}
	c.p.Settle = append(c.p.Settle, store.Settlement{Claim: w.claim, Outcomes: w.outcomes})
	m.try(h, c, false)
	m.verify()
	return true
}

// operate sees to it that only failed events hold anything back, and gets them
// out of the way.
func (m *machine) operate(r *relay, d string) {
	v := m.views[d]
	blocked := map[string]bool{}
	for _, e := range m.ledger.Missing(d) {
		if v.failed[e.ID] {
			blocked[e.Key] = true
		}
	}
	for id := range union(v.failed, v.maybe) {
		blocked[m.keyOf(id)] = true
	}
	for _, e := range m.ledger.Missing(d) {
		if !v.failed[e.ID] && !v.maybe[e.ID] && (!blocked[e.Key] || e.Unordered) {
			m.fatalf("%s: event %s of key %q never came", d, short(e.ID), e.Key)
		}
	}
	op, ok := m.Store.(store.Operator)
	if !ok {
		return
	}
	for _, id := range slices.Sorted(maps.Keys(v.maybe)) {
		if n, err := op.Retry(m.ctx, store.Target{Destination: d, ID: id}); err != nil {
			m.fatalf("retry %s: %v", short(id), err)
		} else if n > 0 {
			m.ledger.Retried(d, id)
			v.loose[id] = true
			v.retried(id)
		}
	}
	m.settleDown(r, d)
	for range 100 {
		ids := slices.Sorted(maps.Keys(v.failed))
		if len(ids) == 0 {
			return
		}
		for _, id := range ids {
			if chance(m.t, "skip", 2) {
				m.skipOf(op, d, id)
				continue
			}
			n, err := op.Retry(m.ctx, store.Target{Destination: d, ID: id})
			if err != nil || n != 1 {
				m.fatalf("retry of failed %s: %d, %v", short(id), n, err)
			}
			m.ledger.Retried(d, id)
			v.retried(id)
		}
		m.settleDown(r, d)
	}
}

// keyOf is the key of an event; unordered ones have none.
func (m *machine) keyOf(id string) string { return m.keysOf[id] }

// checkEnd makes sure that all has come.
func (m *machine) checkEnd(d string) {
	m.t.Helper()
	m.verify()
	v := m.views[d]
	for _, e := range m.ledger.Missing(d) {
		if !v.free[e.ID] && !v.gone[e.ID] {
			m.fatalf("%s: event %s of key %q never came", d, short(e.ID), e.Key)
		}
	}
	for id := range v.seen {
		if !v.consumed[id] && !v.gone[id] && !v.loose[id] {
			m.fatalf("%s: a consumer that drops by sequence has lost event %s of key %q", d, short(id), m.keyOf(id))
		}
	}
}

// checkStatus makes sure that operators see that nothing is left.
func (m *machine) checkStatus() {
	m.t.Helper()
	in, ok := m.Store.(store.Inspector)
	if !ok {
		return
	}
	s, err := in.Status(m.ctx)
	if err != nil {
		m.fatalf("status: %v", err)
	}
	for _, d := range s.Destinations {
		free := int64(0)
		for id := range m.views[d.Name].free {
			if !m.views[d.Name].gone[id] {
				free++
			}
		}
		if d.Pending.N+d.Publishing.N+d.Waiting.N+d.Scheduled.N != 0 || d.Failed.N != free {
			m.fatalf("status when all is done: %+v, want %d failed", d, free)
		}
	}
}
