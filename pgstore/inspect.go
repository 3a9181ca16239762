package pgstore

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

var (
	_ store.Inspector = (*Store)(nil)
	_ store.Operator  = (*Store)(nil)
)

// countCap bounds what is counted one by one; beyond it a count is "at least".
const countCap = 10000

// inspectTimeout bounds every query made for people.
const inspectTimeout = 10 * time.Second

// pendingOf is the condition under which the event e is not done for the lease
// l: not visible in base, and in a window not passed yet. Exceptions come on
// top.
const pendingOf = `
	not pg_visible_in_snapshot(e.tx_id, l.base)
	and not (l.target is not null and e.id <= l.at and pg_visible_in_snapshot(e.tx_id, l.target))`

// openLease matches an event with the lease of its lane.
const openLease = `((l.lanes >> e.lane::int) & 1) = 1`

// querier is the pool or a transaction.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// view is what people look through.
type view struct {
	*Store
	q querier
}

func (s *Store) view() view { return view{s, s.pool} }

// look calls f within inspectTimeout. Where a pooler may stand in front, that is
// in one transaction, which has the settings to itself.
func (s *Store) look(ctx context.Context, f func(context.Context, view) error) error {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	if !s.cfg.Inspect {
		return f(ctx, s.view())
	}
	err := s.inTx(ctx, func(tx pgx.Tx) error { return f(ctx, view{s, tx}) })
	if errors.Is(err, pgx.ErrTxCommitRollback) {
		return nil // f has seen to the error, and there was nothing to be kept
	}
	return err
}

// Status implements store.Inspector.
func (s *Store) Status(ctx context.Context) (out store.Status, err error) {
	err = s.look(ctx, func(ctx context.Context, v view) error {
		out, err = v.status(ctx)
		return err
	})
	return out, err
}

func (v view) status(ctx context.Context) (store.Status, error) {
	out := store.Status{Destinations: []store.DestinationStatus{}, Relays: []store.RelayStatus{}}
	leases, err := v.leaseStatus(ctx)
	if err != nil {
		return out, err
	}
	rows, err := v.q.Query(ctx, `select distinct destination from outbox_leases order by 1`)
	if err != nil {
		return out, Explain(fmt.Errorf("pgstore: status: %w", err))
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return out, Explain(fmt.Errorf("pgstore: status: %w", err))
	}
	for _, name := range names {
		d, err := v.destinationStatus(ctx, name, store.Unheld(leases[name]))
		if err != nil {
			return out, fmt.Errorf("pgstore: status of %q: %w", name, err)
		}
		d.Leases = leases[name]
		out.Destinations = append(out.Destinations, d)
	}
	sortByAge(out.Destinations)
	rows, err = v.q.Query(ctx, `
		select relay, extract(epoch from clock_timestamp() - seen_at)::float8,
		       expires_at < clock_timestamp() or pg_try_advisory_xact_lock_shared(lock)
		from outbox_relays order by relay limit 1000`)
	if err != nil {
		return out, fmt.Errorf("pgstore: status: %w", err)
	}
	var r store.RelayStatus
	var seen float64
	_, err = pgx.ForEachRow(rows, []any{&r.Name, &seen, &r.Gone}, func() error {
		r.Seen = max(0, time.Duration(seen*float64(time.Second)))
		out.Relays = append(out.Relays, r)
		return nil
	})
	if err != nil {
		return out, fmt.Errorf("pgstore: status: %w", err)
	}
	if err := v.oldestTransaction(ctx, &out); err != nil {
		return out, fmt.Errorf("pgstore: status: %w", err)
	}
	if err := v.storage(ctx, &out); err != nil {
		return out, Explain(fmt.Errorf("pgstore: status: %w", err))
	}
	if err := v.checkSource(ctx); err != nil {
		out.Warnings = append(out.Warnings, strings.TrimPrefix(err.Error(), "pgstore: ")+"; "+outrider.Hint(err))
	}
	return out, nil
}

// sortByAge puts what has waited longest first.
func sortByAge(d []store.DestinationStatus) {
	for i := 1; i < len(d); i++ {
		for j := i; j > 0 && d[j].OldestPending > d[j-1].OldestPending; j-- {
			d[j], d[j-1] = d[j-1], d[j]
		}
	}
}

