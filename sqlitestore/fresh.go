package sqlitestore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// Claim implements store.Session.
func (ses *session) Claim(ctx context.Context, p store.ClaimParams) (*store.Claim, error) {
	l := ses.lease(p.Lease)
	if l == nil {
		return nil, store.ErrFenced
	}
	if p.MaxRecords <= 0 || p.MaxBytes <= 0 {
		return nil, errors.New("sqlitestore: ClaimParams.MaxRecords and MaxBytes are needed")
	}
	if p.Kind == store.Due {
		if err := ses.st.checkIDs(ctx); err != nil {
			return nil, err
		}
		return l.claimDue(ctx, p)
	}
	// Pages of which nothing is to be sent are passed and the next one is read;
	// the bound keeps a call short when there are many.
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

// stretch is what is to be read.
type stretch struct {
	from, to int64 // from < id <= to
	limit    int
	redo     *page // it was in hand before
}

// found is what was read of a stretch: all rows of the lease's lanes up to an
// id.
type found struct {
	rows []row
	to   int64
	more bool
}

// claimFresh reads the next page. No claim and again: it had nothing to be
// sent, and there is more.
func (l *lease) claimFresh(ctx context.Context, p store.ClaimParams) (c *store.Claim, again bool, err error) {
	if full, err := l.full(ctx, p.MaxExceptions); full || err != nil {
		return nil, false, err
	}
	s, ok := l.next(p)
	if !ok {
		return nil, false, nil
	}
	f, err := l.scan(ctx, p, s)
	if err != nil {
		return nil, false, fmt.Errorf("sqlitestore: read lease %d: %w", l.ID, explain(err))
	}
	// Behind the read: what fell before it shows, and nothing is passed over.
	if err := l.ses.st.checkIDs(ctx); err != nil {
		return nil, false, err
	}
	if n := len(f.rows); n > 0 {
		l.ses.st.source.read(f.rows[n-1].id, f.rows[n-1].rec.ID)
	}
	c, again, write := l.handOut(p, s, f)
	if write {
		if err := l.flush(ctx); err != nil {
			return nil, false, err
		}
	}
	return c, again, nil
}

// next is the stretch to be read next. false: nothing may be read now.
func (l *lease) next(p store.ClaimParams) (stretch, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.redo) > 0 {
		pg := l.redo[0]
		s := stretch{pg.From, pg.To, p.MaxRecords, &pg}
		if pg.Limit > 0 {
			s.limit = min(s.limit, pg.Limit)
			if l.busy() {
				return s, false // one piece at a time
			}
		}
		return s, true
	}
	s := stretch{l.read, math.MaxInt64, p.MaxRecords, nil}
	if to := l.stopAt(); to != 0 {
		s.to = to
	}
	return s, !l.exclusive() && s.from < s.to
}

// busy reports whether any fresh claim with records is in hand. Called with mu
// held.
func (l *lease) busy() bool {
	return slices.ContainsFunc(l.open, func(f *fresh) bool { return !f.empty() })
}

// exclusive reports whether a piece of what was in hand at a death is in hand.
// Called with mu held.
func (l *lease) exclusive() bool {
	return slices.ContainsFunc(l.open, func(f *fresh) bool { return !f.empty() && f.records.Exclusive })
}

// full reports whether the lease has as many exceptions as it may. A held key
// without a head that waits counts as one.
func (l *lease) full(ctx context.Context, most int) (bool, error) {
	if most == 0 {
		return false, nil
	}
	count := func() int {
		l.mu.Lock()
		defer l.mu.Unlock()
		n := len(l.waiting)
		if n+len(l.held) < most {
			return n
		}
		for _, k := range l.held {
			if _, ok := l.waiting[k.head]; !ok {
				n++
			}
		}
		return n
	}
	if count() < most {
		return false, nil
	}
	// Operators may have taken some away.
	l.writing.Lock()
	defer l.writing.Unlock()
	if err := l.resolve(ctx); err != nil {
		return false, err
	}
	if err := l.countWaiting(ctx); err != nil {
		return false, fmt.Errorf("sqlitestore: count exceptions of lease %d: %w", l.ID, explain(err))
	}
	return count() >= most, nil
}

const waitingSQL = `
	select id from outbox_exceptions
	where destination = ? and state in ('WAITING', 'PUBLISHING') and ((? >> lane) & 1) = 1`

func (l *lease) countWaiting(ctx context.Context) error {
	waiting := map[int64]struct{}{}
	err := l.ses.st.query(ctx, func(r *sql.Rows) (bool, error) {
		var id int64
		err := r.Scan(&id)
		waiting[id] = struct{}{}
		return true, err
	}, waitingSQL, l.Destination, mask(l.Lanes))
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiting = waiting
	return nil
}

// inline is what payloads are read along with their rows: what a page of
// MaxRecords may have on average, but never less than 4 KiB.
func inline(p store.ClaimParams) int { return max(p.MaxBytes/p.MaxRecords, 4<<10) }

const freshSQL = `select ` + columns + ` from outbox_events e where e.id > ?2 and e.id <= ?3 order by e.id`

