package sqlitestore

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// due is the driver's part of a Due claim.
type due struct {
	l       *lease
	claim   *store.Claim
	drains  []*drain
	page    int64
	settled bool
}

// drain is what a Due claim has of one held key: its head, if that is due, and
// successors. Without a key it is one unordered exception.
type drain struct {
	key       string
	head      int64   // exception in front; 0: none
	first     int     // index of its first record in the claim
	ids       []int64 // of its records
	to        int64   // nothing of the key is left up to here
	page      int64   // of its successors' sequences; 0: the claim's own
	scheduled []row
}

// ids are the row ids of the claim's records.
func (d *due) ids() []int64 {
	var out []int64
	for _, dr := range d.drains {
		out = append(out, dr.ids...)
	}
	return out
}

// dueException is an exception whose time has come.
type dueException struct {
	id, due, page, failed      int64
	lane                       int
	key, state                 string
	attempts, starts, together int
}

// queue is what is due of one key, or one unordered exception.
type queue struct {
	since int64 // when it was due, or when it was last served
	x     *dueException
	k     *heldKey
	event *row // of x; nil: it is gone
}

// keyName is "" for what has no key.
func (q *queue) keyName() string {
	if q.k == nil {
		return ""
	}
	return q.k.key
}

// piece is how many records may go together, after a death; 0: any number.
func (q *queue) piece() int {
	switch {
	case q.x != nil:
		return q.x.together
	case q.k.again > q.k.at:
		return q.k.together
	}
	return 0
}

const maxDrains = 64 // held keys in one Due claim that have no due head

// claimDue hands out what is due of the exceptions, and of the keys that wait
// to be drained. It marks them as in hand itself, so that an operator who acts
// on them at the same moment comes before or after, never in between.
func (l *lease) claimDue(ctx context.Context, p store.ClaimParams) (*store.Claim, error) {
	l.writing.Lock()
	defer l.writing.Unlock()
	if err := l.resolve(ctx); err != nil {
		return nil, err
	}
	for range 16 {
		c, again, err := l.readDue(ctx, p)
		if err != nil {
			return nil, fmt.Errorf("sqlitestore: read what is due of lease %d: %w", l.ID, explain(err))
		}
		if !again {
			return c, nil
		}
	}
	return &store.Claim{Lease: l.Lease, Kind: store.Due, More: true}, nil
}

// readDue makes a claim. again: it has no records, but there may be more.
func (l *lease) readDue(ctx context.Context, p store.ClaimParams) (c *store.Claim, again bool, err error) {
	c = &store.Claim{Lease: l.Lease, Kind: store.Due}
	l.mu.Lock()
	busy := l.exclusive()
	l.mu.Unlock()
	if busy {
		return c, false, nil
	}
	if err := l.noteFreed(ctx); err != nil {
		return nil, false, err
	}
	now, err := l.ses.st.time(ctx, l.ses.st.reader)
	if err != nil {
		return nil, false, err
	}
	found, next, err := l.lookDue(ctx, now, p.MaxRecords)
	if err != nil {
		return nil, false, err
	}
	c.NextDue = next
	b := &dueBuilder{l: l, p: p, now: now, d: &due{l: l, claim: c}}
	c.Driver = b.d
	b.queue(found)
	if err := b.fill(ctx); err != nil {
		return nil, false, err
	}
	if b.nothing() {
		if b.unready && (c.NextDue == 0 || c.NextDue > soon) {
			c.NextDue = soon
		}
		return c, false, nil
	}
	if err := b.begin(ctx); err != nil {
		return nil, false, err
	}
	if len(c.Records) > 0 {
		return c, false, nil
	}
	// All that was read is not due yet, or gone: it is settled at once.
	return c, true, l.commit(ctx, store.CommitParams{Lease: l.Lease, Settle: []store.Settlement{{Claim: c}}})
}

// soon is when to look again for what is due and waits for claims in hand.
const soon = 5 * time.Millisecond

