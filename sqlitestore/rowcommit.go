package sqlitestore

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/outrider-dev/outrider/store"
)

// Commit implements store.Session.
func (ses *rowSession) Commit(ctx context.Context, p store.CommitParams) error {
	l, ok := ses.leases.get(p.Lease)
	if !ok {
		return store.ErrFenced
	}
	l.writing.Lock()
	defer l.writing.Unlock()
	if err := l.resolve(ctx); err != nil {
		return err
	}
	if l.recognised(p) {
		return nil
	}
	l.mu.Lock()
	pl := &rowPlan{l: l, open: l.open, keys: map[string]*rowKey{}, left: map[*rowClaim]int{}, stopped: map[*rowKey]struct{}{}}
	err := pl.build(p)
	l.mu.Unlock()
	if err != nil {
		return err
	}
	return l.write(ctx, &written{params: p, apply: pl.apply}, pl.write)
}

// rowOutcome is what becomes of a row.
type rowOutcome struct {
	c  *rowClaim
	id int64
	o  *store.Outcome
	// counted: the failure counts.
	counted bool
}

// rowPlan is what one commit changes.
type rowPlan struct {
	l       *rowLease
	open    []*rowClaim
	whole   []*rowClaim // all of it was published
	rows    []rowOutcome
	settled []*rowClaim
	alone   *rowClaim // a Due claim that is started with nothing beside it
	started []*rowClaim
	keys    map[string]*rowKey
	inFront map[string]int64     // of those, the first row that stays in a Fresh claim
	left    map[*rowClaim]int    // rows that stay in hand of what was settled
	stopped map[*rowKey]struct{} // held back by a record that did not get through
}

// build works out the changes. Called with mu held.
func (p *rowPlan) build(c store.CommitParams) error {
	for i := range c.Settle {
		s := &c.Settle[i]
		d, ok := s.Claim.Driver.(*rowClaim)
		if !ok || d.l != p.l {
			return errors.New("sqlitestore: a claim of another lease")
		}
		if len(s.Outcomes) != len(d.rows) {
			return fmt.Errorf("sqlitestore: settlement of a claim of %d records has %d outcomes", len(d.rows), len(s.Outcomes))
		}
		switch {
		case d.settled:
			p.later(d, s)
		case d.claim.Kind == store.Due:
			p.settleDue(d, s)
		case len(p.open) == 0 || p.open[0] != d || !d.started:
			return errors.New("sqlitestore: fresh claims are settled in the order in which they were started")
		default:
			p.settleFresh(d, s)
		}
	}
	for _, c := range c.Start {
		if d, ok := c.Driver.(*rowClaim); ok && d.claim.Kind == store.Fresh {
			if !slices.Contains(p.open, d) {
				return errors.New("sqlitestore: a claim was started that is not handed out")
			}
			p.started = append(p.started, d)
		}
		if d, ok := c.Driver.(*rowClaim); ok && d.claim.Kind == store.Due && c.Alone {
			p.alone = d
		}
	}
	p.findInFront()
	return nil
}

// findInFront finds what stays in hand, or is still to be sent, of keys that are
// written. They may stand behind it, as a delayed one does that others of its key
// have gone in front of: whoever comes after a death has to begin there.
func (p *rowPlan) findInFront() {
	if len(p.keys) == 0 {
		return
	}
	p.inFront = map[string]int64{}
	for _, c := range p.open {
		for i := range c.rows {
			r := &c.rows[i]
			if _, ok := p.inFront[r.rec.Key]; !ok && p.keys[r.rec.Key] != nil {
				p.inFront[r.rec.Key] = r.id
			}
		}
	}
}

