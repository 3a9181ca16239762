package relay

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/outrider-dev/outrider/store"
)

// join enters the store.
func (r *Relay) join(ctx context.Context) (store.Session, error) {
	p := store.JoinParams{Relay: r.cfg.Name, TTL: r.cfg.LeaseTTL, Grace: r.cfg.Grace}
	for _, d := range r.cfg.Destinations {
		p.Destinations = append(p.Destinations, store.Destination{Name: d.Name, FromEarliest: d.FromEarliest})
	}
	return r.cfg.Store.Join(ctx, p)
}

// run is Run.
func (r *Relay) run(ctx context.Context) error { //nolint:contextcheck // it means kctx: leases are renewed during the soft stop
	sess, err := r.join(ctx)
	if ctx.Err() != nil && sess == nil {
		return nil
	}
	if err != nil {
		return fmt.Errorf("relay: cannot join the store: %w", err)
	}
	r.keeper.joined.Store(true)
	defer r.keeper.joined.Store(false)
	// What stands beside the leases ends with ctx.
	var beside sync.WaitGroup
	beside.Go(func() { r.watch(ctx) })
	beside.Go(func() { r.maintainNow(ctx) })
	beside.Go(func() { r.failures.run(ctx) })
	defer r.failures.sum()
	for sess != nil {
		m := newMembership(r, sess)
		kctx, stop := context.WithCancel(context.Background())
		var kept sync.WaitGroup
		kept.Go(func() { m.renew(kctx) })
		sctx, unsweep := context.WithCancel(ctx)
		kept.Go(func() { m.sweep(sctx) })
		next := m.serve(ctx)
		unsweep()
		if next == nil {
			err = m.leave() //nolint:contextcheck // ctx has ended
		}
		stop()
		kept.Wait()
		select {
		case late := <-m.next:
			r.abandon(late) //nolint:contextcheck // ctx may have ended
		default:
		}
		if next != nil {
			r.abandon(sess) //nolint:contextcheck // ctx may have ended
		}
		sess = next
	}
	beside.Wait()
	if !within(r.cfg.SettleTimeout/5, r.asking.Wait) {
		err = errors.Join(err, errors.New("relay: calls of the store have not returned"))
	}
	return err
}

// within reports whether f returns in time.
func within(d time.Duration, f func()) bool {
	done := make(chan struct{})
	go func() {
		f()
		close(done)
	}()
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-done:
		return true
	case <-t.C:
		return false
	}
}

// abandon tidies up a membership that is dead already, if that is possible.
func (r *Relay) abandon(sess store.Session) {
	ctx, cancel := context.WithTimeout(context.Background(), r.cfg.Grace)
	defer cancel()
	_ = sess.Leave(ctx)
}

// leave is the soft stop: nothing new is taken, what was begun may end; after
// Config.SoftTimeout calls are cut off, and what they do not say in time is not
// waited for. Everything is written under contexts of its own, since the one of
// Run has ended.
func (m *membership) leave() error {
	r := m.relay
	soft := time.NewTimer(max(0, r.cfg.SoftTimeout))
	defer soft.Stop()
	all := m.orderAll(order{leave: true})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if !m.await(ctx, all, soft.C, r.cut) {
		// The parts of SettleTimeout: for calls to return, for commits, and
		// the rest for giving leases back.
		part := r.cfg.SettleTimeout * 2 / 5
		m.orderAll(order{cut: true})
		over := m.await(ctx, all, time.After(part), nil)
		if !over {
			m.orderAll(order{giveUp: true})
			over = m.await(ctx, all, time.After(part), nil)
		}
		if !over {
			for _, w := range all {
				w.end()
			}
			m.wg.Wait()
		}
	}
	return m.handBack(all)
}

// orderAll tells all workers something.
func (m *membership) orderAll(o order) []*worker {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []*worker
	for _, x := range m.members {
		all = append(all, x.w)
		x.w.order(o)
	}
	return all
}

