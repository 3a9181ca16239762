package sqlitestore

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"time"

	"github.com/outrider-dev/outrider/store"
)

// sample is what a lease saw of one page: every row of its lanes with
// from < id <= to.
type sample struct {
	lanes    store.LaneSet
	from, to int64
	seen     []int64
}

// watched is what a lease keeps for the next sweep.
type watched struct {
	wanted bool // a page is to be sampled
	page   *sample
}

// sweepRows is how many rows of a page's range are looked at.
const sweepRows = 100_000

// note keeps a page that has been settled as a sample. Called with mu held.
func (l *lease) note(f *fresh) {
	if w := &l.watched; w.wanted && len(f.seen) > 0 {
		w.wanted, w.page = false, &sample{l.Lanes, f.page.From, f.page.To, f.seen}
	}
}

// Sweep implements store.Sweeper: it reads a page that was settled since the
// last sweep once more. A row of it that was not seen has been given an id by
// hand, one that had been passed.
func (ses *session) Sweep(ctx context.Context) (store.Swept, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	var out store.Swept
	for _, l := range ses.leases.all() {
		l.mu.Lock()
		s := l.watched.page
		l.watched = watched{wanted: true}
		l.mu.Unlock()
		if s == nil {
			continue
		}
		if err := ses.st.unseen(ctx, s, func(row int64) { out.Add(l.Destination, strconv.FormatInt(row, 10)) }); err != nil {
			return out, fmt.Errorf("sqlitestore: sweep of lease %d: %w", l.ID, explain(err))
		}
	}
	return out, nil
}

const unseenSQL = `select e.id, coalesce(e.event_key, e.aggregate_id) from outbox_events e where e.id > ? and e.id <= ? order by e.id limit ?`

// unseen tells of the rows of a sample's page that are not in it.
func (s *Stream) unseen(ctx context.Context, p *sample, tell func(row int64)) error {
	seen := make(map[int64]bool, len(p.seen))
	for _, id := range p.seen {
		seen[id] = true
	}
	return s.query(ctx, func(r *sql.Rows) (bool, error) {
		var id int64
		var key string
		if err := r.Scan(&id, &key); err != nil {
			return false, err
		}
		if !seen[id] && p.lanes.Has(laneOf(id, key)) {
			tell(id)
		}
		return true, nil
	}, unseenSQL, p.from, p.to, sweepRows)
}
