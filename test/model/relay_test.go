package model

import (
	"errors"
	"iter"
	"slices"
	"time"

	"pgregory.net/rapid"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
	"github.com/outrider-dev/outrider/storetest"
)

// holding is a lease in a relay's hands, and what it has in hand under it.
type holding struct {
	r     *relay
	lease store.Lease
	until time.Duration // it lives as long at least

	fresh []*work // in order, until first settled
	due   []*work
	aside []*work // settled, but for slow records

	// holds are the keys that have stopped at a record whose claim is not
	// settled yet: what is claimed until then stops as well.
	holds map[string]*work

	moving *move   // likewise
	lost   *commit // whose answer was lost; it is repeated before anything else
	unsure bool    // somebody may have acquired lanes of it without hearing so
	taken  bool    // somebody else has lanes of it: nothing counts any more
	over   bool    // given back, or known to be taken
}

// state of a record in hand.
type state uint8

const (
	todo    state = iota
	slow          // with the destination, which has not answered
	decided       // its outcome stands
	set           // settled as InHand
	ended         // set aside, and its outcome stands now
)

// work is a claim in a relay's hands.
type work struct {
	h        *holding
	claim    *store.Claim
	started  bool
	settled  bool
	state    []state
	outcomes []store.Outcome
	stops    map[string]bool // keys of which nothing is sent any more
}

// commit is a Commit and what it means.
type commit struct {
	p      store.CommitParams
	first  []*work
	later  []*work
	start  []*work
	ledger []*storetest.Settlement
	at     time.Duration // of the first try
	past   []string      // events of which an operator has made something else since
}

// holdings are all leases that were ever held and not given back.
func (m *machine) holdings() iter.Seq[*holding] {
	return func(yield func(*holding) bool) {
		for _, r := range m.relays {
			for _, h := range r.holdings {
				if !yield(h) {
					return
				}
			}
		}
	}
}

// held are the leases that somebody works on, be it in vain.
func (m *machine) held() []*holding {
	var out []*holding
	for h := range m.holdings() {
		if !h.over {
			out = append(out, h)
		}
	}
	return out
}

// lease draws one to work on. A call under it that had no answer is repeated
// first.
func (m *machine) lease(t *rapid.T) *holding {
	h := pick(t, "lease", m.held())
	if h.moving != nil && (len(h.inHand()) > 0 || chance(t, "repeat", 2)) {
		h.repeat()
		t.SkipNow()
	}
	return h
}

// mayBeTaken reports whether others may take the lease over.
func (h *holding) mayBeTaken() bool {
	return h.r.dead || h.r.cut || h.r.left || h.r.m.now >= h.until
}

// again reports whether the relay itself has acquired the lease anew since.
func (h *holding) again() bool {
	return slices.ContainsFunc(h.r.holdings, func(x *holding) bool {
		return x.lease.ID == h.lease.ID && x.lease.Epoch > h.lease.Epoch
	})
}

// inHand is all that is claimed.
func (h *holding) inHand() []*work { return slices.Concat(h.fresh, h.due, h.aside) }

// loseToDeath notes that a lease is somebody else's. What was alone in hand is
// charged for it, and what was with the destination may have got there.
func (h *holding) loseToDeath() {
	h.taken = true
	for _, w := range h.inHand() {
		if (w.started || h.lost != nil && slices.Contains(h.lost.start, w)) && w.claim.Alone {
			h.view().died(w.claim.Records[0].ID)
		}
	}
	h.abandon()
}

// abandon notes that what is in hand will be sent again. What was given up and
// not settled so is not given up any more; what a lost commit says of it may
// stand or not. What it says was published has been, so it need not come again:
// if its place was lost, that is noted of it here, and deliver has not.
func (h *holding) abandon() {
	v := h.view()
	for _, w := range h.inHand() {
		for i, r := range w.claim.Records {
			unsettled := w.state[i] == decided && !w.settled || w.state[i] == ended
			if v.loose[r.ID] && unsettled && !v.free[r.ID] {
				h.r.m.ledger.Retried(v.name, r.ID)
			}
		}
	}
	if h.lost == nil {
		return
	}
	for _, s := range h.lost.p.Settle {
		for i, o := range s.Outcomes {
			switch r := s.Claim.Records[i]; {
			case o.State == store.Failed || o.State == store.Waiting:
				v.maybe[r.ID] = true
			case o.State == store.Published && v.loose[r.ID]:
				r.Unordered = true // it has no place
				h.r.m.ledger.Delivered(v.name, r)
			}
		}
	}
}

// findTaken notes that the store says that a lease is not held any more: who may
// have acquired it without hearing so has. Nobody can have sent anything under it
// since.
func (h *holding) findTaken() {
	if h.unsure && !h.taken {
		h.loseToDeath()
	}
}

// drop ends the work on a lease.
func (h *holding) drop() {
	h.over = true
	h.fresh, h.due, h.aside, h.lost = nil, nil, nil, nil
}

func (h *holding) view() *view { return h.r.m.views[h.lease.Destination] }

