package sqlitestore

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// Status implements store.Inspector. Counts stop at a cap, and say so.
func (s *Stream) Status(ctx context.Context) (store.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	out := store.Status{Destinations: []store.DestinationStatus{}}
	v, err := s.look(ctx, "")
	if err != nil {
		return out, fmt.Errorf("sqlitestore: status: %w", explain(err))
	}
	for _, name := range v.names {
		t, err := v.sum(ctx, v.dests[name])
		if err != nil {
			return out, fmt.Errorf("sqlitestore: status of %q: %w", name, explain(err))
		}
		out.Destinations = append(out.Destinations, t.status())
	}
	sortByAge(out.Destinations)
	if out.Relays, err = s.members.relayStatus(ctx, v.now); err != nil {
		return out, fmt.Errorf("sqlitestore: status: %w", explain(err))
	}
	if out.Storage, err = s.storage(ctx); err != nil {
		return out, fmt.Errorf("sqlitestore: status: %w", explain(err))
	}
	if err := s.checkSource(ctx); err != nil {
		out.Warnings = append(out.Warnings, warning(err))
	}
	return out, nil
}

// storage is the size of the file, with what else is in it: how much of it is
// the outbox's SQLite could only tell by walking over all pages.
func (d *database) storage(ctx context.Context) (store.Storage, error) {
	var pages, size int64
	err := d.row(ctx, []any{&pages, &size}, `select page_count, page_size from pragma_page_count(), pragma_page_size()`)
	return store.Storage{Bytes: pages * size}, err
}

func warning(err error) string {
	return strings.TrimPrefix(err.Error(), "sqlitestore: ") + "; " + outrider.Hint(err)
}

// sortByAge puts what has waited longest first.
func sortByAge(d []store.DestinationStatus) {
	slices.SortStableFunc(d, func(a, b store.DestinationStatus) int { return cmp.Compare(b.OldestPending, a.OldestPending) })
}

func (m *members) relayStatus(ctx context.Context, now int64) ([]store.RelayStatus, error) {
	out := []store.RelayStatus{}
	err := m.db.query(ctx, func(r *sql.Rows) (bool, error) {
		var rs store.RelayStatus
		var seen, expires, lock int64
		err := r.Scan(&rs.Name, &seen, &expires, &lock)
		rs.Seen = max(0, time.Duration(now-seen)*time.Microsecond)
		rs.Gone = expires <= now || m.locks && m.free(lock)
		out = append(out, rs)
		return true, err
	}, `select relay, seen_at, expires_at, lock from `+m.relays+` order by relay limit 1000`)
	return out, err
}

// leaseStatus is who has a lease; expires is 0 when its owner gave it up, which
// says nothing of when.
func (m *members) leaseStatus(id, lanes, epoch int64, owner string, lock, expires, now int64) store.LeaseStatus {
	l := store.LeaseStatus{ID: id, Lanes: store.LaneSet(lanes), Owner: owner, Epoch: epoch}
	l.Count = l.Lanes.Len()
	if owner == "" {
		return l
	}
	l.Gone = m.locks && m.free(lock)
	if expires != 0 {
		l.Expires = time.Duration(expires-now) * time.Microsecond
	}
	return l
}

// tally is a destination being summed up.
type tally struct {
	store.DestinationStatus
	now     int64
	blocked map[string]bool
}

// add counts what is in a state; at is when the oldest of it was written.
func (t *tally) add(state store.State, n, at int64) {
	if n == 0 {
		return
	}
	age := max(0, time.Duration(t.now-at)*time.Microsecond)
	switch state {
	case store.Pending:
		t.Pending.N += n
		t.OldestPending = max(t.OldestPending, age)
	case store.InHand:
		t.Publishing.N += n
		t.OldestPending = max(t.OldestPending, age)
	case store.Waiting:
		t.Waiting.N += n
	case store.Scheduled:
		t.Scheduled.N += n
	case store.Failed:
		t.Failed.N += n
		t.OldestFailed = max(t.OldestFailed, age)
	}
}

// stuck counts what is in hand in a lane that nobody holds.
func (t *tally) stuck(state store.State, unheld store.LaneSet, lane int, n int64) {
	if state == store.InHand && unheld.Has(lane) {
		t.Stuck.N += n
	}
}

// block counts pending ones behind a head.
func (t *tally) block(key string, at int64) {
	t.blocked[key] = true
	t.OldestBlocked = max(t.OldestBlocked, time.Duration(t.now-at)*time.Microsecond)
}

func (t *tally) status() store.DestinationStatus {
	t.BlockedKeys.N = int64(len(t.blocked))
	return t.DestinationStatus
}

// sum sums up a destination: what its leases have not come to, what is behind
// held keys, and the exceptions.
func (v *view) sum(ctx context.Context, d *viewDest) (*tally, error) {
	t := &tally{now: v.now, blocked: map[string]bool{}}
	t.Name, t.Leases = d.name, d.leases
	if err := v.sumFresh(ctx, d, t); err != nil {
		return nil, err
	}
	if err := v.sumHeld(ctx, d, t); err != nil {
		return nil, err
	}
	return t, v.sumExceptions(ctx, d, t)
}

