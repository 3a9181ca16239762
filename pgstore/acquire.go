package pgstore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outrider-dev/outrider/store"
)

func isCode(err error, code string) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == code
}

// freeLease is a row of outbox_leases that may be taken.
type freeLease struct {
	id    int64
	lanes store.LaneSet
	clean bool // given back, not left behind
}

// Acquire implements store.Session.
func (ses *session) Acquire(ctx context.Context, p store.AcquireParams) (_ []store.Lease, err error) {
	defer ses.st.explain(&err)
	if p.Lanes <= 0 {
		return nil, nil
	}
	ses.acquiring.Lock()
	defer ses.acquiring.Unlock()
	own, dead, err := ses.look(ctx)
	if err != nil {
		return nil, err
	}
	known := ses.leases.ids()
	var taken []*lease
	err = ses.st.inTx(ctx, func(tx pgx.Tx) error {
		taken = nil
		if err := lockDestination(ctx, tx, p.Destination); err != nil {
			return err
		}
		free, err := freeLeases(ctx, tx, p.Destination, dead, own, known)
		if err != nil {
			return err
		}
		if len(free) == 0 {
			return missing(ctx, tx, p.Destination)
		}
		for room := p.Lanes; room > 0 && len(free) > 0; free = free[1:] {
			f := free[0]
			if !f.clean {
				if err := bury(ctx, tx, f.id); err != nil {
					return err
				}
			}
			if n := f.lanes.Len(); n > room {
				if f.id, err = split(ctx, tx, f.id, f.lanes.First(room)); err != nil {
					return err
				}
				f.lanes = f.lanes.First(room)
			}
			l, err := ses.take(ctx, tx, f, own)
			if err != nil {
				return err
			}
			taken = append(taken, l)
			room -= f.lanes.Len()
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("pgstore: acquire leases of %q: %w", p.Destination, err)
	}
	out := make([]store.Lease, len(taken))
	ses.leases.Lock()
	defer ses.leases.Unlock()
	for i, l := range taken {
		ses.leases.m[l.ID] = l
		out[i] = l.Lease
	}
	return out, nil
}

// freeLeases finds the leases of a destination that nobody holds. One of this
// session's own that it does not know is one that an earlier call has acquired
// without hearing so.
func freeLeases(ctx context.Context, tx pgx.Tx, destination string, dead []int64, own int64, known []int64) ([]freeLease, error) {
	rows, err := tx.Query(ctx, `
		select lease, lanes, owner_lock is null from outbox_leases
		where destination = $1
		  and (owner_lock is null or expires_at < clock_timestamp() or owner_lock = any($2)
		       or owner_lock = $3 and lease <> all($4))
		order by lease for update`, destination, dead, own, known)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(r pgx.CollectableRow) (f freeLease, err error) {
		var lanes int64
		err = r.Scan(&f.id, &lanes, &f.clean)
		f.lanes = store.LaneSet(lanes)
		return f, err
	})
}

// split moves some lanes of a lease to a new one that stands at the same place
// and has the same owner, and returns its id.
func split(ctx context.Context, tx pgx.Tx, id int64, lanes store.LaneSet) (int64, error) {
	var other int64
	err := tx.QueryRow(ctx, `
		with rest as (update outbox_leases set lanes = lanes & ~$2::bigint where lease = $1 returning *)
		insert into outbox_leases (destination, lanes, owner, owner_lock, epoch, expires_at, base, target, at, top, hi, page, open)
		select destination, $2, owner, owner_lock, epoch, expires_at, base, target, at, top, hi, page, open from rest
		returning lease`, id, mask(lanes)).Scan(&other)
	return other, err
}

// take makes a free lease the session's own and reads where it stands.
func (ses *session) take(ctx context.Context, tx pgx.Tx, f freeLease, own int64) (*lease, error) {
	l := &lease{ses: ses, held: map[string]*heldKey{}, waiting: laned{}, inHand: laned{}, pass: laned{}, counts: map[string]int{}, reader: newReader()}
	var base string
	var target *string
	var doc []byte
	var lanes int64
	err := tx.QueryRow(ctx, `
		update outbox_leases set owner = $2, owner_lock = $3, epoch = epoch + 1, writes = writes + 1,
			expires_at = clock_timestamp() + $4 * interval '1 microsecond'
		where lease = $1
		returning lease, destination, lanes, epoch, writes, base::text, target::text, at, top, hi, page, open`,
		f.id, ses.params.Relay, own, ses.params.TTL.Microseconds()).
		Scan(&l.ID, &l.Destination, &lanes, &l.Epoch, &l.writes, &base, &target,
			&l.done.at, &l.done.top, &l.done.hi, &l.done.page, &doc)
	if err != nil {
		return nil, err
	}
	l.wrote(l.writes)
	l.Lanes = store.LaneSet(lanes)
	if l.done.base, err = parseSnapshot(base); err != nil {
		return nil, err
	}
	if target != nil {
		t, err := parseSnapshot(*target)
		if err != nil {
			return nil, err
		}
		l.done.target = &t
	}
	var h hand
	if err := json.Unmarshal(doc, &h); err != nil {
		return nil, fmt.Errorf("lease %d: what it has in hand: %w", l.ID, err)
	}
	l.redo = h.Redo
	l.read = l.done
	return l, l.load(ctx, tx)
}

// bury frees the lease of an owner that is gone. It is fenced as a whole, before
// a part of it is taken: what the owner might still write of the rest would be
// of the part as well.
func bury(ctx context.Context, tx pgx.Tx, id int64) error {
	var destination string
	var lanes int64
	var doc []byte
	err := tx.QueryRow(ctx, `select destination, lanes, open from outbox_leases where lease = $1`, id).Scan(&destination, &lanes, &doc)
	if err != nil {
		return err
	}
	var h hand
	if err := json.Unmarshal(doc, &h); err != nil {
		return fmt.Errorf("lease %d: what it has in hand: %w", id, err)
	}
	if doc, err = json.Marshal(h.died(false)); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, `
		update outbox_leases set owner = null, owner_lock = null, expires_at = null, epoch = epoch + 1, open = $2
		where lease = $1`, id, doc); err != nil {
		return err
	}
	return recoverExceptions(ctx, tx, destination, lanes)
}

