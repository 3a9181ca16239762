package storetest

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// main is the destination of most tests.
const mainDest = "main"

// eventID is a UUID that tells tests and readers its number.
func eventID(n int64) string { return fmt.Sprintf("00000000-0000-7000-8000-%012d", n) }

var eventCount atomic.Int64

// event makes one of a key; key "" makes an unordered one.
func event(key string) outrider.Event {
	n := eventCount.Add(1)
	return outrider.Event{
		ID:            eventID(n),
		AggregateType: "order",
		AggregateID:   "42",
		Type:          "Happened",
		Key:           key,
		Unordered:     key == "",
		Payload:       fmt.Appendf(nil, `{"n": %d}`, n),
	}
}

// events makes one for each key.
func events(keys ...string) []outrider.Event {
	var out []outrider.Event
	for _, k := range keys {
		out = append(out, event(k))
	}
	return out
}

// spread makes n events over a number of keys, in turn.
func spread(n, keys int) []outrider.Event {
	var out []outrider.Event
	for i := range n {
		out = append(out, event(fmt.Sprintf("key-%d", i%keys)))
	}
	return out
}

// lease times of a member.
type terms struct {
	name  string
	ttl   time.Duration
	grace time.Duration
	dests []store.Destination
}

const forever = 24 * time.Hour

// member is a relay that does as it is told.
type member struct {
	b     *bench
	t     testing.TB
	s     store.Session
	lease store.Lease
	// params of its claims; Lease and Kind are filled in.
	params store.ClaimParams
}

// join makes a member whose leases never expire by themselves.
func (b *bench) join() *member {
	b.t.Helper()
	return b.joinAs(terms{})
}

// joinMortal makes a member whose leases can be taken over after die.
func (b *bench) joinMortal() *member {
	b.t.Helper()
	return b.joinAs(b.mortal())
}

// mortal are the terms of such a one.
func (b *bench) mortal() terms {
	if b.caps.LiveTakeOver {
		return terms{}
	}
	return terms{ttl: b.short()}
}

func (b *bench) joinAs(terms terms) *member {
	b.t.Helper()
	m, err := b.tryJoin(terms)
	if err != nil {
		b.t.Fatal(err)
	}
	return m
}

func (b *bench) tryJoin(m terms) (*member, error) {
	p := store.JoinParams{Relay: m.name, TTL: m.ttl, Grace: m.grace, Destinations: m.dests}
	if p.Relay == "" {
		p.Relay = "relay"
	}
	if p.TTL == 0 {
		p.TTL = forever
	}
	if p.Grace == 0 {
		p.Grace = b.short()
	}
	if p.Destinations == nil {
		p.Destinations = []store.Destination{{Name: mainDest, FromEarliest: true}}
	}
	s, err := b.Store.Join(b.ctx, p)
	if err != nil {
		return nil, fmt.Errorf("join: %w", err)
	}
	b.t.Cleanup(func() { _ = s.Leave(b.ctx) })
	return &member{b: b, t: b.t, s: s, params: store.ClaimParams{MaxRecords: 100, MaxBytes: 1 << 20}}, nil
}

// owner makes a member that holds all lanes of the main destination.
func (b *bench) owner() *member {
	b.t.Helper()
	return b.join().takeAll()
}

func (b *bench) mortalOwner() *member {
	b.t.Helper()
	return b.joinMortal().takeAll()
}

// acquire takes leases of the main destination.
func (m *member) acquire(lanes int) []store.Lease {
	m.t.Helper()
	leases, err := m.s.Acquire(m.b.ctx, store.AcquireParams{Destination: mainDest, Lanes: lanes})
	if err != nil {
		m.t.Fatalf("acquire: %v", err)
	}
	for _, l := range leases {
		if l.Destination != mainDest || l.Lanes == 0 {
			m.t.Fatalf("acquired %+v", l)
		}
	}
	return leases
}

// takeAll waits until the member holds all lanes in one lease.
func (m *member) takeAll() *member {
	m.t.Helper()
	m.b.until("all lanes are acquired", func() bool {
		leases := m.acquire(64)
		if len(leases) > 0 {
			m.lease = leases[0]
		}
		return len(leases) > 0
	})
	if m.lease.Lanes != store.AllLanes {
		m.t.Fatalf("acquired lanes %x of one lease that holds them all", m.lease.Lanes)
	}
	return m
}

// die ends the member's connections without a word.
func (m *member) die() {
	m.t.Helper()
	m.b.Kill(m.t, m.s)
}

