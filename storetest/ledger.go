package storetest

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// Ledger notes what was committed and what was delivered, and finds what must
// not be:
//
//  1. a committed event that was neither delivered nor given up, one that was
//     rolled back and seen;
//  2. an event settled under a claim that does not hold it any more;
//  3. a first delivery in front of an earlier one of its key, that is one of
//     the same transaction or of one that had ended before the later began.
//     Delayed events hold nothing back.
//
// Its methods may be called from any goroutine. Event ids must be unique.
type Ledger struct {
	// Sequences: along the first deliveries of a key Record.Sequence grows,
	// and one that is delivered again keeps its own or has a higher one than
	// any. Set it before use.
	Sequences bool

	mu     sync.Mutex
	clock  int
	events map[string]*entry
	keys   map[string][]*entry // ordered ones, as they were added
	views  map[string]*view
	faults []error
}

// entry is an event in the ledger.
type entry struct {
	event    outrider.Event
	tx       *LedgerTx
	pos      int
	position map[string]*position // by destination
}

// position is where an event stands with a destination.
type position struct {
	holder    *store.Claim // that has it in hand
	since     int          // when it was noted as such
	begun     int          // when its start was on its way
	delivered int
	over      bool // delivered, given up or discarded
	overSince int  // when that was noted
	retried   bool // by an operator, maybe after its key had gone on
	sequence  outrider.Sequence
}

// view is what a destination has seen.
type view struct {
	last map[string]outrider.Sequence // by key
	done map[string]int               // by key, how many at its front need no look any more
}

// LedgerTx is a transaction in a Ledger.
type LedgerTx struct {
	ledger       *Ledger
	begun, ended int // 0: not yet
	rolledBack   bool
}

// NewLedger makes an empty Ledger.
func NewLedger() *Ledger {
	return &Ledger{events: map[string]*entry{}, keys: map[string][]*entry{}, views: map[string]*view{}}
}

func (l *Ledger) fault(format string, args ...any) {
	l.faults = append(l.faults, fmt.Errorf(format, args...))
}

func (l *Ledger) tick() int {
	l.clock++
	return l.clock
}

// Begin notes a transaction. Call it before the transaction begins.
func (l *Ledger) Begin() *LedgerTx {
	l.mu.Lock()
	defer l.mu.Unlock()
	return &LedgerTx{ledger: l, begun: l.tick()}
}

// Add notes events. Call it before they are added.
func (x *LedgerTx) Add(events ...outrider.Event) {
	x.ledger.mu.Lock()
	defer x.ledger.mu.Unlock()
	for _, e := range events {
		if e.ID == "" || x.ledger.events[e.ID] != nil {
			x.ledger.fault("ledger: event id %q is not unique", e.ID)
		}
		n := &entry{event: e, tx: x, pos: x.ledger.tick(), position: map[string]*position{}}
		x.ledger.events[e.ID] = n
		if !e.Unordered {
			x.ledger.keys[keyOf(e)] = append(x.ledger.keys[keyOf(e)], n)
		}
	}
}

// Commit notes the end of a transaction. Call it when it has committed.
func (x *LedgerTx) Commit() {
	x.ledger.mu.Lock()
	defer x.ledger.mu.Unlock()
	x.ended = x.ledger.tick()
}

// Rollback notes the end of a transaction. Call it before it is rolled back.
func (x *LedgerTx) Rollback() {
	x.ledger.mu.Lock()
	defer x.ledger.mu.Unlock()
	x.rolledBack = true
}

// at finds an event's position.
func (l *Ledger) at(destination, id string) (*entry, *position) {
	e := l.events[id]
	if e == nil {
		l.fault("%s: event %s was never added", destination, id)
		return nil, nil
	}
	if e.tx.rolledBack {
		l.fault("%s: event %s was rolled back and seen", destination, id)
	}
	p := e.position[destination]
	if p == nil {
		p = &position{}
		e.position[destination] = p
	}
	return e, p
}

// Started notes that a claim is in hand. Call it when its start is committed,
// where nobody else can have done anything since.
func (l *Ledger) Started(c *store.Claim) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.started(c, l.tick())
}

// starting notes that the starts of claims are on their way; call done when they
// were committed. By then others may have taken the lease over, and what they
// did is noted already.
func (l *Ledger) starting(claims []*store.Claim) (done func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	begun := l.tick()
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, c := range claims {
			l.started(c, begun)
		}
	}
}

// started notes that a claim whose start began then is in hand.
func (l *Ledger) started(c *store.Claim, begun int) {
	for _, r := range c.Records {
		_, p := l.at(c.Lease.Destination, r.ID)
		switch {
		case p == nil:
			continue
		case p.over && p.overSince < begun:
			l.fault("%s: event %s was handed out after it had been settled for good", c.Lease.Destination, r.ID)
		case p.begun > begun:
			continue // whoever has it now was quicker to note it
		}
		p.holder, p.begun, p.since = c, begun, l.tick()
	}
}