// leaseStatus looks who has which lanes. An owner whose lock is free is gone;
// the lock is tried as renew does. The time since a relay left, which has put an
// end to its leases at once, is not known.
func (v view) leaseStatus(ctx context.Context) (map[string][]store.LeaseStatus, error) {
	rows, err := v.q.Query(ctx, `
		select destination, lease, lanes, coalesce(owner, ''), epoch,
		       case when isfinite(expires_at) then extract(epoch from expires_at - clock_timestamp())::float8 else 0 end,
		       coalesce(pg_try_advisory_xact_lock_shared(owner_lock), false)
		from outbox_leases order by destination, lease`)
	if err != nil {
		return nil, Explain(fmt.Errorf("pgstore: status: %w", err))
	}
	out := map[string][]store.LeaseStatus{}
	var name string
	var l store.LeaseStatus
	var lanes int64
	var left float64
	_, err = pgx.ForEachRow(rows, []any{&name, &l.ID, &lanes, &l.Owner, &l.Epoch, &left, &l.Gone}, func() error {
		l.Lanes = store.LaneSet(lanes)
		l.Count = l.Lanes.Len()
		l.Expires = time.Duration(left * float64(time.Second))
		out[name] = append(out[name], l)
		return nil
	})
	return out, err
}

// destinationStatus counts up to a cap, from the oldest on, and by index alone.
// What is in hand in the lanes unheld is stuck.
func (v view) destinationStatus(ctx context.Context, name string, unheld store.LaneSet) (store.DestinationStatus, error) {
	d := store.DestinationStatus{Name: name}
	age := func(seconds *float64) time.Duration {
		if seconds == nil || *seconds < 0 {
			return 0
		}
		return time.Duration(*seconds * float64(time.Second))
	}
	var pending, waiting, scheduled, publishing, failed, blocked, held int64
	var inHand, stuckInHand, stuckApart int64
	var oldest, oldestWaiting, oldestFailed, oldestBlocked *float64
	err := v.q.QueryRow(ctx, `
		with fresh as (
			select p.created_at from outbox_leases l cross join lateral (
				(select e.id, e.created_at from outbox_events e
				 where e.tx_id >= pg_snapshot_xmax(l.base) and `+openLease+` and `+pendingOf+`
				   and (e.available_at is null or e.available_at <= clock_timestamp())
				 order by e.tx_id, e.id limit $2)
				union all
				(select e.id, e.created_at from pg_snapshot_xip(l.base) x(t) cross join lateral
					(select * from outbox_events where tx_id = x.t) e
				 where `+openLease+` and `+pendingOf+` limit $2)) p
			where l.destination = $1 limit $2)
		select (select count(*) from fresh),
		       (select extract(epoch from clock_timestamp() - min(created_at))::float8 from fresh),
		       coalesce((select sum((p->>'n')::bigint) from outbox_leases l, json_array_elements(l.open->'open') p where l.destination = $1), 0),
		       coalesce((select sum((p->>'n')::bigint) from outbox_leases l, json_array_elements(l.open->'open') p
				where l.destination = $1 and l.lanes & $3::bigint <> 0), 0)`,
		name, countCap+1, int64(unheld)).Scan(&pending, &oldest, &inHand, &stuckInHand)
	if err != nil {
		return d, err
	}
	err = v.q.QueryRow(ctx, `
		select
			(select count(*) from (select from outbox_exceptions where destination = $1 and state = 'WAITING' limit $2) x),
			(select count(*) from (select from outbox_exceptions where destination = $1 and state = 'SCHEDULED' limit $2) x),
			(select count(*) from (select from outbox_exceptions where destination = $1 and state = 'PUBLISHING' limit $2) x),
			(select count(*) from (select from outbox_exceptions where destination = $1 and state = 'PUBLISHING' and (($3::bigint >> lane::int) & 1) = 1 limit $2) x),
			(select count(*) from (select from outbox_exceptions where destination = $1 and state = 'FAILED' limit $2) x),
			(select count(*) from (select from outbox_held_keys where destination = $1 and head is not null limit $2) x),
			(select count(*) from (select from outbox_held_keys where destination = $1 limit $2) x),
			(select extract(epoch from clock_timestamp() - created_at)::float8 from outbox_exceptions
				where destination = $1 and state = 'WAITING' order by created_at limit 1),
			(select extract(epoch from clock_timestamp() - created_at)::float8 from outbox_exceptions
				where destination = $1 and state = 'FAILED' order by created_at limit 1),
			(select extract(epoch from clock_timestamp() - min(x.created_at))::float8
				from (select * from outbox_held_keys where destination = $1 and head is not null limit $2) h
				join outbox_exceptions x on x.destination = h.destination and x.id = h.head)`,
		name, countCap+1, int64(unheld)).Scan(&waiting, &scheduled, &publishing, &stuckApart, &failed, &blocked, &held, &oldestWaiting, &oldestFailed, &oldestBlocked)
	if err != nil {
		return d, err
	}
	heldPending, oldestHeld, err := v.heldPending(ctx, name)
	if err != nil {
		return d, err
	}
	d.Pending = capped(max(0, pending-inHand) + heldPending)
	d.Waiting, d.Scheduled, d.Failed, d.BlockedKeys = capped(waiting), capped(scheduled), capped(failed), capped(blocked)
	d.Publishing = capped(publishing + min(inHand, countCap+1))
	d.Stuck = capped(stuckApart + min(stuckInHand, countCap+1))
	d.OldestPending = max(age(oldest), age(oldestWaiting), age(oldestHeld))
	d.OldestFailed, d.OldestBlocked = age(oldestFailed), age(oldestBlocked)
	return d, nil
}

