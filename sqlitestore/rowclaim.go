package sqlitestore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/outrider-dev/outrider/store"
)

// rowLease is what a session knows of a lease of a row store. What matters is
// in the rows; this is where it has read to, so that it does not read the same
// rows for ever, and which keys are not part of Fresh claims.
type rowLease struct {
	fence
	ses *rowSession

	mu     sync.Mutex
	read   int64 // rows that were waiting to be read are above this id
	open   []*rowClaim
	dues   map[*rowClaim]struct{} // Due claims in hand
	asides map[*rowClaim]struct{} // claims that were settled but for slow rows
	held   map[string]*rowKey
	claims int64    // number of the last Fresh claim
	forgot []string // tokens of claims that were marked and then forgotten

	seq   int64  // the last id given out, as seen by this lease
	id    int64  // a row that was read, and its event: with another one in its
	event string // place, ids were set back and have climbed up again
	fell  bool   // ids were set back: everything is to be read again
}

func newRowLease(ses *rowSession) *rowLease {
	return &rowLease{fence: fence{db: ses.st.database, table: "outbox_row_leases", member: ses.member}, ses: ses, held: map[string]*rowKey{},
		dues: map[*rowClaim]struct{}{}, asides: map[*rowClaim]struct{}{}}
}

// rowKey is a key that is held back. The fields are those of a stream's held
// key.
type rowKey struct {
	key            string
	lane           int
	head, at, last int64
	born, wait     int64
	inHand         bool
	served         int64 // when it was last part of a Due claim
}

// ready reports whether nothing is in hand that may hold records of the key.
// Called with mu held.
func (k *rowKey) ready(l *rowLease) bool {
	return !k.inHand && (len(l.open) == 0 || l.open[0].no > k.wait)
}

// rowClaim is the driver's part of a claim.
type rowClaim struct {
	l         *rowLease
	claim     *store.Claim
	token     string
	no        int64 // of a Fresh one
	before    int64
	rows      []rowState
	scheduled []rowState // not due yet, to be noted as such
	burst     []*rowKey
	drained   map[string]int64 // keys of a Due claim, with the id up to which nothing is left
	started   bool
	settled   bool
	left      int // slow rows, once it is settled
}

// rowState is a row with what a row store keeps in it.
type rowState struct {
	row
	state                      string
	attempts, starts, together int
	again                      bool
	failed                     int64
}

const rowColumns = columns + `, e.state, e.attempts, e.starts, e.together, e.again, coalesce(e.first_failed, 0)`

func (s *scanner) scanRow(rows *sql.Rows, out *rowState) error {
	err := s.scan(rows, &out.row, &out.state, &out.attempts, &out.starts, &out.together, &out.again, &out.failed)
	r := &out.rec
	r.Attempts, r.Starts = out.attempts, out.starts
	if out.failed != 0 {
		r.Waited = time.Duration(s.now-out.failed) * time.Microsecond
	}
	return err
}

const (
	rowFreshSQL = `select ` + rowColumns + ` from outbox_rows e
		where e.state = 'PENDING' and e.state <> 'PUBLISHED' and e.id > ?2 order by e.id`
	rowDueSQL = `select ` + rowColumns + ` from outbox_rows e
		where e.state in ('WAITING', 'SCHEDULED') and e.due_at <= ?2 and ((?3 >> e.lane) & 1) = 1
		  and not exists (select 1 from outbox_row_keys k where k.event_key = coalesce(e.event_key, e.aggregate_id) and k.head <> e.id)
		order by e.due_at limit ?4`
	rowNextSQL = `select due_at from outbox_rows
		where state in ('WAITING', 'SCHEDULED') and due_at > ? and ((? >> lane) & 1) = 1 order by due_at limit 1`
	rowKeySQL = `select ` + rowColumns + ` from outbox_rows e
		where coalesce(e.event_key, e.aggregate_id) = ?2 and e.id > ?3 and e.id <= ?4
		  and e.state not in ('PUBLISHED', 'DISCARDED') and not (e.state = 'FAILED' and e.free)
		order by e.id limit ?5`
	rowMarkSQL = `update outbox_rows as r set state = 'PUBLISHING', token = ?1, alone = ?2, lane = j.value ->> 1
		from json_each(?3) j where r.id = j.value ->> 0 and r.state in ('PENDING', 'WAITING', 'SCHEDULED')
		returning id`
)

