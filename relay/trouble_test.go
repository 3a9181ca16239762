package relay

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/memstore"
	"github.com/outrider-dev/outrider/store"
)

func (l *logLines) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.buf.String(), text)
}

// What has one cause is said once when it begins and once when it is over,
// whatever it stops: renewals, claims, settlements and maintenance, of all
// destinations.
func TestOneCauseIsSaidOnce(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		log := &logLines{}
		other := memsink.New(memsink.Config{})
		s := &maintainedStore{Store: w.store}
		r := w.start(func(c *Config) {
			c.Logger, c.Store, c.MaintainEvery = log.logger(), s, time.Second
			c.Destinations = append(c.Destinations, Destination{Name: "other", Sink: other, FromEarliest: true})
		})
		keys := many(1000, 10)
		ids := w.add(keys...)
		w.wait(1000, time.Second)
		var away atomic.Bool
		var n atomic.Int64
		w.store.SetFaults(func(_ context.Context, op memstore.Op) error {
			if away.Load() {
				return outrider.WithHint(fmt.Errorf("no room for %d: %v", n.Add(1), op), "make room")
			}
			return nil
		}, nil)
		for i := range 5 {
			away.Store(true)
			time.Sleep(time.Second)
			s.full.Store(true) // whoever says it first
			keys, ids = append(keys, many(100, 10)...), append(ids, w.add(many(100, 10)...)...)
			time.Sleep(10 * time.Minute)
			if h := r.Health(); h.Ready() || !h.Stuck || h.StoreHint != "make room" || h.StoreFailing < 9*time.Minute {
				t.Errorf("health: %+v", h)
			}
			away.Store(false)
			s.full.Store(false)
			w.wait(len(ids), 30*time.Second)
			time.Sleep(30 * time.Second)
			if h := r.Health(); !h.Ready() || h.Stuck || h.StoreError != "" || h.StoreHint != "" || h.StoreFailing != 0 {
				t.Errorf("health: %+v", h)
			}
			if off, on := log.count("cannot be asked"), log.count("asked again"); off != i+1 || on != i+1 {
				t.Errorf("%d outages were said %d times, their ends %d times:\n%s", i+1, off, on, log.buf.String())
			}
		}
		if off, on := log.count("maintenance complains"), log.count("maintenance is well"); off != 0 || on != 0 {
			t.Errorf("maintenance said %d times what had been said, and %d times that it is over", off, on)
		}
		s.full.Store(true) // alone
		time.Sleep(time.Minute)
		s.full.Store(false)
		time.Sleep(time.Minute)
		if off, on := log.count("maintenance complains"), log.count("maintenance is well"); off != 1 || on != 1 {
			t.Errorf("maintenance said %d times what nobody else had said, and %d times that it is over", off, on)
		}
		w.mustBe(store.Published, ids...)
		w.mustArriveInOrder(keys, ids, 0)
		r.end()
	})
}

// maintainedStore has maintenance, for which there may be no room.
type maintainedStore struct {
	*memstore.Store
	full atomic.Bool
}

func (s *maintainedStore) Maintain(context.Context) error {
	if s.full.Load() {
		return outrider.WithHint(errors.New("no room to tidy up"), "make room")
	}
	return nil
}

// Causes that are not one are said each, also when the second comes while the
// first stands; and each operation's end, unless another has the same cause.
func TestCausesAreToldApart(t *testing.T) {
	log, now := &logLines{}, time.Second
	tr := newTroubles(newLogger(log.logger()), func() time.Duration { return now })
	a, b, plain := outrider.WithHint(errors.New("no room"), "A"), outrider.WithHint(errors.New("no right"), "B"), errors.New("no answer")
	for i, step := range []struct {
		id      string
		err     error
		off, on int // lines so far
	}{
		{"claim", a, 1, 0}, {"renew", a, 1, 0}, {"claim", a, 1, 0},
		{"claim", nil, 1, 0},                                       // renew stands, by the same
		{"renew", b, 2, 0}, {"renew", a, 2, 0}, {"renew", b, 2, 0}, // to and fro
		{"settle", b, 2, 0}, {"sweep", plain, 3, 0}, {"merge", plain, 4, 0}, {"merge", nil, 4, 1},
		{"renew", nil, 4, 1}, {"settle", nil, 4, 2}, {"settle", nil, 4, 2},
		{"settle", b, 5, 2}, // anew
	} {
		tr.note(step.id, "d", step.id, step.err)
		if off, on := log.count("cannot be asked"), log.count("asked again"); off != step.off || on != step.on {
			t.Errorf("step %d: said %d times that it cannot be asked and %d times that it can:\n%s", i, off, on, log.buf.String())
		}
		now += time.Second
	}
	h := Health{}
	tr.show(&h, 2*time.Second)
	if h.Stuck || h.StoreError != "no right" || h.StoreHint != "B" || h.StoreFailing != time.Second { // and not of the sweep, which stops nothing
		t.Errorf("health: %+v", h)
	}
	now += time.Second
	if tr.show(&h, 2*time.Second); !h.Stuck {
		t.Errorf("health: %+v", h)
	}
}

// A relay that renews its leases and cannot read events is not at work.
func TestStuckIsNotReady(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		s := &unreadableStore{Store: w.store}
		r := w.start(func(c *Config) { c.Store = s })
		time.Sleep(time.Second)
		s.away.Store(true)
		ids := w.add("a")
		time.Sleep(r.cfg.Grace / 10)
		if h := r.Health(); !h.Ready() || h.StoreError == "" {
			t.Errorf("at the first failure: %+v", h)
		}
		time.Sleep(r.cfg.Grace)
		if h := r.Health(); h.Ready() || !h.Stuck || h.Starved {
			t.Errorf("health: %+v", h)
		}
		s.away.Store(false)
		time.Sleep(10 * time.Second)
		if h := r.Health(); !h.Ready() || h.StoreError != "" {
			t.Errorf("health afterwards: %+v", h)
		}
		w.mustBe(store.Published, ids...)
		r.end()
	})
}
