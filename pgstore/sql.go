package pgstore

import (
	"fmt"
	"strconv"
)

// statements are the store's queries in the form that fits the payload's type.
// $1 is always the lanes' mask in those that read events.
type statements struct {
	now    string // the current snapshot and the highest id visible in it
	fresh  string // rows of transactions not begun in base, for a small window
	late   string // rows of transactions open in base, for a small window
	first  string // the lowest id among a window's rows up to hi
	older  string // a window's rows up to hi
	newer  string // a window's rows above hi
	again  string // a page's rows once more
	key    string // a held key's successors
	due    string // due exceptions
	one    string // one row
	unseen string // rows of a window that are not among those seen
	given  string // the last id given out, and rows with ids beyond it, from the highest on
	behind string // rows that a position has left behind without their ids having been there
	large  string // payloads left out of the above for their size
}

// columns are what a record is made of; see scan. A payload beyond the limit
// ($2) is left out and fetched by itself, so that a page's memory has a bound
// that does not depend on what was written.
const columns = `e.id, e.event_id, e.aggregate_type, e.aggregate_id, e.event_type,
	coalesce(e.event_key, e.aggregate_id) as key, e.content_type, e.headers,
	e.created_at, e.lane, coalesce(e.available_at > clock_timestamp(), false) as later, e.available_at,
	coalesce(%[1]s, 0) as size,
	case when %[1]s <= $2 then e.payload end as payload`

const inLanes = `(($1::bigint >> e.lane::int) & 1) = 1`

