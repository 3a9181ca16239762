package sqlitestore

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"time"

	"github.com/outrider-dev/outrider/store"
)

var (
	_ store.Inspector = (*Rows)(nil)
	_ store.Operator  = (*Rows)(nil)
)

const (
	rowShown = `, e.state, e.attempts, e.class, e.message, coalesce(e.last_failed, 0), e.due_at,
		coalesce((select k.head from outbox_row_keys k where k.event_key = coalesce(e.event_key, e.aggregate_id) and e.event_key is not ''), 0)`
	listRowsSQL      = `select ` + bareColumns + rowShown + ` from outbox_rows e where e.id > ?2 order by e.id limit ?3`
	listRowsKeySQL   = `select ` + bareColumns + rowShown + ` from outbox_rows e where coalesce(e.event_key, e.aggregate_id) = ?4 and e.id > ?2 order by e.id limit ?3`
	listRowsStateSQL = `select ` + bareColumns + rowShown + ` from outbox_rows e where e.state = ?4 and e.state <> 'PUBLISHED' and e.id > ?2 order by e.id limit ?3`
)

// rowWords are the words in the table of what people ask for.
var rowWords = map[store.State]string{
	store.InHand: "PUBLISHING", store.Waiting: "WAITING", store.Failed: "FAILED", store.Discarded: "DISCARDED",
}

// shownRow is a row as people see it.
type shownRow struct {
	row
	entry store.Entry
}

// shown reads rows with their states.
func (s *Rows) shown(ctx context.Context, destination string, now int64, query string, args ...any) ([]shownRow, error) {
	var out []shownRow
	sc := scanner{now: now}
	err := s.query(ctx, func(r *sql.Rows) (bool, error) {
		var w shownRow
		var state string
		var failed, head int64
		var due sql.NullInt64
		e := &w.entry
		if err := sc.scan(r, &w.row, &state, &e.Attempts, &e.Class, &e.Message, &failed, &due, &head); err != nil {
			return false, err
		}
		rec := &w.rec
		e.Destination, e.Row, e.EventID, e.Type = destination, rec.Row, rec.ID, rec.Type
		e.AggregateType, e.AggregateID, e.Key, e.Unordered, e.CreatedAt = rec.AggregateType, rec.AggregateID, rec.Key, rec.Unordered, rec.CreatedAt
		if failed != 0 {
			e.LastFailure = time.UnixMicro(failed).UTC()
		}
		e.State, e.Reason = rowStanding(&w.row, state, head)
		switch e.State {
		case store.Waiting:
			e.DueIn = max(0, time.Duration(due.Int64-now)*time.Microsecond)
		case store.Scheduled:
			e.DueIn = time.Duration(rec.AvailableAt.UnixMicro()-now) * time.Microsecond
		}
		out = append(out, w)
		return true, nil
	}, query, args...)
	return out, err
}

// rowStanding is a row's state and why it waits.
func rowStanding(r *row, state string, head int64) (store.State, string) {
	switch {
	case state == "PUBLISHED":
		return store.Published, ""
	case state == "PUBLISHING":
		return store.InHand, ""
	case state == "FAILED":
		return store.Failed, ""
	case state == "DISCARDED":
		return store.Discarded, ""
	case state == "WAITING":
		return store.Waiting, "retry"
	case r.later:
		return store.Scheduled, "due later"
	case head != 0 && head != r.id:
		return store.Pending, "held behind " + strconv.FormatInt(head, 10)
	}
	return store.Pending, "new"
}

// destination is the only one there is; "": none has joined yet.
func (s *Rows) destination(ctx context.Context) (string, error) {
	var name string
	err := s.row(ctx, []any{&name}, `select coalesce((select destination from outbox_row_leases limit 1), '')`)
	return name, err
}

// List implements store.Inspector. Next may be set on a page that is not full,
// when much had to be walked over.
func (s *Rows) List(ctx context.Context, p store.ListParams) (store.Page, error) {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	after, err := afterRow(p.AfterRow)
	if err != nil {
		return store.Page{}, err
	}
	name, err := s.destination(ctx)
	if err == nil && p.Destination != "" && p.Destination != name {
		return store.Page{Entries: []store.Entry{}}, nil
	}
	var now int64
	if err == nil {
		now, err = s.time(ctx, s.reader)
	}
	if err != nil {
		return store.Page{}, fmt.Errorf("sqlitestore: list: %w", explain(err))
	}
	query, args := listRowsSQL, []any(nil)
	if word, ok := rowWords[p.State]; ok {
		query, args = listRowsStateSQL, []any{word}
	}
	if p.Key != "" {
		query, args = listRowsKeySQL, []any{p.Key}
	}
	page, err := walk(p, after, func(after int64) ([]int64, [][]store.Entry, error) {
		rows, err := s.shown(ctx, name, now, query, append([]any{0, after, walkStep}, args...)...)
		ids, entries := make([]int64, len(rows)), make([][]store.Entry, len(rows))
		for i := range rows {
			ids[i], entries[i] = rows[i].id, []store.Entry{rows[i].entry}
		}
		return ids, entries, err
	})
	if err != nil {
		return store.Page{}, fmt.Errorf("sqlitestore: list: %w", explain(err))
	}
	return page, nil
}

// Show implements store.Inspector.
func (s *Rows) Show(ctx context.Context, id string) ([]store.Detail, error) {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	name, err := s.destination(ctx)
	var now int64
	if err == nil {
		now, err = s.time(ctx, s.reader)
	}
	if err != nil {
		return nil, fmt.Errorf("sqlitestore: show %s: %w", id, explain(err))
	}
	where, arg := byID(id)
	rows, err := s.shown(ctx, name, now, `select `+columns+rowShown+` from outbox_rows e where `+where+` order by e.id limit 100`, 1<<40, arg)
	if err != nil {
		return nil, fmt.Errorf("sqlitestore: show %s: %w", id, explain(err))
	}
	out := make([]store.Detail, len(rows))
	for i := range rows {
		out[i] = store.Detail{Record: rows[i].rec, Entries: []store.Entry{rows[i].entry}}
	}
	return out, nil
}

// Status implements store.Inspector. Counts stop at a cap, and say so.
func (s *Rows) Status(ctx context.Context) (store.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	out := store.Status{Destinations: []store.DestinationStatus{}}
	now, err := s.time(ctx, s.reader)
	if err == nil {
		var t *tally
		if t, err = s.sum(ctx, now); err == nil && t != nil {
			out.Destinations = append(out.Destinations, t.status())
		}
	}
	if err == nil {
		out.Relays, err = s.members.relayStatus(ctx, now)
	}
	if err != nil {
		return out, fmt.Errorf("sqlitestore: status: %w", explain(err))
	}
	if out.Storage, err = s.storage(ctx); err != nil {
		return out, fmt.Errorf("sqlitestore: status: %w", explain(err))
	}
	if err := s.sameFile(); err != nil {
		out.Warnings = append(out.Warnings, warning(err))
	}
	return out, nil
}

// sum sums the destination up; nil: there is none.
func (s *Rows) sum(ctx context.Context, now int64) (*tally, error) {
	t := &tally{now: now, blocked: map[string]bool{}}
	err := s.query(ctx, func(r *sql.Rows) (bool, error) {
		var id, lanes, epoch, lock, expires int64
		var owner string
		err := r.Scan(&t.Name, &id, &lanes, &owner, &lock, &epoch, &expires)
		t.Leases = append(t.Leases, s.members.leaseStatus(id, lanes, epoch, owner, lock, expires, now))
		return true, err
	}, `select destination, lease, lanes, coalesce(owner, ''), coalesce(owner_lock, 0), epoch, coalesce(expires_at, 0) from outbox_row_leases order by lease`)
	if err != nil || t.Leases == nil {
		return nil, err
	}
	unheld := store.Unheld(t.Leases)
	for state, count := range map[string]*store.Count{
		"PENDING": &t.Pending, "PUBLISHING": &t.Publishing, "WAITING": &t.Waiting, "SCHEDULED": &t.Scheduled, "FAILED": &t.Failed,
	} {
		seen := 0
		rows, err := s.shown(ctx, t.Name, now, listRowsStateSQL, 0, int64(-1<<63), countCap+1, state)
		if err != nil {
			return nil, err
		}
		for i := range rows {
			if seen++; seen > countCap {
				count.Estimate = true
				break
			}
			r, at := &rows[i], rows[i].rec.CreatedAt.UnixMicro()
			t.add(r.entry.State, 1, at)
			t.stuck(r.entry.State, unheld, r.rec.Lane, 1)
			if r.entry.State == store.Waiting && r.entry.DueIn == 0 {
				t.OldestPending = max(t.OldestPending, time.Duration(now-at)*time.Microsecond)
			}
			if r.entry.State == store.Pending && r.entry.Reason != "new" {
				t.block(r.rec.Key, at)
			}
		}
	}
	return t, nil
}

// Retry implements store.Operator.
func (s *Rows) Retry(ctx context.Context, target store.Target) (int, error) {
	return s.act(ctx, "retry", target, func(t *tx, id int64) error {
		_, err := t.exec(`
			update outbox_rows set due_at = ?, free = 0, starts = 0, together = 0,
				attempts = case when state = 'FAILED' then 0 else attempts end,
				first_failed = case when state = 'FAILED' then null else first_failed end,
				state = 'WAITING'
			where id = ?`, t.now, id)
		return err
	})
}

// Skip implements store.Operator. Whoever holds the lease takes note that the
// key is free.
func (s *Rows) Skip(ctx context.Context, target store.Target) (int, error) {
	return s.act(ctx, "skip", target, func(t *tx, id int64) error {
		if _, err := t.exec(`update outbox_rows set state = 'DISCARDED', due_at = null, done_at = ? where id = ?`, t.now, id); err != nil {
			return err
		}
		_, err := t.exec(`update outbox_row_keys set head = null, at = max(at, ?1), freed = ?1
			where head = ?1 and event_key = (select coalesce(event_key, aggregate_id) from outbox_rows where id = ?1)`, id)
		return err
	})
}

// act does something to each row meant: of an id those that have failed or wait,
// of a key the head, if that has failed.
func (s *Rows) act(ctx context.Context, what string, target store.Target, f func(*tx, int64) error) (int, error) {
	var ids []int64
	err := s.write(ctx, s.writer, func(t *tx) error {
		ids = nil
		query, args := `select e.id from outbox_row_keys k cross join outbox_rows e on e.id = k.head where k.event_key = ?1 and e.state = 'FAILED'`, []any{target.Key}
		switch {
		case target.ID != "":
			query, args = `select e.id from outbox_rows e where (e.event_id = ?1 or e.id = ?1) and e.state in ('FAILED', 'WAITING')`, []any{target.ID}
		case target.Key == "":
			return nil
		}
		query += ` and (?2 = '' or ?2 = (select destination from outbox_row_leases limit 1))`
		err := t.rows(func(r *sql.Rows) error {
			var id int64
			err := r.Scan(&id)
			ids = append(ids, id)
			return err
		}, query, append(args, target.Destination)...)
		if err != nil {
			return err
		}
		for _, id := range ids {
			if err := f(t, id); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("sqlitestore: %s: %w", what, err)
	}
	return len(ids), nil
}
