package pgstore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

type commandTag = pgconn.CommandTag

// serverSaid reports whether an error is the server's own answer, so that the
// transaction is known to have failed.
func serverSaid(err error) bool {
	var pg *pgconn.PgError
	// An administrator's shutdown can come between commit and answer.
	return errors.As(err, &pg) && pg.Code[:2] != "57" && pg.Code[:2] != "08"
}

// Commit implements store.Session.
func (ses *session) Commit(ctx context.Context, p store.CommitParams) error {
	l := ses.lease(p.Lease)
	if l == nil {
		return store.ErrFenced
	}
	l.writing.Lock()
	defer l.writing.Unlock()
	if err := l.resolve(ctx); err != nil {
		return err
	}
	if l.last != nil && sameCommit(l.last.params, p) {
		return nil
	}
	return l.commit(ctx, p)
}

// sameCommit reports whether b is a repetition of a.
func sameCommit(a, b store.CommitParams) bool {
	if len(a.Settle)+len(a.Start) == 0 {
		return false
	}
	return slices.Equal(a.Start, b.Start) && slices.EqualFunc(a.Settle, b.Settle, func(x, y store.Settlement) bool {
		return x.Claim == y.Claim && slices.Equal(x.Outcomes, y.Outcomes)
	})
}

// commit writes with the lease's writing lock held.
func (l *lease) commit(ctx context.Context, p store.CommitParams) error {
	l.mu.Lock()
	pl := newPlan(l)
	err := pl.build(p)
	l.mu.Unlock()
	if err != nil {
		return err
	}
	what := &written{params: p, apply: pl.apply}
	first, others, err := pl.statements()
	if err != nil {
		return err
	}
	return l.write(ctx, what, first, others...)
}

// exception is a row of outbox_exceptions to be written.
type exception struct {
	rec      *outrider.Record
	state    string
	due      time.Duration // from now, unless at is set
	at       time.Time
	attempts int
	class    string
	message  string
	failure  bool // count the time as that of a failure
}

// journalRow notes what became of a claim.
type journalRow struct {
	Kind      string   `json:"kind"`
	From      int64    `json:"from"`
	To        int64    `json:"to"`
	Records   int      `json:"records"`
	Published int      `json:"published"`
	Receipts  []string `json:"receipts"`
}

// plan is what one commit changes: in the database by statements, in memory by
// apply, once it is known to be written.
type plan struct {
	l       *lease
	done    position
	open    []*fresh // what stays in hand
	started []*fresh
	settled []*fresh
	dues    []*due // settled for the first time

	put     map[int64]exception
	drop    []int64
	keys    map[string]*heldKey
	lows    map[string]int64
	dropKey []string
	passed  []int64
	journal []journalRow
}

func newPlan(l *lease) *plan {
	return &plan{l: l, done: l.done, open: l.open, put: map[int64]exception{}, keys: map[string]*heldKey{}, lows: map[string]int64{}}
}

// build works out the changes. Called with mu held.
func (p *plan) build(c store.CommitParams) error {
	for i := range c.Settle {
		s := &c.Settle[i]
		if len(s.Outcomes) != len(s.Claim.Records) {
			return fmt.Errorf("pgstore: settlement of a claim of %d records has %d outcomes", len(s.Claim.Records), len(s.Outcomes))
		}
		switch d := s.Claim.Driver.(type) {
		case *fresh:
			if d.settled {
				p.later(s, d.ids)
				continue
			}
			p.passEmpty()
			if len(p.open) == 0 || p.open[0] != d || !d.started {
				return errors.New("pgstore: fresh claims are settled in the order in which they were started")
			}
			p.settleFresh(d, s)
		case *due:
			if d.settled {
				p.later(s, d.ids())
				continue
			}
			p.settleDue(d, s)
		default:
			return errors.New("pgstore: a claim of another store")
		}
	}
	p.passEmpty()
	for _, c := range c.Start {
		if f, ok := c.Driver.(*fresh); ok {
			if !slices.Contains(p.open, f) {
				return errors.New("pgstore: a claim was started that is not handed out")
			}
			p.started = append(p.started, f)
		}
	}
	p.dropKey = append(p.dropKey, p.l.rejoined...)
	return nil
}

