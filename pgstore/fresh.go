package pgstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider/store"
)

// Claim implements store.Session.
func (ses *session) Claim(ctx context.Context, p store.ClaimParams) (_ *store.Claim, err error) {
	defer ses.st.explain(&err)
	l := ses.lease(p.Lease)
	if l == nil {
		return nil, store.ErrFenced
	}
	if p.MaxRecords <= 0 || p.MaxBytes <= 0 {
		return nil, fmt.Errorf("pgstore: ClaimParams.MaxRecords and MaxBytes are needed")
	}
	if err := l.whereabouts(ctx); err != nil {
		return nil, err
	}
	for range changes {
		c, err := l.claim(ctx, p)
		if !errors.Is(err, errSetChanged) {
			return c, err
		}
	}
	return nil, errSetChanged
}

func (l *lease) claim(ctx context.Context, p store.ClaimParams) (*store.Claim, error) {
	if p.Kind == store.Due {
		return l.claimDue(ctx, p)
	}
	// Pages of which nothing is left to be sent are settled at once and the
	// next one is read; the bound keeps a call short when there are many.
	for range 16 {
		c, err := l.claimFresh(ctx, p)
		if err != nil || c == nil || len(c.Records) > 0 {
			if c == nil {
				c = &store.Claim{Lease: l.Lease}
			}
			return c, err
		}
		if err := l.flush(ctx); err != nil {
			return nil, err
		}
	}
	return &store.Claim{Lease: l.Lease, More: true}, nil
}

// flush settles claims without records that nothing else is in hand before.
func (l *lease) flush(ctx context.Context) error {
	l.writing.Lock()
	defer l.writing.Unlock()
	if err := l.resolve(ctx); err != nil {
		return err
	}
	l.mu.Lock()
	ready := len(l.open) > 0 && len(l.open[0].records.Records) == 0
	l.mu.Unlock()
	if !ready {
		return nil
	}
	return l.commit(ctx, store.CommitParams{Lease: l.Lease})
}

// clear deletes the rows of keys that have gone back to the lease. The next
// commit does; at rest there may be none for long, and each look for freed keys
// would come to all of them.
func (l *lease) clear(ctx context.Context) error {
	l.writing.Lock()
	defer l.writing.Unlock()
	if err := l.resolve(ctx); err != nil {
		return err
	}
	return l.commit(ctx, store.CommitParams{Lease: l.Lease})
}

// claimFresh reads the next page. nil: there is none now. A claim without
// records covers a page all of which is held back or scheduled.
func (l *lease) claimFresh(ctx context.Context, p store.ClaimParams) (*store.Claim, error) {
	l.mu.Lock()
	empty := len(l.open) > 0 && len(l.open[0].records.Records) == 0
	l.mu.Unlock()
	if empty {
		if err := l.flush(ctx); err != nil {
			return nil, err
		}
	}
	if full, err := l.full(ctx, p.MaxExceptions); full || err != nil {
		return nil, err
	}
	l.mu.Lock()
	if len(l.redo) > 0 {
		again := l.redo[0]
		busy := len(l.open) > 0
		l.mu.Unlock()
		if busy && again.Limit > 0 {
			return nil, nil // one piece at a time
		}
		return l.readAgain(ctx, p, again)
	}
	if l.exclusive() {
		l.mu.Unlock()
		return nil, nil
	}
	l.mu.Unlock()
	if wait, err := l.rejoin(ctx); wait || err != nil {
		return nil, err
	}
	stop := l.stopAt()
	l.mu.Lock()
	pos, burdened, gone := l.read, l.burdened(p.MaxExceptions), len(l.rejoined)
	l.mu.Unlock()
	if gone >= freedAtOnce {
		if err := l.clear(ctx); err != nil {
			return nil, err
		}
	}
	if burdened {
		return nil, nil
	}
	if pos.target == nil && stop != nil && pos.base.text == stop.text {
		return nil, nil
	}
	if pos.target == nil {
		return l.openWindow(ctx, p, pos, stop)
	}
	return l.readWindow(ctx, p, pos)
}

