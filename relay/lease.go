package relay

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// membership is the relay's time in one store.Session. Its goroutine, serve,
// takes leases and gives them back, and owns what is not said to be shared.
type membership struct {
	relay *Relay
	sess  store.Session
	dests []*holding
	next  chan store.Session // from rejoin
	news  chan struct{}
	wg    sync.WaitGroup // workers
	// handing: leases are being given back, so renewals find them gone.
	handing atomic.Bool

	lastRenewal time.Duration // renew's

	// mu guards what workers and renew tell.
	mu      sync.Mutex
	members map[int64]*member // by lease
	drained []*worker
	over    []*worker
}

// member is a lease with its worker.
type member struct {
	w     *worker
	lease store.Lease
	idle  bool // told to have nothing in hand, and has
}

// holding is what the relay has of one destination.
type holding struct {
	d         *destination
	op        *operation
	mergeAt   time.Duration // not before; after a Merge that came too early
	acquireAt time.Duration // not before, after an error
}

// operation is a change of leases for which workers must have nothing in hand.
type operation struct {
	of   []*member
	keep store.LaneSet // for one member: what stays; for two: they are merged
}

func newMembership(r *Relay, sess store.Session) *membership {
	m := &membership{relay: r, sess: sess, next: make(chan store.Session, 1),
		news: make(chan struct{}, 1), members: map[int64]*member{}, lastRenewal: r.now()}
	for _, d := range r.dests {
		m.dests = append(m.dests, &holding{d: d})
	}
	return m
}

func (m *membership) poke() {
	select {
	case m.news <- struct{}{}:
	default:
	}
}

// serve runs until ctx ends, and returns nil then, or until the membership has
// to be given up for the one it returns.
func (m *membership) serve(ctx context.Context) store.Session {
	for {
		m.takeReports()
		if m.relay.keeper.fresh() {
			for _, h := range m.dests {
				m.balance(ctx, h)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-m.news:
		case sess := <-m.next:
			m.dropAll()
			return sess
		}
	}
}

// leases lists those held, for renew.
func (m *membership) leases() []store.Lease {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]store.Lease, 0, len(m.members))
	for _, x := range m.members {
		out = append(out, x.lease)
	}
	return out
}

// lost ends the workers of leases that a renewal did not find held any more,
// unless they have been given back or acquired anew meanwhile.
func (m *membership) lost(asked []store.Lease, ids []int64) {
	for _, id := range ids {
		i := slices.IndexFunc(asked, func(l store.Lease) bool { return l.ID == id })
		m.mu.Lock()
		x := m.members[id]
		m.mu.Unlock()
		if i < 0 || x == nil || x.lease.Epoch != asked[i].Epoch {
			continue
		}
		if f := m.relay.cfg.Hooks.LeaseLost; f != nil {
			f(x.lease.Destination)
		}
		m.relay.log.seldom("lost "+x.lease.Destination, "a lease was lost", "destination", x.lease.Destination,
			"lease", id)
		x.w.lapse()
	}
}

// takeReports takes over what workers have told.
func (m *membership) takeReports() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, x := range m.members {
		if slices.Contains(m.drained, x.w) {
			x.idle = true
		}
		if slices.Contains(m.over, x.w) {
			delete(m.members, id)
		}
	}
	m.drained, m.over = nil, nil
}

// add begins the work on a lease.
func (m *membership) add(d *destination, l store.Lease) {
	w := m.relay.newWorker(d, m.sess, l, func(w *worker) { m.tell(&m.drained, w) })
	m.mu.Lock()
	m.members[l.ID] = &member{w: w, lease: l}
	m.mu.Unlock()
	m.wg.Go(func() {
		w.main()
		m.tell(&m.over, w)
	})
}

func (m *membership) tell(list *[]*worker, w *worker) {
	m.mu.Lock()
	*list = append(*list, w)
	m.mu.Unlock()
	m.poke()
}

// of lists a destination's members, largest first.
func (m *membership) of(d *destination) []*member {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []*member
	for _, x := range m.members {
		if x.w.dest == d {
			out = append(out, x)
		}
	}
	slices.SortFunc(out, func(a, b *member) int {
		if n := b.lease.Lanes.Len() - a.lease.Lanes.Len(); n != 0 {
			return n
		}
		return int(a.lease.ID - b.lease.ID)
	})
	return out
}

// balance brings what is held of a destination to this relay's fair share among
// those that serve it.
func (m *membership) balance(ctx context.Context, h *holding) {
	if h.op != nil {
		m.proceed(ctx, h)
		return
	}
	held := m.of(h.d)
	lanes := 0
	for _, x := range held {
		lanes += x.lease.Lanes.Len()
	}
	relays := max(1, int(h.d.serving.Load()))
	share := (outrider.Lanes + relays - 1) / relays
	switch {
	case lanes < share:
		m.acquire(ctx, h, share-lanes)
	case lanes > share:
		m.shrink(h, held, lanes-share)
	}
	if lanes >= share {
		m.relay.troubles.end("acquire " + h.d.Name) // there is nothing to be asked for
	}
	if h.op == nil && len(held) > 1 && lanes <= share {
		m.merge(h, held)
	}
}

