package relay

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/memstore"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// LSE-06: a send that takes many times the life of a lease is done once,
// because the lease is renewed meanwhile.
func TestLSE06_SendLongerThanLease(t *testing.T) {
	var tries *attempts
	inWorld(t, memsink.Config{Decide: func(ctx context.Context, m sink.Message) sink.Result {
		tries.note(m.Key)
		sleep(ctx, time.Minute)
		return memsink.Deliver
	}}, func(w *world) {
		tries = newAttempts()
		change := func(c *Config) { c.Destinations[0].PublishTimeout = 5 * time.Minute }
		var relays []*running
		for range 3 {
			relays = append(relays, w.start(change))
		}
		time.Sleep(3 * time.Second)
		ids := w.add("a")
		time.Sleep(2 * time.Minute)
		w.mustBe(store.Published, ids...)
		if n := len(tries.of("a")); n != 1 {
			t.Errorf("sent %d times", n)
		}
		if n := w.events.get(&w.events.lost); n != 0 {
			t.Errorf("%d leases were lost", n)
		}
		for _, r := range relays {
			r.end()
		}
	})
}

// LSE-06, the other half: when renewal fails for good, the relay stops, and
// what it has to say too late is refused and counted.
func TestLSE06_LateResultIsRefused(t *testing.T) {
	var tries *attempts
	inWorld(t, memsink.Config{Decide: func(ctx context.Context, m sink.Message) sink.Result {
		if tries.note(m.Key) == 1 {
			sleep(ctx, 10*time.Second)
			return answer(sink.Reject, sink.ClassInvalid)
		}
		return memsink.Deliver
	}, NoOrderInFlight: true}, func(w *world) {
		tries = newAttempts()
		a := w.start()
		time.Sleep(time.Second)
		ids := w.add("a")
		time.Sleep(500 * time.Millisecond)
		w.store.Kill(only(w)) // before the other joins, which has the same name
		b := w.start()
		time.Sleep(30 * time.Second)
		w.mustBe(store.Published, ids...)
		if n := len(tries.of("a")); n != 2 {
			t.Errorf("sent %d times, not by the first and by the second relay", n)
		}
		if n := w.events.get(&w.events.fenced) + w.events.get(&w.events.lost); n == 0 {
			t.Error("nobody counted that a lease had gone")
		}
		a.end()
		b.end()
	})
}

// only is the session of the one relay that there is.
func only(w *world) store.Session {
	w.t.Helper()
	all := w.store.Sessions()
	if len(all) != 1 {
		w.t.Errorf("there are %d sessions, not one", len(all))
	}
	for _, s := range all {
		return s
	}
	return nil
}

// LSE-09: however busy the relay is and however slow the database's answers to
// its claims and commits are, it is not declared dead.
func TestLSE09_BusyRelayStaysAlive(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		a := w.start(func(c *Config) { c.Name = "busy" })
		time.Sleep(time.Second)
		w.store.SetFaults(func(ctx context.Context, op memstore.Op) error {
			if op == memstore.OpClaim || op == memstore.OpCommit {
				sleep(ctx, 40*time.Second) // far beyond LeaseTTL
			}
			return ctx.Err()
		}, nil)
		ids := w.add(many(100, 10)...)
		time.Sleep(time.Minute)
		if n := w.events.get(&w.events.lost); n != 0 {
			t.Errorf("%d leases were lost", n)
		}
		if h := a.Health(); h.Starved || h.Relays != 1 || h.Destinations[0].Lanes != outrider.Lanes {
			t.Errorf("health: %+v", h)
		}
		w.store.SetFaults(nil, nil)
		time.Sleep(time.Minute)
		w.mustBe(store.Published, ids...)
		a.end()
	})
}

