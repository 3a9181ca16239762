package memstore_test

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

func TestStore(t *testing.T) {
	for name, cfg := range map[string]memstore.Config{
		"Full":           {},
		"NoFanOut":       {NoFanOut: true},
		"NoSequences":    {NoSequences: true},
		"NoLiveTakeOver": {NoLiveTakeOver: true},
		"Plain":          {NoFanOut: true, NoSequences: true, NoLiveTakeOver: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Run("SetClock", func(t *testing.T) { storetest.Run(t, harness(cfg, true)) })
			t.Run("RealClock", func(t *testing.T) { storetest.Run(t, harness(cfg, false)) })
		})
	}
}

func harness(cfg memstore.Config, set bool) storetest.Harness {
	return storetest.Harness{Binary: true, Short: 50 * time.Millisecond, Open: func(t testing.TB) *storetest.Outbox {
		cfg, clock := cfg, &clock{now: time.Now()}
		if set {
			cfg.Now = clock.Now
		}
		s := memstore.New(cfg)
		out := &storetest.Outbox{
			Store:     s,
			Begin:     func(testing.TB) storetest.Tx { return tx{s.Begin()} },
			Kill:      func(_ testing.TB, x store.Session) { s.Kill(x) },
			SetNextID: func(_ testing.TB, id int64) { s.SetNextID(id) },
			LoseAnswer: func(testing.TB, store.Session) {
				var once sync.Once
				s.SetFaults(nil, func(_ context.Context, op memstore.Op) (err error) {
					if op == memstore.OpCommit || op == memstore.OpAcquire {
						once.Do(func() { err = errors.New("answer is lost") })
					}
					return err
				})
			},
		}
		if set {
			out.Advance = clock.Advance
		}
		t.Cleanup(func() {
			if m := s.Misuse(); len(m) > 0 {
				t.Errorf("the suite itself goes against the rules: %v", m)
			}
		})
		return out
	}}
}

type tx struct{ *memstore.Tx }

func (x tx) Add(t testing.TB, events ...outrider.Event) {
	t.Helper()
	if _, err := x.Tx.Add(events...); err != nil {
		t.Fatal(err)
	}
}

func (x tx) Commit(t testing.TB) {
	t.Helper()
	if err := x.Tx.Commit(); err != nil {
		t.Fatal(err)
	}
}

func (x tx) Rollback(testing.TB) { x.Tx.Rollback() }

type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}
