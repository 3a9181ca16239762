package sqlitestore

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"slices"
	"time"

	"github.com/outrider-dev/outrider/store"
)

// claimDue hands out rows whose time has come, and what is behind held keys. It
// marks them as in hand itself, so that an operator who acts on them at the same
// moment comes before or after, never in between.
func (l *rowLease) claimDue(ctx context.Context, p store.ClaimParams) (*store.Claim, error) {
	l.writing.Lock()
	defer l.writing.Unlock()
	if err := l.resolve(ctx); err != nil {
		return nil, err
	}
	if err := l.tidy(ctx); err != nil {
		return nil, err
	}
	b := &rowDue{l: l, p: p, c: l.newClaim(store.Due), limit: p.MaxRecords}
	if err := b.read(ctx); err != nil {
		return nil, fmt.Errorf("sqlitestore: read what is due of lease %d: %w", l.ID, explain(err))
	}
	c := b.c.claim
	if len(b.c.rows)+len(b.c.scheduled) == 0 {
		if b.unready && (c.NextDue == 0 || c.NextDue > soon) {
			c.NextDue = soon
		}
		return c, nil
	}
	c.Exclusive = len(b.c.rows) > 0 && b.pieces
	c.Alone = c.Exclusive && len(b.c.rows) == 1
	return c, b.begin(ctx)
}

// tidy gives back what was forgotten, and takes note of heads that operators
// have taken away.
func (l *rowLease) tidy(ctx context.Context) error {
	l.mu.Lock()
	forgot := l.forgot
	l.mu.Unlock()
	freed := map[string]int64{}
	err := l.db.query(ctx, func(r *sql.Rows) (bool, error) {
		var key string
		var head int64
		err := r.Scan(&key, &head)
		freed[key] = head
		return true, err
	}, `select event_key, freed from outbox_row_keys where freed > 0 and ((? >> lane) & 1) = 1`, mask(l.Lanes))
	if err != nil || len(freed)+len(forgot) == 0 {
		return explain(err)
	}
	apply := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.forgot = l.forgot[len(forgot):]
		for key, head := range freed {
			if k := l.held[key]; k != nil && k.head == head {
				k.head, k.at = 0, max(k.at, head)
			}
		}
	}
	return l.write(ctx, &written{apply: apply}, func(t *tx) error {
		for key := range freed {
			if _, err := t.exec(`delete from outbox_row_keys where event_key = ? and head is null`, key); err != nil {
				return err
			}
		}
		return undo(t, forgot)
	})
}

// undo makes rows of claims that were marked and then forgotten what they
// were before.
func undo(t *tx, tokens []string) error {
	for _, token := range tokens {
		if _, err := t.exec(`update outbox_rows set token = null, alone = 0, `+restored+` where token = ? and state = 'PUBLISHING'`, token); err != nil {
			return err
		}
	}
	return nil
}

// rowDue fills a Due claim.
type rowDue struct {
	l       *rowLease
	p       store.ClaimParams
	c       *rowClaim
	limit   int
	bytes   int
	pieces  bool // only what was in hand at a death
	unready bool // something waits for a claim in hand
	now     int64
}

func (b *rowDue) read(ctx context.Context) error {
	l := b.l
	var err error
	if b.now, err = l.db.time(ctx, l.db.reader); err != nil {
		return err
	}
	var due []rowState
	sc := scanner{now: b.now}
	bytes := 0
	err = l.db.query(ctx, func(r *sql.Rows) (bool, error) {
		var w rowState
		err := sc.scanRow(r, &w)
		if bytes += w.rec.Size(); bytes > b.p.MaxBytes {
			w.large, w.rec.Payload = w.large || len(w.rec.Payload) > 0, nil // it may not be wanted
		}
		due = append(due, w)
		return true, err
	}, rowDueSQL, inline(b.p), b.now, mask(l.Lanes), b.p.MaxRecords+1)
	if err != nil {
		return err
	}
	err = l.db.query(ctx, func(r *sql.Rows) (bool, error) {
		var at int64
		err := r.Scan(&at)
		b.c.claim.NextDue = time.Duration(at-b.now) * time.Microsecond
		return false, err
	}, rowNextSQL, b.now, mask(l.Lanes))
	if err != nil {
		return err
	}
	return b.fill(ctx, due)
}

// fill takes due rows, with what is behind heads, then drains free keys.
func (b *rowDue) fill(ctx context.Context, due []rowState) error {
	b.pieces = slices.ContainsFunc(due, func(r rowState) bool { return r.together > 0 })
	for i := range due {
		r := &due[i]
		if b.pieces && r.together == 0 {
			b.c.claim.More = true
			continue
		}
		k, ok := b.admits(r)
		if !ok {
			continue
		}
		if full, err := b.take(ctx, r); err != nil || full {
			b.c.claim.More = true
			return err
		}
		if k != nil {
			if err := b.drain(ctx, k, max(k.at, r.id), b.share()-1); err != nil {
				return err
			}
		}
	}
	for _, k := range b.free() {
		if len(b.c.rows) >= b.limit {
			b.c.claim.More = true
			return nil
		}
		if err := b.drain(ctx, k, k.at, b.share()); err != nil {
			return err
		}
	}
	return nil
}