// A relay that cannot renew stops sending well before its leases can be taken
// over, and goes on when it can.
func TestLSE09_StarvedRelayStopsSending(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		r := w.start()
		w.add("a")
		w.wait(1, time.Second)
		var away atomic.Bool
		away.Store(true)
		w.store.SetFaults(func(_ context.Context, op memstore.Op) error {
			if op == memstore.OpRenew && away.Load() {
				return errors.New("no connection")
			}
			return nil
		}, nil)
		time.Sleep(2 * time.Second)
		ids := w.add("a", "b")
		time.Sleep(3 * time.Second)
		if n := w.sink.Len(); n != 1 {
			t.Errorf("%d messages were sent by a relay that could not renew", n-1)
		}
		if h := r.Health(); !h.Starved || h.Ready() || h.StoreError == "" {
			t.Errorf("health: %+v", h)
		}
		away.Store(false)
		w.wait(3, 600*time.Millisecond)
		w.mustBe(store.Published, ids...)
		if h := r.Health(); h.Starved || !h.Ready() || h.StoreError != "" {
			t.Errorf("health: %+v", h)
		}
		r.end()
	})
}

// cutOffSession is one of a relay that can be cut off from the database for a
// while; its claims and commits stay so.
type cutOffStore struct {
	*memstore.Store
	renew, rest atomic.Bool
}

type cutOffSession struct {
	store.Session
	s *cutOffStore
}

func (s *cutOffStore) Join(ctx context.Context, p store.JoinParams) (store.Session, error) {
	if s.renew.Load() {
		return nil, errors.New("cut off")
	}
	ss, err := s.Store.Join(ctx, p)
	return &cutOffSession{ss, s}, err
}

func (s *cutOffSession) Renew(ctx context.Context, l []store.Lease) (store.Renewal, error) {
	if s.s.renew.Load() {
		return store.Renewal{}, errors.New("cut off")
	}
	return s.Session.Renew(ctx, l)
}

func (s *cutOffSession) Claim(ctx context.Context, p store.ClaimParams) (*store.Claim, error) {
	if s.s.rest.Load() {
		return nil, errors.New("cut off")
	}
	return s.Session.Claim(ctx, p)
}

// A renewal that finds a lease gone has its calls cut off at once.
func TestLostLeaseCutsItsCalls(t *testing.T) {
	var tries *attempts
	var cutAt time.Duration
	inWorld(t, memsink.Config{NoOrderInFlight: true, Decide: func(ctx context.Context, m sink.Message) sink.Result {
		if tries.note(m.Key) == 1 {
			<-ctx.Done()
			cutAt = time.Since(tries.t0)
			return answer(sink.Unknown, sink.ClassStopped)
		}
		return memsink.Deliver
	}}, func(w *world) {
		tries = newAttempts()
		s := &cutOffStore{Store: w.store}
		a := w.start(func(c *Config) {
			c.Store = s
			c.Destinations[0].PublishTimeout, c.Destinations[0].SlowAfter = time.Hour, time.Hour
		})
		time.Sleep(time.Second)
		ids := w.add("a")
		time.Sleep(time.Second)
		s.renew.Store(true)
		s.rest.Store(true)
		b := w.start()
		time.Sleep(20 * time.Second)
		s.renew.Store(false)
		time.Sleep(5 * time.Second)
		w.mustBe(store.Published, ids...)
		if cutAt == 0 || cutAt > 23*time.Second {
			t.Errorf("its call was cut off after %v", cutAt)
		}
		if n := w.events.get(&w.events.lost); n != 1 {
			t.Errorf("%d leases were counted as lost", n)
		}
		s.rest.Store(false)
		a.end()
		b.end()
	})
}