// claim reads a claim.
func (m *member) claim(kind store.Kind) *store.Claim {
	m.t.Helper()
	p := m.params
	p.Lease, p.Kind = m.lease, kind
	c, err := m.s.Claim(m.b.ctx, p)
	if err != nil {
		m.t.Fatalf("claim: %v", err)
	}
	if c.Kind != kind || c.Lease != m.lease {
		m.t.Fatalf("claim of kind %v, lease %+v; asked for %v, %+v", c.Kind, c.Lease, kind, m.lease)
	}
	if c.Alone && (!c.Exclusive || len(c.Records) != 1) {
		m.t.Errorf("claim with Alone has Exclusive %v and %d records", c.Exclusive, len(c.Records))
	}
	return c
}

func (m *member) fresh() *store.Claim { m.t.Helper(); return m.claim(store.Fresh) }
func (m *member) due() *store.Claim   { m.t.Helper(); return m.claim(store.Due) }

// commit writes and notes it in the ledger.
func (m *member) commit(settle []store.Settlement, start ...*store.Claim) error {
	m.t.Helper()
	done := m.note(settle, start)
	err := m.s.Commit(m.b.ctx, store.CommitParams{Lease: m.lease, Settle: settle, Start: start})
	m.sweep()
	if err == nil {
		done()
	}
	return err
}

// sweep looks for events that were passed over, of which there are none, in
// whatever a test does.
func (m *member) sweep() {
	m.t.Helper()
	w, ok := m.s.(store.Sweeper)
	if !ok {
		return
	}
	s, err := w.Sweep(m.b.ctx)
	if err != nil {
		m.t.Errorf("sweep: %v", err)
	}
	if s.Found != 0 {
		m.t.Errorf("a sweep found %d events passed over, of which there are none: %v", s.Found, s.Rows)
	}
}

// note notes a commit in the ledger: now that it is on its way, and when it
// has taken effect.
func (m *member) note(settle []store.Settlement, start []*store.Claim) (done func()) {
	var settling []*Settlement
	for _, s := range settle {
		settling = append(settling, m.b.ledger.Settle(s.Claim, s.Outcomes))
	}
	started := m.b.ledger.starting(start)
	return func() {
		for _, s := range settling {
			s.Done()
		}
		started()
	}
}

// start puts claims in hand.
func (m *member) start(claims ...*store.Claim) {
	m.t.Helper()
	if err := m.commit(nil, claims...); err != nil {
		m.t.Fatalf("start: %v", err)
	}
}

// hand reads a Fresh claim and puts it in hand.
func (m *member) hand() *store.Claim {
	m.t.Helper()
	c := m.fresh()
	if len(c.Records) == 0 {
		m.t.Fatalf("nothing to claim")
	}
	m.start(c)
	return c
}

// deliver delivers a claim's records, or those at the places given.
func (m *member) deliver(c *store.Claim, at ...int) {
	for i, r := range c.Records {
		if len(at) == 0 || slices.Contains(at, i) {
			m.b.ledger.Delivered(c.Lease.Destination, r)
		}
	}
}

// settle writes outcomes of a claim; the last one goes for the rest.
func (m *member) settle(c *store.Claim, outcomes ...store.Outcome) {
	m.t.Helper()
	if err := m.commit([]store.Settlement{settlement(c, outcomes...)}); err != nil {
		m.t.Fatalf("settle: %v", err)
	}
}

func settlement(c *store.Claim, outcomes ...store.Outcome) store.Settlement {
	for len(outcomes) < len(c.Records) {
		outcomes = append(outcomes, outcomes[len(outcomes)-1])
	}
	return store.Settlement{Claim: c, Outcomes: outcomes[:len(c.Records)], Receipts: []string{"main/0@1"}}
}

// finish delivers and settles a claim in hand.
func (m *member) finish(c *store.Claim) {
	m.t.Helper()
	m.deliver(c)
	m.settle(c, published)
}

var (
	published = store.Outcome{State: store.Published}
	pending   = store.Outcome{State: store.Pending}
	inHand    = store.Outcome{State: store.InHand}
	unchanged = store.Outcome{State: store.Unchanged}
)

func waiting(attempts int, due time.Duration) store.Outcome {
	return store.Outcome{State: store.Waiting, Attempts: attempts, Due: due, Class: "refused", Message: "not now"}
}

func failed(attempts int, free bool) store.Outcome {
	return store.Outcome{State: store.Failed, Attempts: attempts, Free: free, Class: "invalid", Message: "never"}
}

// outcomes follows what a relay does: decide says what becomes of each record
// that is sent, and what is behind a stopped one of its key is not sent.
func (m *member) outcomes(c *store.Claim, decide func(outrider.Record) store.Outcome) []store.Outcome {
	stopped := map[string]bool{}
	var out []store.Outcome
	for _, r := range c.Records {
		if !r.Unordered && stopped[r.Key] {
			out = append(out, pending)
			continue
		}
		o := published
		if decide != nil {
			o = decide(r)
		}
		switch {
		case o.State == store.Published:
			m.b.ledger.Delivered(c.Lease.Destination, r)
		case o.State == store.Failed && o.Free:
			m.b.ledger.GivenUp(c.Lease.Destination, r.ID)
		default:
			stopped[r.Key] = true
		}
		out = append(out, o)
	}
	return out
}

