package sqlitestore

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"

	"github.com/outrider-dev/outrider/store"
)

// freeLease is a row of outbox_leases that may be taken.
type freeLease struct {
	id    int64
	lanes store.LaneSet
	clean bool // given back, not left behind
}

// Acquire implements store.Session.
func (ses *session) Acquire(ctx context.Context, p store.AcquireParams) ([]store.Lease, error) {
	if p.Lanes <= 0 {
		return nil, nil
	}
	if left := ses.hasLeft(); left {
		return nil, fmt.Errorf("sqlitestore: acquire leases of %q: the session has left", p.Destination)
	}
	ses.acquiring.Lock()
	defer ses.acquiring.Unlock()
	known := ses.leases.epochs()
	var taken []*lease
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
		if len(free) == 0 {
			if err := missing(t, p.Destination); err != nil {
				return err
			}
		}
		for room := p.Lanes; room > 0 && len(free) > 0; free = free[1:] {
			f := free[0]
			if f.lanes.Len() > room {
				if err := fenceOff(t, "outbox_leases", f); err != nil {
					return err
				}
				if f.id, err = split(t, f.id, f.lanes.First(room)); err != nil {
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

// freeLeases finds the leases of a destination that nobody holds. One of this
// member's own that it does not know, by its epoch, is one that an earlier call
// has acquired without hearing so.
func (b *member) freeLeases(t *tx, destination string, dead map[int64]bool, known map[int64]int64) ([]freeLease, error) {
	var out []freeLease
	err := t.rows(func(r *sql.Rows) error {
		var f freeLease
		var lanes, epoch int64
		var lock sql.NullInt64
		var expired bool
		if err := r.Scan(&f.id, &lanes, &lock, &epoch, &expired); err != nil {
			return err
		}
		f.lanes, f.clean = store.LaneSet(lanes), !lock.Valid
		if f.clean || expired || dead[lock.Int64] || lock.Int64 == b.lock && known[f.id] != epoch {
			out = append(out, f)
		}
		return nil
	}, `select lease, lanes, owner_lock, epoch, coalesce(expires_at <= ?, 1) from `+b.leases+` where destination = ? order by lease`, t.now, destination)
	return out, err
}

// fenceOff keeps an owner that is gone from writing under what is left of a lease
// of which a part is taken: what it settled of the part would count as well.
func fenceOff(t *tx, table string, f freeLease) error {
	if f.clean {
		return nil
	}
	_, err := t.exec(`update `+table+` set epoch = epoch + 1, expires_at = 0 where lease = ?`, f.id)
	return err
}

// split moves some lanes of a lease to a new one that stands at the same place
// and has the same owner, and returns its id.
func split(t *tx, id int64, lanes store.LaneSet) (int64, error) {
	if _, err := t.exec(`update outbox_leases set lanes = lanes & ~? where lease = ?`, mask(lanes), id); err != nil {
		return 0, err
	}
	var other int64
	err := t.row([]any{&other}, `
		insert into outbox_leases (destination, lanes, owner, owner_lock, epoch, expires_at, base, page, open)
		select destination, ?, owner, owner_lock, epoch, expires_at, base, page, open from outbox_leases where lease = ?
		returning lease`, mask(lanes), id)
	return other, err
}

// take makes a free lease the session's own and reads where it stands.
func (ses *session) take(t *tx, f freeLease) (*lease, error) {
	l := newLease(ses)
	var doc string
	var lanes int64
	err := t.row([]any{&l.ID, &l.Destination, &lanes, &l.Epoch, &l.writes, &l.done, &l.page, &doc}, `
		update outbox_leases set owner = ?, owner_lock = ?, epoch = epoch + 1, writes = writes + 1, expires_at = ?
		where lease = ?
		returning lease, destination, lanes, epoch, writes, base, page, open`,
		ses.params.Relay, ses.lock, t.now+ses.params.TTL.Microseconds(), f.id)
	if err != nil {
		return nil, err
	}
	l.Lanes = store.LaneSet(lanes)
	return l, l.stand(t, doc, f.clean)
}

// stand takes over what was in hand, and reads what is held back.
func (l *lease) stand(t *tx, doc string, clean bool) error {
	var h hand
	if err := json.Unmarshal([]byte(doc), &h); err != nil {
		return fmt.Errorf("lease %d: what it has in hand: %w", l.ID, err)
	}
	h = h.died(clean)
	l.redo, l.was, l.read, l.saved = h.Redo, h.Redo, l.done, l.done
	for _, p := range h.Redo {
		l.page = max(l.page, p.Page)
	}
	text, err := json.Marshal(h)
	if err != nil {
		return err
	}
	if _, err := t.exec(`update outbox_leases set open = ? where lease = ?`, string(text), l.ID); err != nil {
		return err
	}
	if err := recoverExceptions(t, l, clean); err != nil {
		return err
	}
	return l.load(t)
}

const inLanes = `destination = ? and ((? >> lane) & 1) = 1`

// recoverExceptions makes due again what the former owner had in hand of them,
// in pieces if it died.
func recoverExceptions(t *tx, l *lease, clean bool) error {
	var n int
	err := t.row([]any{&n}, `
		select (select count(*) from outbox_exceptions where `+inLanes+` and state = 'PUBLISHING') +
		       (select coalesce(sum(in_hand), 0) from outbox_held_keys where `+inLanes+`)`,
		l.Destination, mask(l.Lanes), l.Destination, mask(l.Lanes))
	if err != nil || n == 0 {
		return err
	}
	var together any = pieces(n)
	died := 1
	if clean {
		together, died = nil, 0 // as they were
	}
	_, err = t.exec(`
		update outbox_exceptions set state = 'WAITING', due_at = min(coalesce(due_at, ?1), ?1),
			starts = starts + alone * ?2, together = coalesce(?3, together), alone = 0
		where destination = ?4 and ((?5 >> lane) & 1) = 1 and state = 'PUBLISHING'`,
		t.now, died, together, l.Destination, mask(l.Lanes))
	if err != nil {
		return err
	}
	_, err = t.exec(`
		update outbox_held_keys set again = max(again, in_hand_to), in_hand = 0, in_hand_to = 0,
			starts = starts + alone * ?1, together = coalesce(?2, together), alone = 0
		where destination = ?3 and ((?4 >> lane) & 1) = 1 and in_hand > 0`,
		died, together, l.Destination, mask(l.Lanes))
	return err
}

// load reads the lease's held keys and which exceptions wait.
func (l *lease) load(t *tx) error {
	_, err := t.exec(`delete from outbox_held_keys where `+inLanes+` and joined > 0 and joined <= ?`, l.Destination, mask(l.Lanes), l.done)
	if err != nil {
		return err
	}
	err = t.rows(func(r *sql.Rows) error {
		k := &heldKey{parked: true, loaded: true}
		var joined int64
		err := r.Scan(&k.key, &k.lane, &k.head, &k.at, &k.again, &k.starts, &k.together, &k.page, &joined)
		l.page = max(l.page, k.page)
		if joined > 0 {
			l.joined[k.key], l.noted[k.key] = joined, true
		} else {
			l.held[k.key] = k
		}
		return err
	}, `select event_key, lane, coalesce(head, 0), at, again, starts, together, page, joined from outbox_held_keys where `+inLanes,
		l.Destination, mask(l.Lanes))
	if err != nil {
		return err
	}
	err = t.rows(func(r *sql.Rows) error {
		var id int64
		err := r.Scan(&id)
		l.waiting[id] = struct{}{}
		return err
	}, waitingSQL, l.Destination, mask(l.Lanes))
	if err != nil {
		return err
	}
	return l.loadLast(t)
}

// loadLast finds what was passed over of each held key, and lets those go that
// nothing is left of.
func (l *lease) loadLast(t *tx) error {
	for _, k := range l.held {
		err := t.row([]any{&k.last}, `
			select coalesce((select id from outbox_events
				where coalesce(event_key, aggregate_id) = ? and id > ? and id <= ? order by id desc limit 1), 0)`, k.key, k.at, l.done)
		if err != nil {
			return err
		}
		if l.rejoin(k) {
			if _, err := t.exec(`delete from outbox_held_keys where destination = ? and event_key = ?`, l.Destination, k.key); err != nil {
				return err
			}
			delete(l.joined, k.key)
			// Its head may have been skipped without anybody taking note.
			if err := unpark(t, l.Destination, k.key); err != nil {
				return err
			}
		}
	}
	return nil
}

// Release implements store.Session.
func (ses *session) Release(ctx context.Context, sl store.Lease, keep store.LaneSet) (store.Lease, error) {
	l := ses.lease(sl)
	if l == nil {
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
	l.mu.Lock()
	done := l.done
	keys := copies(l.unknown(done))
	l.mu.Unlock()
	var kept *lease
	what := &written{apply: func() {
		ses.leases.drop(l.Lease)
		if kept != nil {
			ses.leases.put(kept)
		}
	}}
	err := l.move(ctx, what, func() { ses.leases.drop(l.Lease) }, func(t *tx) (err error) {
		kept = nil
		if _, err := t.exec(`update outbox_leases set base = max(base, ?) where lease = ?`, done, l.ID); err != nil {
			return err
		}
		if err := putKeys(t, l, keys); err != nil {
			return err
		}
		if rest == 0 {
			return giveBack(t, l.ID, l.Destination, give)
		}
		id, err := split(t, l.ID, give)
		if err != nil {
			return err
		}
		if err := giveBack(t, id, l.Destination, give); err != nil {
			return err
		}
		kept, err = l.anew(t)
		return err
	})
	if err != nil {
		return sl, err
	}
	if kept == nil {
		return store.Lease{}, nil
	}
	return kept.Lease, nil
}

// anew reads where a lease stands once lanes were taken out of it. What was not
// settled of it is handed out again.
func (l *lease) anew(t *tx) (*lease, error) {
	n := newLease(l.ses)
	n.ID, n.Destination, n.Epoch, n.writes = l.ID, l.Destination, l.Epoch, l.writes+1
	var lanes int64
	var doc string
	err := t.row([]any{&lanes, &n.done, &n.page, &doc}, `select lanes, base, page, open from outbox_leases where lease = ?`, n.ID)
	if err != nil {
		return nil, err
	}
	n.Lanes = store.LaneSet(lanes)
	return n, n.stand(t, doc, true)
}

// giveBack frees a lease so that no death is counted.
func giveBack(t *tx, id int64, destination string, lanes store.LaneSet) error {
	var doc string
	if err := t.row([]any{&doc}, `select open from outbox_leases where lease = ?`, id); err != nil {
		return err
	}
	var h hand
	if err := json.Unmarshal([]byte(doc), &h); err != nil {
		return err
	}
	text, err := json.Marshal(h.died(true))
	if err != nil {
		return err
	}
	if _, err := t.exec(`
		update outbox_leases set owner = null, owner_lock = null, expires_at = null, epoch = epoch + 1, open = ?
		where lease = ?`, string(text), id); err != nil {
		return err
	}
	l := &lease{fence: fence{Lease: store.Lease{ID: id, Destination: destination, Lanes: lanes}}}
	return recoverExceptions(t, l, true)
}