// newStatements makes them for a payload of the given type.
func newStatements(payload string) statements {
	size := `octet_length(e.payload)`
	if payload != "bytea" {
		size = `octet_length(e.payload::text)`
	}
	cols := fmt.Sprintf(columns, size)
	return statements{
		now: `select pg_current_snapshot()::text, coalesce((select max(id) from outbox_events), 0)`,

		// A row that was written with the id of a transaction yet to come, as
		// one copied from elsewhere may be, would be new at every look.
		fresh: `select ` + cols + ` from outbox_events e
			where e.tx_id >= $3::xid8 and ` + inLanes + `
			  and pg_visible_in_snapshot(e.tx_id, pg_current_snapshot())
			order by e.tx_id, e.id limit $4`,

		// One transaction as a range: an equality would let the planner take
		// the primary key for the order by id, and walk all history there when
		// statistics say that transactions are large.
		// Those that are still open are passed over: what they have written
		// so far would be walked in vain at every look.
		late: `select e.* from unnest($3::text[]) as x(t) cross join lateral (
			select ` + cols + ` from outbox_events e
			where e.tx_id >= x.t::xid8 and e.tx_id <= x.t::xid8 and ` + inLanes + `
			order by e.tx_id, e.id limit $4) e
			where pg_visible_in_snapshot(x.t::xid8, pg_current_snapshot())`,

		first: `select coalesce(min(id), 0) from (
				(select e.id from outbox_events e
				where e.tx_id >= $1::xid8 and e.id + 0 <= $3
				order by e.tx_id, e.id limit 1000000000)
				union all
				select e.id from unnest($2::text[]) as x(t) cross join lateral (
					select id from outbox_events where tx_id >= x.t::xid8 and tx_id <= x.t::xid8
					order by tx_id, id limit 1) e
				where e.id <= $3) e`,

		// Ids at or below hi that were not seen yet: few, and found by their
		// transaction. "+ 0" keeps the planner off the primary key, which
		// would walk all history below hi.
		older: `with late as materialized (
				(select e.id from outbox_events e
				where e.tx_id >= $3::xid8 and e.id + 0 <= $5 and e.id + 0 > $6
				order by e.tx_id, e.id limit 1000000000)
				union
				select e.id from unnest($4::text[]) as x(t) cross join lateral (
					select id from outbox_events where tx_id >= x.t::xid8 and tx_id <= x.t::xid8
					order by tx_id, id limit 1000000000) e
				where e.id <= $5 and e.id > $6)
			select ` + cols + ` from late join outbox_events e using (id)
			where ` + inLanes + ` and pg_visible_in_snapshot(e.tx_id, $7::pg_snapshot)
			order by e.id limit $8`,

		newer: `select ` + cols + ` from outbox_events e
			where e.id > $3 and e.id <= $4 and ` + inLanes + `
			  and pg_visible_in_snapshot(e.tx_id, $5::pg_snapshot)
			order by e.id limit $6`,

		again: `select ` + cols + ` from outbox_events e
			where e.id > $3 and e.id <= $4 and ` + inLanes + `
			  and pg_visible_in_snapshot(e.tx_id, $5::pg_snapshot)
			  and not pg_visible_in_snapshot(e.tx_id, $6::pg_snapshot)
			order by e.id limit $7`,

		key: `select ` + cols + ` from outbox_events e
			where coalesce(e.event_key, e.aggregate_id) = $3 and e.id > $4 and ` + inLanes + `
			  and pg_visible_in_snapshot(e.tx_id, $5::pg_snapshot)
			  and not pg_visible_in_snapshot(e.tx_id, $6::pg_snapshot)
			order by coalesce(e.event_key, e.aggregate_id), e.id limit $7`,

		due: `select ` + cols + `, x.attempts, x.starts, x.together,
				coalesce((extract(epoch from clock_timestamp() - x.first_failed) * 1000000)::bigint, 0) as waited,
				x.id as xid, x.state <> 'SCHEDULED' as again
			from outbox_exceptions x left join outbox_events e on e.id = x.id
			where x.destination = $3 and (($1::bigint >> x.lane::int) & 1) = 1
			  and x.state in ('WAITING', 'SCHEDULED', 'PUBLISHING') and x.due_at <= clock_timestamp()
			  and x.id <> all($4::bigint[])
			  and not exists (select from outbox_held_keys h
				where h.destination = x.destination and h.event_key = x.event_key
				  and x.event_key <> '' and h.head <> x.id)
			  and x.event_key <> all($6::text[])
			order by x.due_at, x.id limit $5`,

		unseen: `with mine as materialized (
				(select e.id, e.tx_id, e.lane from outbox_events e
				where e.tx_id >= $2::xid8 and e.tx_id < $4::xid8
				order by e.tx_id, e.id limit 100000)
				union all
				select e.id, x.t::xid8, e.lane from unnest($3::text[]) as x(t) cross join lateral (
					select id, lane from outbox_events where tx_id >= x.t::xid8 and tx_id <= x.t::xid8
					order by tx_id, id limit 100000) e)
			select e.id from mine e
			where ` + inLanes + ` and pg_visible_in_snapshot(e.tx_id, $5::pg_snapshot)
			  and not exists (select from unnest($6::bigint[]) as seen(id) where seen.id = e.id)
			limit 100`,

		given: `with last as materialized (select case when is_called then last_value else 0 end as id from outbox_events_id_seq)
			select id, array(select e.id from outbox_events e where e.id > (select id from last) order by e.id desc limit ` +
			strconv.Itoa(sweepFar+1) + `) from last`,

		behind: `select e.id from (
				select id, tx_id, lane, coalesce(event_key, aggregate_id) as key
				from outbox_events where id > $2 order by id limit ` + strconv.Itoa(sweepRows) + `) e
			where ` + inLanes + ` and e.id <> all(coalesce($5::bigint[], '{}'))
			  and (pg_visible_in_snapshot(e.tx_id, $3::pg_snapshot) or e.tx_id >= pg_snapshot_xmax(pg_current_snapshot()))
			  and not exists (select from outbox_held_keys h where h.destination = $4 and h.event_key = e.key)
			limit 100`,

		one: `select ` + cols + ` from outbox_events e where e.id = $3 and ` + inLanes,

		large: `select id, payload from outbox_events where id = any($1)`,
	}
}