func (b *rowDue) share() int {
	if b.p.KeyShare > 0 {
		return b.p.KeyShare
	}
	return b.p.MaxRecords
}

// admits reports whether a due row may be handed out now; k is its key if it is
// the head of it.
func (b *rowDue) admits(r *rowState) (k *rowKey, ok bool) {
	l := b.l
	l.mu.Lock()
	defer l.mu.Unlock()
	k = l.held[r.rec.Key]
	switch {
	case r.rec.Key == "" || k == nil:
		return nil, true
	case !k.ready(l):
		b.unready = true
		return nil, false
	case k.head == r.id:
		return k, true
	case k.head == 0 && r.id <= k.at:
		return nil, true // behind nothing: a delayed one
	}
	return nil, false // it comes with its key
}

// free are the held keys that have nothing in front, those first that have waited
// longest.
func (b *rowDue) free() []*rowKey {
	l := b.l
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []*rowKey
	for key, k := range l.held {
		switch {
		case k.head != 0:
		case !k.ready(l):
			b.unready = b.unready || !k.inHand
		case k.at >= k.last:
			delete(l.held, key)
		default:
			out = append(out, k)
		}
	}
	slices.SortFunc(out, func(x, y *rowKey) int { return cmp.Or(cmp.Compare(x.served, y.served), cmp.Compare(x.key, y.key)) })
	return out
}

// take puts a row into the claim if it fits.
func (b *rowDue) take(ctx context.Context, r *rowState) (full bool, err error) {
	limit := pieceLimit(b.limit, r.together)
	if n := len(b.c.rows); n > 0 && (n >= limit || b.bytes+r.size > b.p.MaxBytes) {
		return true, nil
	}
	if ok, err := b.l.db.fetchLarge(ctx, "outbox_rows", &r.row); err != nil || !ok {
		return false, err
	}
	b.limit = limit
	b.bytes += r.size
	b.c.add(*r)
	return false, nil
}

// drain takes what is behind a key's head, up to where the lease has read.
func (b *rowDue) drain(ctx context.Context, k *rowKey, from int64, n int) error {
	l := b.l
	l.mu.Lock()
	to, last := l.read, k.last
	k.served = b.now
	l.mu.Unlock()
	b.c.drained[k.key] = 0
	n = min(n, b.limit-len(b.c.rows))
	if n <= 0 || from >= last {
		return nil
	}
	var rows []rowState
	sc := scanner{now: b.now}
	room := b.p.MaxBytes - b.bytes
	whole := true
	err := l.db.query(ctx, func(r *sql.Rows) (bool, error) {
		var w rowState
		if err := sc.scanRow(r, &w); err != nil {
			return false, err
		}
		if len(rows) == n || w.state == "PUBLISHING" || w.state == "FAILED" || w.state == "WAITING" ||
			room < w.size && len(rows)+len(b.c.rows) > 0 {
			whole = false
			return false, nil
		}
		room -= w.size
		rows = append(rows, w)
		return true, nil
	}, rowKeySQL, inline(b.p), k.key, from, to, n+1)
	if err != nil {
		return err
	}
	if len(rows) > 0 && len(b.c.rows) == 0 && rows[0].together > 0 {
		b.pieces = true
	}
	for i := range rows {
		r := &rows[i]
		if (r.together > 0) != b.pieces && !r.later {
			whole = false
			break
		}
		if r.later {
			if r.state == "PENDING" {
				b.c.scheduled = append(b.c.scheduled, *r)
			}
		} else if full, err := b.take(ctx, r); err != nil || full {
			whole = false
			break
		}
		b.c.drained[k.key] = r.id
	}
	if whole {
		b.c.drained[k.key] = to
	}
	if len(rows) == 0 && whole && from == k.at && k.head == 0 {
		l.mu.Lock()
		k.at = max(k.at, to)
		l.mu.Unlock()
		delete(b.c.drained, k.key)
	}
	return nil
}

// begin marks what was chosen as in hand. Called with writing held.
func (b *rowDue) begin(ctx context.Context) error {
	l, c := b.l, b.c
	var marked map[int64]bool
	apply := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		rows := c.rows
		c.rows, c.claim.Records = nil, nil
		for _, r := range rows {
			if marked[r.id] {
				c.add(r)
			}
		}
		for key, to := range c.drained {
			if k := l.held[key]; k != nil {
				k.inHand = len(c.rows) > 0
				if len(c.rows) == 0 {
					k.at = max(k.at, to) // nothing but delayed ones
				}
			}
		}
		c.started = true
		if len(c.rows) > 0 {
			l.dues[c] = struct{}{}
		}
	}
	lost := false
	what := &written{apply: func() {
		if apply(); lost {
			c.forget() // nobody has the claim
		}
	}}
	err := l.write(ctx, what, func(t *tx) (err error) {
		if marked, err = c.mark(t); err != nil {
			return err
		}
		return putScheduled(t, c.scheduled)
	})
	lost = err != nil
	return err
}
