package pgstore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider/store"
)

var _ store.Merger = (*session)(nil)

// Merge implements store.Merger. Two leases stand at the same place when their
// bases are the same snapshot; since each takes its own, one is set for both up
// to which they then work.
func (ses *session) Merge(ctx context.Context, a, b store.Lease) (store.Lease, bool, error) {
	la, lb := ses.lease(a), ses.lease(b)
	switch {
	case la == nil || lb == nil:
		return a, false, store.ErrFenced
	case la == lb || la.Destination != lb.Destination:
		return a, false, errors.New("pgstore: two leases of one destination are needed to join them")
	}
	if la.ID > lb.ID { // one order of locking
		la, lb = lb, la
	}
	la.writing.Lock()
	defer la.writing.Unlock()
	lb.writing.Lock()
	defer lb.writing.Unlock()
	for _, l := range []*lease{la, lb} {
		if err := l.resolve(ctx); err != nil {
			return a, false, err
		}
	}
	if !la.restsWith(lb) {
		return a, false, ses.meet(ctx, la, lb)
	}
	if err := ses.join(ctx, la, lb); err != nil {
		return a, false, err
	}
	ses.leases.drop(lb.Lease)
	return la.Lease, true, nil
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
		l.stop, l.stopUntil = &snap, time.Now().Add(meetLimit)
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
	if l.stop != nil && time.Now().After(l.stopUntil) {
		l.stop = nil
	}
	return l.stop
}

// join moves b's lanes to a.
func (ses *session) join(ctx context.Context, a, b *lease) error {
	hi, page := max(a.done.hi, b.done.hi), max(a.read.page, b.read.page)
	lanes := a.Lanes | b.Lanes
	err := ses.st.inTx(ctx, func(tx pgx.Tx) error {
		if err := lockDestination(ctx, tx, a.Destination); err != nil {
			return err
		}
		var n int
		if err := tx.QueryRow(ctx, `
			with gone as (delete from outbox_leases where lease = $1 and epoch = $2 returning lanes),
			     kept as (update outbox_leases l set lanes = l.lanes | gone.lanes, base = $5::pg_snapshot,
			                target = null, at = 0, top = 0, hi = $6, page = $7, writes = writes + 1
			              from gone where lease = $3 and epoch = $4 returning 1)
			select count(*) from kept`, b.ID, b.Epoch, a.ID, a.Epoch, a.done.base.text, hi, page).Scan(&n); err != nil {
			return err
		}
		if n == 0 {
			return store.ErrFenced
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("pgstore: join lease %d into %d: %w", b.ID, a.ID, err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.writes++
	a.Lanes = lanes
	a.done.hi, a.done.page, a.read.hi, a.read.page = hi, page, hi, page
	a.stop = nil
	a.exceptions += b.exceptions
	a.rejoined = append(a.rejoined, b.rejoined...)
	for id := range b.pass {
		a.pass[id] = true
	}
	for key, k := range b.held {
		k.wait, k.born = 0, 0
		a.held[key] = k
	}
	return nil
}
