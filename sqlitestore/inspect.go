package sqlitestore

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

var (
	_ store.Inspector = (*Stream)(nil)
	_ store.Operator  = (*Stream)(nil)
)

const (
	// inspectTimeout bounds every call made for people.
	inspectTimeout = 10 * time.Second
	// walkLimit is how many rows one call walks over at most.
	walkLimit = 20_000
	walkStep  = 500
	// countCap bounds what is counted one by one.
	countCap = 10_000
)

// bareColumns are columns without the payload; ?1 is there for scan's sake.
const bareColumns = `e.id, e.event_id, e.aggregate_type, e.aggregate_id, e.event_type, e.event_key,
	e.content_type, null, e.created_at, e.available_at, nullif(?1, ?1)`

// view is how the leases stood when somebody looked. SQLite has no way to work
// out a key's lane, so what a view does in other databases is done here.
type view struct {
	s     *Stream
	now   int64
	names []string
	dests map[string]*viewDest
}

type viewDest struct {
	name   string
	unheld store.LaneSet // in hand there is stuck
	leases []store.LeaseStatus
	lanes  [outrider.Lanes]*viewLease
}

type viewLease struct {
	base int64
	hand hand
}

// look reads the leases of a destination, "" for all.
func (s *Stream) look(ctx context.Context, destination string) (*view, error) {
	v := &view{s: s, dests: map[string]*viewDest{}}
	var err error
	if v.now, err = s.time(ctx, s.reader); err != nil {
		return nil, err
	}
	err = s.query(ctx, func(r *sql.Rows) (bool, error) {
		var name, owner, doc string
		var id, lanes, lock, epoch, expires int64
		l := &viewLease{}
		if err := r.Scan(&name, &id, &lanes, &owner, &lock, &epoch, &expires, &l.base, &doc); err != nil {
			return false, err
		}
		if err := json.Unmarshal([]byte(doc), &l.hand); err != nil {
			return false, err
		}
		d := v.dests[name]
		if d == nil {
			d = &viewDest{name: name}
			v.dests[name] = d
			v.names = append(v.names, name)
		}
		ls := s.members.leaseStatus(id, lanes, epoch, owner, lock, expires, v.now)
		d.leases = append(d.leases, ls)
		for i := range d.lanes {
			if ls.Lanes.Has(i) {
				d.lanes[i] = l
			}
		}
		return true, nil
	}, `select destination, lease, lanes, coalesce(owner, ''), coalesce(owner_lock, 0), epoch, coalesce(expires_at, 0), base, open
		from outbox_leases where ?1 = '' or destination = ?1 order by destination, lease`, destination)
	for _, d := range v.dests {
		d.unheld = store.Unheld(d.leases)
	}
	return v, err
}

// lease is that of a lane.
func (d *viewDest) lease(lane int) *viewLease {
	if l := d.lanes[lane]; l != nil {
		return l
	}
	return &viewLease{}
}

// standing is what the database knows of a row beside where its lease stands.
type standing struct {
	exception *viewException
	held      *viewHeld
}

type viewException struct {
	state              string
	due                sql.NullInt64
	attempts           int
	class, message     string
	created, last, lid int64
}

type viewHeld struct{ head, at, inHandTo, joined int64 }

// standings looks rows up in the exceptions and the held keys.
func (v *view) standings(ctx context.Context, destination string, rows []row) ([]standing, error) {
	ids, keys := make([]int64, len(rows)), make([]string, 0, len(rows))
	for i := range rows {
		ids[i] = rows[i].id
		if k := rows[i].rec.Key; k != "" {
			keys = append(keys, k)
		}
	}
	slices.Sort(keys)
	idDoc, _ := json.Marshal(ids) // numbers and texts always encode
	keyDoc, _ := json.Marshal(slices.Compact(keys))
	exceptions, held := map[int64]*viewException{}, map[string]*viewHeld{}
	err := v.s.query(ctx, func(r *sql.Rows) (bool, error) {
		x := &viewException{}
		err := r.Scan(&x.lid, &x.state, &x.due, &x.attempts, &x.class, &x.message, &x.created, &x.last)
		exceptions[x.lid] = x
		return true, err
	}, `select x.id, x.state, x.due_at, x.attempts, x.class, x.message, x.created_at, coalesce(x.last_failed, 0)
		from json_each(?) j cross join outbox_exceptions x on x.destination = ? and x.id = j.value`, string(idDoc), destination)
	if err != nil {
		return nil, err
	}
	err = v.s.query(ctx, func(r *sql.Rows) (bool, error) {
		var key string
		h := &viewHeld{}
		err := r.Scan(&key, &h.head, &h.at, &h.inHandTo, &h.joined)
		held[key] = h
		return true, err
	}, `select h.event_key, coalesce(h.head, 0), h.at, case when h.in_hand > 0 then in_hand_to else 0 end, joined
		from json_each(?) j cross join outbox_held_keys h on h.destination = ? and h.event_key = j.value`, string(keyDoc), destination)
	if err != nil {
		return nil, err
	}
	out := make([]standing, len(rows))
	for i := range rows {
		out[i] = standing{exceptions[rows[i].id], held[rows[i].rec.Key]}
	}
	return out, nil
}