// Claim implements store.Session.
func (ses *rowSession) Claim(ctx context.Context, p store.ClaimParams) (*store.Claim, error) {
	l, ok := ses.leases.get(p.Lease)
	if !ok {
		return nil, store.ErrFenced
	}
	if p.MaxRecords <= 0 || p.MaxBytes <= 0 {
		return nil, errors.New("sqlitestore: ClaimParams.MaxRecords and MaxBytes are needed")
	}
	if p.Kind == store.Due {
		return l.claimDue(ctx, p)
	}
	for range 16 {
		c, again, err := l.claimFresh(ctx, p)
		if err != nil || c != nil {
			return c, err
		}
		if !again {
			return &store.Claim{Lease: l.Lease, Kind: store.Fresh}, nil
		}
	}
	return &store.Claim{Lease: l.Lease, Kind: store.Fresh, More: true}, nil
}

func (l *rowLease) newClaim(kind store.Kind) *rowClaim {
	c := &rowClaim{l: l, claim: &store.Claim{Lease: l.Lease, Kind: kind}, token: fmt.Sprintf("%x", randomLock()), drained: map[string]int64{}}
	c.claim.Driver = c
	return c
}

// add puts a row into the claim.
func (c *rowClaim) add(r rowState) {
	c.rows = append(c.rows, r)
	c.claim.Records = append(c.claim.Records, r.rec)
	c.claim.Redelivery = c.claim.Redelivery || r.again || r.state == "WAITING"
}

// claimFresh reads pending rows.
func (l *rowLease) claimFresh(ctx context.Context, p store.ClaimParams) (*store.Claim, bool, error) {
	if err := l.lookBack(ctx); err != nil {
		return nil, false, err
	}
	full, err := l.full(ctx, p.MaxExceptions)
	l.mu.Lock()
	if l.fell && len(l.open) > 0 {
		l.mu.Unlock()
		return nil, false, nil // what is in hand would be read again
	}
	l.restart()
	from, busy := l.read, slices.ContainsFunc(l.open, func(c *rowClaim) bool { return c.claim.Exclusive })
	l.mu.Unlock()
	if err != nil || full || busy {
		return nil, false, err
	}
	rows, to, more, err := l.scan(ctx, p, from)
	if err != nil {
		return nil, false, fmt.Errorf("sqlitestore: read lease %d: %w", l.ID, explain(err))
	}
	c, note := l.choose(p, from, rows, to)
	if n := len(rows); n > 0 {
		l.mu.Lock()
		l.id, l.event = rows[n-1].id, rows[n-1].rec.ID
		l.mu.Unlock()
	}
	if note {
		if err := l.note(ctx, c.scheduled); err != nil {
			return nil, false, err
		}
	}
	if c == nil || len(c.rows) == 0 {
		return nil, more || c == nil, nil
	}
	c.claim.More = more
	return c.claim, false, nil
}

// lookBack sees whether ids were set back: then rows that nobody has read have
// ids that were passed.
func (l *rowLease) lookBack(ctx context.Context) error {
	l.mu.Lock()
	before, id, event := l.seq, l.id, l.event
	l.mu.Unlock()
	var seq int64
	var there sql.NullString
	err := l.db.row(ctx, []any{&seq, &there}, `
		select coalesce((select seq from sqlite_sequence where name = 'outbox_rows'), 0),
		       (select event_id from outbox_rows where id = ?)`, id)
	if err != nil {
		return fmt.Errorf("sqlitestore: look at the ids: %w", explain(err))
	}
	back := seq < before || there.Valid && event != "" && there.String != event
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seq = seq
	if back {
		l.fell, l.id, l.event = true, 0, ""
		l.db.cfg.Logger.Warn("the ids of outbox_rows were set back; all rows are read again", "from", max(before, id), "last id", seq)
	}
	return nil
}