// recoverExceptions makes due again what the former owner had in hand of them
// when it died, in pieces.
func recoverExceptions(ctx context.Context, tx pgx.Tx, destination string, lanes int64) error {
	var n int
	err := tx.QueryRow(ctx, `
		select (select count(*) from outbox_exceptions
		        where destination = $1 and (($2::bigint >> lane::int) & 1) = 1 and state = 'PUBLISHING') +
		       (select coalesce(sum(in_hand), 0) from outbox_held_keys
		        where destination = $1 and (($2::bigint >> lane::int) & 1) = 1)`,
		destination, lanes).Scan(&n)
	if err != nil || n == 0 {
		return err
	}
	_, err = tx.Exec(ctx, `
		update outbox_exceptions set state = 'WAITING', due_at = least(due_at, clock_timestamp()),
			starts = starts + alone::int, together = $3, alone = false
		where destination = $1 and (($2::bigint >> lane::int) & 1) = 1 and state = 'PUBLISHING'`,
		destination, lanes, pieces(n))
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `
		update outbox_held_keys set suspects = in_hand, in_hand = 0,
			starts = starts + alone::int, together = $3, alone = false
		where destination = $1 and (($2::bigint >> lane::int) & 1) = 1 and in_hand > 0`,
		destination, lanes, pieces(n))
	return err
}

// load reads the lease's held keys, and which exceptions wait.
func (l *lease) load(ctx context.Context, tx pgx.Tx) error {
	rows, err := tx.Query(ctx, `
		select event_key, lane, coalesce(head, 0), base::text, target::text, at, coalesce(low, 0),
		       starts, together, suspects
		from outbox_held_keys where destination = $1 and (($2::bigint >> lane::int) & 1) = 1`,
		l.Destination, mask(l.Lanes))
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		k := &heldKey{}
		var base string
		var target *string
		if err := rows.Scan(&k.key, &k.lane, &k.head, &base, &target, &k.at, &k.low, &k.starts, &k.together, &k.suspects); err != nil {
			return err
		}
		k.next = k.low
		if k.base, err = parseSnapshot(base); err != nil {
			return err
		}
		if target != nil {
			t, err := parseSnapshot(*target)
			if err != nil {
				return err
			}
			k.target = &t
		}
		l.held[k.key] = k
	}
	if err := rows.Err(); err != nil {
		return err
	}
	if err := l.loadPassed(ctx, tx); err != nil {
		return err
	}
	res, err := tx.Query(ctx, waitingSQL, mask(l.Lanes), l.Destination, nil)
	if err != nil {
		return err
	}
	l.waiting, err = collectLaned(res)
	return err
}