const (
	dueSQL = `
		select id, due_at, page, coalesce(first_failed, 0), lane, event_key, state, attempts, starts, together
		from outbox_exceptions
		where destination = ? and state in ('WAITING', 'SCHEDULED', 'PUBLISHING') and due_at <= ? and ((? >> lane) & 1) = 1
		order by due_at limit ?`
	nextDueSQL = `
		select due_at from outbox_exceptions
		where destination = ? and state in ('WAITING', 'SCHEDULED', 'PUBLISHING') and due_at > ? and ((? >> lane) & 1) = 1
		order by due_at limit 1`
	freedSQL = `
		select event_key, freed from outbox_held_keys
		where destination = ? and freed > 0 and ((? >> lane) & 1) = 1`
	keySQL = `select ` + columns + ` from outbox_events e
		where coalesce(e.event_key, e.aggregate_id) = ?2 and e.id > ?3 and e.id <= ?4 order by e.id limit ?5`
	eventsSQL = `select ` + columns + ` from json_each(?2) j cross join outbox_events e on e.id = j.value`
)

// noteFreed takes note of heads that operators have taken away.
func (l *lease) noteFreed(ctx context.Context) error {
	freed := map[string]int64{}
	err := l.ses.st.query(ctx, func(r *sql.Rows) (bool, error) {
		var key string
		var head int64
		err := r.Scan(&key, &head)
		freed[key] = head
		return true, err
	}, freedSQL, l.Destination, mask(l.Lanes))
	if err != nil || len(freed) == 0 {
		return err
	}
	apply := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		for key, head := range freed {
			if k := l.held[key]; k != nil && k.head == head {
				k.head, k.at, k.parked = 0, max(k.at, head), false
			}
			delete(l.waiting, head)
		}
	}
	return l.write(ctx, &written{apply: apply}, func(t *tx) error {
		for key, head := range freed {
			if _, err := t.exec(`update outbox_held_keys set freed = 0 where destination = ? and event_key = ? and freed = ?`, l.Destination, key, head); err != nil {
				return err
			}
			if err := unpark(t, l.Destination, key); err != nil {
				return err
			}
		}
		return nil
	})
}

// lookDue finds exceptions that are due and not in hand, one more than asked
// for, and when the next one will be.
func (l *lease) lookDue(ctx context.Context, now int64, limit int) ([]*dueException, time.Duration, error) {
	st := l.ses.st
	l.mu.Lock()
	inHand := len(l.inHand)
	l.mu.Unlock()
	var out []*dueException
	err := st.query(ctx, func(r *sql.Rows) (bool, error) {
		x := &dueException{}
		err := r.Scan(&x.id, &x.due, &x.page, &x.failed, &x.lane, &x.key, &x.state, &x.attempts, &x.starts, &x.together)
		l.mu.Lock()
		if !l.inHand[x.id] {
			out = append(out, x)
		}
		l.mu.Unlock()
		return true, err
	}, dueSQL, l.Destination, now, mask(l.Lanes), limit+inHand+1)
	if err != nil {
		return nil, 0, err
	}
	var next time.Duration
	err = st.query(ctx, func(r *sql.Rows) (bool, error) {
		var at int64
		err := r.Scan(&at)
		next = time.Duration(at-now) * time.Microsecond
		return false, err
	}, nextDueSQL, l.Destination, now, mask(l.Lanes))
	return out, next, err
}

// dueBuilder fills a Due claim.
type dueBuilder struct {
	l   *lease
	p   store.ClaimParams
	now int64
	d   *due

	queues  []*queue
	park    []*dueException // they wait for another head of their key
	gone    []int64         // exceptions whose events are gone
	unready bool            // something waits for a claim in hand
	bytes   int
}

func (b *dueBuilder) nothing() bool {
	return len(b.d.drains)+len(b.park)+len(b.gone) == 0
}

// queue sorts what is due by how long it has waited.
func (b *dueBuilder) queue(found []*dueException) {
	l := b.l
	l.mu.Lock()
	defer l.mu.Unlock()
	queued := map[*heldKey]bool{}
	for _, x := range found {
		if x.key == "" {
			b.queues = append(b.queues, &queue{since: x.due, x: x})
			continue
		}
		k := l.held[x.key]
		if k == nil {
			k = l.borrow(x)
		}
		switch {
		case !k.ready(l):
			b.unready = true
		case k.head == x.id, k.head == 0 && !queued[k]:
			queued[k] = true
			b.queues = append(b.queues, &queue{since: x.due, x: x, k: k})
		case k.head != 0:
			b.park = append(b.park, x)
		}
	}
	for _, k := range l.held {
		switch {
		case k.head != 0 || queued[k]:
		case !k.ready(l):
			b.unready = b.unready || k.inHand == 0
		case k.at < k.last:
			b.queues = append(b.queues, &queue{since: k.served, k: k})
		default:
			l.rejoin(k)
		}
	}
	slices.SortStableFunc(b.queues, func(x, y *queue) int {
		return cmp.Or(cmp.Compare(x.since, y.since), cmp.Compare(x.keyName(), y.keyName()))
	})
}