// round claims, sends and settles once; it returns what came to an end.
func (m *member) round(kind store.Kind, decide func(outrider.Record) store.Outcome) ([]outrider.Record, error) {
	m.t.Helper()
	c := m.claim(kind)
	if len(c.Records) == 0 {
		return nil, nil
	}
	if err := m.commit(nil, c); err != nil {
		return nil, err
	}
	outcomes := m.outcomes(c, decide)
	if err := m.commit([]store.Settlement{settlement(c, outcomes...)}); err != nil {
		return nil, err
	}
	var out []outrider.Record
	for i, o := range outcomes {
		if o.State == store.Published || o.State == store.Failed {
			out = append(out, c.Records[i])
		}
	}
	return out, nil
}

// drain works until n events have come to an end, and returns them in order.
func (m *member) drain(n int, decide func(outrider.Record) store.Outcome) []outrider.Record {
	m.t.Helper()
	var out []outrider.Record
	m.b.until(fmt.Sprintf("%d events come to an end", n), func() bool {
		for {
			fresh, err := m.round(store.Fresh, decide)
			if err != nil {
				m.t.Fatal(err)
			}
			due, err := m.round(store.Due, decide)
			if err != nil {
				m.t.Fatal(err)
			}
			out = append(append(out, fresh...), due...)
			if len(out) >= n {
				return true
			}
			if len(fresh)+len(due) == 0 {
				return false
			}
		}
	})
	if len(out) > n {
		m.t.Errorf("%d events came to an end, want %d", len(out), n)
	}
	return out
}

// idle makes sure that there is nothing to be sent now.
func (m *member) idle() {
	m.t.Helper()
	for range 3 {
		for _, kind := range []store.Kind{store.Fresh, store.Due} {
			if c := m.claim(kind); len(c.Records) > 0 {
				m.t.Errorf("there is something to send: kind %v, %v", kind, ids(c.Records))
				m.s.Forget(c)
			}
		}
	}
}

// nextDue waits for a Due claim with records.
func (m *member) nextDue() *store.Claim {
	m.t.Helper()
	var c *store.Claim
	m.b.until("a Due claim has records", func() bool {
		c = m.due()
		return len(c.Records) > 0
	})
	return c
}

// nextFresh waits for a Fresh claim with records.
func (m *member) nextFresh() *store.Claim {
	m.t.Helper()
	var c *store.Claim
	m.b.until("a Fresh claim has records", func() bool {
		c = m.fresh()
		return len(c.Records) > 0
	})
	return c
}

// fenced makes sure that the member's lease is not its own any more. After
// its connections have ended it may need to ask more than once.
func (m *member) fenced(p store.CommitParams) {
	m.t.Helper()
	var err error
	for range 100 {
		if err = m.s.Commit(m.b.ctx, p); err == nil || errors.Is(err, store.ErrFenced) {
			break
		}
	}
	if !errors.Is(err, store.ErrFenced) {
		m.t.Errorf("stale commit: %v, want ErrFenced", err)
	}
}

// ids of records or events, for comparison.
func ids(records []outrider.Record) []string {
	out := make([]string, 0, len(records))
	for _, r := range records {
		out = append(out, r.ID)
	}
	return out
}

func idsOf(events []outrider.Event) []string {
	out := make([]string, 0, len(events))
	for _, e := range events {
		out = append(out, e.ID)
	}
	return out
}

// wantHead compares what a Due claim holds with what is due of a key, in order:
// it may hold as little as the head.
func wantHead(t testing.TB, what string, got []outrider.Record, want ...outrider.Event) {
	t.Helper()
	n := max(1, min(len(got), len(want)))
	wantIDs(t, what, got, want[:n]...)
}

// wantIDs compares what a claim holds.
func wantIDs(t testing.TB, what string, got []outrider.Record, want ...outrider.Event) {
	t.Helper()
	if g, w := ids(got), idsOf(want); !slices.Equal(g, w) {
		t.Fatalf("%s: got %v, want %v", what, g, w)
	}
}

// sameSequences compares those of records that came twice.
func sameSequences(t testing.TB, got, want []outrider.Record) {
	t.Helper()
	for i := range want {
		if got[i].Sequence != want[i].Sequence {
			t.Errorf("event %s had sequence %v, has %v now", want[i].ID, want[i].Sequence, got[i].Sequence)
		}
	}
}

// ofKey are the records of one key.
func ofKey(records []outrider.Record, key string) []outrider.Record {
	return slices.DeleteFunc(slices.Clone(records), func(r outrider.Record) bool { return r.Key != key })
}