func (m *membership) acquire(ctx context.Context, h *holding, lanes int) {
	if m.relay.now() < h.acquireAt {
		return
	}
	actx, cancel := context.WithTimeout(ctx, m.relay.cfg.LeaseTTL)
	defer cancel()
	got, err := m.sess.Acquire(actx, store.AcquireParams{Destination: h.d.Name, Lanes: lanes})
	if ctx.Err() != nil && err != nil {
		return
	}
	m.relay.storeError(h.d.Name, "acquire", err)
	if err != nil {
		h.acquireAt = m.relay.now() + m.relay.cfg.Grace/4
		return
	}
	for _, l := range got {
		m.add(h.d, l) //nolint:contextcheck // a worker outlives ctx: what it has begun it may end
	}
}

// shrink begins to give lanes back, of the largest lease.
func (m *membership) shrink(h *holding, held []*member, surplus int) {
	x := held[0]
	h.op = &operation{of: []*member{x}, keep: x.lease.Lanes.First(max(0, x.lease.Lanes.Len()-surplus))}
	x.w.order(order{drain: true})
}

// merge begins to join the two smallest leases, so that the same table is not
// read once for each. After an attempt that came too early it waits until both
// have nothing to do, as they have at the place where the store stops them.
func (m *membership) merge(h *holding, held []*member) {
	if _, ok := m.sess.(store.Merger); !ok {
		return
	}
	a, b := held[len(held)-2], held[len(held)-1]
	if m.relay.now() < h.mergeAt && !(a.w.quiet.Load() && b.w.quiet.Load()) {
		return
	}
	h.op = &operation{of: []*member{a, b}}
	a.w.order(order{drain: true})
	b.w.order(order{drain: true})
}

// mergePause is how long after an attempt to merge that came too early busy
// workers are left alone.
const mergePause = 10 * time.Second

// proceed goes on with an operation once its workers have nothing in hand.
func (m *membership) proceed(ctx context.Context, h *holding) {
	op := h.op
	m.mu.Lock()
	gone, ready := false, true
	for _, x := range op.of {
		gone = gone || m.members[x.lease.ID] != x
		ready = ready && x.idle
	}
	m.mu.Unlock()
	if !gone && !ready {
		return
	}
	h.op = nil
	switch {
	case gone:
		for _, x := range op.of {
			m.resume(x, x.lease)
		}
	case len(op.of) == 2:
		m.doMerge(ctx, h, op.of[0], op.of[1])
	default:
		m.doShrink(ctx, op.of[0], op.keep)
	}
}

// resume lets a worker go on with a lease; one without lanes ends it.
func (m *membership) resume(x *member, l store.Lease) {
	m.mu.Lock()
	x.idle = false
	if l.Lanes == 0 {
		delete(m.members, x.lease.ID)
	} else {
		x.lease = l
	}
	m.mu.Unlock()
	if l.Lanes == 0 {
		x.w.order(order{leave: true})
	} else {
		x.w.order(order{resume: &l})
	}
}

func (m *membership) doShrink(ctx context.Context, x *member, keep store.LaneSet) {
	rctx, cancel := context.WithTimeout(ctx, m.relay.cfg.LeaseTTL)
	defer cancel()
	left, err := m.sess.Release(rctx, x.lease, keep)
	if ctx.Err() == nil {
		m.relay.storeError(x.lease.Destination, "release", unlessFenced(err))
	}
	switch {
	case errors.Is(err, store.ErrFenced):
		x.w.lapse()
	case err != nil:
		m.resume(x, x.lease)
	default:
		m.resume(x, left)
	}
}

func (m *membership) doMerge(ctx context.Context, h *holding, a, b *member) {
	rctx, cancel := context.WithTimeout(ctx, m.relay.cfg.LeaseTTL)
	defer cancel()
	joined, ok, err := m.sess.(store.Merger).Merge(rctx, a.lease, b.lease) //nolint:errcheck // what begins a merge has asked
	if ctx.Err() == nil {
		m.relay.storeError(h.d.Name, "merge", unlessFenced(err))
	}
	switch {
	case err == nil && ok:
		m.resume(b, store.Lease{})
		m.resume(a, joined)
	default:
		h.mergeAt = m.relay.now() + mergePause
		m.resume(a, a.lease)
		m.resume(b, b.lease)
	}
}

// unlessFenced is err, or nil for ErrFenced, which is an answer.
func unlessFenced(err error) error {
	if errors.Is(err, store.ErrFenced) {
		return nil
	}
	return err
}

// dropAll ends all workers; their leases are lost.
func (m *membership) dropAll() {
	m.mu.Lock()
	for _, x := range m.members {
		if f := m.relay.cfg.Hooks.LeaseLost; f != nil {
			f(x.lease.Destination)
		}
		x.w.lapse()
	}
	m.mu.Unlock()
	m.wg.Wait()
}
