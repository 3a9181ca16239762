package sqlitestore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// Rows is an outbox whose rows carry their state: one destination, and no
// position but for what a lease keeps in memory.
type Rows struct {
	*database
	members members
}

var (
	_ store.Store      = (*Rows)(nil)
	_ store.Watcher    = (*Rows)(nil)
	_ store.Maintainer = (*Rows)(nil)
	_ store.Merger     = (*rowSession)(nil)
)

// OpenRows opens the row store in an existing file.
func OpenRows(ctx context.Context, cfg Config) (*Rows, error) {
	db, err := openDatabase(ctx, cfg, "outbox_rows", " --set rows")
	if err != nil {
		return nil, err
	}
	return &Rows{database: db, members: newMembers(db, "outbox_row_relays", "outbox_row_leases")}, nil
}

// Capabilities implements store.Store. For LiveTakeOver see Stream's.
func (s *Rows) Capabilities() store.Capabilities {
	return store.Capabilities{LiveTakeOver: s.members.locks}
}

// Close implements store.Store.
func (s *Rows) Close() error { return s.close() }

// Maintain implements store.Maintainer: it looks for a file that was replaced.
func (s *Rows) Maintain(context.Context) error { return s.sameFile() }

// Watch implements store.Watcher.
func (s *Rows) Watch(ctx context.Context, notify func()) error {
	return s.watch(ctx, notify, `select coalesce((select seq from sqlite_sequence where name = 'outbox_rows'), 0)`)
}

// rowSession is one relay's membership in a row store.
type rowSession struct {
	st *Rows
	*member
	leases locked[*rowLease]
}

// Join implements store.Store.
func (s *Rows) Join(ctx context.Context, p store.JoinParams) (store.Session, error) {
	switch {
	case p.TTL <= 0 || p.Grace <= 0:
		return nil, errors.New("sqlitestore: JoinParams.TTL and Grace are needed")
	case len(p.Destinations) > 1:
		return nil, outrider.WithHint(fmt.Errorf("sqlitestore: a row store serves one destination, not %d", len(p.Destinations)), "use the stream for several")
	}
	if err := s.sameFile(); err != nil {
		return nil, err
	}
	for _, d := range p.Destinations {
		err := s.write(ctx, s.writer, func(t *tx) error { return addRowDestination(t, d.Name) })
		if err != nil {
			return nil, err
		}
	}
	m, err := s.members.join(ctx, p)
	if err != nil {
		return nil, err
	}
	return &rowSession{st: s, member: m, leases: locked[*rowLease]{m: map[int64]*rowLease{}}}, nil
}

func addRowDestination(t *tx, name string) error {
	var is string
	err := t.row([]any{&is}, `select destination from outbox_row_leases limit 1`)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		_, err = t.exec(`insert into outbox_row_leases (destination, lanes) values (?, -1)`, name)
	case err == nil && is != name:
		return outrider.WithHint(fmt.Errorf("sqlitestore: this row store serves %q, not %q", is, name), "a row is done or not, for one destination: use the stream for several")
	}
	return err
}

// Renew implements store.Session.
func (ses *rowSession) Renew(ctx context.Context, leases []store.Lease) (store.Renewal, error) {
	return ses.renew(ctx, leases, ses.leases.drop)
}

// Leave implements store.Session.
func (ses *rowSession) Leave(ctx context.Context) error { return ses.leave(ctx) }