// key is a held key as the plan has it so far, to be changed; nil if it is not
// held.
func (p *rowPlan) key(name string) *rowKey {
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

func (p *rowPlan) put(d *rowClaim, i int, o *store.Outcome) {
	if o.State == store.InHand {
		p.left[d]++
	}
	p.rows = append(p.rows, rowOutcome{d, d.rows[i].id, o, o.Attempts > d.rows[i].attempts})
}

// over reports whether an outcome lets the key go on.
func over(o *store.Outcome) bool {
	return o.State == store.Published || o.State == store.Scheduled || o.State == store.Failed && o.Free
}

func (p *rowPlan) settleFresh(d *rowClaim, s *store.Settlement) {
	p.open = p.open[1:]
	p.settled = append(p.settled, d)
	if !slices.ContainsFunc(s.Outcomes, func(o store.Outcome) bool { return o.State != store.Published }) {
		p.whole = append(p.whole, d)
		return
	}
	for i := range s.Outcomes {
		o, r := &s.Outcomes[i], &d.rows[i]
		p.put(d, i, o)
		if r.rec.Unordered || over(o) {
			continue
		}
		k := p.key(r.rec.Key)
		if k != nil && (k.born < d.no || k.born == d.no && k.at < r.id) {
			k.last = max(k.last, r.id) // behind what holds its key back
			continue
		}
		if k == nil {
			k = &rowKey{key: r.rec.Key, lane: r.rec.Lane}
			p.keys[k.key] = k
		}
		k.born, k.at, k.last = d.no, r.id-1, max(k.last, r.id)
		if o.State != store.Pending {
			k.head = r.id
		}
		p.stopped[k] = struct{}{}
	}
}

func (p *rowPlan) settleDue(d *rowClaim, s *store.Settlement) {
	p.settled = append(p.settled, d)
	stopped := map[string]bool{}
	for i := range s.Outcomes {
		o, r := &s.Outcomes[i], &d.rows[i]
		p.put(d, i, o)
		if r.rec.Unordered {
			continue
		}
		k := p.key(r.rec.Key)
		switch {
		case over(o):
			p.end(k, r.id)
		case stopped[r.rec.Key]:
			k.last = max(k.last, r.id)
		default:
			stopped[r.rec.Key] = true
			p.stop(d, r, o)
		}
	}
	for key, to := range d.drained {
		if k := p.key(key); k != nil {
			k.inHand = false
			if !stopped[key] && k.head == 0 {
				k.at = max(k.at, to)
			}
		}
	}
}

// end moves a key on over a row that is done.
func (p *rowPlan) end(k *rowKey, id int64) {
	if k == nil {
		return
	}
	if k.head == id {
		k.head = 0
	}
	if k.head == 0 {
		k.at = max(k.at, id)
	}
}

// stop holds a key back by a row of a Due claim.
func (p *rowPlan) stop(d *rowClaim, r *rowState, o *store.Outcome) {
	k := p.key(r.rec.Key)
	if k == nil { // a delayed one: what has been read of the key is not behind it
		k = &rowKey{key: r.rec.Key, lane: r.rec.Lane, at: p.l.read, last: p.l.read, born: p.l.claims, wait: p.l.claims}
		p.keys[k.key] = k
	} else if r.id > k.at {
		k.at = r.id - 1
	}
	k.last = max(k.last, r.id)
	if o.State != store.Pending || k.head == r.id {
		k.head = r.id
	}
	p.stopped[k] = struct{}{}
}

// later ends slow records of a claim that was settled before.
func (p *rowPlan) later(d *rowClaim, s *store.Settlement) {
	for i := range s.Outcomes {
		o, r := &s.Outcomes[i], &d.rows[i]
		if o.State == store.Unchanged || o.State == store.InHand {
			continue
		}
		p.put(d, i, o)
		p.left[d]--
		if !r.rec.Unordered && over(o) {
			p.end(p.key(r.rec.Key), r.id)
		}
	}
}

// write makes the changes in the database.
func (p *rowPlan) write(t *tx) error {
	l := p.l
	if _, err := t.exec(`update outbox_row_leases set expires_at = ? where lease = ?`, t.now+l.ses.params.TTL.Microseconds(), l.ID); err != nil {
		return err
	}
	if p.alone != nil { // a death before its start did not count
		if _, err := t.exec(`update outbox_rows set alone = 1 where token = ? and state = 'PUBLISHING'`, p.alone.token); err != nil {
			return err
		}
	}
	for _, d := range p.whole {
		_, err := t.exec(`
			update outbox_rows set state = 'PUBLISHED', token = null, alone = 0, together = 0, due_at = null, done_at = ?
			where token = ? and state = 'PUBLISHING'`, t.now, d.token)
		if err != nil {
			return err
		}
	}
	for i := range p.rows {
		if err := putRow(t, &p.rows[i]); err != nil {
			return err
		}
	}
	for _, d := range p.settled {
		if err := putScheduled(t, d.scheduled); err != nil {
			return err
		}
	}
	for _, k := range p.keys {
		if err := putRowKey(t, k, p.inFront[k.key]); err != nil {
			return err
		}
	}
	for _, d := range p.started {
		if _, err := d.mark(t); err != nil {
			return err
		}
	}
	return nil
}

// putRow writes what became of one row, if the claim still has it in hand.
func putRow(t *tx, r *rowOutcome) error {
	const mine = ` where id = ? and token = ? and state = 'PUBLISHING'`
	o := r.o
	var err error
	switch o.State {
	case store.InHand:
	case store.Published:
		_, err = t.exec(`update outbox_rows set state = 'PUBLISHED', token = null, alone = 0, together = 0, due_at = null, done_at = ?`+mine, t.now, r.id, r.c.token)
	case store.Waiting, store.Failed:
		state, due := "WAITING", any(t.now+ceilMicros(o.Due))
		if o.State == store.Failed {
			state, due = "FAILED", nil
		}
		var first any
		if r.counted {
			first = t.now
		}
		_, err = t.exec(`
			update outbox_rows set state = ?, token = null, alone = 0, together = 0, due_at = ?, attempts = ?, class = ?, message = ?,
				first_failed = coalesce(first_failed, ?), last_failed = ?, free = ?`+mine,
			state, due, o.Attempts, o.Class, cutText(o.Message), first, t.now, o.Free, r.id, r.c.token)
	case store.Scheduled:
		_, err = t.exec(`update outbox_rows set state = 'SCHEDULED', token = null, alone = 0, due_at = available_at`+mine, r.id, r.c.token)
	default: // not sent: an ordered one is read again by its key, a loose one is due
		_, err = t.exec(`
			update outbox_rows set token = null, alone = 0,
				due_at = case when event_key = '' then coalesce(due_at, ?) else due_at end,
				state = case when event_key = '' then 'WAITING' when due_at is null then 'PENDING' when last_failed is null and available_at is not null then 'SCHEDULED' else 'WAITING' end`+mine,
			t.now, r.id, r.c.token)
	}
	return err
}

// putRowKey writes the head of a held key. One that an operator has taken away
// does not come back by it.
func putRowKey(t *tx, k *rowKey, inFront int64) error {
	if k.head == 0 {
		_, err := t.exec(`delete from outbox_row_keys where event_key = ?`, k.key)
		return err
	}
	at := k.at
	if inFront > 0 {
		at = min(at, inFront-1)
	}
	_, err := t.exec(`
		insert into outbox_row_keys as h (event_key, lane, head, at) values (?, ?, ?, ?)
		on conflict (event_key) do update set at = excluded.at, head = case when h.freed <> excluded.head then excluded.head end`,
		k.key, k.lane, k.head, at)
	return err
}

// apply makes the changes in memory.
func (p *rowPlan) apply() {
	l := p.l
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range p.started {
		d.started = true
	}
	for _, d := range p.settled {
		d.settled = true
		if d.claim.Kind == store.Fresh {
			l.open = l.open[1:]
		}
		delete(l.dues, d)
	}
	for d, n := range p.left {
		if d.left += n; d.left > 0 {
			l.asides[d] = struct{}{}
		} else {
			delete(l.asides, d)
		}
	}
	for key, k := range p.keys {
		if old := l.held[key]; old != nil {
			k.last = max(k.last, old.last)
			k.inHand = k.inHand && old.inHand
		}
		l.held[key] = k
	}
	stopped := map[string]*rowKey{}
	for k := range p.stopped {
		stopped[k.key] = k
	}
	if len(stopped) > 0 {
		// What has been handed out of them since will be given back.
		for _, c := range l.open {
			for i := range c.rows {
				if k := stopped[c.rows[i].rec.Key]; k != nil {
					k.last, k.wait = max(k.last, c.rows[i].id), c.no
				}
			}
		}
	}
	for key, k := range l.held {
		if k.head == 0 && k.at >= k.last && k.ready(l) {
			delete(l.held, key)
		}
	}
}