// passEmpty settles claims without records at the head of what is in hand.
func (p *plan) passEmpty() {
	for len(p.open) > 0 && len(p.open[0].records.Records) == 0 {
		p.settleFresh(p.open[0], &store.Settlement{})
	}
}

// key is a held key as the plan has it so far, to be changed; nil if it is not
// held.
func (p *plan) key(name string) *heldKey {
	if k, ok := p.keys[name]; ok {
		return k
	}
	if k := p.l.held[name]; k != nil && name != "" {
		copied := *k
		p.keys[name] = &copied
		return &copied
	}
	return nil
}

// peek is key to be looked at only.
func (p *plan) peek(name string) *heldKey {
	if k, ok := p.keys[name]; ok {
		return k
	}
	if name == "" {
		return nil
	}
	return p.l.held[name]
}

// settleFresh ends a page: what is not done becomes an exception, and its key is
// held back from there.
func (p *plan) settleFresh(f *fresh, s *store.Settlement) {
	p.open = p.open[1:]
	p.done = f.after
	p.settled = append(p.settled, f)
	p.passed = append(p.passed, f.passed...)
	published := 0
	for i := range s.Outcomes {
		o := &s.Outcomes[i]
		if o.State == store.Published {
			published++
			continue
		}
		rec, id := &f.records.Records[i], f.ids[i]
		if rec.Unordered {
			p.except(rec, id, o)
			continue
		}
		if k := p.peek(rec.Key); k != nil && (k.born < f.no || k.born == f.no && k.at < id) {
			continue // held since before, or behind the one that stopped it: it is read again by its key
		}
		if o.State == store.Failed && o.Free {
			p.except(rec, id, o)
			continue
		}
		p.hold(f, rec, id, o)
	}
	for i := range f.scheduled {
		r := &f.scheduled[i]
		if k := p.peek(r.rec.Key); k != nil && (k.born < f.no || k.born == f.no && k.at < r.id) {
			continue // the key's own reading comes to it
		}
		p.put[r.id] = exception{rec: &r.rec, state: "SCHEDULED", at: r.rec.AvailableAt}
	}
	for key, id := range f.skipped {
		if k := p.l.held[key]; k != nil && !(k.target != nil && k.target.text == f.page.Snap) {
			p.lows[key] = lowest(p.lows[key], id)
		}
	}
	for _, k := range f.burst {
		p.key(k.key)
	}
	if len(f.records.Records) > 0 {
		p.journal = append(p.journal, journalRow{"FRESH", f.page.From, f.page.To, len(s.Outcomes), published, s.Receipts})
	}
}

// hold takes a key out of its lease's way, from a record on.
func (p *plan) hold(f *fresh, rec *outrider.Record, id int64, o *store.Outcome) {
	k := p.key(rec.Key)
	if k == nil || k.born > f.no {
		// Not held, or held for a burst from a later page on only.
		base, err := parseSnapshot(f.page.Base)
		snap, err2 := parseSnapshot(f.page.Snap)
		if err != nil || err2 != nil {
			panic("pgstore: a page whose snapshots were read before cannot be read: " + f.page.Base + ", " + f.page.Snap)
		}
		k = &heldKey{key: rec.Key, lane: rec.Lane, base: base, target: &snap, born: f.no, wait: p.l.claims}
		p.keys[rec.Key] = k
		for _, g := range p.open {
			for i := range g.records.Records {
				if g.records.Records[i].Key == rec.Key {
					k.skip(g.ids[i])
					break // ascending
				}
			}
			if low, ok := g.skipped[rec.Key]; ok {
				k.skip(low)
			}
		}
	}
	k.at, k.near = id-1, false
	if o.State != store.Pending {
		k.head = id
		p.except(rec, id, o)
	}
}

// except writes an exception for a record.
func (p *plan) except(rec *outrider.Record, id int64, o *store.Outcome) {
	e := exception{rec: rec, attempts: o.Attempts, class: o.Class, message: cutText(o.Message)}
	switch o.State {
	case store.Waiting:
		e.state, e.due, e.failure = "WAITING", o.Due, o.Class != ""
	case store.Failed:
		e.state, e.failure = "FAILED", true
	case store.InHand:
		e.state, e.attempts = "PUBLISHING", rec.Attempts
	default: // Pending: not sent
		e.state, e.attempts = "WAITING", rec.Attempts
	}
	p.put[id] = e
}

// later ends slow records of a claim that was settled before.
func (p *plan) later(s *store.Settlement, ids []int64) {
	for i := range s.Outcomes {
		o := &s.Outcomes[i]
		if o.State == store.Unchanged || o.State == store.InHand {
			continue
		}
		p.end(&s.Claim.Records[i], ids[i], o)
	}
}

// end gives an exception in hand its outcome, and its key its way.
func (p *plan) end(rec *outrider.Record, id int64, o *store.Outcome) {
	done := o.State == store.Published || o.State == store.Failed && o.Free
	if o.State == store.Published {
		delete(p.put, id)
		p.drop = append(p.drop, id)
	} else {
		p.except(rec, id, o)
	}
	if rec.Unordered || !done {
		return
	}
	if k := p.key(rec.Key); k != nil && k.head == id {
		k.head, k.at = 0, id
	}
}

// settleDue ends a claim of exceptions and of held keys' successors.
func (p *plan) settleDue(d *due, s *store.Settlement) {
	p.dues = append(p.dues, d)
	published := 0
	for i := range d.singles {
		o := &s.Outcomes[i]
		if o.State == store.Published {
			published++
		}
		if o.State != store.InHand {
			p.end(&d.claim.Records[i], d.singles[i], o)
		}
	}
	for _, dr := range d.drains {
		published += p.settleDrain(d, dr, s)
	}
	if n := len(s.Outcomes); n > 0 {
		ids := d.ids()
		p.journal = append(p.journal, journalRow{"DUE", slices.Min(ids), slices.Max(ids), n, published, s.Receipts})
	}
}

// settleDrain moves a held key on by the successors that are done.
func (p *plan) settleDrain(d *due, dr *drain, s *store.Settlement) int {
	k := p.key(dr.key)
	if k == nil {
		return 0
	}
	k.inHand = 0
	if k.head != 0 {
		return 0 // its head is still to come, and nothing behind it was sent
	}
	published := 0
	k.starts = 0
	if k.suspects -= len(dr.ids); k.suspects <= 0 {
		k.suspects, k.together = 0, 0
	}
	stopped := false
	for j, id := range dr.ids {
		o := &s.Outcomes[dr.first+j]
		rec := &d.claim.Records[dr.first+j]
		if o.State == store.Published {
			published++
			k.at = id
			continue
		}
		if o.State == store.Failed && o.Free {
			p.except(rec, id, o)
			k.at = id
			continue
		}
		k.at, stopped = id-1, true
		if o.State != store.Pending {
			k.head = id
			p.except(rec, id, o)
		}
		break
	}
	for _, id := range dr.passed {
		if !stopped || id <= k.at {
			p.passed = append(p.passed, id)
		}
	}
	for i := range dr.scheduled {
		if r := &dr.scheduled[i]; !stopped || r.id <= k.at {
			p.put[r.id] = exception{rec: &r.rec, state: "SCHEDULED", at: r.rec.AvailableAt}
		}
	}
	switch {
	case stopped:
	case dr.all:
		k.base, k.target, k.at, k.near = *k.target, nil, 0, true
	default:
		k.at = dr.to
	}
	return published
}

// apply makes the changes in memory.
func (p *plan) apply() {
	l := p.l
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done = p.done
	l.open = l.open[len(p.settled):]
	for _, f := range p.settled {
		f.settled = true
	}
	for _, f := range p.started {
		f.started = true
	}
	for _, d := range p.dues {
		d.settled = true
	}
	for id, e := range p.put {
		was := l.inHand[id]
		switch e.state {
		case "PUBLISHING":
			if !was {
				l.exceptions++
			}
			l.inHand[id] = true
		case "WAITING":
			if !was {
				l.exceptions++
			}
			delete(l.inHand, id)
		default:
			if was {
				l.exceptions--
			}
			delete(l.inHand, id)
		}
	}
	for _, id := range p.drop {
		if l.inHand[id] {
			l.exceptions--
		}
		delete(l.inHand, id)
	}
	for _, id := range p.passed {
		delete(l.pass, id)
	}
	for key, k := range p.keys {
		if low := p.lows[key]; low != 0 {
			k.skip(low)
		}
		l.held[key] = k
	}
	for key, low := range p.lows {
		if _, ok := p.keys[key]; !ok && l.held[key] != nil {
			l.held[key].skip(low)
		}
	}
	l.rejoined = l.rejoined[:0]
}

// cutText keeps a message within store.MaxMessage, at a character's border, and
// free of what a text column cannot hold.
func cutText(s string) string {
	clean := make([]rune, 0, min(len(s), store.MaxMessage))
	size := 0
	for _, r := range s {
		if r == 0 {
			r = utf8.RuneError
		}
		if size += utf8.RuneLen(r); size > store.MaxMessage {
			break
		}
		clean = append(clean, r)
	}
	return string(clean)
}

// hand is what the lease has in hand after the commit.
func (p *plan) hand() hand {
	h := hand{Open: []page{}}
	var later []page
	for _, f := range p.open {
		switch {
		case f.started || slices.Contains(p.started, f):
			h.Open = append(h.Open, f.page)
		case f.records.Redelivery:
			later = append(later, f.page)
		}
	}
	h.Redo = append(later, p.l.redo...)
	return h
}

// statements are the plan's writes: the lease's row first, by which they are
// fenced.
func (p *plan) statements() (func(*pgx.Batch) *pgx.QueuedQuery, []func(*pgx.Batch), error) {
	l := p.l
	l.mu.Lock()
	doc, err := json.Marshal(p.hand())
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
	if len(p.lows) > 0 {
		others = append(others, p.putLows)
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
		where lease = $1 and epoch = $2 and writes = $3
		returning lease, destination, epoch, owner),
	j as (
		insert into outbox_journal (destination, lease, epoch, relay, kind, from_id, to_id, records, published, receipts)
		select l.destination, l.lease, l.epoch, l.owner, r.kind, r."from", r."to", r.records, r.published, r.receipts
		from l, json_to_recordset($12) as r(kind text, "from" bigint, "to" bigint, records int, published int, receipts json))
	select from l`

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

const putKeySQL = `
	insert into outbox_held_keys as h (destination, event_key, lane, head, base, target, at, low, in_hand, starts, together, suspects)
	select $4, $5, $6::smallint, nullif($7::bigint, 0), $8::pg_snapshot, $9::pg_snapshot, $10::bigint, nullif($11::bigint, 0),
		$12::int, $13::int, $14::int, $15::int
	where ` + fenced + `
	on conflict (destination, event_key) do update set head = excluded.head, base = excluded.base,
		target = excluded.target, at = excluded.at, low = excluded.low, in_hand = excluded.in_hand,
		starts = excluded.starts, together = excluded.together,
		suspects = excluded.suspects, alone = false, freed = false`

func (p *plan) putLows(b *pgx.Batch) {
	l := p.l
	keys, lows := make([]string, 0, len(p.lows)), make([]int64, 0, len(p.lows))
	for key, low := range p.lows {
		if _, ok := p.keys[key]; ok {
			continue // written with the key
		}
		if k := l.held[key]; k == nil || lowest(lowest(k.low, k.next), low) == lowest(k.low, k.next) {
			continue // no news
		}
		keys, lows = append(keys, key), append(lows, low)
	}
	if len(keys) == 0 {
		return
	}
	b.Queue(`
		update outbox_held_keys h set low = least(h.low, r.low)
		from unnest($5::text[], $6::bigint[]) as r(key, low)
		where `+fenced+` and h.destination = $4 and h.event_key = r.key`, l.ID, l.Epoch, l.writes+1, l.Destination, keys, lows)
}
