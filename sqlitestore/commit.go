package sqlitestore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

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
	if l.recognised(p) {
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
	var doc []byte
	if err == nil {
		doc, err = json.Marshal(pl.hand())
	}
	page := l.page
	l.mu.Unlock()
	if err != nil {
		return err
	}
	return l.write(ctx, &written{params: p, apply: pl.apply}, func(t *tx) error {
		return pl.write(t, page, string(doc))
	})
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
	failed   bool // it has failed right now
	counted  bool // and that counts
	page     int64
	together int
}

// journalRow notes what became of a claim.
type journalRow struct {
	kind      string
	from, to  int64
	records   int
	published int
	receipts  []string
}

// plan is what one commit changes: in the database by write, in memory by
// apply, once it is known to be written.
type plan struct {
	l       *lease
	done    int64
	open    []*fresh // what stays in hand
	started []*fresh
	alone   *due // started with nothing beside it
	settled []*fresh
	dues    []*due // settled for the first time

	put     map[int64]exception
	drop    []int64
	keys    map[string]*heldKey
	stopped map[string]bool // keys held back by a record of a page
	unpark  []string
	rejoin  map[string]bool  // keys that were drained to the end of what was passed over
	joined  map[string]int64 // keys whose joining is to be written
	dropKey []string
	forget  []string // keys of joined that nothing is left of
	journal []journalRow
}

func newPlan(l *lease) *plan {
	return &plan{l: l, done: l.done, open: l.open, put: map[int64]exception{}, keys: map[string]*heldKey{},
		stopped: map[string]bool{}, rejoin: map[string]bool{}, joined: map[string]int64{}}
}

// build works out the changes. Called with mu held.
func (p *plan) build(c store.CommitParams) error {
	for i := range c.Settle {
		s := &c.Settle[i]
		if len(s.Outcomes) != len(s.Claim.Records) {
			return fmt.Errorf("sqlitestore: settlement of a claim of %d records has %d outcomes", len(s.Claim.Records), len(s.Outcomes))
		}
		switch d := s.Claim.Driver.(type) {
		case *fresh:
			if d.settled {
				p.later(s, d.ids)
				continue
			}
			p.passEmpty()
			if len(p.open) == 0 || p.open[0] != d || !d.started {
				return errors.New("sqlitestore: fresh claims are settled in the order in which they were started")
			}
			p.settleFresh(d, s)
		case *due:
			if d.settled {
				p.later(s, d.ids())
				continue
			}
			p.settleDue(d, s)
		default:
			return errors.New("sqlitestore: a claim of another store")
		}
	}
	p.passEmpty()
	for _, c := range c.Start {
		if f, ok := c.Driver.(*fresh); ok {
			if !slices.Contains(p.open, f) {
				return errors.New("sqlitestore: a claim was started that is not handed out")
			}
			p.started = append(p.started, f)
		}
		if d, ok := c.Driver.(*due); ok && c.Alone {
			p.alone = d
		}
	}
	for _, k := range p.l.unknown(p.done) {
		p.key(k.key)
	}
	p.settleJoined()
	return nil
}

// passEmpty settles pages without records at the head of what is in hand.
func (p *plan) passEmpty() {
	for len(p.open) > 0 && p.open[0].empty() {
		p.settleFresh(p.open[0], &store.Settlement{})
	}
}

// settleJoined gets rid of keys that move with their lease again, once it has
// come to where they joined it; until then the database has to know.
func (p *plan) settleJoined() {
	for key, at := range p.l.joined {
		_, again := p.keys[key]
		again = again || p.l.held[key] != nil
		switch {
		case p.done >= at:
			p.forget = append(p.forget, key)
			if !again {
				p.dropKey = append(p.dropKey, key)
			}
		case !p.l.noted[key] && !again:
			p.joined[key] = at
		}
	}
}