// behind is why a pending row has not been sent.
func (h *viewHeld) behind(id int64) string {
	if h != nil && h.head != 0 && h.head != id && h.joined == 0 {
		return "held behind " + strconv.FormatInt(h.head, 10)
	}
	return "new"
}

// entry says how a row stands with a destination.
func (v *view) entry(d *viewDest, r *row, st standing) store.Entry {
	rec := &r.rec
	e := store.Entry{
		Destination: d.name, Row: rec.Row, EventID: rec.ID, Type: rec.Type,
		AggregateType: rec.AggregateType, AggregateID: rec.AggregateID,
		Key: rec.Key, Unordered: rec.Unordered, CreatedAt: rec.CreatedAt,
	}
	if x := st.exception; x != nil {
		v.exceptional(&e, r, x, st.held)
	} else {
		e.State, e.Reason = v.place(d, r, st.held)
	}
	if e.State == store.Scheduled {
		e.DueIn = time.Duration(rec.AvailableAt.UnixMicro()-v.now) * time.Microsecond
	}
	return e
}

func (v *view) exceptional(e *store.Entry, r *row, x *viewException, h *viewHeld) {
	e.Attempts, e.Class, e.Message = x.attempts, x.class, x.message
	if x.last != 0 {
		e.LastFailure = time.UnixMicro(x.last).UTC()
	}
	switch {
	case x.state == "PUBLISHING":
		e.State = store.InHand
	case x.state == "FAILED":
		e.State = store.Failed
	case x.state == "DISCARDED":
		e.State = store.Discarded
	case x.state == "SCHEDULED" && r.later:
		e.State, e.Reason = store.Scheduled, "due later"
	case x.state == "WAITING" && x.due.Valid:
		e.State, e.Reason = store.Waiting, "retry"
		e.DueIn = max(0, time.Duration(x.due.Int64-v.now)*time.Microsecond)
	default:
		e.State, e.Reason = store.Pending, h.behind(r.id)
	}
}

// place is the state of a row that is no exception: by where its lease stands,
// and its key if that is held back.
func (v *view) place(d *viewDest, r *row, h *viewHeld) (store.State, string) {
	l := d.lease(r.rec.Lane)
	if h != nil && h.joined == 0 && r.id > h.at {
		switch {
		case r.id <= h.inHandTo:
			return store.InHand, ""
		case r.later:
			return store.Scheduled, "due later"
		}
		return store.Pending, h.behind(r.id)
	}
	switch {
	case r.id <= l.base:
		return store.Published, ""
	case h != nil && r.id <= max(h.at, h.joined):
		return store.Published, "" // done ahead of the lease
	case r.later:
		return store.Scheduled, "due later"
	}
	for _, p := range l.hand.Open {
		if p.From < r.id && r.id <= p.To {
			return store.InHand, ""
		}
	}
	return store.Pending, "new"
}

// entries says how rows stand with each destination.
func (v *view) entries(ctx context.Context, rows []row) ([][]store.Entry, error) {
	out := make([][]store.Entry, len(rows))
	for _, name := range v.names {
		st, err := v.standings(ctx, name, rows)
		if err != nil {
			return nil, err
		}
		for i := range rows {
			out[i] = append(out[i], v.entry(v.dests[name], &rows[i], st[i]))
		}
	}
	return out, nil
}

// List implements store.Inspector. FAILED, waiting and discarded events are
// found through the exceptions; the others by walking the table, a bounded
// stretch per call, so that Next may be set on a page that is not full.
func (s *Stream) List(ctx context.Context, p store.ListParams) (store.Page, error) {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	after, err := afterRow(p.AfterRow)
	if err != nil {
		return store.Page{}, err
	}
	v, err := s.look(ctx, p.Destination)
	if err != nil {
		return store.Page{}, fmt.Errorf("sqlitestore: list: %w", explain(err))
	}
	query, args, after, err := v.source(ctx, p, after)
	if err != nil {
		return store.Page{}, fmt.Errorf("sqlitestore: list: %w", explain(err))
	}
	page, err := walk(p, after, func(after int64) ([]int64, [][]store.Entry, error) {
		rows, err := bareRows(ctx, s.database, v.now, query, append([]any{0, after, walkStep}, args...)...)
		if err != nil {
			return nil, nil, err
		}
		ids := make([]int64, len(rows))
		for i := range rows {
			ids[i] = rows[i].id
		}
		entries, err := v.entries(ctx, rows)
		return ids, entries, err
	})
	if err != nil {
		return store.Page{}, fmt.Errorf("sqlitestore: list: %w", explain(err))
	}
	return page, nil
}

func afterRow(text string) (int64, error) {
	if text == "" {
		return -1 << 63, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, outrider.WithHint(fmt.Errorf("sqlitestore: list: %q is not a row id", text), "give the number that the page before ended with")
	}
	return n, nil
}

