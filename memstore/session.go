package memstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outrider-dev/outrider/store"
)

// session is one relay's membership.
type session struct {
	store  *Store
	params store.JoinParams
	seen   time.Time
	killed time.Time // when its connection ended; zero: it has not
	left   bool
}

var errConnection = errors.New("memstore: connection is lost")

// Join implements store.Store.
func (s *Store) Join(ctx context.Context, p store.JoinParams) (store.Session, error) {
	ss := &session{store: s, params: p}
	err := s.do(ctx, OpJoin, func(now time.Time) error {
		switch {
		case p.TTL <= 0 || p.Grace <= 0:
			return errors.New("memstore: TTL and Grace are needed")
		case s.cfg.NoFanOut && len(p.Destinations) > 1:
			return errors.New("memstore: this store serves one destination")
		}
		for _, d := range p.Destinations {
			switch {
			case s.find(d.Name) != nil:
			case s.cfg.NoFanOut && len(s.destinations) > 0:
				return fmt.Errorf("memstore: this store serves %q alone", s.destinations[0].name)
			case s.cfg.NoFanOut || d.FromEarliest:
				s.introduce(d.Name, s.rows)
			default:
				s.introduce(d.Name, nil)
			}
		}
		ss.seen = now
		s.sessions = append(s.sessions, ss)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return ss, nil
}

// alive reports whether the session has shown itself of late.
func (ss *session) alive(now time.Time) bool {
	return !ss.left && ss.killed.IsZero() && now.Before(ss.seen.Add(ss.params.TTL))
}

// gone reports whether others can tell that the session has ended.
func (ss *session) gone(now time.Time) bool {
	return !now.Before(ss.seen.Add(ss.params.TTL)) || !ss.killed.IsZero() && !ss.store.cfg.NoLiveTakeOver
}

// gone reports whether the lease is free to be taken.
func (l *lease) gone(now time.Time) bool {
	o := l.owner
	switch {
	case o == nil || !now.Before(l.expires):
		return true
	case o.killed.IsZero() || o.store.cfg.NoLiveTakeOver:
		return false
	default:
		return !now.Before(o.killed.Add(o.params.Grace))
	}
}

// held finds a lease that the session holds.
func (ss *session) held(l store.Lease) (*lease, error) {
	if d := ss.store.find(l.Destination); d != nil {
		for _, x := range d.leases {
			if x.id == l.ID && x.owner == ss && x.epoch == l.Epoch {
				return x, nil
			}
		}
	}
	return nil, store.ErrFenced
}

func (l *lease) public() store.Lease {
	return store.Lease{ID: l.id, Destination: l.dest.name, Lanes: l.lanes, Epoch: l.epoch}
}

// Acquire implements store.Session.
func (ss *session) Acquire(ctx context.Context, p store.AcquireParams) ([]store.Lease, error) {
	var out []store.Lease
	var taken []*lease
	err := ss.store.do(ctx, OpAcquire, func(now time.Time) error {
		d := ss.store.find(p.Destination)
		switch {
		case ss.left || !ss.killed.IsZero():
			return errConnection
		case d == nil:
			return fmt.Errorf("memstore: acquire: %w", store.Retired(p.Destination))
		}
		left := p.Lanes
		for _, l := range slices.Clone(d.leases) {
			if left <= 0 {
				break
			}
			if !l.gone(now) && !(l.unheard && l.owner == ss) {
				continue
			}
			l.giveUp(true)
			if l.lanes.Len() > left {
				l = l.split(ss.store, l.lanes.First(left))
			}
			l.owner, l.expires, l.unheard = ss, now.Add(ss.params.TTL), true
			l.epoch++
			left -= l.lanes.Len()
			out, taken = append(out, l.public()), append(taken, l)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	ss.store.mu.Lock()
	defer ss.store.mu.Unlock()
	for i, l := range taken {
		if l.epoch == out[i].Epoch {
			l.unheard = false
		}
	}
	return out, nil
}

// split takes lanes out of a lease that nothing is in hand of, into a new one.
func (l *lease) split(s *Store, lanes store.LaneSet) *lease {
	l.lanes &^= lanes
	n := s.newLease(l.dest, lanes)
	n.page, n.epoch = l.page, l.epoch
	return n
}

// giveUp ends an ownership. What was in hand is handed out again before
// anything else; after a death, in pieces of a twentieth, so that the one that
// kills its process is found in few steps, and counted when it was alone.
func (l *lease) giveUp(death bool) {
	var hand []*cell
	alone := false
	for _, c := range slices.Clone(l.claims) {
		if c.started {
			alone = c.Alone
		}
		for _, x := range c.cells {
			if x.claim == c && c.started {
				hand = append(hand, x)
			}
		}
		c.drop()
	}
	for _, x := range hand {
		x.state, x.again = store.Pending, true
		delete(x.dest.exceptions, x)
		x.dest.again[x] = struct{}{}
		switch {
		case !death:
		case alone && len(hand) == 1:
			x.starts++
			x.piece = 1
		default:
			x.piece = max(1, len(hand)/20)
		}
	}
	l.owner, l.last = nil, store.CommitParams{}
}

// Renew implements store.Session.
func (ss *session) Renew(ctx context.Context, leases []store.Lease) (store.Renewal, error) {
	out := ss.params.Alone()
	err := ss.store.do(ctx, OpRenew, func(now time.Time) error {
		if ss.left || !ss.killed.IsZero() {
			return errConnection
		}
		ss.seen = now
		for _, p := range leases {
			if l, err := ss.held(p); err == nil {
				l.expires = now.Add(ss.params.TTL)
			} else {
				out.Lost = append(out.Lost, p.ID)
			}
		}
		for _, other := range ss.store.sessions {
			if other != ss && other.alive(now) {
				out.Count(other.params.Names())
			}
		}
		return nil
	})
	if err != nil {
		return store.Renewal{}, err
	}
	return out, nil
}

// Release implements store.Session.
func (ss *session) Release(ctx context.Context, p store.Lease, keep store.LaneSet) (store.Lease, error) {
	var out store.Lease
	err := ss.store.do(ctx, OpRelease, func(now time.Time) error {
		l, err := ss.held(p)
		if err != nil {
			return err
		}
		keep &= l.lanes
		if keep == l.lanes {
			out = l.public()
			return nil
		}
		l.giveUp(false)
		if keep != 0 {
			l.split(ss.store, l.lanes&^keep)
			l.owner = ss
			out = l.public()
		}
		return nil
	})
	if err != nil {
		return store.Lease{}, err
	}
	return out, nil
}

// Merge implements store.Merger. Rows have no position, so any two leases
// stand at the same place.
func (ss *session) Merge(ctx context.Context, pa, pb store.Lease) (store.Lease, bool, error) {
	var out store.Lease
	err := ss.store.do(ctx, OpMerge, func(now time.Time) error {
		a, err := ss.held(pa)
		if err != nil {
			return err
		}
		b, err := ss.held(pb)
		if err != nil {
			return err
		}
		if a == b || a.dest != b.dest {
			return misuse("merge of leases %d and %d", a.id, b.id)
		}
		if len(a.claims)+len(b.claims) > 0 {
			return misuse("merge of leases %d and %d with claims in hand", a.id, b.id)
		}
		a.lanes |= b.lanes
		a.page = max(a.page, b.page)
		a.dest.leases = slices.DeleteFunc(a.dest.leases, func(l *lease) bool { return l == b })
		out = a.public()
		return nil
	})
	if err != nil {
		return store.Lease{}, false, err
	}
	return out, true, nil
}

// Leave implements store.Session.
func (ss *session) Leave(ctx context.Context) error {
	return ss.store.do(ctx, OpLeave, func(now time.Time) error {
		if !ss.killed.IsZero() {
			return errConnection // as good as dead: what it holds is found so
		}
		ss.left = true
		for _, d := range ss.store.destinations {
			for _, l := range d.leases {
				if l.owner == ss {
					l.giveUp(true)
				}
			}
		}
		ss.store.sessions = slices.DeleteFunc(ss.store.sessions, func(x *session) bool { return x == ss })
		return nil
	})
}
