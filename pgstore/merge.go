package pgstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider/store"
)

var (
	_ store.Merger  = (*session)(nil)
	_ store.Sweeper = (*session)(nil)
)

// Merge implements store.Merger. Two leases stand at the same place when their
// bases are the same snapshot; since each takes its own, one is set for both up
// to which they then work.
func (ses *session) Merge(ctx context.Context, a, b store.Lease) (_ store.Lease, _ bool, err error) {
	defer ses.st.explain(&err)
	la, lb := ses.lease(a), ses.lease(b)
	if la == nil {
		return a, false, store.ErrFenced
	}
	if lb == nil {
		return ses.merged(ctx, la, b)
	}
	if la == lb || la.Destination != lb.Destination {
		return a, false, errors.New("pgstore: two leases of one destination are needed to join them")
	}
	first, second := la, lb
	if la.ID > lb.ID { // one order of locking
		first, second = lb, la
	}
	first.writing.Lock()
	defer first.writing.Unlock()
	second.writing.Lock()
	defer second.writing.Unlock()
	if err := la.resolve(ctx); err != nil {
		return a, false, err
	}
	if ses.lease(b) == nil {
		return la.holds(b) // by an earlier call, whose answer was lost
	}
	if err := lb.resolve(ctx); err != nil {
		return a, false, err
	}
	if !la.restsWith(lb) {
		return a, false, ses.meet(ctx, la, lb)
	}
	if err := ses.join(ctx, la, lb); err != nil {
		return a, false, err
	}
	return la.Lease, true, nil
}

// merged answers for a lease that is gone: it may be so because an earlier call,
// whose answer was lost, has joined it into l.
func (ses *session) merged(ctx context.Context, l *lease, gone store.Lease) (store.Lease, bool, error) {
	l.writing.Lock()
	defer l.writing.Unlock()
	if err := l.resolve(ctx); err != nil {
		return l.Lease, false, err
	}
	return l.holds(gone)
}

// holds says whether a lease that is gone was joined into this one.
func (l *lease) holds(gone store.Lease) (store.Lease, bool, error) {
	if gone.ID == l.ID || gone.Lanes == 0 || gone.Lanes&^l.Lanes != 0 {
		return l.Lease, false, store.ErrFenced
	}
	return l.Lease, true, nil
}

// restsWith reports whether two leases stand at the same place with nothing in
// hand.
func (l *lease) restsWith(o *lease) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	o.mu.Lock()
	defer o.mu.Unlock()
	return l.rests() && o.rests() && l.done.base.text == o.done.base.text
}

func (l *lease) rests() bool {
	for _, k := range l.held {
		if k.inHand > 0 {
			return false
		}
	}
	return len(l.open) == 0 && len(l.redo) == 0 && l.done.target == nil && l.read.target == nil && len(l.inHand) == 0
}

// meet sets a place at which both leases stop.
func (ses *session) meet(ctx context.Context, a, b *lease) error {
	sa, sb := a.stopAt(), b.stopAt()
	if sa != nil && sb != nil && sa.text == sb.text {
		return nil
	}
	var text string
	if err := ses.st.pool.QueryRow(ctx, `select pg_current_snapshot()::text`).Scan(&text); err != nil {
		return fmt.Errorf("pgstore: %w", err)
	}
	snap, err := parseSnapshot(text)
	if err != nil {
		return err
	}
	for _, l := range []*lease{a, b} {
		l.mu.Lock()
		l.stop, l.stopUntil = &snap, time.Now().Add(meetLimit) //nolint:forbidigo // monotonic, of this process alone: how long to wait
		l.mu.Unlock()
	}
	return nil
}

// meetLimit is how long leases wait for each other; the other one may be lost.
const meetLimit = 10 * time.Second

// stopAt is the place at which the lease's fresh claims stop, nil for none.
func (l *lease) stopAt() *snapshot {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stop != nil && time.Now().After(l.stopUntil) { //nolint:forbidigo // as in meet
		l.stop = nil
	}
	return l.stop
}

// join moves b's lanes to a.
func (ses *session) join(ctx context.Context, a, b *lease) error {
	hi, page := max(a.done.hi, b.done.hi), max(a.read.page, b.read.page)
	lanes := a.Lanes | b.Lanes
	joined := &written{apply: func() { a.takeIn(b, lanes, hi, page) }}
	a.move(joined)
	b.move(&written{apply: func() {}}) // if it took effect, there is no b
	err := ses.st.inTx(ctx, func(tx pgx.Tx) error {
		if err := lockDestination(ctx, tx, a.Destination); err != nil {
			return err
		}
		var n int
		if err := tx.QueryRow(ctx, `
			with gone as (delete from outbox_leases where lease = $1 and epoch = $2 and writes = $8 returning lanes),
			     kept as (update outbox_leases l set lanes = l.lanes | gone.lanes, base = $5::pg_snapshot,
			                target = null, at = 0, top = 0, hi = $6, page = $7, writes = writes + 1
			              from gone where lease = $3 and epoch = $4 and writes = $9 returning 1)
			select count(*) from kept`, b.ID, b.Epoch, a.ID, a.Epoch, a.done.base.text, hi, page, b.writes, a.writes).Scan(&n); err != nil {
			return err
		}
		if n == 0 {
			return store.ErrFenced
		}
		return nil
	})
	a.moved(err)
	if err != nil {
		b.moved(err)
		return fmt.Errorf("pgstore: join lease %d into %d: %w", b.ID, a.ID, err)
	}
	return nil
}

// takeIn makes the changes of a join in memory.
func (l *lease) takeIn(b *lease, lanes store.LaneSet, hi, page int64) {
	l.ses.leases.drop(b.Lease)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.Lanes = lanes
	l.done.hi, l.done.page, l.read.hi, l.read.page = hi, page, hi, page
	l.stop = nil
	maps.Copy(l.waiting, b.waiting)
	l.rejoined = append(l.rejoined, b.rejoined...)
	maps.Copy(l.pass, b.pass)
	for key, k := range b.held {
		k.wait, k.born = 0, 0
		l.held[key] = k
	}
}
