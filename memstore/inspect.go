package memstore

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// shown is the state that people see, and why a pending event is pending.
func (x *cell) shown(now time.Time) (store.State, string) {
	switch {
	case x.state == store.Pending && x.row.record.AvailableAt.After(now), x.state == store.Scheduled && x.due.After(now):
		return store.Scheduled, "due later"
	case x.state == store.Scheduled:
		return store.Pending, x.behind()
	case x.state == store.Waiting:
		return store.Waiting, "retry"
	case x.state == store.Pending:
		return store.Pending, x.behind()
	default:
		return x.state, ""
	}
}

// behind is why a pending cell has not been sent.
func (x *cell) behind() string {
	if h := x.holder(); h != nil {
		return "held behind " + h.row.record.Row
	}
	return "new"
}

// holder is the head that holds the cell's key back, if another one does.
func (x *cell) holder() *cell {
	if x.key == nil || !x.key.held {
		return nil
	}
	for _, h := range x.key.cells {
		if _, ok := x.dest.exceptions[h]; ok && h != x && h.head() {
			return h
		}
	}
	return nil
}

func (x *cell) entry(now time.Time) store.Entry {
	r := &x.row.record
	state, reason := x.shown(now)
	e := store.Entry{
		Destination: x.dest.name, Row: r.Row, EventID: r.ID, Type: r.Type,
		AggregateType: r.AggregateType, AggregateID: r.AggregateID,
		Key: r.Key, Unordered: r.Unordered,
		State: state, Reason: reason,
		Attempts: x.attempts, Class: x.class, Message: x.message,
		CreatedAt: r.CreatedAt, LastFailure: x.lastFailed,
	}
	switch state {
	case store.Waiting:
		e.DueIn = max(0, x.due.Sub(now))
	case store.Scheduled:
		e.DueIn = r.AvailableAt.Sub(now)
	}
	return e
}

// Status implements store.Inspector.
func (s *Store) Status(ctx context.Context) (store.Status, error) {
	var out store.Status
	err := s.do(ctx, OpInspect, func(now time.Time) error {
		for _, d := range s.destinations {
			out.Destinations = append(out.Destinations, d.status(now, !s.cfg.NoLiveTakeOver))
		}
		for _, ss := range s.sessions {
			out.Relays = append(out.Relays, store.RelayStatus{Name: ss.params.Relay, Seen: now.Sub(ss.seen), Gone: ss.gone(now)})
		}
		return nil
	})
	slices.SortStableFunc(out.Destinations, func(a, b store.DestinationStatus) int {
		return cmp.Compare(b.OldestPending, a.OldestPending)
	})
	return out, err
}

// status sums a destination up; live says that the end of a connection shows.
func (d *destination) status(now time.Time, live bool) store.DestinationStatus {
	out := store.DestinationStatus{Name: d.name}
	for _, l := range d.leases {
		ls := store.LeaseStatus{ID: l.id, Lanes: l.lanes, Count: l.lanes.Len(), Epoch: l.epoch}
		if l.owner != nil {
			ls.Owner, ls.Expires = l.owner.params.Relay, l.expires.Sub(now)
			ls.Gone = live && !l.owner.killed.IsZero()
		}
		out.Leases = append(out.Leases, ls)
	}
	unheld := store.Unheld(out.Leases)
	blocked := map[*key]bool{}
	for _, x := range d.open {
		age := now.Sub(x.row.record.CreatedAt)
		state, _ := x.shown(now)
		switch state {
		case store.Pending:
			out.Pending.N++
			out.OldestPending = max(out.OldestPending, age)
			if x.holder() != nil {
				blocked[x.key] = true
				out.OldestBlocked = max(out.OldestBlocked, age)
			}
		case store.InHand:
			out.Publishing.N++
			if unheld.Has(x.row.record.Lane) {
				out.Stuck.N++
			}
			out.OldestPending = max(out.OldestPending, age)
		case store.Waiting:
			out.Waiting.N++
			if !x.due.After(now) {
				out.OldestPending = max(out.OldestPending, age)
			}
		case store.Scheduled:
			out.Scheduled.N++
		case store.Failed:
			out.Failed.N++
			out.OldestFailed = max(out.OldestFailed, age)
		}
	}
	out.BlockedKeys.N = int64(len(blocked))
	return out
}