// scan reads until it has what a claim may hold and knows whether there is
// more. Rows that are not wanted are kept without their payloads, since it
// shows only afterwards whether their key is still held.
func (l *lease) scan(ctx context.Context, p store.ClaimParams, s stretch) (*found, error) {
	st := l.ses.st
	now, err := st.time(ctx, st.reader)
	if err != nil {
		return nil, err
	}
	sc := scanner{now: now}
	f := &found{to: s.from}
	l.mu.Lock()
	f.rows, l.buf = l.buf[:0], nil
	free := p.KeyShare == 0 && len(l.held)+len(l.joined) == 0 // every row is wanted
	l.mu.Unlock()
	share := map[string]int{}
	seen, n, bytes := 0, 0, 0
	most := 16*s.limit + 1000 // rows looked at
	whole := true
	err = st.query(ctx, func(r *sql.Rows) (bool, error) {
		f.rows = append(f.rows, row{})
		w := &f.rows[len(f.rows)-1]
		if err := sc.scan(r, w); err != nil {
			return false, err
		}
		seen++
		switch {
		case !l.Lanes.Has(w.rec.Lane):
			f.rows = f.rows[:len(f.rows)-1]
		case !free && l.unwanted(p, w, share):
			w.skip, w.rec.Payload = true, nil
		case w.later:
			w.rec.Payload = nil
		case n == s.limit, n > 0 && bytes+w.size > p.MaxBytes:
			f.rows = f.rows[:len(f.rows)-1]
			f.more, whole = true, false
			f.to = w.id - 1
			return false, nil
		default:
			n++
			bytes += w.size
		}
		f.to = w.id
		if seen == most {
			f.more, whole = true, false
			return false, nil
		}
		return true, nil
	}, freshSQL, inline(p), s.from, s.to)
	if err != nil {
		return nil, err
	}
	if whole && s.to != math.MaxInt64 {
		f.to = s.to
	}
	if whole && s.redo != nil {
		// Does anything come behind what was in hand?
		if err := st.row(ctx, []any{&f.more}, `select exists (select 1 from outbox_events where id > ?)`, s.to); err != nil {
			return nil, err
		}
	}
	return f, l.fetch(ctx, f)
}

// unwanted reports whether a row is not to be sent now: its key is held back,
// or has its share.
func (l *lease) unwanted(p store.ClaimParams, w *row, share map[string]int) bool {
	key := w.rec.Key
	if key == "" {
		return false
	}
	l.mu.Lock()
	held := l.holds(key, w.id)
	l.mu.Unlock()
	if held || p.KeyShare == 0 || w.later {
		return held
	}
	share[key]++
	return share[key] > p.KeyShare
}

// holds reports whether the row of a key is not part of fresh claims. Called
// with mu held.
func (l *lease) holds(key string, id int64) bool {
	return l.held[key] != nil || id <= l.joined[key]
}

// fetch reads the payloads that were left out.
func (l *lease) fetch(ctx context.Context, f *found) error {
	var gone []int64
	for i := range f.rows {
		if r := &f.rows[i]; !r.skip && !r.later {
			ok, err := l.ses.st.fetchLarge(ctx, "outbox_events", r)
			if err != nil {
				return err
			}
			if !ok {
				gone = append(gone, r.id)
			}
		}
	}
	if gone != nil {
		f.rows = slices.DeleteFunc(f.rows, func(r row) bool { return slices.Contains(gone, r.id) })
	}
	return nil
}

// handOut makes a claim of a page's rows: without those of held keys, those
// that are not due, and what a key has beyond its share. No claim: there was
// nothing to be sent; write: but something to be written.
func (l *lease) handOut(p store.ClaimParams, s stretch, found *found) (c *store.Claim, again, write bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.redo == nil && (l.read != s.from || len(l.redo) > 0) || s.redo != nil && (len(l.redo) == 0 || l.redo[0] != *s.redo) {
		return nil, true, false // a claim was forgotten meanwhile
	}
	f := &fresh{l: l, no: l.claims + 1, before: l.read, redo: s.redo != nil}
	if f.redo {
		f.page = *s.redo
	}
	c = &store.Claim{Lease: l.Lease, Kind: store.Fresh, Driver: f, Redelivery: f.redo}
	f.records = c
	l.choose(p, f, found)
	if l.watched.wanted && !f.redo {
		for i := range found.rows {
			if id := found.rows[i].id; id <= found.to {
				f.seen = append(f.seen, id)
			}
		}
	}
	clear(found.rows)
	l.buf = found.rows
	f.page.From, f.page.To, f.page.N = s.from, found.to, len(c.Records)
	if f.redo {
		c.Exclusive = f.page.Limit > 0
		c.Alone = f.page.Limit == 1 && len(c.Records) == 1
		f.page.Alone = c.Alone
		l.takeRedo(f.page)
		if i := slices.Index(f.ids, f.page.One); i >= 0 {
			c.Records[i].Starts = f.page.Starts
		} else {
			f.page.Starts = 0
		}
		if c.Alone {
			f.page.One = f.ids[0]
		}
	} else if len(c.Records)+len(f.scheduled)+len(l.open) > 0 {
		// One behind others in hand has a number even if all of it is held
		// back: after a death it may not be.
		l.page++
		f.page.Page = l.page
	}
	for i := range c.Records {
		// A delayed event of a page that is read again may not have been due
		// when it was read first: others of its key are ahead of its place.
		if !f.redo || c.Records[i].AvailableAt.IsZero() {
			c.Records[i].Sequence = outrider.Sequence{Page: f.page.Page, Pos: f.ids[i]}
		}
	}
	for _, k := range f.burst {
		k.page = f.page.Page
	}
	more := found.more || len(l.redo) > 0
	c.More = more
	if !f.empty() || len(f.scheduled) > 0 {
		l.append(f)
		if f.empty() {
			return nil, more, l.open[0] == f
		}
		return c, more, false
	}
	return nil, more, l.pass(f)
}