// ask claims.
func (h *holding) ask(p store.ClaimParams) (*store.Claim, error) {
	m := h.r.m
	p.Lease = h.lease
	c, err := h.r.s.Claim(m.ctx, p)
	if m.calmed() && err != nil && !errors.Is(err, store.ErrFenced) {
		m.logf("  claim of lease %d: %v", h.lease.ID, err)
		return &store.Claim{}, nil
	}
	if h.moving != nil && errors.Is(err, store.ErrFenced) {
		h.arrive(0)
		return &store.Claim{}, nil
	}
	if err == nil && h.moving != nil {
		h.arrive(c.Lease.Lanes)
	}
	if err == nil {
		m.checkClaim(h, p, c)
	}
	return c, err
}

// params draws how a claim is bounded.
func params(t *rapid.T, kind store.Kind) store.ClaimParams {
	return store.ClaimParams{
		Kind:          kind,
		MaxRecords:    rapid.SampledFrom([]int{1, 2, 3, 5, 10, 50}).Draw(t, "MaxRecords"),
		MaxBytes:      rapid.SampledFrom([]int{1 << 20, 1 << 20, 700, 1}).Draw(t, "MaxBytes"),
		KeyShare:      rapid.SampledFrom([]int{0, 0, 1, 2, 5}).Draw(t, "KeyShare"),
		MaxExceptions: rapid.SampledFrom([]int{0, 0, 0, 1, 3}).Draw(t, "MaxExceptions"),
	}
}

func (m *machine) claim(t *rapid.T) {
	h := m.lease(t)
	kind := store.Fresh
	if chance(t, "due", 2) {
		kind = store.Due
	}
	if kind == store.Fresh && len(h.fresh) >= 3 || kind == store.Due && len(h.due) >= 2 {
		t.SkipNow()
	}
	p := params(t, kind)
	m.maybeLose(t, h.r)
	m.claimOf(h, p)
}

// claimOf claims and keeps what comes.
func (m *machine) claimOf(h *holding, p store.ClaimParams) *work {
	m.t.Helper()
	c, err := h.ask(p)
	if err != nil {
		m.refused(h, "claim", err)
		return nil
	}
	if len(c.Records) == 0 {
		h.r.s.Forget(c)
		return nil
	}
	w := &work{h: h, claim: c, state: make([]state, len(c.Records)),
		outcomes: make([]store.Outcome, len(c.Records)), stops: map[string]bool{}}
	for k := range h.holds {
		w.stops[k] = true
	}
	if p.Kind == store.Fresh {
		h.fresh = append(h.fresh, w)
	} else {
		h.due = append(h.due, w)
	}
	m.logf("  %s lease %d: %v", h.r.name, h.lease.ID, w)
	return w
}

// refused judges an error of the store.
func (m *machine) refused(h *holding, what string, err error) {
	m.t.Helper()
	if errors.Is(err, store.ErrFenced) {
		h.findTaken()
	}
	switch {
	case !errors.Is(err, store.ErrFenced):
		m.fatalf("%s: %s of lease %d: %v", h.r.name, what, h.lease.ID, err)
	case !h.taken:
		m.fatalf("%s: %s of lease %d, which nobody has taken: %v", h.r.name, what, h.lease.ID, err)
	}
	m.logf("  %s lease %d is fenced", h.r.name, h.lease.ID)
	h.drop()
}

// before reports whether a record of the same key is still on its way in front
// of record i.
func (w *work) blocked(i int) bool {
	key := w.claim.Records[i].Key
	if key == "" {
		return false
	}
	undecided := func(x *work, n int) bool {
		for j := range n {
			if x.claim.Records[j].Key == key && x.state[j] <= slow {
				return true
			}
		}
		return false
	}
	if w.claim.Kind == store.Fresh {
		for _, x := range w.h.fresh {
			if x == w {
				break
			}
			if undecided(x, len(x.state)) {
				return true
			}
		}
	}
	return undecided(w, i)
}

// stop ends the sending of a key behind record i.
func (w *work) stop(i int) {
	key := w.claim.Records[i].Key
	if key == "" {
		return
	}
	for j := i + 1; j < len(w.state); j++ {
		if w.claim.Records[j].Key == key && w.state[j] <= slow {
			w.state[j], w.outcomes[j] = decided, store.Outcome{State: store.Pending}
		}
	}
	for _, x := range slices.Concat(w.h.fresh, w.h.due) {
		if x != w && !(x.claim.Kind == w.claim.Kind && x.settled) {
			x.stops[key] = true
		}
	}
	w.h.holds[key] = w
}

// send carries on with one claim.
func (m *machine) send(t *rapid.T) {
	w := pick(t, "claim to send", m.sendable())
	n := rapid.SampledFrom([]int{1, 2, 100, 100, 100}).Draw(t, "records")
	bad := rapid.SampledFrom([]int{0, 4, 12}).Draw(t, "one in how many fails")
	m.sendOf(w, n, func(r outrider.Record) sent { return draw(t, bad) })
}