// List implements store.Inspector.
func (s *Store) List(ctx context.Context, p store.ListParams) (store.Page, error) {
	var out store.Page
	err := s.do(ctx, OpInspect, func(now time.Time) error {
		after := int64(0)
		if p.AfterRow != "" {
			var err error
			if after, err = strconv.ParseInt(p.AfterRow, 10, 64); err != nil {
				return fmt.Errorf("memstore: no such row: %q", p.AfterRow)
			}
		}
		limit := min(max(p.Limit, 0), 1000)
		if limit == 0 {
			limit = 50
		}
		i, found := slices.BinarySearchFunc(s.rows, after, func(r *row, id int64) int { return cmp.Compare(r.id, id) })
		if found {
			i++
		}
		for _, r := range s.rows[i:] {
			var entries []store.Entry
			for _, x := range r.cells {
				if e := x.entry(now); selects(p, e) {
					entries = append(entries, e)
				}
			}
			if len(entries) == 0 {
				continue
			}
			if len(out.Entries) >= limit {
				out.Next = out.Entries[len(out.Entries)-1].Row
				return nil
			}
			out.Entries = append(out.Entries, entries...)
		}
		return nil
	})
	return out, err
}

// Show implements store.Inspector.
func (s *Store) Show(ctx context.Context, id string) ([]store.Detail, error) {
	var out []store.Detail
	err := s.do(ctx, OpInspect, func(now time.Time) error {
		for _, r := range s.rows {
			if r.record.ID != id && r.record.Row != id {
				continue
			}
			d := store.Detail{Record: r.record}
			for _, x := range r.cells {
				d.Entries = append(d.Entries, x.entry(now))
			}
			out = append(out, d)
		}
		return nil
	})
	return out, err
}

// targets are the cells that an operator means, which nobody has in hand. By a
// key that is its head, if that has failed.
func (s *Store) targets(t store.Target) []*cell {
	var out []*cell
	for _, r := range s.rows {
		for _, x := range r.cells {
			switch {
			case t.Destination != "" && t.Destination != x.dest.name, x.claim != nil:
			case t.ID != "" && (r.record.ID == t.ID || r.record.Row == t.ID),
				t.ID == "" && t.Key != "" && r.record.Key == t.Key && x.state == store.Failed && x.head():
				out = append(out, x)
			}
		}
	}
	return out
}

// Retry implements store.Operator.
func (s *Store) Retry(ctx context.Context, t store.Target) (int, error) {
	n := 0
	err := s.do(ctx, OpOperate, func(now time.Time) error {
		for _, x := range s.targets(t) {
			switch x.state {
			case store.Failed:
				if x.free {
					// Its key has gone on, so its old place is behind.
					x.reopen()
					x.seq = outrider.Sequence{}
				}
				x.attempts, x.starts, x.firstFailed = 0, 0, time.Time{}
			case store.Waiting:
			default:
				continue
			}
			x.state, x.due = store.Waiting, now
			x.dest.exceptions[x] = struct{}{}
			x.hold(now)
			n++
		}
		return nil
	})
	return n, err
}

// Skip implements store.Operator.
func (s *Store) Skip(ctx context.Context, t store.Target) (int, error) {
	n := 0
	err := s.do(ctx, OpOperate, func(now time.Time) error {
		for _, x := range s.targets(t) {
			switch {
			case x.finished() && x.state == store.Failed:
				x.state = store.Discarded
				x.dest.forget()
			case x.state == store.Failed, x.state == store.Waiting:
				x.finish(store.Discarded)
			default:
				continue
			}
			n++
		}
		return nil
	})
	return n, err
}

// selects reports whether an entry is among those asked for.
func selects(p store.ListParams, e store.Entry) bool {
	return (p.Destination == "" || p.Destination == e.Destination) &&
		(p.State == store.Unchanged || p.State == e.State) &&
		(p.Key == "" || p.Key == e.Key) &&
		(p.Type == "" || p.Type == e.Type)
}
