package sqlitestore_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
	"github.com/outrider-dev/outrider/storetest"
)

// clock is set by the test.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *clock { return &clock{now: time.Now().Truncate(time.Microsecond)} }

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

// The suite once more, to the nanosecond.
func TestStreamByClock(t *testing.T) { runByClock(t, migrate.Stream) }
func TestRowsByClock(t *testing.T)   { runByClock(t, migrate.Rows) }

func runByClock(t *testing.T, set migrate.Set) {
	t.Helper()
	storetest.Run(t, storetest.Harness{
		OneWriter: true, Binary: true,
		Open: func(t testing.TB) *storetest.Outbox {
			c := newClock()
			db := makeDB(t, set)
			db.clock = c
			return &storetest.Outbox{
				Store:     open(t, set, sqlitestore.Config{Path: db.path, Now: c.Now}),
				Begin:     db.begin,
				Kill:      func(_ testing.TB, s store.Session) { sqlitestore.Kill(s) },
				Advance:   c.Advance,
				SetNextID: db.setNextID,
			}
		},
	})
}

// open opens either store.
func open(t testing.TB, set migrate.Set, cfg sqlitestore.Config) store.Store {
	t.Helper()
	s, err := openSet(context.Background(), set, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func openSet(ctx context.Context, set migrate.Set, cfg sqlitestore.Config) (store.Store, error) {
	if set == migrate.Rows {
		return sqlitestore.OpenRows(ctx, cfg)
	}
	return sqlitestore.OpenStream(ctx, cfg)
}
