package relay

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/memstore"
	"github.com/outrider-dev/outrider/store"
)

// A settlement that comes when the lease has gone, and no renewal has said so
// yet, is refused, counted, and ends the worker at once.
func TestLateSettlementIsCounted(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		var away atomic.Bool
		var commits atomic.Int32
		w.store.SetFaults(func(ctx context.Context, op memstore.Op) error {
			switch {
			case op == memstore.OpRenew && away.Load():
				return errors.New("no answer")
			case op == memstore.OpCommit && commits.Add(1) == 2:
				away.Store(true)
				w.store.Kill(only(w))
				sleep(ctx, 3*time.Second) // its grace
				takeAll(t, w.store)
			}
			return nil
		}, nil)
		r := w.start()
		w.add("a")
		w.wait(1, time.Minute)
		time.Sleep(3100 * time.Millisecond)
		if n := w.events.get(&w.events.fenced); n != 1 {
			t.Errorf("%d refused settlements were counted, not the one", n)
		}
		if n := w.events.get(&w.events.lost); n != 0 {
			t.Errorf("%d leases were found lost: this test is of what comes before that", n)
		}
		if h := r.Health().Destinations[0]; h.Leases != 0 || h.InFlight != 0 {
			t.Errorf("there are %d leases and %d events in hand still", h.Leases, h.InFlight)
		}
		if n := len(w.arrived("a")); n != 1 {
			t.Errorf("it was sent %d times", n)
		}
		away.Store(false)
	})
}

// takeAll has somebody else take all lanes.
func takeAll(t *testing.T, s *memstore.Store) {
	t.Helper()
	ctx := context.Background()
	other, err := s.Join(ctx, store.JoinParams{Relay: "other", TTL: time.Hour, Grace: time.Second, Destinations: []store.Destination{{Name: "out"}}})
	if err != nil {
		t.Error(err)
		return
	}
	if got, err := other.Acquire(ctx, store.AcquireParams{Destination: "out", Lanes: outrider.Lanes}); err != nil || len(got) == 0 {
		t.Errorf("acquired %v, %v", got, err)
	}
}