// loadPassed reads which events a rebase has put in front of the lease though
// they are none of its business any more.
func (l *lease) loadPassed(ctx context.Context, tx pgx.Tx) error {
	rows, err := tx.Query(ctx, `
		select id, lane from outbox_exceptions
		where destination = $1 and pass and (($2::bigint >> lane::int) & 1) = 1`, l.Destination, mask(l.Lanes))
	if err != nil {
		return err
	}
	l.pass, err = collectLaned(rows)
	return err
}

// collectLaned reads ids with their lanes.
func collectLaned(rows pgx.Rows) (laned, error) {
	ids := laned{}
	var id int64
	var lane int
	_, err := pgx.ForEachRow(rows, []any{&id, &lane}, func() error { ids[id] = lane; return nil })
	return ids, err
}

// Release implements store.Session.
func (ses *session) Release(ctx context.Context, sl store.Lease, keep store.LaneSet) (_ store.Lease, err error) {
	defer ses.st.explain(&err)
	l := ses.lease(sl)
	if l == nil {
		return store.Lease{}, store.ErrFenced
	}
	l.writing.Lock()
	defer l.writing.Unlock()
	if err := l.resolve(ctx); err != nil {
		return sl, err
	}
	give := l.Lanes &^ keep
	rest := l.Lanes & keep
	if give == 0 {
		return l.Lease, nil
	}
	l.move(&written{apply: func() { l.keep(rest) }})
	err = ses.st.inTx(ctx, func(tx pgx.Tx) error {
		if err := lockDestination(ctx, tx, l.Destination); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, `
			update outbox_leases set writes = writes + 1
			where lease = $1 and epoch = $2 and owner_lock is not null and writes = $3`, l.ID, l.Epoch, l.writes)
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			return store.ErrFenced
		}
		id := l.ID
		if rest != 0 {
			if id, err = split(ctx, tx, l.ID, give); err != nil {
				return err
			}
		}
		return giveBack(ctx, tx, id, l.Destination, give)
	})
	l.moved(err)
	if err != nil {
		return sl, fmt.Errorf("pgstore: release lanes of lease %d: %w", l.ID, err)
	}
	if rest == 0 {
		ses.leases.drop(sl)
		return store.Lease{}, nil
	}
	return l.Lease, nil
}

// giveBack frees a lease so that no death is counted.
func giveBack(ctx context.Context, tx pgx.Tx, id int64, destination string, lanes store.LaneSet) error {
	var doc []byte
	if err := tx.QueryRow(ctx, `select open from outbox_leases where lease = $1`, id).Scan(&doc); err != nil {
		return err
	}
	var h hand
	if err := json.Unmarshal(doc, &h); err != nil {
		return err
	}
	doc, err := json.Marshal(h.died(true))
	if err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, `
		update outbox_leases set owner = null, owner_lock = null, expires_at = null, epoch = epoch + 1, open = $2
		where lease = $1`, id, doc); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, `
		update outbox_exceptions set state = 'WAITING', due_at = least(due_at, clock_timestamp()), alone = false
		where destination = $1 and (($2::bigint >> lane::int) & 1) = 1 and state = 'PUBLISHING'`,
		destination, mask(lanes)); err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `
		update outbox_held_keys set in_hand = 0, alone = false
		where destination = $1 and (($2::bigint >> lane::int) & 1) = 1 and in_hand > 0`,
		destination, mask(lanes))
	return err
}

// lease finds the session's own state of a lease, nil if it is not held.
func (ses *session) lease(sl store.Lease) *lease {
	l := ses.leases.get(sl.ID)
	if l == nil || l.Epoch != sl.Epoch {
		return nil
	}
	return l
}
