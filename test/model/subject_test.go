package model

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/memstore"
	"github.com/outrider-dev/outrider/store"
	"github.com/outrider-dev/outrider/storetest"
)

// subject is a store under test, and the ways around it. Nothing in it waits:
// time passes when the model says so.
type subject struct {
	store.Store

	// begin starts an application's transaction. With oneWriter it ends
	// before anything else is done.
	begin     func(t testing.TB) storetest.Tx
	oneWriter bool

	// kill ends the connection of the session that joined under a name, as
	// the death of its process does. nil: only expiry tells of a death.
	kill func(t testing.TB, s store.Session, name string)

	// advance lets time pass for the store.
	advance func(t testing.TB, d time.Duration)

	// lazy is how much less than their whole time leases may have left that
	// are renewed: what has most of it left is not written for that.
	lazy time.Duration

	// lose lets what is asked next take effect, whatever it is, and its answer
	// be lost; calm ends that if nothing was asked. nil: not possible.
	lose func(s store.Session)
	calm func()
	// ended, if not nil, is given what a run has logged.
	ended func(trace []string)

	// loseAny: answers of Acquire, Claim, Release and Merge can be lost too.
	loseAny bool
}

// maker makes an empty subject for each run.
type maker func(t testing.TB) *subject

// epoch is where model clocks begin.
var epoch = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

// clock is one that is set.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) advance(_ testing.TB, d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

var errLost = errors.New("answer is lost")

// inMemory makes memstores; wrap, if not nil, goes around each.
func inMemory(cfg memstore.Config, wrap func(store.Store) store.Store) maker {
	return func(t testing.TB) *subject {
		c := &clock{now: epoch}
		cfg := cfg
		cfg.Now = c.Now
		s := memstore.New(cfg)
		out := &subject{
			Store:   s,
			begin:   func(testing.TB) storetest.Tx { return memoryTx{s.Begin()} },
			kill:    func(_ testing.TB, x store.Session, _ string) { s.Kill(unwrapped(x)) },
			advance: c.advance,
			calm:    func() { s.SetFaults(nil, nil) },
		}
		out.lose = func(store.Session) {
			var once sync.Once
			s.SetFaults(nil, func(_ context.Context, op memstore.Op) (err error) {
				if op == memstore.OpCommit || op == memstore.OpRelease {
					once.Do(func() { err = errLost })
				}
				return err
			})
		}
		if wrap != nil {
			out.Store = wrap(s)
		}
		return out
	}
}

// unwrapped is the session that a wrapper goes around.
func unwrapped(s store.Session) store.Session {
	if w, ok := s.(interface{ Unwrap() store.Session }); ok {
		return w.Unwrap()
	}
	return s
}

type memoryTx struct{ *memstore.Tx }

func (x memoryTx) Add(t testing.TB, events ...outrider.Event) {
	t.Helper()
	if _, err := x.Tx.Add(events...); err != nil {
		t.Fatal(err)
	}
}

func (x memoryTx) Commit(t testing.TB) {
	t.Helper()
	if err := x.Tx.Commit(); err != nil {
		t.Fatal(err)
	}
}

func (x memoryTx) Rollback(testing.TB) { x.Tx.Rollback() }