// end notes that an event has come to its end.
func (l *Ledger) end(p *position) {
	if !p.over {
		p.over, p.overSince = true, l.tick()
	}
}

// keyOf is the key of an event, which may have been left to its default.
func keyOf(e outrider.Event) string {
	if e.Key == "" && !e.Unordered {
		return e.AggregateID
	}
	return e.Key
}

func delayed(e outrider.Event) bool { return e.Delay != 0 || !e.AvailableAt.IsZero() }

// before reports whether e has to be delivered in front of f, of the same key.
func (e *entry) before(f *entry) bool {
	if e.tx == f.tx {
		return e.pos < f.pos
	}
	return e.tx.ended != 0 && e.tx.ended < f.tx.begun
}

// Delivered notes that a destination got a message.
func (l *Ledger) Delivered(destination string, r outrider.Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e, p := l.at(destination, r.ID)
	if p == nil {
		return
	}
	p.delivered++
	first := p.delivered == 1
	before := p.sequence
	p.sequence = r.Sequence
	if r.Unordered {
		return
	}
	v := l.views[destination]
	if v == nil {
		v = &view{last: map[string]outrider.Sequence{}, done: map[string]int{}}
		l.views[destination] = v
	}
	// What is read anew, behind a head that failed, has a place anew. What is
	// outside the order of its key need not have one.
	outside := r.Sequence.IsZero() && (delayed(e.event) || p.retried)
	if l.Sequences && !outside && (first || r.Sequence != before) {
		if last := v.last[r.Key]; r.Sequence.String() <= last.String() {
			l.fault("%s: event %s has sequence %v, its key went up to %v before, itself to %v", destination, r.ID, r.Sequence, last, before)
		}
		v.last[r.Key] = r.Sequence
	}
	if !first {
		return
	}
	if delayed(e.event) {
		return
	}
	for i, x := range l.keys[r.Key][v.done[r.Key]:] {
		q := x.position[destination]
		switch {
		case x.tx.rolledBack, delayed(x.event), q != nil && (q.delivered > 0 || q.over):
			if i == 0 {
				v.done[r.Key]++
			}
		case x.before(e):
			l.fault("%s: event %s of key %q was delivered in front of %s", destination, r.ID, r.Key, x.event.ID)
		}
	}
}

// Settlement is a settlement that is on its way.
type Settlement struct {
	ledger   *Ledger
	claim    *store.Claim
	outcomes []store.Outcome
	begun    int
}

// Settle notes that outcomes are about to be committed.
func (l *Ledger) Settle(c *store.Claim, outcomes []store.Outcome) *Settlement {
	l.mu.Lock()
	defer l.mu.Unlock()
	return &Settlement{l, c, outcomes, l.tick()}
}

// Done notes that they were.
func (s *Settlement) Done() {
	l := s.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, r := range s.claim.Records {
		o := s.outcomes[i]
		if o.State == store.Unchanged || o.State == store.InHand {
			continue
		}
		_, p := l.at(s.claim.Lease.Destination, r.ID)
		switch {
		case p == nil:
			continue
		case p.holder != s.claim && p.since < s.begun:
			l.fault("%s: event %s was settled under a claim that does not hold it", s.claim.Lease.Destination, r.ID)
		case p.holder == s.claim:
			p.holder, p.since = nil, l.tick()
		}
		if o.State == store.Published || o.State == store.Failed && o.Free {
			l.end(p)
		}
	}
}

// GivenUp notes events that will not be delivered, such as those discarded.
func (l *Ledger) GivenUp(destination string, ids ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		if _, p := l.at(destination, id); p != nil {
			l.end(p)
		}
	}
}

// Retried notes events that failed and are to be sent after all.
func (l *Ledger) Retried(destination string, ids ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		if _, p := l.at(destination, id); p != nil {
			p.over, p.retried = false, true
		}
	}
}

// Missing are the committed events that a destination has neither got nor
// given up, in the order in which they were added.
func (l *Ledger) Missing(destination string) []outrider.Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []*entry
	for _, e := range l.events {
		if p := e.position[destination]; e.tx.ended != 0 && (p == nil || p.delivered == 0 && !p.over) {
			out = append(out, e)
		}
	}
	slices.SortFunc(out, func(a, b *entry) int { return a.pos - b.pos })
	events := make([]outrider.Event, len(out))
	for i, e := range out {
		events[i] = e.event
	}
	return events
}

// Err gives the faults found so far, or nil.
func (l *Ledger) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return errors.Join(l.faults...)
}

func (l *Ledger) verify(t testing.TB) {
	t.Helper()
	if err := l.Err(); err != nil {
		t.Error(err)
	}
}