// await waits until all workers have ended, a time has come, or stop.
func (m *membership) await(ctx context.Context, all []*worker, at <-chan time.Time, stop <-chan struct{}) bool {
	for _, w := range all {
		select {
		case <-w.done:
		case <-at:
			return false
		case <-stop:
			return false
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// handBack gives up leases and membership.
func (m *membership) handBack(all []*worker) error {
	r := m.relay
	m.handing.Store(true)
	ctx, cancel := context.WithTimeout(context.Background(), max(r.cfg.SettleTimeout/5, 10*time.Millisecond))
	defer cancel()
	var errs []error
	for _, w := range all {
		if w.undone > 0 {
			errs = append(errs, fmt.Errorf("relay: %d events of %s were left in hand and will be sent again", w.undone, w.dest.Name))
		}
		if w.lapsed.Load() {
			continue
		}
		if _, err := m.sess.Release(ctx, w.lease, 0); unlessFenced(err) != nil {
			errs = append(errs, fmt.Errorf("relay: cannot give back a lease: %w", err))
		}
	}
	if err := m.sess.Leave(ctx); err != nil {
		errs = append(errs, fmt.Errorf("relay: cannot leave the store: %w", err))
	}
	for _, d := range r.dests {
		if n := d.calling.Load(); n > 0 {
			errs = append(errs, fmt.Errorf("relay: %d calls of the sink of %s have not returned", n, d.Name))
		}
	}
	return errors.Join(errs...)
}

// watch has the store tell of new events, where it can.
func (r *Relay) watch(ctx context.Context) {
	w, ok := r.cfg.Store.(store.Watcher)
	if !ok {
		return
	}
	for try := 0; ctx.Err() == nil; try++ {
		from := r.now()
		err := w.Watch(ctx, func() { r.wake("watch") })
		if ctx.Err() != nil {
			return
		}
		if r.now()-from > time.Minute {
			try = 0
		}
		r.storeError("", "watch", err)
		sleep(ctx, jitter(doubled(100*time.Millisecond, 10*time.Second, try)))
		r.storeError("", "watch", nil)
	}
}

// maintainNow has the store's maintenance done now and then.
func (r *Relay) maintainNow(ctx context.Context) {
	w, ok := r.cfg.Store.(store.Maintainer)
	if !ok {
		return
	}
	said := false
	for ctx.Err() == nil {
		err := w.Maintain(ctx)
		if ctx.Err() != nil {
			return
		}
		r.mu.Lock()
		was := r.maintain
		r.maintain = err
		r.mu.Unlock()
		switch {
		case err != nil && (was == nil || was.Error() != err.Error()) && !r.troubles.told(err):
			said = true
			r.log.Warn("the store's maintenance complains", "error", err, "hint", hint(err))
		case err == nil && said:
			said = false
			r.log.Info("the store's maintenance is well again")
		}
		sleep(ctx, r.cfg.MaintainEvery)
	}
}

// sweep has the store look for events that were passed over, now and then.
func (m *membership) sweep(ctx context.Context) {
	r := m.relay
	w, ok := m.sess.(store.Sweeper)
	if !ok || r.cfg.SweepEvery < 0 {
		return
	}
	for sleep(ctx, r.cfg.SweepEvery); ctx.Err() == nil; sleep(ctx, r.cfg.SweepEvery) {
		s, err := w.Sweep(ctx)
		if ctx.Err() != nil {
			return
		}
		r.storeError("", "sweep", err)
		if err != nil {
			continue
		}
		if r.cfg.Hooks.Swept != nil {
			r.cfg.Hooks.Swept(s.Found)
		}
		if s.Found > 0 {
			r.log.Error("events were passed over and will not be sent", "found", s.Found, "rows", s.Rows,
				"hint", "look whether they were written with an id or a transaction's id of their own, as copied rows are; insert them anew without these to have them sent")
		}
	}
}

// sleep waits, unless ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
