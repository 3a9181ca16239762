package relay

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/memstore"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// LSE-22: what was published is marked, also when a commit fails or its answer
// is lost; what stays unmarked is bounded, and counted.
func TestLSE22_PublishedIsMarked(t *testing.T) {
	for name, lost := range map[string]bool{"failing": false, "answers lost": true} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, memsink.Config{}, func(w *world) {
				var n atomic.Int64
				bad := func(_ context.Context, op memstore.Op) error {
					if op == memstore.OpCommit && n.Add(1)%3 == 0 {
						return errors.New("commit failed")
					}
					return nil
				}
				if lost {
					w.store.SetFaults(nil, bad)
				} else {
					w.store.SetFaults(bad, nil)
				}
				r := w.start(func(c *Config) { c.MaxRecords = 100 })
				keys := many(5000, 50)
				ids := w.add(keys...)
				w.wait(5000, time.Minute)
				time.Sleep(time.Second)
				w.mustBe(store.Published, ids...)
				if n := w.events.get(&w.events.storeErr); n == 0 {
					t.Error("failing commits were not counted")
				}
				r.end()
				r = w.start()
				time.Sleep(10 * time.Second)
				w.mustArriveInOrder(keys, ids, 0)
				r.end()
			})
		})
	}
}

// While nothing can be marked, no more is published than is bounded.
func TestLSE22_UnmarkedIsBounded(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		var away atomic.Bool
		w.store.SetFaults(func(_ context.Context, op memstore.Op) error {
			if op == memstore.OpCommit && away.Load() {
				return errors.New("database is away")
			}
			return nil
		}, nil)
		lines := &lineCounter{}
		r := w.start(func(c *Config) { c.MaxRecords = 10; c.Logger = lines.logger() })
		ids := w.add("a")
		w.wait(1, time.Second)
		time.Sleep(100 * time.Millisecond)
		away.Store(true)
		ids = append(ids, w.add(many(1000, 10)...)...)
		time.Sleep(5 * time.Minute)
		if n := w.sink.Len(); n > 21 {
			t.Errorf("%d were published and not marked", n-1)
		}
		if n := lines.count(); n > 3 {
			t.Errorf("%d lines were logged", n)
		}
		if n := w.events.get(&w.events.storeErr); n < 50 {
			t.Errorf("%d commits were counted as failed in 5 minutes", n)
		}
		away.Store(false)
		w.wait(1001, time.Minute)
		w.mustBe(store.Published, ids...)
		r.end()
	})
}

// While a commit cannot be written, what was started is not sent either, so
// that as little as possible would come twice.
func TestSendingPausesWithoutDatabase(t *testing.T) {
	inWorld(t, memsink.Config{NoOrder: true, Decide: func(ctx context.Context, _ sink.Message) sink.Result {
		sleep(ctx, 50*time.Millisecond)
		return memsink.Deliver
	}}, func(w *world) {
		var away atomic.Bool
		w.store.SetFaults(func(_ context.Context, op memstore.Op) error {
			if op == memstore.OpCommit && away.Load() {
				return errors.New("database is away")
			}
			return nil
		}, nil)
		r := w.start()
		time.Sleep(time.Second)
		ids := w.add("b")
		time.Sleep(10 * time.Millisecond)
		ids = append(ids, w.add("a", "a", "a", "a", "a", "a")...)
		time.Sleep(10 * time.Millisecond)
		away.Store(true)
		time.Sleep(time.Minute)
		if n := w.sink.Len(); n != 2 {
			t.Errorf("%d messages were sent, not the one in flight and the one behind it", n)
		}
		away.Store(false)
		time.Sleep(10 * time.Second)
		w.mustBe(store.Published, ids...)
		r.end()
	})
}