// heldPending counts successors of held keys that their leases have passed, up
// to a cap, and gives the age of the oldest.
func (v view) heldPending(ctx context.Context, name string) (int64, *float64, error) {
	var n int64
	var oldest *float64
	err := v.q.QueryRow(ctx, `
		select count(*), extract(epoch from clock_timestamp() - min(created_at))::float8 from (
			select h.head, p.created_at from outbox_held_keys h
			join outbox_leases l on l.destination = h.destination and ((l.lanes >> h.lane::int) & 1) = 1
			cross join lateral (
				select e.id, e.created_at from outbox_events e
				where coalesce(e.event_key, e.aggregate_id) = h.event_key and e.event_key is distinct from ''
				  and e.id > case when h.target is null then coalesce(h.low, 9223372036854775807) - 1 else least(h.at, coalesce(h.low, h.at + 1) - 1) end
				  and not pg_visible_in_snapshot(e.tx_id, h.base)
				  and not (h.target is not null and e.id <= h.at and pg_visible_in_snapshot(e.tx_id, h.target))
				  and not (`+pendingOf+`)
				  and not exists (select from outbox_exceptions x where x.destination = h.destination and x.id = e.id)
				order by coalesce(e.event_key, e.aggregate_id), e.id limit $2) p
			where h.destination = $1 limit $2) x`, name, countCap+1).Scan(&n, &oldest)
	return n, oldest, err
}

func capped(n int64) store.Count {
	if n > countCap {
		return store.Count{N: countCap, Estimate: true}
	}
	return store.Count{N: n}
}

const entrySQL = `
	select destination, id, event_id::text, event_type, aggregate_type, aggregate_id, event_key, state, reason,
		attempts, class, message, created_at, last_failed,
		greatest(coalesce(extract(epoch from due_at - clock_timestamp())::float8, 0), 0)
	from outbox_state`

// List implements store.Inspector. FAILED, waiting and such are found through
// the exceptions; the others by walking the table from AfterRow on, a bounded
// stretch per call, so that Next may be set on a page that is not full.
func (s *Store) List(ctx context.Context, p store.ListParams) (out store.Page, err error) {
	err = s.look(ctx, func(ctx context.Context, v view) error {
		out, err = v.list(ctx, p)
		return err
	})
	return out, err
}

func (v view) list(ctx context.Context, p store.ListParams) (store.Page, error) {
	if p.Limit <= 0 {
		p.Limit = 50
	}
	p.Limit = min(p.Limit, 1000)
	after := int64(0)
	if p.AfterRow != "" {
		var err error
		if after, err = strconv.ParseInt(p.AfterRow, 10, 64); err != nil {
			return store.Page{}, outrider.WithHint(fmt.Errorf("pgstore: list: %q is not a row id", p.AfterRow), "give the number that the page before ended with")
		}
	}
	ids, next, err := v.listIDs(ctx, p, after)
	if err != nil {
		return store.Page{}, Explain(fmt.Errorf("pgstore: list: %w", err))
	}
	entries, err := v.entries(ctx, ids, p)
	if err != nil {
		return store.Page{}, Explain(fmt.Errorf("pgstore: list: %w", err))
	}
	return store.Page{Entries: entries, Next: next}, nil
}

// stretch is how many rows one call of List walks over at most.
const stretch = 20000