// Acquire implements store.Session.
func (ses *rowSession) Acquire(ctx context.Context, p store.AcquireParams) ([]store.Lease, error) {
	if p.Lanes <= 0 {
		return nil, nil
	}
	if ses.hasLeft() {
		return nil, fmt.Errorf("sqlitestore: acquire leases of %q: the session has left", p.Destination)
	}
	ses.acquiring.Lock()
	defer ses.acquiring.Unlock()
	known := ses.leases.epochs()
	var taken []*rowLease
	err := ses.st.write(ctx, ses.st.writer, func(t *tx) error {
		taken = nil
		dead, err := ses.dead(t)
		if err != nil {
			return err
		}
		free, err := ses.freeLeases(t, p.Destination, dead, known)
		if err != nil {
			return err
		}
		for room := p.Lanes; room > 0 && len(free) > 0; free = free[1:] {
			f := free[0]
			if f.lanes.Len() > room {
				if err := fenceOff(t, "outbox_row_leases", f); err != nil {
					return err
				}
				if f.id, err = splitRows(t, f.id, f.lanes.First(room)); err != nil {
					return err
				}
				f.lanes = f.lanes.First(room)
			}
			l, err := ses.take(t, f)
			if err != nil {
				return err
			}
			taken = append(taken, l)
			room -= f.lanes.Len()
		}
		return ses.bury(t, dead)
	})
	if err == nil {
		err = ses.lost()
	}
	if err != nil {
		return nil, fmt.Errorf("sqlitestore: acquire leases of %q: %w", p.Destination, err)
	}
	out := make([]store.Lease, len(taken))
	for i, l := range taken {
		ses.leases.put(l)
		out[i] = l.Lease
	}
	return out, nil
}

func splitRows(t *tx, id int64, lanes store.LaneSet) (int64, error) {
	if _, err := t.exec(`update outbox_row_leases set lanes = lanes & ~? where lease = ?`, mask(lanes), id); err != nil {
		return 0, err
	}
	var other int64
	err := t.row([]any{&other}, `
		insert into outbox_row_leases (destination, lanes, owner, owner_lock, epoch, expires_at)
		select destination, ?, owner, owner_lock, epoch, expires_at from outbox_row_leases where lease = ?
		returning lease`, mask(lanes), id)
	return other, err
}

// take makes a free lease the session's own. What was in hand comes again.
func (ses *rowSession) take(t *tx, f freeLease) (*rowLease, error) {
	l := newRowLease(ses)
	var lanes int64
	err := t.row([]any{&l.ID, &l.Destination, &lanes, &l.Epoch, &l.writes}, `
		update outbox_row_leases set owner = ?, owner_lock = ?, epoch = epoch + 1, writes = writes + 1, expires_at = ?
		where lease = ? returning lease, destination, lanes, epoch, writes`,
		ses.params.Relay, ses.lock, t.now+ses.params.TTL.Microseconds(), f.id)
	if err != nil {
		return nil, err
	}
	l.Lanes = store.LaneSet(lanes)
	if err := recoverRows(t, l.Lanes, f.clean); err != nil {
		return nil, err
	}
	return l, l.load(t)
}

// recoverRows makes rows that were in hand come again, in pieces after a death.
func recoverRows(t *tx, lanes store.LaneSet, clean bool) error {
	const hand = `state = 'PUBLISHING' and ((? >> lane) & 1) = 1`
	var n int
	if err := t.row([]any{&n}, `select count(*) from outbox_rows where `+hand, mask(lanes)); err != nil || n == 0 {
		return err
	}
	var together any = pieces(n)
	died := 1
	if clean {
		together, died = nil, 0
	}
	_, err := t.exec(`
		update outbox_rows set token = null, again = 1, alone = 0, starts = starts + alone * ?, together = coalesce(?, together),
			due_at = min(due_at, ?), `+restored+`
		where `+hand, died, together, t.now, mask(lanes))
	if err != nil {
		return err
	}
	// A slow head is the first of its key to be drained now.
	_, err = t.exec(`
		update outbox_row_keys set head = null where ((? >> lane) & 1) = 1
		  and head in (select id from outbox_rows where id = head and state not in ('WAITING', 'FAILED'))`, mask(lanes))
	return err
}

// restored is the state that a row had before it was in hand.
const restored = `state = case when due_at is null then 'PENDING' when last_failed is null and available_at is not null then 'SCHEDULED' else 'WAITING' end`

