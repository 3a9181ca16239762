// Package storetest is the conformance suite of package store. A driver passes
// it to keep its place:
//
//	func TestStore(t *testing.T) { storetest.Run(t, storetest.Harness{Open: open}) }
//
// It speaks of states and outcomes alone, so streams and row stores run the
// same tests. What a driver promises in store.Capabilities is held to work,
// what it does not promise is held to be refused.
//
// No test measures time: where a driver has no clock to be set, tests wait for
// what must happen, with a limit that only a hang reaches.
package storetest

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// Harness is how the suite gets at a driver.
type Harness struct {
	// Open makes a fresh and empty outbox and ends it when the test does.
	// Needed.
	Open func(t testing.TB) *Outbox

	// OneWriter: a transaction begins when the one before has ended, so tests
	// of transactions that overlap are left out.
	OneWriter bool

	// Binary: payloads may be anything, not only JSON.
	Binary bool

	// Serial: tests run one after another.
	Serial bool

	// Short is the time given to leases and delays that a test waits for,
	// where Outbox.Advance is nil. Default: 300 ms.
	Short time.Duration
}

// Outbox is a store and the ways around it.
type Outbox struct {
	Store store.Store

	// Begin starts an application's transaction. Needed.
	Begin func(t testing.TB) Tx

	// Kill ends a session's connections as the death of its process does,
	// without Leave. Needed.
	Kill func(t testing.TB, s store.Session)

	// Advance moves the clock by which the store decides. nil: it is real.
	Advance func(d time.Duration)

	// SetNextID sets the id of the next row. nil: the driver's ids are not
	// numbers.
	SetNextID func(t testing.TB, id int64)

	// LoseAnswer lets the next Commit or Acquire of a session take effect and
	// return an error. nil: tests of lost answers are left out.
	LoseAnswer func(t testing.TB, s store.Session)
}

// Tx is an application's transaction.
type Tx interface {
	Add(t testing.TB, events ...outrider.Event)
	Commit(t testing.TB)
	Rollback(t testing.TB)
}

// test is one of the suite.
type test struct {
	name string
	run  func(b *bench)
}

// Run runs the suite, each test on an outbox of its own.
func Run(t *testing.T, h Harness) {
	t.Helper()
	if h.Short == 0 {
		h.Short = 300 * time.Millisecond
	}
	for _, group := range []struct {
		name  string
		tests []test
	}{
		{"Deliver", deliverTests},
		{"Settle", settleTests},
		{"Claim", claimTests},
		{"Lease", leaseTests},
		{"Move", moveTests},
		{"Death", deathTests},
		{"Place", placeTests},
		{"Delayed", delayedTests},
		{"Intent", intentTests},
		{"FanOut", fanOutTests},
		{"Operate", operateTests},
		{"Retire", retireTests},
		{"Concurrent", concurrentTests},
	} {
		t.Run(group.name, func(t *testing.T) {
			for _, c := range group.tests {
				t.Run(c.name, func(t *testing.T) {
					if !h.Serial {
						t.Parallel()
					}
					b := newBench(t, h)
					c.run(b)
					b.ledger.verify(t)
				})
			}
		})
	}
}

// limit is how long a test waits for what must happen.
const limit = time.Minute

// bench is what a test works at.
type bench struct {
	*Outbox
	t       testing.TB
	ctx     context.Context
	harness Harness
	caps    store.Capabilities
	ledger  *Ledger
}

func newBench(t testing.TB, h Harness) *bench {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*limit)
	t.Cleanup(cancel)
	b := &bench{Outbox: h.Open(t), t: t, ctx: ctx, harness: h}
	b.caps = b.Store.Capabilities()
	b.ledger = NewLedger()
	b.ledger.Sequences = b.caps.Sequences
	return b
}

// short is a time that a test can let pass.
func (b *bench) short() time.Duration {
	if b.Advance != nil {
		return 10 * time.Second
	}
	return b.harness.Short
}

// pause lets a little time pass.
func (b *bench) pause() {
	if b.Advance != nil {
		b.Advance(b.short() / 10)
		runtime.Gosched()
		return
	}
	select {
	case <-b.ctx.Done():
	case <-time.After(5 * time.Millisecond):
	}
}

// until waits for what must happen.
func (b *bench) until(what string, ok func() bool) {
	b.t.Helper()
	begin := time.Now()
	for n := 0; !ok(); n++ {
		d := time.Since(begin)
		if d > limit || b.Advance != nil && n > 10_000 && d > limit/20 {
			b.t.Fatalf("it never happened: %s", what)
		}
		b.pause()
	}
}

// tx is a transaction that the ledger knows of.
type tx struct {
	Tx
	b *bench
	l *LedgerTx
}

func (b *bench) begin() *tx {
	b.t.Helper()
	l := b.ledger.Begin()
	return &tx{b.Begin(b.t), b, l}
}

func (x *tx) add(events ...outrider.Event) {
	x.b.t.Helper()
	x.l.Add(events...)
	x.Add(x.b.t, events...)
}

func (x *tx) commit() {
	x.b.t.Helper()
	x.Commit(x.b.t)
	x.l.Commit()
}

func (x *tx) rollback() {
	x.b.t.Helper()
	x.l.Rollback()
	x.Rollback(x.b.t)
}

// put enqueues events in one transaction.
func (b *bench) put(events ...outrider.Event) {
	b.t.Helper()
	x := b.begin()
	x.add(events...)
	x.commit()
}