// exceptional are the states that have rows in outbox_exceptions.
var exceptional = map[store.State][]string{
	store.Failed:    {"FAILED"},
	store.Discarded: {"DISCARDED"},
	store.Waiting:   {"WAITING"},
	store.Scheduled: {"SCHEDULED"},
}

// listIDs finds the rows to be shown, in order.
func (v view) listIDs(ctx context.Context, p store.ListParams, after int64) ([]int64, string, error) {
	if states, ok := exceptional[p.State]; ok {
		rows, err := v.q.Query(ctx, `
			select distinct id from outbox_exceptions
			where state = any($1) and ($2 = '' or destination = $2) and ($3 = '' or event_key = $3)
			  and ($4 = '' or event_type = $4) and id > $5
			order by id limit $6`, states, p.Destination, p.Key, p.Type, after, p.Limit)
		if err != nil {
			return nil, "", err
		}
		ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		return ids, nextOf(ids, p.Limit), err
	}
	if p.Key != "" {
		rows, err := v.q.Query(ctx, `
			select id from outbox_events
			where coalesce(event_key, aggregate_id) = $1 and id > $2
			order by coalesce(event_key, aggregate_id), id limit $3`, p.Key, after, p.Limit)
		if err != nil {
			return nil, "", err
		}
		ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		return ids, nextOf(ids, p.Limit), err
	}
	rows, err := v.q.Query(ctx, `
		select id, event_type from (select id, event_type from outbox_events where id > $1 order by id limit $2) e`,
		after, stretch)
	if err != nil {
		return nil, "", err
	}
	defer rows.Close()
	var ids []int64
	walked, last := 0, int64(0)
	for rows.Next() && len(ids) < p.Limit {
		var id int64
		var typ string
		if err := rows.Scan(&id, &typ); err != nil {
			return nil, "", err
		}
		walked, last = walked+1, id
		if p.Type == "" || p.Type == typ {
			ids = append(ids, id)
		}
	}
	rows.Close()
	if len(ids) < p.Limit && walked < stretch {
		return ids, "", rows.Err()
	}
	return ids, itoa(last), rows.Err()
}

func nextOf(ids []int64, limit int) string {
	if len(ids) < limit {
		return ""
	}
	return itoa(ids[len(ids)-1])
}

// entries says how rows stand with each destination, without those that the
// parameters leave out.
func (v view) entries(ctx context.Context, ids []int64, p store.ListParams) ([]store.Entry, error) {
	rows, err := v.q.Query(ctx, entrySQL+` where id = any($1) and ($2 = '' or destination = $2)
		order by id, destination`, ids, p.Destination)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	out := []store.Entry{}
	for rows.Next() {
		var e store.Entry
		var id int64
		var state string
		var failed *time.Time
		var due float64
		if err := rows.Scan(&e.Destination, &id, &e.EventID, &e.Type, &e.AggregateType, &e.AggregateID, &e.Key, &state,
			&e.Reason, &e.Attempts, &e.Class, &e.Message, &e.CreatedAt, &failed, &due); err != nil {
			return nil, err
		}
		e.Row, e.Unordered = itoa(id), e.Key == ""
		if failed != nil {
			e.LastFailure = *failed
		}
		e.DueIn = time.Duration(due * float64(time.Second))
		e.State = stateOf(state, e.Reason)
		if p.State == store.Unchanged || p.State == e.State {
			out = append(out, e)
		}
	}
	return out, rows.Err()
}

// stateOf turns the view's words into a state.
func stateOf(word, reason string) store.State {
	switch {
	case word == "PENDING" && reason == "retry":
		return store.Waiting
	case word == "PENDING" && reason == "due later":
		return store.Scheduled
	case word == "PUBLISHING":
		return store.InHand
	case word == "FAILED":
		return store.Failed
	case word == "DISCARDED":
		return store.Discarded
	case word == "PUBLISHED":
		return store.Published
	}
	return store.Pending
}

// Show implements store.Inspector.
func (s *Store) Show(ctx context.Context, id string) (out []store.Detail, err error) {
	err = s.look(ctx, func(ctx context.Context, v view) error {
		out, err = v.show(ctx, id)
		return err
	})
	return out, err
}