// borrow holds a key back for an exception that has been out of its order, such
// as a delayed event: its sequence has to grow over those of what is in hand,
// and what comes later over it. Called with mu held.
func (l *lease) borrow(x *dueException) *heldKey {
	k := &heldKey{key: x.key, lane: x.lane, at: l.read, last: l.read, born: l.claims, borrowed: true}
	for _, f := range l.open {
		if f.has(x.key) {
			k.wait = f.no
		}
	}
	l.held[x.key], l.borrowed[x.key] = k, true
	return k
}

// fill reads the events and takes as many as the claim may hold.
func (b *dueBuilder) fill(ctx context.Context) error {
	if err := b.pieces(); err != nil {
		return err
	}
	limit := b.p.MaxRecords
	if len(b.queues) > limit {
		b.queues, b.d.claim.More = b.queues[:limit], true
	}
	if err := b.readEvents(ctx); err != nil {
		return err
	}
	keys, drains := 0, 0
	for _, q := range b.queues {
		if q.k != nil {
			keys++
		}
	}
	share := b.p.KeyShare
	if share == 0 {
		share = max(1, limit/max(1, keys))
	}
	for _, q := range b.queues {
		if n := q.piece(); n > 0 {
			limit = min(limit, n)
		}
		room := limit - len(b.d.claim.Records)
		if q.x == nil {
			drains++
		}
		if room <= 0 || drains > maxDrains {
			b.d.claim.More = true
			break
		}
		full, err := b.offer(ctx, q, min(share, room))
		if err != nil {
			return err
		}
		if full {
			b.d.claim.More = true
			break
		}
	}
	return nil
}

// pieces sees to it that what was in hand at a death goes by itself, before
// anything else.
func (b *dueBuilder) pieces() error {
	if !slices.ContainsFunc(b.queues, func(q *queue) bool { return q.piece() > 0 }) {
		return nil
	}
	n := len(b.queues)
	b.queues = slices.DeleteFunc(b.queues, func(q *queue) bool { return q.piece() == 0 })
	c := b.d.claim
	c.More = len(b.queues) < n
	c.Exclusive = true
	return nil
}