const (
	listAllSQL       = `select ` + bareColumns + ` from outbox_events e where e.id > ?2 order by e.id limit ?3`
	listKeySQL       = `select ` + bareColumns + ` from outbox_events e where coalesce(e.event_key, e.aggregate_id) = ?4 and e.id > ?2 order by e.id limit ?3`
	listExceptionSQL = `
		select ` + bareColumns + ` from (
			select x.id from outbox_leases l cross join outbox_exceptions x on x.destination = l.destination
			where (?4 = '' or l.destination = ?4) and x.state = ?5 and x.id > ?2
			  and x.id in (select y.id from outbox_exceptions y where y.destination = l.destination and y.state = ?5 and y.id > ?2 order by y.id limit ?3)
			group by x.id order by x.id limit ?3) found
		cross join outbox_events e on e.id = found.id order by e.id`
)

var exceptional = map[store.State]string{store.Waiting: "WAITING", store.Failed: "FAILED", store.Discarded: "DISCARDED"}

// source is what a list is made from.
func (v *view) source(ctx context.Context, p store.ListParams, after int64) (query string, args []any, from int64, err error) {
	if p.Key != "" {
		return listKeySQL, []any{p.Key}, after, nil
	}
	if state, ok := exceptional[p.State]; ok {
		return listExceptionSQL, []any{p.Destination, state}, after, nil
	}
	if p.State != store.Pending && p.State != store.Scheduled && p.State != store.InHand {
		return listAllSQL, nil, after, nil
	}
	// Nothing pending is below where the leases and held keys stand.
	var low int64
	err = v.s.row(ctx, []any{&low}, `
		select min(coalesce((select min(base) from outbox_leases), 0),
		           coalesce((select min(at) from outbox_held_keys), 9223372036854775807),
		           coalesce((select min(id) - 1 from outbox_exceptions where state in ('WAITING', 'SCHEDULED', 'PUBLISHING')), 9223372036854775807))`)
	return listAllSQL, nil, max(after, low), err
}

// walk pages through rows until it has what was asked for, or has seen enough.
// read gives the next few rows behind an id.
func walk(p store.ListParams, after int64, read func(after int64) ([]int64, [][]store.Entry, error)) (store.Page, error) {
	limit := min(max(p.Limit, 0), 1000)
	if limit == 0 {
		limit = 50
	}
	out := store.Page{Entries: []store.Entry{}}
	for walked := 0; walked < walkLimit; walked += walkStep {
		ids, all, err := read(after)
		if err != nil {
			return out, err
		}
		for i := range ids {
			mine := slices.DeleteFunc(all[i], func(e store.Entry) bool { return !selects(p, e) })
			if len(mine) > 0 && len(out.Entries) >= limit {
				out.Next = out.Entries[len(out.Entries)-1].Row
				return out, nil
			}
			out.Entries = append(out.Entries, mine...)
			after = ids[i]
		}
		if len(ids) < walkStep {
			return out, nil
		}
	}
	out.Next = strconv.FormatInt(after, 10)
	return out, nil
}

func bareRows(ctx context.Context, db *database, now int64, query string, args ...any) ([]row, error) {
	var rows []row
	sc := scanner{now: now}
	err := db.query(ctx, func(r *sql.Rows) (bool, error) {
		rows = append(rows, row{})
		return true, sc.scan(r, &rows[len(rows)-1])
	}, query, args...)
	return rows, err
}

// selects reports whether an entry is among those asked for.
func selects(p store.ListParams, e store.Entry) bool {
	return (p.Destination == "" || p.Destination == e.Destination) &&
		(p.State == store.Unchanged || p.State == e.State) &&
		(p.Key == "" || p.Key == e.Key) &&
		(p.Type == "" || p.Type == e.Type)
}

// Show implements store.Inspector.
func (s *Stream) Show(ctx context.Context, id string) ([]store.Detail, error) {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	v, err := s.look(ctx, "")
	if err != nil {
		return nil, fmt.Errorf("sqlitestore: show %s: %w", id, explain(err))
	}
	where, arg := byID(id)
	rows, err := bareRows(ctx, s.database, v.now, `select `+columns+` from outbox_events e where `+where+` order by e.id limit 100`, 1<<40, arg)
	if err != nil {
		return nil, fmt.Errorf("sqlitestore: show %s: %w", id, explain(err))
	}
	all, err := v.entries(ctx, rows)
	if err != nil {
		return nil, fmt.Errorf("sqlitestore: show %s: %w", id, explain(err))
	}
	out := make([]store.Detail, len(rows))
	for i := range rows {
		out[i] = store.Detail{Record: rows[i].rec, Entries: all[i]}
	}
	return out, nil
}

// byID is the condition for an event's id or a row's.
func byID(id string) (where string, arg any) {
	if n, err := strconv.ParseInt(id, 10, 64); err == nil {
		return `e.id = ?2`, n
	}
	if norm, err := outrider.ParseID(id); err == nil {
		id = norm
	}
	return `e.event_id = ?2`, id
}