// full reports whether so many exceptions wait or are in hand that nothing new
// is read. Operators may have ended some, so that they are counted anew, but not
// at every look.
func (l *lease) full(ctx context.Context, limit int) (bool, error) {
	l.mu.Lock()
	n, since := len(l.waiting), time.Since(l.counted)
	l.mu.Unlock()
	if limit == 0 || n < limit {
		return false, nil
	}
	if since < countEvery {
		return true, nil
	}
	l.writing.Lock()
	defer l.writing.Unlock()
	if err := l.resolve(ctx); err != nil {
		return true, err
	}
	rows, err := l.ses.st.pool.Query(ctx, waitingSQL, mask(l.Lanes), l.Destination, limit)
	if err != nil {
		return true, fmt.Errorf("pgstore: count exceptions of lease %d: %w", l.ID, err)
	}
	found, err := collectLaned(rows)
	if err != nil {
		return true, fmt.Errorf("pgstore: count exceptions of lease %d: %w", l.ID, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counted = time.Now() //nolint:forbidigo // monotonic, of this process alone: how often to count
	if len(found) >= limit {
		return true, nil // there may be more of them
	}
	l.waiting = found
	return false, nil
}

const countEvery = time.Second

// waitingSQL finds the exceptions of a lease that wait or are in hand, up to a
// number of each.
const waitingSQL = `
	(select id, lane from outbox_exceptions
	where destination = $2 and state = 'WAITING' and (($1::bigint >> lane::int) & 1) = 1
	order by created_at limit $3::bigint)
	union all
	(select id, lane from outbox_exceptions
	where destination = $2 and state = 'PUBLISHING' and (($1::bigint >> lane::int) & 1) = 1
	order by created_at limit $3::bigint)`

// burdened reports whether so many keys are held that nothing new is read. It
// bounds memory, and is judged when those that can have gone back to the lease.
// Drained ones do not count: where a window is being read they go back at its
// end, and the lease has to come to it. Called with mu held.
func (l *lease) burdened(limit int) bool {
	if limit == 0 || len(l.held) < heldPer*limit {
		return false
	}
	n := 0
	for _, k := range l.held {
		if !k.drained(l) {
			n++
		}
	}
	return n >= heldPer*limit
}

const heldPer = 4 // held keys for each of ClaimParams.MaxExceptions

// exclusive reports whether a piece of what was in hand at a death is in hand.
// Called with mu held.
func (l *lease) exclusive() bool {
	for _, f := range l.open {
		if f.records.Exclusive {
			return true
		}
	}
	return false
}

// inline is up to what size payloads are read along with their rows: what one of
// MaxRecords may have on average, but never less than 4 KiB.
func inline(p store.ClaimParams) int { return max(p.MaxBytes/p.MaxRecords, 4<<10) }

// openWindow takes a snapshot and reads what came since base. What fits a page
// is the window; else the window is set and its first page read.
func (l *lease) openWindow(ctx context.Context, p store.ClaimParams, pos position, stop *snapshot) (*store.Claim, error) {
	if stop != nil {
		pos.target, pos.top = stop, 0
		var err error
		if pos.top, err = l.highest(ctx); err != nil {
			return nil, err
		}
		return l.readWindow(ctx, p, pos)
	}
	limit := p.MaxRecords + 1
	var text string
	var top int64
	st := l.ses.st
	found := st.takeBatch()
	err := l.readOnly(ctx,
		func(b *pgx.Batch) {
			b.Queue(st.sql.now).QueryRow(func(r pgx.Row) error { return r.Scan(&text, &top) })
		},
		func(b *pgx.Batch) {
			b.Queue(st.sql.fresh, mask(l.Lanes), inline(p), pos.base.xmax, limit).
				Query(func(r pgx.Rows) error { return l.reader.rows(r, found, p.MaxBytes, l.size) })
		},
		func(b *pgx.Batch) {
			if len(pos.base.xip) > 0 {
				b.Queue(st.sql.late, mask(l.Lanes), inline(p), pos.base.xipText(), limit).
					Query(func(r pgx.Rows) error { return l.reader.rows(r, found, p.MaxBytes, l.size) })
			}
		})
	if err != nil {
		return nil, fmt.Errorf("pgstore: read lease %d: %w", l.ID, err)
	}
	snap, err := parseSnapshot(text)
	if err != nil {
		return nil, err
	}
	rows := found.rows
	if len(rows) == 0 {
		st.giveRows(found)
		l.idle(pos, snap)
		return nil, nil
	}
	if len(rows) > p.MaxRecords || bytesOf(rows) > p.MaxBytes {
		pos.target, pos.top = &snap, top
		st.giveRows(found)
		return l.readWindow(ctx, p, pos)
	}
	found.sort()
	pg := page{Base: pos.base.text, Snap: snap.text, From: rows[0].id - 1, To: rows[len(rows)-1].id, Last: true}
	return l.handOut(ctx, p, pos, pg, found)
}

// idle moves base on past a snapshot with nothing in it, so that the next look
// does not begin further and further back. In memory only: it is as true
// without.
func (l *lease) idle(pos position, snap snapshot) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.read.base.text != pos.base.text || l.read.target != nil {
		return
	}
	l.read.base = snap
	if len(l.open) == 0 {
		l.done.base = snap
		for _, k := range l.held {
			if k.target == nil && k.base.text == pos.base.text {
				k.base = snap // nothing came of this key either
			}
		}
	}
}

// readWindow reads the next page of a window, in order of ids. Rows that came
// late have ids that have been passed; mostly they are close behind hi, and one
// walk along the primary key from the first of them takes in all.
func (l *lease) readWindow(ctx context.Context, p store.ClaimParams, pos position) (*store.Claim, error) {
	st := l.ses.st
	from := pos.at
	if from == 0 && pos.hi > 0 {
		first, err := l.lowest(ctx, pos)
		if err != nil {
			return nil, err
		}
		from = pos.hi
		if first > 0 {
			from = first - 1
		}
	}
	found := st.takeBatch()
	var err error
	behind := pos.hi - from
	if behind > walk {
		// hi may be an id that somebody chose, with nothing to be walked over
		// between it and the ids that have been given out.
		var given mark
		if given, err = st.given(ctx); err != nil {
			return nil, fmt.Errorf("pgstore: read lease %d: %w", l.ID, err)
		}
		behind = min(pos.hi, given.top) - from
	}
	switch {
	case from >= pos.hi:
		err = l.query(ctx, p, found, st.sql.newer, mask(l.Lanes), inline(p), from, pos.top, pos.target.text, p.MaxRecords+1)
	case behind <= walk:
		err = l.query(ctx, p, found, st.sql.again, mask(l.Lanes), inline(p), from, pos.top, pos.target.text, pos.base.text, p.MaxRecords+1)
	default:
		err = l.query(ctx, p, found, st.sql.older, mask(l.Lanes), inline(p), pos.base.xmax, pos.base.xipText(), pos.hi, from,
			pos.target.text, p.MaxRecords+1)
		if room := p.MaxRecords + 1 - len(found.rows); err == nil && room > 0 && !found.more {
			err = l.query(ctx, p, found, st.sql.newer, mask(l.Lanes), inline(p), pos.hi, pos.top, pos.target.text, room)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("pgstore: read lease %d: %w", l.ID, err)
	}
	rows := found.rows
	n := cut(rows[:min(len(rows), p.MaxRecords)], p.MaxBytes)
	pg := page{Base: pos.base.text, Snap: pos.target.text, From: from, Top: pos.top, Last: n == len(rows) && !found.more}
	found.cut(n)
	pg.To = max(from, pos.top)
	if !pg.Last {
		pg.To = rows[n-1].id
	}
	return l.handOut(ctx, p, pos, pg, found)
}

// walk is how many ids behind hi a window's rows are still looked for along the
// primary key, among those that are done.
const walk = 500_000

// query reads rows behind those there are.
func (l *lease) query(ctx context.Context, p store.ClaimParams, b *batch, sql string, args ...any) error {
	var q pgx.Batch
	q.Queue(sql, args...).Query(func(r pgx.Rows) error { return l.reader.rows(r, b, p.MaxBytes, l.size) })
	return l.ses.st.readEvents(ctx, &q)
}

// readAgain reads a page that was in hand before, or the next piece of it.
func (l *lease) readAgain(ctx context.Context, p store.ClaimParams, pg page) (*store.Claim, error) {
	limit := p.MaxRecords
	if pg.Limit > 0 {
		limit = min(limit, pg.Limit)
	}
	found := l.ses.st.takeBatch()
	err := l.query(ctx, p, found, l.ses.st.sql.again, mask(l.Lanes), inline(p), pg.From, pg.To, pg.Snap, pg.Base, limit+1)
	if err != nil {
		return nil, fmt.Errorf("pgstore: read lease %d again: %w", l.ID, err)
	}
	rows := found.rows
	n := cut(rows[:min(len(rows), limit)], p.MaxBytes)
	whole := n == len(rows) && !found.more
	found.cut(n)
	l.mu.Lock()
	pos := l.read
	l.mu.Unlock()
	piece := pg
	if !whole {
		piece.To, piece.Last = rows[n-1].id, false
	}
	return l.handOut(ctx, p, pos, piece, found)
}

// cut is how many rows come before their payloads exceed max; at least one.
func cut(rows []row, limit int) int {
	sum := 0
	for i := range rows {
		sum += rows[i].size
		if sum > limit && i > 0 {
			return i
		}
	}
	return len(rows)
}

func bytesOf(rows []row) int {
	sum := 0
	for i := range rows {
		sum += rows[i].size
	}
	return sum
}

// lowest is the lowest id among a window's rows up to hi, 0 if there are none.
func (l *lease) lowest(ctx context.Context, pos position) (int64, error) {
	return l.readID(ctx, l.ses.st.sql.first, pos.base.xmax, pos.base.xipText(), pos.hi)
}

// highest is the highest id there is.
func (l *lease) highest(ctx context.Context) (int64, error) {
	return l.readID(ctx, `select coalesce(max(id), 0) from outbox_events`)
}

// readID reads where a window begins or ends. It is read as events are: where a
// partition is missing, it is another id.
func (l *lease) readID(ctx context.Context, sql string, args ...any) (id int64, err error) {
	var b pgx.Batch
	b.Queue(sql, args...).QueryRow(func(r pgx.Row) error { return r.Scan(&id) })
	if err := l.ses.st.readEvents(ctx, &b); err != nil {
		return 0, fmt.Errorf("pgstore: read lease %d: %w", l.ID, err)
	}
	return id, nil
}

// Forget implements store.Session.
func (ses *session) Forget(c *store.Claim) {
	if d, ok := c.Driver.(*due); ok {
		d.forget()
		return
	}
	f, ok := c.Driver.(*fresh)
	if !ok {
		return
	}
	l := f.l
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.open, f)
	if i < 0 {
		return
	}
	for _, g := range l.open[i:] {
		for _, k := range g.burst {
			if l.held[k.key] == k {
				delete(l.held, k.key)
			}
		}
	}
	// What was read again goes back in front, in one piece per claim.
	var back []page
	for _, g := range l.open[i:] {
		if g.records.Redelivery {
			pg := g.page
			pg.Alone = false
			back = append(back, pg)
		}
	}
	l.redo = append(back, l.redo...)
	page := l.read.page // numbers of pages never come again
	l.read = f.before
	l.read.page = page
	l.open = l.open[:i]
}

// rejoin lets held keys that stand where the lease stands move with it again.
// It needs that nothing is in hand; under load it asks for that now and then
// by having fresh claims wait, and reports so.
func (l *lease) rejoin(ctx context.Context) (wait bool, err error) {
	l.mu.Lock()
	var near []*heldKey
	for _, k := range l.held {
		if k.head == 0 && k.inHand == 0 && k.near {
			near = append(near, k)
			if len(near) == 500 {
				break
			}
		}
	}
	if len(near) == 0 || l.done.target != nil || l.read.target != nil {
		l.joining = 0
		l.mu.Unlock()
		return false, nil
	}
	if len(l.open) > 0 {
		wait = l.sinceJoin >= joinEvery
		l.mu.Unlock()
		return wait, nil
	}
	l.sinceJoin = 0
	behind := 0
	for _, k := range near {
		if _, any := k.start(l); any && k.base.text != l.done.base.text {
			behind++ // some came since, to be drained first
			continue
		}
		delete(l.held, k.key)
		l.rejoined = append(l.rejoined, k.key)
	}
	defer l.mu.Unlock()
	// Those with a few left get the occasion to send them before the lease
	// moves on; not for ever.
	if behind > 0 && l.joining < joinTries {
		l.joining++
		return true, nil
	}
	l.joining = 0
	return false, nil
}

const (
	joinEvery = 16 // fresh claims between two occasions to rejoin
	joinTries = 8  // fresh claims refused at one occasion
)

// readOnly runs queries that see one snapshot.
func (l *lease) readOnly(ctx context.Context, queries ...func(*pgx.Batch)) error {
	var b pgx.Batch
	b.Queue(`begin isolation level repeatable read read only`)
	for _, q := range queries {
		q(&b)
	}
	b.Queue(`commit`) // what partitions there are is asked behind it: this snapshot may be older than the reading
	return l.ses.st.readEvents(ctx, &b)
}

func cmpInt(a, b int64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }
