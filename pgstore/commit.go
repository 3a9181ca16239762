package pgstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

type commandTag = pgconn.CommandTag

// serverSaid reports whether an error is the server's own answer, so that the
// transaction is known to have failed.
func serverSaid(err error) bool {
	var pg *pgconn.PgError
	// An administrator's shutdown can come between commit and answer.
	return errors.As(err, &pg) && pg.Code[:2] != "57" && pg.Code[:2] != "08"
}

// Commit implements store.Session.
func (ses *session) Commit(ctx context.Context, p store.CommitParams) (err error) {
	defer ses.st.explain(&err)
	l := ses.lease(p.Lease)
	if l == nil {
		return store.ErrFenced
	}
	l.writing.Lock()
	defer l.writing.Unlock()
	if err := l.resolve(ctx); err != nil {
		return err
	}
	if l.last != nil && sameCommit(l.last.params, p) {
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
	l.mu.Unlock()
	if err != nil {
		return err
	}
	what := &written{params: p, apply: pl.apply}
	first, others, err := pl.statements()
	if err != nil {
		return err
	}
	return l.write(ctx, what, first, others...)
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
	failure  bool // count the time as that of a failure
}

// journalRow notes what became of a claim.
type journalRow struct {
	Kind      string   `json:"kind"`
	From      int64    `json:"from"`
	To        int64    `json:"to"`
	Records   int      `json:"records"`
	Published int      `json:"published"`
	Receipts  []string `json:"receipts"`
}

// plan is what one commit changes: in the database by statements, in memory by
// apply, once it is known to be written.
type plan struct {
	l       *lease
	done    position
	open    []*fresh // what stays in hand
	redo    []page   // what is to be read again, as of open
	started []*fresh
	settled []*fresh
	dues    []*due // settled for the first time
	alone   *due   // started with nothing beside it

	put     map[int64]exception
	drop    []int64
	keys    map[string]*heldKey
	lows    map[string]int64
	stopped map[string]bool // keys held from a record of a settled page on
	dropKey []string
	// rejoined is how many of the lease's rejoined keys are in dropKey; a claim
	// beside the commit can add more.
	rejoined int
	passed   []int64
	journal  []journalRow
}

func newPlan(l *lease) *plan {
	return &plan{l: l, done: l.done, open: l.open, redo: l.redo, put: map[int64]exception{}, keys: map[string]*heldKey{}, lows: map[string]int64{}, stopped: map[string]bool{}}
}

// build works out the changes. Called with mu held.
func (p *plan) build(c store.CommitParams) error {
	for i := range c.Settle {
		s := &c.Settle[i]
		if len(s.Outcomes) != len(s.Claim.Records) {
			return fmt.Errorf("pgstore: settlement of a claim of %d records has %d outcomes", len(s.Claim.Records), len(s.Outcomes))
		}
		switch d := s.Claim.Driver.(type) {
		case *fresh:
			if d.settled {
				p.later(s, d.ids)
				continue
			}
			p.passEmpty()
			if len(p.open) == 0 || p.open[0] != d || !d.started {
				return errors.New("pgstore: fresh claims are settled in the order in which they were started")
			}
			p.settleFresh(d, s)
		case *due:
			if d.settled {
				p.later(s, d.ids())
				continue
			}
			p.settleDue(d, s)
		default:
			return errors.New("pgstore: a claim of another store")
		}
	}
	p.passEmpty()
	for _, c := range c.Start {
		if f, ok := c.Driver.(*fresh); ok {
			if !slices.Contains(p.open, f) {
				return errors.New("pgstore: a claim was started that is not handed out")
			}
			p.started = append(p.started, f)
		}
		if d, ok := c.Driver.(*due); ok && c.Alone {
			p.alone = d
		}
	}
	p.rejoined = len(p.l.rejoined)
	p.dropKey = append(p.dropKey, p.l.rejoined...)
	return nil
}

// passEmpty settles claims without records at the head of what is in hand.
func (p *plan) passEmpty() {
	for len(p.open) > 0 && len(p.open[0].records.Records) == 0 {
		p.settleFresh(p.open[0], &store.Settlement{})
	}
}

// key is a held key as the plan has it so far, to be changed; nil if it is not
// held.
func (p *plan) key(name string) *heldKey {
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
	p.done = f.after
	p.settled = append(p.settled, f)
	p.passed = append(p.passed, f.passed...)
	published := 0
	for i := range s.Outcomes {
		o := &s.Outcomes[i]
		if o.State == store.Published {
			published++
			continue
		}
		rec, id := &f.records.Records[i], f.ids[i]
		if rec.Unordered {
			p.except(rec, id, o)
			continue
		}
		if k := p.peek(rec.Key); k != nil && (k.born < f.no || k.born == f.no && k.at < id) {
			// Held since before, or behind the one that stopped it: it is read
			// again by its key.
			p.passOver(f, k, id)
			continue
		}
		if o.State == store.Failed && o.Free {
			p.except(rec, id, o)
			continue
		}
		p.hold(f, rec, id, o)
	}
	for i := range f.scheduled {
		r := &f.scheduled[i]
		if k := p.peek(r.rec.Key); k != nil && (k.born < f.no || k.born == f.no && k.at < r.id) {
			p.passOver(f, k, r.id) // the key's own reading comes to it
			continue
		}
		p.put[r.id] = exception{rec: r.rec, state: "SCHEDULED", at: r.rec.AvailableAt}
	}
	for key, id := range f.skipped {
		if k := p.l.held[key]; k != nil {
			p.passOver(f, k, id)
		}
	}
	for _, k := range f.burst {
		p.key(k.key)
	}
	if len(f.records.Records) > 0 {
		p.journal = append(p.journal, journalRow{"FRESH", f.page.From, f.page.To, len(s.Outcomes), published, s.Receipts})
	}
}

// passOver notes that the lease leaves a row of a held key behind, unless it lies
// in the stretch that the key is reading anyway.
func (p *plan) passOver(f *fresh, k *heldKey, id int64) {
	if k.target == nil || k.target.text != f.page.Snap {
		p.lows[k.key] = lowest(p.lows[k.key], id)
	}
}

// hold takes a key out of its lease's way, from a record on.
func (p *plan) hold(f *fresh, rec *outrider.Record, id int64, o *store.Outcome) {
	k := p.key(rec.Key)
	if k == nil || k.born > f.no {
		// Not held, or held for a burst from a later page on only.
		base, err := parseSnapshot(f.page.Base)
		snap, err2 := parseSnapshot(f.page.Snap)
		if err != nil || err2 != nil {
			panic("pgstore: a page whose snapshots were read before cannot be read: " + f.page.Base + ", " + f.page.Snap)
		}
		k = &heldKey{key: rec.Key, lane: rec.Lane, base: base, target: &snap, born: f.no}
		p.keys[rec.Key] = k
	}
	p.stopped[rec.Key] = true
	k.at, k.near = id-1, false
	if o.State != store.Pending {
		k.head = id
		p.except(rec, id, o)
	}
}

// except writes an exception for a record.
func (p *plan) except(rec *outrider.Record, id int64, o *store.Outcome) {
	e := exception{rec: rec, attempts: o.Attempts, class: o.Class, message: cutText(o.Message)}
	switch o.State {
	case store.Waiting:
		e.state, e.due, e.failure = "WAITING", o.Due, o.Class != ""
	case store.Failed:
		e.state, e.failure = "FAILED", true
	case store.InHand:
		e.state, e.attempts = "PUBLISHING", rec.Attempts
	default: // Pending: not sent
		e.state, e.attempts = "WAITING", rec.Attempts
	}
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

// end gives an exception in hand its outcome, and its key its way.
func (p *plan) end(rec *outrider.Record, id int64, o *store.Outcome) {
	done := o.State == store.Published || o.State == store.Failed && o.Free
	if o.State == store.Published {
		delete(p.put, id)
		p.drop = append(p.drop, id)
	} else {
		p.except(rec, id, o)
	}
	if rec.Unordered || !done {
		return
	}
	if k := p.key(rec.Key); k != nil && k.head == id {
		k.head, k.at = 0, id
	}
}

// settleDue ends a claim of exceptions and of held keys' successors.
func (p *plan) settleDue(d *due, s *store.Settlement) {
	p.dues = append(p.dues, d)
	published := 0
	for i := range d.singles {
		o := &s.Outcomes[i]
		if o.State == store.Published {
			published++
		}
		if o.State != store.InHand {
			p.end(&d.claim.Records[i], d.singles[i], o)
		}
	}
	for _, dr := range d.drains {
		published += p.settleDrain(d, dr, s)
	}
	if n := len(s.Outcomes); n > 0 {
		ids := d.ids()
		p.journal = append(p.journal, journalRow{"DUE", slices.Min(ids), slices.Max(ids), n, published, s.Receipts})
	}
}

// settleDrain moves a held key on by the successors that are done.
func (p *plan) settleDrain(d *due, dr *drain, s *store.Settlement) int {
	k := p.key(dr.key)
	if k == nil {
		return 0
	}
	k.inHand = 0
	if k.head != 0 {
		return 0 // its head is still to come, and nothing behind it was sent
	}
	published := 0
	k.starts = 0
	if k.suspects -= len(dr.ids); k.suspects <= 0 {
		k.suspects, k.together = 0, 0
	}
	stopped := false
	for j, id := range dr.ids {
		o := &s.Outcomes[dr.first+j]
		rec := &d.claim.Records[dr.first+j]
		if o.State == store.Published {
			published++
			k.at = id
			continue
		}
		if o.State == store.Failed && o.Free {
			p.except(rec, id, o)
			k.at = id
			continue
		}
		k.at, stopped = id-1, true
		if o.State != store.Pending {
			k.head = id
			p.except(rec, id, o)
		}
		break
	}
	for _, id := range dr.passed {
		if !stopped || id <= k.at {
			p.passed = append(p.passed, id)
		}
	}
	for i := range dr.scheduled {
		if r := &dr.scheduled[i]; !stopped || r.id <= k.at {
			p.put[r.id] = exception{rec: r.rec, state: "SCHEDULED", at: r.rec.AvailableAt}
		}
	}
	switch {
	case stopped:
	case dr.all:
		k.base, k.target, k.at, k.near = *k.target, nil, 0, true
	default:
		k.at = dr.to
	}
	return published
}

// apply makes the changes in memory.
func (p *plan) apply() {
	l := p.l
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(p.settled) > 0 {
		l.done = p.done // else an idle look beside the commit may have moved it on
	}
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
		delete(l.waiting, id)
		delete(l.inHand, id)
		switch e.state {
		case "PUBLISHING":
			l.waiting[id], l.inHand[id] = e.rec.Lane, e.rec.Lane
		case "WAITING":
			l.waiting[id] = e.rec.Lane
		}
	}
	for _, id := range p.drop {
		delete(l.waiting, id)
		delete(l.inHand, id)
	}
	for _, id := range p.passed {
		delete(l.pass, id)
	}
	for key, k := range p.keys {
		if low := p.lows[key]; low != 0 {
			k.skip(low)
		}
		l.held[key] = k
		if p.stopped[key] {
			// Claims that were handed out by now may have records of it: they
			// are given back, and passed over when those are settled.
			k.wait = l.claims
		}
	}
	for key, low := range p.lows {
		if _, ok := p.keys[key]; !ok && l.held[key] != nil {
			l.held[key].skip(low)
		}
	}
	l.rejoined = slices.Delete(l.rejoined, 0, p.rejoined)
}

// cutText keeps a message within store.MaxMessage, at a character's border, and
// free of what a text column cannot hold.
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