func (v view) show(ctx context.Context, id string) ([]store.Detail, error) {
	ids, err := v.find(ctx, id)
	if err != nil {
		return nil, err
	}
	out := make([]store.Detail, 0, len(ids))
	r := newReader()
	for _, row := range ids {
		res, err := v.q.Query(ctx, v.sql.one, int64(-1), 1<<30, row)
		if err != nil {
			return nil, fmt.Errorf("pgstore: show %s: %w", id, err)
		}
		var found batch
		if err := r.rows(res, &found, math.MaxInt, 1); err != nil {
			return nil, fmt.Errorf("pgstore: show %s: %w", id, err)
		}
		if len(found.recs) == 0 {
			continue // gone meanwhile
		}
		d := store.Detail{Record: found.recs[0]}
		if d.Entries, err = v.entries(ctx, []int64{row}, store.ListParams{}); err != nil {
			return nil, fmt.Errorf("pgstore: show %s: %w", id, err)
		}
		out = append(out, d)
	}
	return out, nil
}

// find turns an event's or a row's id into row ids.
func (v view) find(ctx context.Context, id string) ([]int64, error) {
	var where string
	var arg any
	if n, err := strconv.ParseInt(id, 10, 64); err == nil {
		where, arg = `id = $1`, n
	} else if event, err := outrider.ParseID(id); err == nil {
		where, arg = `event_id = $1::text::uuid`, event
	} else {
		return nil, nil // neither a UUID nor a number: nothing has that id
	}
	rows, err := v.q.Query(ctx, `select id from outbox_events where `+where+` order by id limit 100`, arg)
	if err == nil {
		var ids []int64
		if ids, err = pgx.CollectRows(rows, pgx.RowTo[int64]); err == nil {
			return ids, nil
		}
	}
	return nil, Explain(fmt.Errorf("pgstore: find %s: %w", id, err))
}

// Retry implements store.Operator.
func (s *Store) Retry(ctx context.Context, t store.Target) (int, error) {
	return s.act(ctx, t, `
		update outbox_exceptions set state = 'WAITING', due_at = clock_timestamp(), starts = 0,
			attempts = case when state = 'FAILED' then 0 else attempts end,
			first_failed = case when state = 'FAILED' then null else first_failed end
		where destination = $1 and id = any($2) and state = any($3)`)
}

// Skip implements store.Operator. The key is freed by noting where its own
// reading goes on; the lease's owner takes it up from there.
func (s *Store) Skip(ctx context.Context, t store.Target) (int, error) {
	return s.act(ctx, t, `
		with gone as (
			update outbox_exceptions set state = 'DISCARDED', due_at = null
			where destination = $1 and id = any($2) and state = any($3)
			returning id, event_key),
		freed as (
			update outbox_held_keys h set head = null, at = gone.id, freed = true from gone
			where h.destination = $1 and h.event_key = gone.event_key and h.head = gone.id)
		select id from gone`)
}

// act runs an operator's statement on what the target means, per destination:
// of an id what has failed or waits, of a key the head, if that has failed.
func (s *Store) act(ctx context.Context, t store.Target, sql string) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	if (t.ID == "") == (t.Key == "") {
		return 0, errors.New("pgstore: an event's id or a key is needed, one of them")
	}
	var ids []int64
	states := []string{"FAILED"}
	if t.ID != "" {
		states = append(states, "WAITING")
		err := s.look(ctx, func(ctx context.Context, v view) (err error) {
			ids, err = v.find(ctx, t.ID)
			return err
		})
		if err != nil {
			return 0, err
		}
	}
	n := 0
	err := s.inTx(ctx, func(tx pgx.Tx) error {
		n = 0
		rows, err := tx.Query(ctx, `
			select x.destination, array_agg(x.id) from outbox_exceptions x
			where ($1 = '' or x.destination = $1)
			  and (x.id = any($2) or x.id in (select head from outbox_held_keys h
			       where h.destination = x.destination and h.event_key = $3 and $3 <> ''))
			group by 1 order by 1`, t.Destination, ids, t.Key)
		if err != nil {
			return err
		}
		type target struct {
			Destination string
			IDs         []int64
		}
		targets, err := pgx.CollectRows(rows, pgx.RowToStructByPos[target])
		if err != nil {
			return err
		}
		for _, x := range targets {
			tag, err := tx.Exec(ctx, sql, x.Destination, x.IDs, states)
			if err != nil {
				return err
			}
			n += int(tag.RowsAffected())
		}
		return nil
	})
	if err != nil {
		return 0, Explain(fmt.Errorf("pgstore: %w", err))
	}
	return n, nil
}
