package pgstore

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// hand is what the lease has in hand after the commit. Pages without records
// are never started; one in front of a page that is counts as well, or what it
// passes over, held back or delayed, would be lost at a death.
func (p *plan) hand() hand {
	h := hand{Open: []page{}}
	last := -1
	for i, f := range p.open {
		if f.started || slices.Contains(p.started, f) {
			last = i
		}
	}
	var later []page
	for i, f := range p.open {
		switch {
		case i <= last:
			h.Open = append(h.Open, f.page)
		case f.records.Redelivery:
			later = append(later, f.page)
		}
	}
	h.Redo = append(later, p.redo...)
	return h
}

// statements are the plan's writes: the lease's row first, by which they are
// fenced.
func (p *plan) statements() (func(*pgx.Batch) *pgx.QueuedQuery, []func(*pgx.Batch), error) {
	l := p.l
	l.mu.Lock()
	doc, err := json.Marshal(p.hand())
	lowered := p.lowered()
	l.mu.Unlock()
	if err != nil {
		return nil, nil, err
	}
	var target *string
	if p.done.target != nil {
		target = &p.done.target.text
	}
	if p.journal == nil {
		p.journal = []journalRow{}
	}
	for i := range p.journal {
		if p.journal[i].Receipts == nil {
			p.journal[i].Receipts = []string{}
		}
	}
	journal, err := json.Marshal(p.journal)
	if err != nil {
		return nil, nil, err
	}
	first := func(b *pgx.Batch) *pgx.QueuedQuery {
		return b.Queue(leaseSQL, l.ID, l.Epoch, l.writes, p.done.base.text, target, p.done.at, p.done.top, p.done.hi,
			p.done.page, doc, l.ses.params.TTL.Microseconds(), journal)
	}
	var others []func(*pgx.Batch)
	if len(p.put) > 0 {
		others = append(others, p.putExceptions)
	}
	if len(p.drop) > 0 {
		others = append(others, func(b *pgx.Batch) {
			b.Queue(`delete from outbox_exceptions where `+fenced+` and destination = $4 and id = any($5)`,
				l.ID, l.Epoch, l.writes+1, l.Destination, p.drop)
		})
	}
	if len(p.passed) > 0 {
		others = append(others, func(b *pgx.Batch) {
			b.Queue(`delete from outbox_exceptions where `+fenced+` and destination = $4 and id = any($5) and pass and state = 'PUBLISHED'`,
				l.ID, l.Epoch, l.writes+1, l.Destination, p.passed)
			b.Queue(`update outbox_exceptions set pass = false where `+fenced+` and destination = $4 and id = any($5) and pass`,
				l.ID, l.Epoch, l.writes+1, l.Destination, p.passed)
		})
	}
	if len(p.dropKey) > 0 {
		others = append(others, func(b *pgx.Batch) {
			b.Queue(`delete from outbox_held_keys where `+fenced+` and destination = $4 and event_key = any($5)`,
				l.ID, l.Epoch, l.writes+1, l.Destination, p.dropKey)
		})
	}
	if len(p.keys) > 0 {
		others = append(others, p.putKeys)
	}
	if len(lowered.keys) > 0 {
		others = append(others, func(b *pgx.Batch) {
			b.Queue(`
				update outbox_held_keys h set low = least(h.low, r.low)
				from unnest($5::text[], $6::bigint[]) as r(key, low)
				where `+fenced+` and h.destination = $4 and h.event_key = r.key`,
				l.ID, l.Epoch, l.writes+1, l.Destination, lowered.keys, lowered.lows)
		})
	}
	if p.alone != nil {
		others = append(others, p.putAlone)
	}
	return first, others, nil
}

// leaseSQL writes where the lease stands, and its journal, in one statement; it
// reports the number of leases written.
const leaseSQL = `
	with l as (
		update outbox_leases set writes = writes + 1, base = $4::pg_snapshot, target = $5::pg_snapshot,
			at = $6, top = $7, hi = $8, page = greatest(page, $9), open = $10,
			expires_at = clock_timestamp() + $11 * interval '1 microsecond'
		where lease = $1 and epoch = $2 and writes = $3 and gen = $3::bigint >> 5
		returning lease, destination, epoch, owner),
	j as (
		insert into outbox_journal (destination, lease, epoch, relay, kind, from_id, to_id, records, published, receipts)
		select l.destination, l.lease, l.epoch, l.owner, r.kind, r."from", r."to", r.records, r.published, r.receipts
		from l, json_to_recordset($12) as r(kind text, "from" bigint, "to" bigint, records int, published int, receipts json))
	select from l`

// putAlone notes that a death from now on counts against what is in hand. It
// does not while a claim is only read, however long that takes.
func (p *plan) putAlone(b *pgx.Batch) {
	l := p.l
	for _, id := range p.alone.singles {
		b.Queue(`update outbox_exceptions set alone = true where `+fenced+` and destination = $4 and id = $5`,
			l.ID, l.Epoch, l.writes+1, l.Destination, id)
	}
	for _, dr := range p.alone.drains {
		b.Queue(`update outbox_held_keys set alone = true where `+fenced+` and destination = $4 and event_key = $5`,
			l.ID, l.Epoch, l.writes+1, l.Destination, dr.key)
	}
}