func (v *view) sumFresh(ctx context.Context, d *viewDest, t *tally) error {
	after := int64(math.MaxInt64)
	for i := range d.lanes {
		after = min(after, d.lease(i).base)
	}
	for walked := 0; ; walked += walkStep {
		if walked >= countCap {
			t.Pending.Estimate = true
			return nil
		}
		rows, err := bareRows(ctx, v.s.database, v.now, listAllSQL, 0, after, walkStep)
		if err != nil {
			return err
		}
		st, err := v.standings(ctx, d.name, rows)
		if err != nil {
			return err
		}
		for i := range rows {
			r := &rows[i]
			after = r.id
			if st[i].exception != nil || r.id <= d.lease(r.rec.Lane).base {
				continue // counted by the others
			}
			state, _ := v.place(d, r, st[i].held)
			t.add(state, 1, r.rec.CreatedAt.UnixMicro())
			t.stuck(state, d.unheld, r.rec.Lane, 1)
			if h := st[i].held; state == store.Pending && h.behind(r.id) != "new" {
				t.block(r.rec.Key, r.rec.CreatedAt.UnixMicro())
			}
		}
		if len(rows) < walkStep {
			return nil
		}
	}
}

// heldMost is how many held keys are looked at one by one.
const heldMost = 1000

// sumHeld counts the successors of held keys that their leases have passed.
func (v *view) sumHeld(ctx context.Context, d *viewDest, t *tally) error {
	type heldRow struct {
		key              string
		lane             int
		head, at, inHand int64
	}
	var keys []heldRow
	err := v.s.query(ctx, func(r *sql.Rows) (bool, error) {
		var k heldRow
		err := r.Scan(&k.key, &k.lane, &k.head, &k.at, &k.inHand)
		keys = append(keys, k)
		return true, err
	}, `select event_key, lane, coalesce(head, 0), at, in_hand from outbox_held_keys
		where destination = ? and joined = 0 limit ?`, d.name, heldMost+1)
	if err != nil {
		return err
	}
	if len(keys) > heldMost {
		keys, t.Pending.Estimate, t.BlockedKeys.Estimate = keys[:heldMost], true, true
	}
	for _, k := range keys {
		var n, oldest int64
		err := v.s.row(ctx, []any{&n, &oldest}, `
			select count(*), coalesce(min(created_at), 0) from (
				select e.created_at from outbox_events e
				where coalesce(e.event_key, e.aggregate_id) = ?1 and e.id > ?2 and e.id <= ?3
				  and not exists (select 1 from outbox_exceptions x where x.destination = ?4 and x.id = e.id)
				order by e.id limit ?5)`, k.key, k.at, d.lease(k.lane).base, d.name, countCap+1)
		if err != nil {
			return err
		}
		if n > countCap {
			n, t.Pending.Estimate = countCap, true
		}
		t.add(store.InHand, min(k.inHand, n), oldest)
		t.stuck(store.InHand, d.unheld, k.lane, min(k.inHand, n))
		t.add(store.Pending, max(0, n-k.inHand), oldest)
		if k.head != 0 && n > 0 {
			t.block(k.key, oldest)
		}
	}
	return nil
}

func (v *view) sumExceptions(ctx context.Context, d *viewDest, t *tally) error {
	var stuck int64
	for _, c := range []struct {
		state string
		as    store.State
		count *store.Count
	}{
		{"WAITING", store.Waiting, &t.Waiting},
		{"SCHEDULED", store.Scheduled, &t.Scheduled},
		{"PUBLISHING", store.InHand, &t.Publishing},
		{"FAILED", store.Failed, &t.Failed},
	} {
		var n, oldest int64
		err := v.s.row(ctx, []any{&n, &oldest}, `
			select count(*), coalesce(min(created_at), 0) from (
				select created_at from outbox_exceptions where destination = ? and state = ? order by id limit ?)`, d.name, c.state, countCap+1)
		if err != nil {
			return err
		}
		if n > countCap {
			n, c.count.Estimate = countCap, true
		}
		t.add(c.as, n, oldest)
	}
	err := v.s.row(ctx, []any{&stuck}, `
		select count(*) from (
			select 1 from outbox_exceptions where destination = ? and state = 'PUBLISHING' and (? >> lane) & 1 = 1 limit ?)`,
		d.name, int64(d.unheld), countCap+1)
	if err != nil {
		return err
	}
	t.Stuck.N += stuck
	if t.Stuck.N > countCap {
		t.Stuck = store.Count{N: countCap, Estimate: true}
	}
	// What is overdue is pending in truth.
	var oldest int64
	err = v.s.row(ctx, []any{&oldest}, `
		select coalesce(min(created_at), 0) from (
			select created_at from outbox_exceptions
			where destination = ? and state in ('WAITING', 'SCHEDULED', 'PUBLISHING') and due_at <= ? order by due_at limit ?)`, d.name, v.now, countCap)
	if err == nil && oldest != 0 {
		t.OldestPending = max(t.OldestPending, time.Duration(v.now-oldest)*time.Microsecond)
	}
	return err
}
