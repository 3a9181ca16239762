package pgstore

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outrider-dev/outrider/store"
)

// sample is what a lease saw of one whole window: every row of its lanes that
// is visible in snap and not in base.
type sample struct {
	lanes      store.LaneSet
	base, snap string
	seen       []int64
}

// mark is a place that a lease had reached: all visible in base was done, and
// no row of it had an id beyond top but those in far.
type mark struct {
	lanes store.LaneSet
	base  string
	top   int64
	far   []int64 // rows whose ids somebody chose, beyond those given out
}

// watched is what a lease keeps for the next sweep.
type watched struct {
	wanted bool    // a window is to be sampled
	part   *sample // the window that is being read
	whole  *sample // one that has been read to its end
	mark   *mark
}

const (
	sampleMost = 10_000 // rows of a window that is sampled; larger ones are left out
	sweepRows  = 10_000 // rows behind a mark that are looked at
	sweepFar   = 100    // rows beyond the ids given out that are noted one by one
)

// note adds a page that has been settled to the sample of its window. Called
// with mu held.
func (l *lease) note(f *fresh) {
	w := &l.watched
	switch {
	case !w.wanted || f.seen == nil:
		w.part = nil
		return
	case f.before.target == nil:
		w.part = &sample{l.Lanes, f.page.Base, f.page.Snap, f.seen}
	case w.part == nil, w.part.lanes != l.Lanes, w.part.base != f.page.Base, w.part.snap != f.page.Snap:
		w.part = nil
		return
	default:
		w.part.seen = append(w.part.seen, f.seen...)
	}
	switch {
	case len(w.part.seen) > sampleMost:
		w.part = nil
	case f.page.Last && len(w.part.seen) > 0:
		w.whole, w.part, w.wanted = w.part, nil, false
	}
}

// Sweep implements store.Sweeper. It asks two questions that do not share their
// answer's way with claims. Does a window that was read hold rows that were not
// seen? And are there rows behind an earlier position, with ids that had not
// been given out then: such as were written with another transaction's id, or
// with one that is yet to come?
func (ses *session) Sweep(ctx context.Context) (_ store.Swept, err error) {
	defer ses.st.explain(&err)
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	var out store.Swept
	for _, id := range ses.leases.ids() {
		l := ses.leases.get(id)
		if l == nil {
			continue
		}
		rows, err := l.sweep(ctx)
		if err != nil {
			return out, fmt.Errorf("pgstore: sweep of lease %d: %w", l.ID, err)
		}
		for _, id := range rows {
			out.Add(l.Destination, itoa(id))
		}
	}
	return out, nil
}

func (l *lease) sweep(ctx context.Context) ([]int64, error) {
	st := l.ses.st
	l.mu.Lock()
	whole, last := l.watched.whole, l.watched.mark
	l.watched.whole, l.watched.mark, l.watched.wanted = nil, nil, true
	lanes, base := l.Lanes, l.done.base.text
	l.mu.Unlock()
	var found []int64
	look := func(sql string, args ...any) error {
		res, err := st.pool.Query(ctx, sql, args...)
		if err != nil {
			return err
		}
		defer res.Close()
		for res.Next() {
			var id int64
			if err := res.Scan(&id); err != nil {
				return err
			}
			if !slices.Contains(found, id) {
				found = append(found, id)
			}
		}
		return res.Err()
	}
	if whole != nil {
		base, err := parseSnapshot(whole.base)
		if err != nil {
			return nil, err
		}
		snap, err := parseSnapshot(whole.snap)
		if err != nil {
			return nil, err
		}
		if err := look(st.sql.unseen, mask(whole.lanes), base.xmax, base.xipText(), snap.xmax, snap.text, whole.seen); err != nil {
			return nil, err
		}
	}
	if last != nil {
		if err := look(st.sql.behind, mask(last.lanes), last.top, last.base, l.Destination, last.far); err != nil {
			return nil, err
		}
	}
	// Asked after base was read: what is visible in base had its id by now.
	next, err := st.given(ctx)
	if err != nil {
		return nil, err
	}
	next.lanes, next.base = lanes, base
	l.mu.Lock()
	l.watched.mark = &next
	l.mu.Unlock()
	return found, nil
}

// given looks up how far ids have been given out. Those that somebody chose are
// no measure of it: above one near the end of all numbers nothing ever comes.
func (s *Store) given(ctx context.Context) (m mark, err error) {
	err = s.pool.QueryRow(ctx, s.sql.given).Scan(&m.top, &m.far)
	if n := len(m.far); n > sweepFar { // nobody takes them from the sequence
		m.top, m.far = m.far[n-1], m.far[:n-1]
	}
	return m, err
}