// choose takes the rows that are to be sent. Called with mu held.
func (l *lease) choose(p store.ClaimParams, f *fresh, found *found) {
	c := f.records
	c.Records = make([]outrider.Record, 0, len(found.rows))
	f.ids = make([]int64, 0, len(found.rows))
	count := map[string]int{}
	for i := range found.rows {
		r := &found.rows[i]
		key := r.rec.Key
		if key != "" && l.holds(key, r.id) {
			if k := l.held[key]; k != nil {
				k.last = max(k.last, r.id)
			}
			continue
		}
		if key != "" && p.KeyShare > 0 && !r.later {
			if count[key] == p.KeyShare {
				k := &heldKey{key: key, lane: r.rec.Lane, at: r.id - 1, last: r.id, born: f.no, wait: f.no}
				l.held[key] = k
				f.burst = append(f.burst, k)
				continue
			}
			count[key]++
		}
		switch {
		case r.skip: // its key has become free since it was read without its payload
			found.to, found.more = r.id-1, true
			return
		case r.later:
			f.scheduled = append(f.scheduled, *r)
		default:
			c.Records = append(c.Records, r.rec)
			f.ids = append(f.ids, r.id)
		}
	}
}

// append puts a page behind what is in hand. Called with mu held.
func (l *lease) append(f *fresh) {
	l.claims++
	l.read = max(l.read, f.page.To)
	l.open = append(l.open, f)
}

// pass moves the lease on over a page of which nothing is to be sent or
// written. It reports whether that is worth a write: what the database does
// not know is read once more by who comes next. Called with mu held.
func (l *lease) pass(f *fresh) bool {
	if f.page.To <= l.read {
		return false
	}
	n := len(l.open)
	switch {
	case n == 0:
		l.read, l.done = f.page.To, f.page.To
		return l.done-l.saved >= passWrite
	case l.open[n-1].empty() && !l.open[n-1].redo && !f.redo:
		l.open[n-1].page.To = f.page.To
		l.open[n-1].seen = nil // of a part only
		l.read = f.page.To
	default:
		l.append(f)
	}
	return false
}

// passWrite is how many ids are passed over before that is written.
const passWrite = 10_000

// takeRedo removes what a claim covers from what is to be read again. Called
// with mu held.
func (l *lease) takeRedo(pg page) {
	first := l.redo[0]
	l.redo = slices.Clone(l.redo)
	if pg.To >= first.To {
		l.redo = l.redo[1:]
		return
	}
	if l.redo[0].From = pg.To; l.redo[0].One <= pg.To {
		l.redo[0].Starts = 0
	}
}

// flush settles pages without records that nothing is in hand before.
func (l *lease) flush(ctx context.Context) error {
	l.writing.Lock()
	defer l.writing.Unlock()
	if err := l.resolve(ctx); err != nil {
		return err
	}
	return l.commit(ctx, store.CommitParams{Lease: l.Lease})
}

// Forget implements store.Session.
func (ses *session) Forget(c *store.Claim) {
	switch d := c.Driver.(type) {
	case *due:
		d.forget()
	case *fresh:
		d.forget()
	}
}

func (f *fresh) forget() {
	l := f.l
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.open, f)
	if i < 0 || f.started {
		return
	}
	var back []page
	for _, g := range l.open[i:] {
		for _, k := range g.burst {
			if l.held[k.key] == k {
				delete(l.held, k.key)
			}
		}
		if g.redo {
			pg := g.page
			pg.Alone = false
			back = append(back, pg)
		}
		// A key that was held back meanwhile has not got these.
		for j, id := range g.ids {
			l.fallBack(g.records.Records[j].Key, id)
		}
		for j := range g.scheduled {
			l.fallBack(g.scheduled[j].rec.Key, g.scheduled[j].id)
		}
	}
	l.redo = append(back, l.redo...)
	l.read = f.before
	l.open = l.open[:i]
}

// fallBack has a held key come to a row that is handed out no more. Called with
// mu held.
func (l *lease) fallBack(key string, id int64) {
	if k := l.held[key]; k != nil {
		k.at = min(k.at, id-1)
	}
}