// restart reads from the first row on, if that is to be: their states tell what
// is done. Called with mu held.
func (l *rowLease) restart() {
	if !l.fell {
		return
	}
	l.fell, l.read = false, 0
	for _, k := range l.held {
		k.at = 0
	}
}

// full reports whether there are as many exceptions as there may be: held keys
// and unordered rows that wait.
func (l *rowLease) full(ctx context.Context, most int) (bool, error) {
	if most == 0 {
		return false, nil
	}
	l.mu.Lock()
	n := len(l.held)
	l.mu.Unlock()
	if n >= most {
		return true, nil
	}
	var loose int
	err := l.db.row(ctx, []any{&loose}, `
		select count(*) from (select 1 from outbox_rows
			where state = 'WAITING' and state <> 'PUBLISHED' and event_key = '' and ((? >> lane) & 1) = 1 limit ?)`, mask(l.Lanes), most)
	return n+loose >= most, explain(err)
}

// scan reads pending rows until the claim is full. Those of held keys come
// without payload.
func (l *rowLease) scan(ctx context.Context, p store.ClaimParams, from int64) (rows []rowState, to int64, more bool, err error) {
	now, err := l.db.time(ctx, l.db.reader)
	if err != nil {
		return nil, 0, false, err
	}
	sc := scanner{now: now}
	share := map[string]int{}
	n, bytes, seen, limit, sort := 0, 0, 0, p.MaxRecords, 0
	to = from
	err = l.db.query(ctx, func(r *sql.Rows) (bool, error) {
		var w rowState
		if err := sc.scanRow(r, &w); err != nil {
			return false, err
		}
		seen++
		key := w.rec.Key
		l.mu.Lock()
		w.skip = key != "" && l.held[key] != nil
		l.mu.Unlock()
		if key != "" && p.KeyShare > 0 && !w.skip && !w.later {
			share[key]++
			w.skip = share[key] > p.KeyShare
		}
		switch {
		case !l.Lanes.Has(w.rec.Lane):
		case w.skip, w.later:
			w.rec.Payload = nil
			rows = append(rows, w)
		case n > 0 && (bytes+w.size > p.MaxBytes || n >= pieceLimit(limit, w.together) || w.sort() != sort):
			more = true
			return false, nil
		default:
			limit, sort = pieceLimit(limit, w.together), w.sort()
			n++
			bytes += w.size
			rows = append(rows, w)
		}
		to = w.id
		if seen >= 16*p.MaxRecords+1000 {
			more = true
			return false, nil
		}
		return true, nil
	}, rowFreshSQL, inline(p), from)
	if err != nil {
		return nil, 0, false, err
	}
	for i := range rows {
		if w := &rows[i]; !w.skip && !w.later {
			if ok, err := l.db.fetchLarge(ctx, "outbox_rows", &w.row); err != nil {
				return nil, 0, false, err
			} else if !ok {
				w.skip = true
			}
		}
	}
	return rows, to, more, nil
}

// sort keeps apart what is new, what was in hand when its owner gave it back,
// and what was at a death.
func (r *rowState) sort() int {
	switch {
	case r.together > 0:
		return 2
	case r.again:
		return 1
	}
	return 0
}

func pieceLimit(limit, together int) int {
	if together > 0 {
		return min(limit, together)
	}
	return limit
}