func (m *machine) sendable() []*work {
	var out []*work
	for h := range m.holdings() {
		if h.over || h.lost != nil || h.moving != nil {
			continue
		}
		for _, w := range slices.Concat(h.fresh, h.due) {
			if w.started && slices.Contains(w.state, todo) {
				out = append(out, w)
			}
		}
	}
	return out
}

// sent is what becomes of a message that is sent.
type sent struct {
	store.Outcome
	arrived bool // whatever the relay was told
	slow    bool
}

var published = sent{Outcome: store.Outcome{State: store.Published}, arrived: true}

func draw(t *rapid.T, bad int) sent {
	if bad == 0 || rapid.IntRange(0, bad-1).Draw(t, "fails") > 0 {
		return published
	}
	due := time.Duration(rapid.SampledFrom([]int{0, 0, 0, 5, 30}).Draw(t, "minutes")) * time.Minute
	o := sent{arrived: chance(t, "arrived", 3)}
	switch rapid.SampledFrom([]string{"wait", "wait", "fail", "free", "slow", "not sent"}).Draw(t, "how") {
	case "wait":
		o.Outcome = store.Outcome{State: store.Waiting, Attempts: 1, Due: due, Class: "refused", Message: "not now"}
	case "fail":
		o.Outcome = store.Outcome{State: store.Failed, Attempts: 2, Class: "invalid", Message: "never"}
	case "free":
		o.Outcome = store.Outcome{State: store.Failed, Attempts: 2, Free: true, Class: "invalid", Message: "never"}
	case "slow":
		o.slow = true
	default:
		o.Outcome, o.arrived = store.Outcome{State: store.Pending}, false
	}
	return o
}

// sendOf sends up to n records of a claim.
func (m *machine) sendOf(w *work, n int, decide func(outrider.Record) sent) {
	for i, r := range w.claim.Records {
		switch {
		case w.state[i] != todo:
		case w.stops[r.Key] && !r.Unordered:
			w.state[i], w.outcomes[i] = decided, store.Outcome{State: store.Pending}
		case n > 0 && !w.blocked(i):
			n--
			s := decide(r)
			m.logf("    send %s: %v", short(r.ID), s)
			if s.slow {
				w.state[i] = slow
				continue
			}
			if s.arrived {
				w.deliver(i, s.Outcome)
			}
			w.finish(i, s.Outcome)
		}
	}
}

// deliver notes that the destination got a record. What is sent under a lease
// that is somebody else's by now is seen by consumers, who have to bear it. One
// whose place is lost is over once its relay knows that it got through.
func (w *work) deliver(i int, o store.Outcome) {
	r := w.claim.Records[i]
	w.h.view().got(r)
	switch {
	case w.h.taken:
	case w.h.view().loose[r.ID]:
		if o.State == store.Published {
			w.h.r.m.ledger.GivenUp(w.h.lease.Destination, r.ID)
		}
	default:
		w.h.r.m.ledger.Delivered(w.h.lease.Destination, r)
	}
}

// finish gives a record its outcome.
func (w *work) finish(i int, o store.Outcome) {
	if id := w.claim.Records[i].ID; o.State == store.Failed && o.Free {
		// Its key goes on at once. Should it be sent again after a death, its
		// place is lost.
		w.h.view().loose[id] = true
		if !w.h.taken {
			w.h.r.m.ledger.GivenUp(w.h.lease.Destination, id)
		}
	}
	if w.state[i] == set {
		w.state[i], w.outcomes[i] = ended, o
		return
	}
	w.state[i], w.outcomes[i] = decided, o
	if o.State != store.Published && !(o.State == store.Failed && o.Free) {
		w.stop(i)
	}
}

// resolve ends a slow message.
func (m *machine) resolve(t *rapid.T) {
	type place struct {
		w *work
		i int
	}
	var places []place
	for h := range m.holdings() {
		if h.over {
			continue
		}
		for _, w := range h.inHand() {
			for i, s := range w.state {
				if s == slow || s == set {
					places = append(places, place{w, i})
				}
			}
		}
	}
	p := pick(t, "slow message", places)
	s := draw(t, 2)
	if s.slow || s.State == store.Pending {
		s = published
	}
	m.logf("  slow %s ends: %v", short(p.w.claim.Records[p.i].ID), s)
	if s.arrived {
		p.w.deliver(p.i, s.Outcome)
	}
	p.w.finish(p.i, s.Outcome)
}

// forget abandons claims that were not started.
func (m *machine) forget(t *rapid.T) {
	h := m.lease(t)
	if h.lost != nil {
		t.SkipNow()
	}
	var unstarted []*work
	for _, w := range slices.Concat(h.fresh, h.due) {
		if !w.started {
			unstarted = append(unstarted, w)
		}
	}
	w := pick(t, "claim", unstarted)
	m.logf("  forget %v", w)
	h.r.s.Forget(w.claim)
	if i := slices.Index(h.fresh, w); i >= 0 {
		h.fresh = h.fresh[:i]
	}
	h.due = slices.DeleteFunc(h.due, func(x *work) bool { return x == w })
}