// LSE-17: due and age are the database's: its clock may be hours off from the
// relay's host, either way.
func TestLSE17_SkewedClocksChangeNothing(t *testing.T) {
	for _, skew := range []time.Duration{-time.Hour, 90 * time.Second, time.Hour} {
		var tries *attempts
		synctest.Test(t, func(t *testing.T) {
			w := &world{t: t, events: newEventLog(), store: memstore.New(memstore.Config{
				Now: func() time.Time { return time.Now().Add(skew) }})}
			w.sink = memsink.New(memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
				if tries.note(m.Key) == 1 {
					return answer(sink.Retry, sink.ClassRefused)
				}
				return memsink.Deliver
			}})
			tries = newAttempts()
			r := w.start(func(c *Config) {
				c.Destinations[0].Retry = Retry{Immediate: -1, Base: 30 * time.Second, Cap: 30 * time.Second}
			})
			ids := w.add("a")
			time.Sleep(time.Minute)
			w.mustBe(store.Published, ids...)
			at := tries.of("a")
			if len(at) != 2 || at[1]-at[0] < 30*time.Second || at[1]-at[0] > 47*time.Second {
				t.Errorf("skew %v: tried at %v", skew, at)
			}
			r.end()
		})
	}
}

// Lanes are shared fairly as relays come and go, and leases of one relay grow
// together again.
func TestFairShare(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		lanes := func(rs ...*running) (out []int) {
			time.Sleep(5 * time.Second)
			for _, r := range rs {
				out = append(out, r.Health().Destinations[0].Lanes)
			}
			return out
		}
		a := w.start()
		if got := fmt.Sprint(lanes(a)); got != "[64]" {
			t.Errorf("alone: %v", got)
		}
		b := w.start()
		if got := fmt.Sprint(lanes(a, b)); got != "[32 32]" {
			t.Errorf("two: %v", got)
		}
		c := w.start()
		sum := 0
		for _, n := range lanes(a, b, c) {
			if n < 20 || n > 22 {
				t.Errorf("three: one has %d", n)
			}
			sum += n
		}
		if sum != 64 {
			t.Errorf("three: %d lanes", sum)
		}
		b.end()
		c.end()
		if got := fmt.Sprint(lanes(a)); got != "[64]" {
			t.Errorf("alone again: %v", got)
		}
		time.Sleep(time.Second)
		if n := a.Health().Destinations[0].Leases; n != 1 {
			t.Errorf("its leases have not grown together: %d", n)
		}
		ids := w.add(many(200, 64)...)
		w.wait(200, time.Second)
		w.mustBe(store.Published, ids...)
		a.end()
	})
}

// A destination's lanes are shared out among the relays that serve it, and no
// others: one that does not would leave its share to nobody. So it is while a
// deployment that adds a destination goes from relay to relay, and back.
func TestShareIsOfThoseThatServe(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		added := memsink.New(memsink.Config{})
		both := func(c *Config) {
			c.Destinations = append(c.Destinations, Destination{Name: "added", Sink: added, FromEarliest: true})
		}
		lanes := func(want string, rs ...*running) {
			t.Helper()
			time.Sleep(5 * time.Second)
			var got []string
			for _, r := range rs {
				for _, d := range r.Health().Destinations {
					got = append(got, fmt.Sprint(d.Name, " ", d.Lanes))
				}
				if n := r.Health().Relays; n != len(rs) {
					t.Errorf("a relay sees %d that are alive, want %d", n, len(rs))
				}
			}
			if fmt.Sprint(got) != want {
				t.Errorf("%v, want %v", got, want)
			}
		}
		old := w.start()
		first := w.start(both)
		lanes("[out 32 out 32 added 64]", old, first)
		ids := w.add(many(200, 100)...)
		w.wait(200, time.Second)
		time.Sleep(time.Second)
		if n := added.Len(); n != 200 {
			t.Errorf("%d of 200 came to the destination that only one relay serves", n)
		}
		w.mustBe(store.Published, ids...)
		second := w.start(both)
		old.end()
		lanes("[out 32 added 32 out 32 added 32]", first, second)
		back := w.start()
		second.end()
		lanes("[out 32 added 64 out 32]", first, back)
		first.end()
		lanes("[out 64]", back)
		back.end()
	})
}