// load reads the lease's held keys.
func (l *rowLease) load(t *tx) error {
	return t.rows(func(r *sql.Rows) error {
		k := &rowKey{}
		err := r.Scan(&k.key, &k.lane, &k.head, &k.at)
		l.held[k.key] = k
		return err
	}, `select event_key, lane, coalesce(head, 0), at from outbox_row_keys where ((? >> lane) & 1) = 1`, mask(l.Lanes))
}

// Release implements store.Session.
func (ses *rowSession) Release(ctx context.Context, sl store.Lease, keep store.LaneSet) (store.Lease, error) {
	l, ok := ses.leases.get(sl)
	if !ok {
		return store.Lease{}, store.ErrFenced
	}
	l.writing.Lock()
	defer l.writing.Unlock()
	if err := l.resolve(ctx); err != nil {
		return sl, err
	}
	give, rest := l.Lanes&^keep, l.Lanes&keep
	if give == 0 {
		return l.Lease, nil
	}
	var kept *rowLease
	what := &written{apply: func() {
		ses.leases.drop(l.Lease)
		if kept != nil {
			ses.leases.put(kept)
		}
	}}
	err := l.move(ctx, what, func() { ses.leases.drop(l.Lease) }, func(t *tx) (err error) {
		kept = nil
		if err := recoverRows(t, l.Lanes, true); err != nil {
			return err
		}
		id := l.ID
		if rest != 0 {
			if id, err = splitRows(t, l.ID, give); err != nil {
				return err
			}
			kept = newRowLease(ses)
			kept.Lease, kept.writes = l.Lease, l.writes+1
			kept.Lanes = rest
			if err := kept.load(t); err != nil {
				return err
			}
		}
		_, err = t.exec(`update outbox_row_leases set owner = null, owner_lock = null, expires_at = null, epoch = epoch + 1 where lease = ?`, id)
		return err
	})
	switch {
	case err != nil:
		return sl, err
	case kept == nil:
		return store.Lease{}, nil
	}
	return kept.Lease, nil
}

// Merge implements store.Merger. Rows have no position, so any two leases stand
// at the same place; what was read is read again.
func (ses *rowSession) Merge(ctx context.Context, a, b store.Lease) (store.Lease, bool, error) {
	la, ok := ses.leases.get(a)
	lb, okb := ses.leases.get(b)
	switch {
	case !ok || !okb:
		return a, false, store.ErrFenced
	case la == lb:
		return a, false, errors.New("sqlitestore: two leases are needed to join them")
	}
	first, second := la, lb
	if la.ID > lb.ID { // one order of locking
		first, second = lb, la
	}
	first.writing.Lock()
	defer first.writing.Unlock()
	second.writing.Lock()
	defer second.writing.Unlock()
	var forgot []string // nobody knows of them once the leases are joined
	for _, l := range []*rowLease{la, lb} {
		if err := l.resolve(ctx); err != nil {
			return a, false, err
		}
		if !l.rests() {
			return a, false, nil
		}
		l.mu.Lock()
		forgot = append(forgot, l.forgot...)
		l.mu.Unlock()
	}
	joined := newRowLease(ses)
	joined.Lease, joined.writes = la.Lease, la.writes+1
	joined.Lanes = la.Lanes | lb.Lanes
	what := &written{apply: func() { ses.leases.drop(lb.Lease); ses.leases.put(joined) }}
	lose := func() { ses.leases.drop(la.Lease); ses.leases.drop(lb.Lease) }
	err := la.move(ctx, what, lose, func(t *tx) error {
		n, err := t.exec(`delete from outbox_row_leases where lease = ? and epoch = ?`, lb.ID, lb.Epoch)
		if err == nil && n == 0 {
			err = store.ErrFenced
		}
		if err == nil {
			_, err = t.exec(`update outbox_row_leases set lanes = ? where lease = ?`, mask(joined.Lanes), la.ID)
		}
		if err == nil {
			err = undo(t, forgot)
		}
		if err == nil {
			err = joined.load(t)
		}
		return err
	})
	if err != nil {
		return a, false, fmt.Errorf("sqlitestore: join lease %d into %d: %w", b.ID, a.ID, err)
	}
	return joined.Lease, true, nil
}