// key is a held key as the plan has it so far, to be changed and written; nil if
// it is not held.
func (p *plan) key(name string) *heldKey {
	if k, ok := p.keys[name]; ok {
		return k
	}
	if k := p.l.held[name]; k != nil && name != "" {
		copied := *k
		copied.borrowed = false
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
	p.done = max(p.done, f.page.To)
	p.settled = append(p.settled, f)
	published := 0
	for i := range s.Outcomes {
		o := &s.Outcomes[i]
		if o.State == store.Published {
			published++
			continue
		}
		rec, id := &f.records.Records[i], f.ids[i]
		switch {
		case rec.Unordered:
			p.except(rec, id, o)
			p.apart(f, id, o)
		case p.heldBefore(f, rec.Key, id):
			p.behind(f, rec.Key, id, o)
		case o.State == store.Failed && o.Free:
			p.except(rec, id, o)
		default:
			p.hold(f, rec, id, o)
			p.behind(f, rec.Key, id, o)
		}
	}
	for i := range f.scheduled {
		r := &f.scheduled[i]
		if p.heldBefore(f, r.rec.Key, r.id) {
			p.behind(f, r.rec.Key, r.id, &store.Outcome{State: store.Pending})
		} else {
			p.put[r.id] = exception{rec: &r.rec, state: "SCHEDULED", at: r.rec.AvailableAt}
		}
	}
	for _, k := range f.burst {
		p.key(k.key)
	}
	if len(s.Outcomes) > 0 {
		p.journal = append(p.journal, journalRow{"FRESH", f.page.From, f.page.To, len(s.Outcomes), published, s.Receipts})
	}
}

// apart keeps an unordered record that was in hand at a death so when it is
// given back.
func (p *plan) apart(f *fresh, id int64, o *store.Outcome) {
	if e := p.put[id]; f.redo && o.State == store.Pending {
		e.together = f.page.Limit
		p.put[id] = e
	}
}

// heldBefore reports whether a row of a page is behind what holds its key back:
// since an earlier page, or since one in front of it in this page.
func (p *plan) heldBefore(f *fresh, key string, id int64) bool {
	k := p.peek(key)
	return k != nil && (k.born < f.no || k.born == f.no && k.at < id)
}

// behind notes that a record is read again by its key. What was in hand at a
// death stays apart.
func (p *plan) behind(f *fresh, key string, id int64, o *store.Outcome) {
	k := p.key(key)
	k.last = max(k.last, id)
	if f.redo && o.State == store.Pending && k.born == f.no {
		k.again, k.together, k.page = id, f.page.Limit, f.page.Page
	}
}

// hold takes a key out of its lease's way, from a record on.
func (p *plan) hold(f *fresh, rec *outrider.Record, id int64, o *store.Outcome) {
	k := p.key(rec.Key)
	if k == nil {
		k = &heldKey{key: rec.Key, lane: rec.Lane}
		p.keys[rec.Key] = k
	}
	k.born, k.at = f.no, id-1
	p.stopped[rec.Key] = true
	if o.State != store.Pending {
		k.head = id
		p.except(rec, id, o)
	}
}

// except writes an exception for a record.
func (p *plan) except(rec *outrider.Record, id int64, o *store.Outcome) {
	e := exception{rec: rec, attempts: o.Attempts, class: o.Class, message: cutText(o.Message), page: rec.Sequence.Page}
	switch o.State {
	case store.Waiting:
		e.state, e.due, e.failed = "WAITING", o.Due, true
	case store.Failed:
		e.state, e.failed = "FAILED", true
	case store.InHand:
		e.state, e.attempts = "PUBLISHING", rec.Attempts
	case store.Scheduled:
		e.state, e.attempts, e.at = "SCHEDULED", rec.Attempts, rec.AvailableAt
	default: // Pending: not sent
		e.state, e.attempts = "WAITING", rec.Attempts
	}
	e.counted = e.failed && e.attempts > rec.Attempts
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

// end gives an exception in hand its outcome, and its key its way. It reports
// whether the key may go on.
func (p *plan) end(rec *outrider.Record, id int64, o *store.Outcome) bool {
	switch o.State {
	case store.Published:
		delete(p.put, id)
		p.drop = append(p.drop, id)
	case store.InHand:
		return false // it stays in hand
	default:
		p.except(rec, id, o)
		if o.State != store.Scheduled && !(o.State == store.Failed && o.Free) {
			return false
		}
	}
	if rec.Unordered {
		return true
	}
	if k := p.peek(rec.Key); k != nil && k.head == id {
		k = p.key(rec.Key)
		k.head, k.at = 0, max(k.at, id)
		if k.parked {
			k.parked = false
			p.unpark = append(p.unpark, k.key)
		}
		p.rejoin[k.key] = true
	}
	return true
}

// settleDue ends a claim of exceptions and of held keys' successors.
func (p *plan) settleDue(d *due, s *store.Settlement) {
	p.dues = append(p.dues, d)
	published := 0
	for i := range s.Outcomes {
		if s.Outcomes[i].State == store.Published {
			published++
		}
	}
	for _, dr := range d.drains {
		p.settleDrain(d, dr, s)
	}
	if ids := d.ids(); len(ids) > 0 {
		p.journal = append(p.journal, journalRow{"DUE", slices.Min(ids), slices.Max(ids), len(ids), published, s.Receipts})
	}
}

// settleDrain ends an exception, and moves a held key on by the successors that
// are done.
func (p *plan) settleDrain(d *due, dr *drain, s *store.Settlement) {
	i, ids := dr.first, dr.ids
	open := true
	if dr.head != 0 {
		open = p.end(&d.claim.Records[i], dr.head, &s.Outcomes[i])
		i, ids = i+1, ids[1:]
	}
	if dr.key == "" {
		return
	}
	k := p.key(dr.key)
	if k == nil {
		return
	}
	k.inHand, k.inHandTo, k.starts = 0, 0, 0
	for j := 0; open && j < len(ids); j++ {
		o, rec := &s.Outcomes[i+j], &d.claim.Records[i+j]
		switch {
		case o.State == store.Published:
			k.at = ids[j]
		case o.State == store.Scheduled, o.State == store.Failed && o.Free:
			p.except(rec, ids[j], o)
			k.at = ids[j]
		default:
			k.at, open = ids[j]-1, false
			if o.State != store.Pending {
				k.head = ids[j]
				p.except(rec, ids[j], o)
			}
		}
	}
	if open {
		k.at = max(k.at, dr.to)
		p.rejoin[k.key] = true
	}
	if k.at >= k.again {
		k.again, k.together = 0, 0
	}
	for j := range dr.scheduled {
		if r := &dr.scheduled[j]; r.id <= k.at {
			p.put[r.id] = exception{rec: &r.rec, state: "SCHEDULED", at: r.rec.AvailableAt}
		}
	}
}

// apply makes the changes in memory.
func (p *plan) apply() {
	l := p.l
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done, l.saved = max(l.done, p.done), p.done
	l.open = l.open[len(p.settled):]
	for _, f := range p.settled {
		f.settled = true
		l.note(f)
	}
	for _, f := range p.started {
		f.started = true
	}
	for _, d := range p.dues {
		d.settled = true
	}
	for id, e := range p.put {
		delete(l.inHand, id)
		delete(l.waiting, id)
		switch e.state {
		case "PUBLISHING":
			l.inHand[id], l.waiting[id] = true, struct{}{}
		case "WAITING":
			l.waiting[id] = struct{}{}
		}
	}
	for _, id := range p.drop {
		delete(l.inHand, id)
		delete(l.waiting, id)
	}
	for _, key := range p.forget {
		delete(l.joined, key)
		delete(l.noted, key)
	}
	for key := range p.joined {
		l.noted[key] = true
	}
	p.applyKeys()
}

// applyKeys takes over what changed of held keys; claims may have passed over
// more of them meanwhile.
func (p *plan) applyKeys() {
	l := p.l
	stopped := map[string]*heldKey{}
	for key, k := range p.keys {
		if old := l.held[key]; old != nil {
			k.last = max(k.last, old.last)
			k.inHand = min(k.inHand, old.inHand) // forgotten
		}
		if p.stopped[key] {
			stopped[key] = k
		}
		l.held[key] = k
	}
	if len(stopped) > 0 {
		// What has been handed out of them since will be given back.
		for _, f := range l.open {
			for i := range f.ids {
				if k := stopped[f.records.Records[i].Key]; k != nil {
					k.last, k.wait = max(k.last, f.ids[i]), f.no
				}
			}
			for i := range f.scheduled {
				if k := stopped[f.scheduled[i].rec.Key]; k != nil {
					k.last, k.wait = max(k.last, f.scheduled[i].id), f.no
				}
			}
		}
	}
	for key := range p.rejoin {
		if k := l.held[key]; k != nil {
			l.rejoin(k)
		}
	}
}

// rejoin lets a key move with its lease again once nothing of it is left of
// what the lease has passed over. What was in hand at a death comes first:
// with what it was sent with. Called with mu held.
func (l *lease) rejoin(k *heldKey) bool {
	if k.head != 0 || k.at < k.last || l.read < k.at || len(l.redo) > 0 || !k.ready(l) {
		return false
	}
	delete(l.held, k.key)
	l.joined[k.key] = l.read
	delete(l.noted, k.key)
	return true
}

// cutText keeps a message within store.MaxMessage, at a character's border, and
// free of what other databases' text cannot hold.
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

// hand is what the lease has in hand after the commit: what was started, and
// what lies in front of it, whose delayed events are noted when it is settled.
func (p *plan) hand() hand {
	h := hand{Open: []page{}}
	last := -1
	for i, f := range p.open {
		if f.started || slices.Contains(p.started, f) {
			last = i
		}
	}
	var later []page
	for i, f := range p.open {
		switch {
		case i <= last:
			h.Open = append(h.Open, f.page)
		case f.redo:
			later = append(later, f.page)
		}
	}
	h.Redo = append(later, p.l.redo...)
	return h
}
