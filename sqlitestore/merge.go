package sqlitestore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/outrider-dev/outrider/store"
)

// Merge implements store.Merger. Two leases stand at the same place when both
// have done all up to the same id; the one that is behind catches up while the
// other waits.
func (ses *session) Merge(ctx context.Context, a, b store.Lease) (store.Lease, bool, error) {
	la, lb := ses.lease(a), ses.lease(b)
	switch {
	case la == nil || lb == nil:
		return a, false, store.ErrFenced
	case la == lb || la.Destination != lb.Destination:
		return a, false, errors.New("sqlitestore: two leases of one destination are needed to join them")
	}
	first, second := la, lb
	if la.ID > lb.ID { // one order of locking
		first, second = lb, la
	}
	first.writing.Lock()
	defer first.writing.Unlock()
	second.writing.Lock()
	defer second.writing.Unlock()
	for _, l := range []*lease{la, lb} {
		if err := l.resolve(ctx); err != nil {
			return a, false, err
		}
	}
	if !first.meets(second) {
		return a, false, nil
	}
	if err := la.join(ctx, lb); err != nil {
		return a, false, fmt.Errorf("sqlitestore: join lease %d into %d: %w", b.ID, a.ID, err)
	}
	ses.leases.drop(lb.Lease)
	return la.Lease, true, nil
}

// meetLimit is how long leases wait for each other; the other one may be lost.
const meetLimit = 10 * time.Second

// meets reports whether two leases stand at the same place with nothing in
// hand. If not, it sets one at which both stop.
func (l *lease) meets(o *lease) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	o.mu.Lock()
	defer o.mu.Unlock()
	if l.rests() && o.rests() && l.done == o.done {
		return true
	}
	if s := l.stopAt(); s != 0 && s == o.stopAt() {
		return false
	}
	for _, x := range []*lease{l, o} {
		x.stop, x.stopTill = max(l.read, o.read), l.ses.st.since()+meetLimit
		for _, p := range x.redo {
			x.stop = max(x.stop, p.To)
		}
	}
	l.stop = max(l.stop, o.stop)
	o.stop = l.stop
	return false
}

// rests reports whether nothing is in hand. Called with mu held.
func (l *lease) rests() bool {
	for _, k := range l.held {
		if k.inHand > 0 {
			return false
		}
	}
	return len(l.open) == 0 && len(l.redo) == 0 && len(l.inHand) == 0
}

// stopAt is the id at which the lease's fresh claims stop, 0 for none. Called
// with mu held.
func (l *lease) stopAt() int64 {
	if l.stop != 0 && l.ses.st.since() > l.stopTill {
		l.stop = 0
	}
	return l.stop
}

// join moves b's lanes to a lease. Called with writing held of both.
func (l *lease) join(ctx context.Context, b *lease) error {
	l.mu.Lock()
	done, page, lanes := l.done, max(l.page, b.page), l.Lanes|b.Lanes
	unknown := l.unknown(done)
	l.mu.Unlock()
	b.mu.Lock()
	unknown = append(unknown, b.unknown(done)...)
	keys := copies(unknown)
	b.mu.Unlock()
	what := &written{apply: func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.Lanes, l.page, l.stop, l.saved = lanes, page, 0, done
		for _, k := range unknown {
			k.borrowed = false
		}
		for key, k := range b.held {
			k.wait, k.born, k.loaded = 0, 0, true // what was in hand was in other pages
			l.held[key] = k
		}
		maps.Copy(l.borrowed, b.borrowed)
		for key, at := range b.joined {
			l.joined[key], l.noted[key] = at, b.noted[key]
		}
		for id := range b.waiting {
			l.waiting[id] = struct{}{}
		}
	}}
	lose := func() { l.ses.leases.drop(l.Lease); l.ses.leases.drop(b.Lease) }
	return l.move(ctx, what, lose, func(t *tx) error {
		n, err := t.exec(`delete from outbox_leases where lease = ? and epoch = ?`, b.ID, b.Epoch)
		if err != nil {
			return err
		}
		if n == 0 {
			return store.ErrFenced
		}
		if err := putKeys(t, l, keys); err != nil {
			return err
		}
		_, err = t.exec(`update outbox_leases set lanes = ?, base = ?, page = ?, open = '{"open":[]}' where lease = ?`, mask(lanes), done, page, l.ID)
		return err
	})
}
