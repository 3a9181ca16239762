package pgstore

import (
	"context"
	"slices"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// handOut makes a claim of a page's rows: without those of held keys, those
// that are not due, and what a key has beyond its share.
func (l *lease) handOut(ctx context.Context, p store.ClaimParams, pos position, pg page, found *batch) (*store.Claim, error) {
	rows := found.rows
	if err := l.ses.st.fetchLarge(ctx, rows); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	redo := len(l.redo) > 0
	if !redo {
		pg.Page = l.nextPageLocked()
	}
	after, err := pos.after(pg)
	if err != nil {
		return nil, err
	}
	f := &fresh{l: l, no: l.claims + 1, before: l.read, after: after, skipped: map[string]int64{}}
	c := &store.Claim{Lease: l.Lease, Kind: store.Fresh, Driver: f, Redelivery: redo}
	f.records = c
	if l.watched.wanted && !redo {
		f.seen = make([]int64, len(rows))
		for i := range rows {
			f.seen[i] = rows[i].id
		}
	}
	l.size = len(rows) + 1
	c.Records = found.recs[:0] // what is left out is closed up
	f.ids = make([]int64, 0, len(rows))
	clear(l.counts)
	for i := range rows {
		r := &rows[i]
		key := r.rec.Key
		if l.pass.has(r.id) {
			f.passed = append(f.passed, r.id)
			continue
		}
		if k := l.held[key]; k != nil && key != "" {
			if low, ok := f.skipped[key]; !ok || r.id < low {
				f.skipped[key] = r.id
			}
			continue
		}
		if r.later {
			rec := *r.rec
			r.rec = &rec
			f.scheduled = append(f.scheduled, *r)
			continue
		}
		if p.KeyShare > 0 && key != "" {
			n := l.counts[key] + 1
			l.counts[key] = n
			if n > p.KeyShare {
				k := &heldKey{key: key, lane: r.rec.Lane, base: pos.base, target: after.target,
					at: r.id - 1, low: r.id, born: f.no, wait: f.no}
				if pg.Last {
					snap := after.base
					k.target = &snap
				}
				l.held[key] = k
				f.burst = append(f.burst, k)
				f.skipped[key] = r.id
				continue
			}
		}
		// A delayed event of a page that is read again may not have been due
		// when it was read first: others of the key are ahead of its place.
		if !redo || r.rec.AvailableAt.IsZero() {
			r.rec.Sequence = outrider.Sequence{Page: pg.Page, Pos: r.id}
		}
		if pg.Starts > 0 && r.id == pg.One {
			r.rec.Starts = pg.Starts
		}
		c.Records = append(c.Records, *r.rec)
		f.ids = append(f.ids, r.id)
	}
	clear(found.recs[len(c.Records):])
	l.ses.st.giveRows(found)
	pg.N = len(c.Records)
	if redo {
		c.Exclusive = pg.Limit > 0
		c.Alone = pg.Limit == 1
		pg.Alone = c.Alone
		l.takeRedo(pg)
		if !slices.Contains(f.ids, pg.One) {
			pg.Starts = 0
		}
		if c.Alone && len(f.ids) == 1 {
			pg.One = f.ids[0]
		}
	}
	f.page = pg
	l.claims++
	l.sinceJoin++
	l.read = after
	l.open = append(l.open, f)
	c.More = len(l.redo) > 0 || after.target != nil
	if len(f.burst) > 0 {
		c.NextDue = dueNow
	}
	return c, nil
}

// takeRedo removes what a claim covers from what is to be read again.
func (l *lease) takeRedo(pg page) {
	first := &l.redo[0]
	if pg.To >= first.To {
		l.redo = l.redo[1:]
		return
	}
	l.redo = append([]page(nil), l.redo...)
	first = &l.redo[0]
	if first.From = pg.To; first.One <= pg.To {
		first.Starts = 0
	}
}