func (p *plan) putExceptions(b *pgx.Batch) {
	l := p.l
	n := len(p.put)
	ids, lanes, attempts := make([]int64, 0, n), make([]int32, 0, n), make([]int32, 0, n)
	keys, events, types, states := make([]string, 0, n), make([]string, 0, n), make([]string, 0, n), make([]string, 0, n)
	classes, messages := make([]string, 0, n), make([]string, 0, n)
	dues := make([]int64, 0, n)
	ats := make([]*time.Time, 0, n)
	created, failures := make([]time.Time, 0, n), make([]bool, 0, n)
	for id, e := range p.put {
		ids, lanes, attempts = append(ids, id), append(lanes, int32(e.rec.Lane)), append(attempts, int32(e.attempts))
		keys, events, types = append(keys, e.rec.Key), append(events, e.rec.ID), append(types, e.rec.Type)
		states, classes, messages = append(states, e.state), append(classes, e.class), append(messages, e.message)
		dues = append(dues, e.due.Microseconds())
		var at *time.Time
		if !e.at.IsZero() {
			at = &e.at
		}
		ats = append(ats, at)
		created, failures = append(created, e.rec.CreatedAt), append(failures, e.failure)
	}
	b.Queue(`
		insert into outbox_exceptions as x (destination, id, lane, event_key, event_id, event_type, state, due_at,
			attempts, class, message, created_at, first_failed, last_failed)
		select $17, r.id, r.lane, r.key, r.event::uuid, r.type, r.state,
			coalesce(r.at, clock_timestamp() + r.due * interval '1 microsecond'),
			r.attempts, r.class, r.message, r.created,
			case when r.failure then clock_timestamp() end, case when r.failure then clock_timestamp() end
		from unnest($4::bigint[], $5::int[], $6::text[], $7::text[], $8::text[], $9::text[], $10::timestamptz[],
			$11::bigint[], $12::int[], $13::text[], $14::text[], $15::timestamptz[], $16::bool[])
			as r(id, lane, key, event, type, state, at, due, attempts, class, message, created, failure)
		where `+fenced+`
		on conflict (destination, id) do update set state = excluded.state, due_at = excluded.due_at,
			attempts = excluded.attempts, together = 0, alone = false,
			class = case when excluded.last_failed is null then x.class else excluded.class end,
			message = case when excluded.last_failed is null then x.message else excluded.message end,
			first_failed = coalesce(x.first_failed, excluded.first_failed),
			last_failed = coalesce(excluded.last_failed, x.last_failed)`,
		l.ID, l.Epoch, l.writes+1, ids, lanes, keys, events, types, states, ats, dues, attempts,
		classes, messages, created, failures, l.Destination)
}

func (p *plan) putKeys(b *pgx.Batch) {
	l := p.l
	for _, k := range p.keys {
		var target *string
		if k.target != nil {
			target = &k.target.text
		}
		low := lowest(lowest(k.low, k.next), p.lows[k.key])
		b.Queue(putKeySQL, l.ID, l.Epoch, l.writes+1, l.Destination, k.key, k.lane, k.head, k.base.text, target, k.at, low,
			k.inHand, k.starts, k.together, k.suspects)
	}
}

// putKeySQL writes a held key. An operator may have skipped its head since that
// was read: then the key stays free from there.
const putKeySQL = `
	insert into outbox_held_keys as h (destination, event_key, lane, head, base, target, at, low, in_hand, starts, together, suspects, freed)
	select $4, $5, $6::smallint, case when x.stands then nullif($7::bigint, 0) end, $8::pg_snapshot, $9::pg_snapshot,
		case when x.stands then $10::bigint else greatest($10::bigint, $7::bigint) end, nullif($11::bigint, 0),
		$12::int, $13::int, $14::int, $15::int, not x.stands
	from (select $7::bigint = 0 or exists (select from outbox_exceptions where destination = $4 and id = $7::bigint
		and state in ('WAITING', 'PUBLISHING', 'FAILED')) as stands) x
	where ` + fenced + `
	on conflict (destination, event_key) do update set head = excluded.head, base = excluded.base,
		target = excluded.target, at = excluded.at, low = excluded.low, in_hand = excluded.in_hand,
		starts = excluded.starts, together = excluded.together,
		suspects = excluded.suspects, alone = false, freed = excluded.freed`

// lowered are keys whose lowest successor is news, with its id. Called with mu
// held.
func (p *plan) lowered() (out struct {
	keys []string
	lows []int64
}) {
	for key, low := range p.lows {
		if _, ok := p.keys[key]; ok {
			continue // written with the key
		}
		if k := p.l.held[key]; k == nil || lowest(lowest(k.low, k.next), low) == lowest(k.low, k.next) {
			continue
		}
		out.keys, out.lows = append(out.keys, key), append(out.lows, low)
	}
	return out
}