// choose makes a claim of what was read. nil: it has to be read again. note:
// there are delayed rows to be noted, with no claim to do it with.
func (l *rowLease) choose(p store.ClaimParams, from int64, rows []rowState, to int64) (c *rowClaim, note bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.read != from {
		return nil, false
	}
	c = l.newClaim(store.Fresh)
	c.no, c.before = l.claims+1, from
	count := map[string]int{}
	for _, r := range rows {
		key := r.rec.Key
		if k := l.held[key]; k != nil && key != "" {
			k.last = max(k.last, r.id)
			continue
		}
		if key != "" && p.KeyShare > 0 && !r.later {
			if count[key] == p.KeyShare {
				k := &rowKey{key: key, lane: r.rec.Lane, at: r.id - 1, last: r.id, born: c.no, wait: c.no}
				l.held[key] = k
				c.burst = append(c.burst, k)
				continue
			}
			count[key]++
		}
		if r.skip { // its key has become free since it was read without its payload
			to = r.id - 1
			break
		}
		if r.later {
			c.scheduled = append(c.scheduled, r)
		} else {
			c.add(r)
		}
	}
	l.read = to
	if len(c.rows) == 0 {
		return c, len(c.scheduled) > 0
	}
	c.claim.Exclusive = c.rows[0].together > 0
	c.claim.Alone = c.claim.Exclusive && len(c.rows) == 1
	l.claims++
	l.open = append(l.open, c)
	return c, false
}

// note writes which rows are not due yet.
func (l *rowLease) note(ctx context.Context, rows []rowState) error {
	l.writing.Lock()
	defer l.writing.Unlock()
	if err := l.resolve(ctx); err != nil {
		return err
	}
	return l.write(ctx, &written{apply: func() {}}, func(t *tx) error { return putScheduled(t, rows) })
}

func putScheduled(t *tx, rows []rowState) error {
	for i := range rows {
		_, err := t.exec(`update outbox_rows set state = 'SCHEDULED', due_at = available_at, lane = ? where id = ? and state = 'PENDING'`, rows[i].rec.Lane, rows[i].id)
		if err != nil {
			return err
		}
	}
	return nil
}

// mark puts rows in hand and says which of them it could.
func (c *rowClaim) mark(t *tx) (map[int64]bool, error) {
	pairs := make([][2]int64, len(c.rows))
	for i := range c.rows {
		pairs[i] = [2]int64{c.rows[i].id, int64(c.rows[i].rec.Lane)}
	}
	doc, err := json.Marshal(pairs)
	if err != nil {
		return nil, err
	}
	marked := make(map[int64]bool, len(pairs))
	return marked, t.rows(func(r *sql.Rows) error {
		var id int64
		err := r.Scan(&id)
		marked[id] = true
		return err
	}, rowMarkSQL, c.token, c.claim.Alone && c.claim.Kind == store.Fresh, string(doc))
}

// Forget implements store.Session.
func (ses *rowSession) Forget(c *store.Claim) {
	if d, ok := c.Driver.(*rowClaim); ok {
		d.forget()
	}
}

func (c *rowClaim) forget() {
	l := c.l
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.settled || c.claim.Kind == store.Fresh && c.started {
		return
	}
	if c.claim.Kind == store.Due {
		if len(c.rows) > 0 {
			l.forgot = append(l.forgot, c.token)
		}
		for key := range c.drained {
			if k := l.held[key]; k != nil {
				k.inHand = false
			}
		}
		c.settled = true
		delete(l.dues, c)
		return
	}
	i := slices.Index(l.open, c)
	if i < 0 {
		return
	}
	for _, g := range l.open[i:] {
		for _, k := range g.burst {
			if l.held[k.key] == k {
				delete(l.held, k.key)
			}
		}
		for _, r := range slices.Backward(g.rows) {
			if k := l.held[r.rec.Key]; k != nil && k.at >= r.id {
				k.at = r.id - 1
			}
		}
	}
	l.open, l.read = l.open[:i], c.before
}

// rests reports whether nothing is in hand.
func (l *rowLease) rests() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.open)+len(l.dues)+len(l.asides) == 0
}