// readEvents reads the events of due exceptions.
func (b *dueBuilder) readEvents(ctx context.Context) error {
	byID := map[int64]*queue{}
	var ids []int64
	for _, q := range b.queues {
		if q.x != nil {
			byID[q.x.id] = q
			ids = append(ids, q.x.id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	doc, err := json.Marshal(ids)
	if err != nil {
		return err
	}
	sc := scanner{now: b.now}
	bytes := 0
	err = b.l.ses.st.query(ctx, func(r *sql.Rows) (bool, error) {
		w := &row{}
		if err := sc.scan(r, w); err != nil {
			return false, err
		}
		if bytes += w.rec.Size(); bytes > b.p.MaxBytes {
			w.large, w.rec.Payload = w.large || len(w.rec.Payload) > 0, nil // it may not be wanted
		}
		byID[w.id].event = w
		return true, nil
	}, eventsSQL, inline(b.p), string(doc))
	return err
}

// offer puts up to n records of a queue into the claim. full: not even the
// first one fits.
func (b *dueBuilder) offer(ctx context.Context, q *queue, n int) (full bool, err error) {
	c := b.d.claim
	dr := &drain{first: len(c.Records)}
	if q.k != nil {
		dr.key = q.k.key
	}
	if x := q.x; x != nil {
		if q.event == nil {
			b.gone = append(b.gone, x.id)
			return false, nil
		}
		if !b.fits(q.event) {
			return true, nil
		}
		if ok, err := b.l.ses.st.fetchLarge(ctx, "outbox_events", q.event); err != nil || !ok {
			return false, err
		}
		r := q.event.rec
		r.Attempts, r.Starts = x.attempts, x.starts
		if x.page != 0 || q.k == nil || !b.l.owes(q.k) {
			r.Sequence = outrider.Sequence{Page: x.page, Pos: x.id}
		}
		if x.failed != 0 {
			r.Waited = time.Duration(b.now-x.failed) * time.Microsecond
		}
		c.Redelivery = c.Redelivery || x.state != "SCHEDULED"
		dr.head, dr.ids = x.id, []int64{x.id}
		b.take(q.event, r)
	}
	if q.k != nil {
		if err := b.successors(ctx, q, dr, n); err != nil {
			return false, err
		}
	}
	switch {
	case len(dr.ids)+len(dr.scheduled) > 0:
		b.d.drains = append(b.d.drains, dr)
	case dr.to == 0:
		return q.x == nil, nil
	default:
		b.l.drained(q.k, dr.to)
	}
	return false, nil
}

// drained notes that nothing of a key was found up to an id. In memory only: it
// is as true without.
func (l *lease) drained(k *heldKey, to int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k.at = max(k.at, to)
	if k.at >= k.again {
		k.again, k.together = 0, 0
	}
	l.rejoin(k)
}

func (b *dueBuilder) fits(r *row) bool {
	return len(b.d.claim.Records) == 0 || b.bytes+r.size <= b.p.MaxBytes
}

func (b *dueBuilder) take(r *row, rec outrider.Record) {
	b.bytes += r.size
	b.d.claim.Records = append(b.d.claim.Records, rec)
}

// successors reads what comes behind the head of a key, or where it was drained
// to.
func (b *dueBuilder) successors(ctx context.Context, q *queue, dr *drain, n int) error {
	l, k := b.l, q.k
	l.mu.Lock()
	from, to, last := max(k.at, dr.head), l.read, k.last
	again := k.again > from
	l.mu.Unlock()
	if again {
		to = k.again
	}
	n -= len(dr.ids)
	if n <= 0 || from >= last || (q.piece() > 0) != (again && k.together > 0) {
		return nil
	}
	var rows []row
	sc := scanner{now: b.now}
	room := b.p.MaxBytes - b.bytes
	whole := true
	err := l.ses.st.query(ctx, func(r *sql.Rows) (bool, error) {
		var w row
		if err := sc.scan(r, &w); err != nil {
			return false, err
		}
		if len(rows) == n || room < w.size && len(rows)+len(b.d.claim.Records) > 0 {
			whole = false
			return false, nil
		}
		room -= w.size
		rows = append(rows, w)
		return true, nil
	}, keySQL, inline(b.p), k.key, from, to, n+1)
	if err != nil {
		return err
	}
	behind := len(dr.ids)
	for i := range rows {
		r := &rows[i]
		page := l.pageOf(k, r.id)
		if again {
			page = k.page
		}
		if !r.later && len(dr.ids) > behind && page != dr.page {
			whole = false // what is in hand of a key has one page: see heldKey
			break
		}
		dr.to = r.id
		if r.later {
			dr.scheduled = append(dr.scheduled, *r)
			continue
		}
		if ok, err := l.ses.st.fetchLarge(ctx, "outbox_events", r); err != nil {
			return err
		} else if !ok {
			continue
		}
		if dr.page = page; again {
			b.d.claim.Redelivery = true
			if len(dr.ids) == 0 {
				r.rec.Starts = k.starts
			}
		}
		if page == 0 || r.rec.AvailableAt.IsZero() { // else it may not have been due then: see handOut
			r.rec.Sequence = outrider.Sequence{Page: page, Pos: r.id}
		}
		dr.ids = append(dr.ids, r.id)
		b.take(r, r.rec)
	}
	if whole {
		dr.to = to
	}
	return nil
}

// owes reports whether records of a key may be to come that keep their places
// from before the lease was acquired. What gets one anew meanwhile would be
// ahead of them: it has none.
func (l *lease) owes(k *heldKey) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.redo) > 0 || k.again > k.at {
		return true
	}
	return !k.loaded && slices.ContainsFunc(l.was, func(p page) bool { return k.at < min(p.To, k.last) })
}

// pageOf is the page that a record of a key was in hand with when the lease was
// acquired; 0: none. A key that had been held back before was not part of it.
func (l *lease) pageOf(k *heldKey, id int64) int64 {
	if k.loaded {
		return 0
	}
	for _, p := range l.was {
		if p.From < id && id <= p.To {
			return p.Page
		}
	}
	return 0
}
