package relay

import (
	"context"
	"errors"
	"fmt"
	"sync"
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
		b := w.start()
		w.store.Kill(oldest(w))
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

// oldest is the session that has the leases.
func oldest(w *world) store.Session {
	for _, s := range w.store.Sessions() {
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

// LSE-12: what a relay had in hand when it died is taken over by one of the
// same name that starts at once.
func TestLSE12_RestartUnderTheSameName(t *testing.T) {
	var tries *attempts
	inWorld(t, memsink.Config{NoOrderInFlight: true, Decide: func(ctx context.Context, m sink.Message) sink.Result {
		if tries.note(m.Key) == 1 {
			<-ctx.Done()
			return answer(sink.Unknown, sink.ClassStopped)
		}
		return memsink.Deliver
	}}, func(w *world) {
		tries = newAttempts()
		dead := w.start()
		time.Sleep(time.Second)
		ids := w.add(many(5, 5)...)
		time.Sleep(500 * time.Millisecond)
		w.kill(dead)
		r := w.start()
		time.Sleep(2*time.Second + 600*time.Millisecond) // Grace, and a renewal
		w.wait(5, time.Second)
		w.mustBe(store.Published, ids...)
		r.end()
	})
}

// kill ends a relay as the death of its process does: nothing more is written,
// its connection ends.
func (w *world) kill(r *running) {
	for _, s := range w.store.Sessions() {
		w.store.Kill(s)
	}
	r.die()
}

// die has a relay do nothing any more. What it has in hand stays so in the store.
func (r *running) die() {
	r.workers.each(func(w *worker) { w.lapse() })
	r.stop()
	r.Cut()
	<-r.done
}

// LSE-15: an event that kills its process is FAILED after three deaths alone in
// hand; what was in hand with it costs nothing, and all else is delivered.
func TestLSE15_EventThatKillsProcesses(t *testing.T) {
	var current *running
	var deaths int
	var mu sync.Mutex
	inWorld(t, memsink.Config{Decide: func(ctx context.Context, m sink.Message) sink.Result {
		if m.Key == "killer" {
			mu.Lock()
			deaths++
			mu.Unlock()
			<-ctx.Done()
			return answer(sink.Unknown, sink.ClassStopped)
		}
		return memsink.Deliver
	}}, func(w *world) {
		ids := w.add(append(many(50, 50), "killer", "killer")...)
		for n := 1; n < 20; n++ {
			current = w.start()
			for range 100 {
				time.Sleep(100 * time.Millisecond)
				mu.Lock()
				died := deaths >= n
				mu.Unlock()
				if died {
					break
				}
			}
			if w.entries()[ids[50]].State == store.Failed {
				break
			}
			w.kill(current)
			time.Sleep(3 * time.Second)
		}
		e := w.entries()[ids[50]]
		if e.State != store.Failed || e.Class != string(sink.ClassWorkerDied) || e.Attempts != 0 {
			t.Errorf("the killer ended as %+v", e)
		}
		if deaths < 3 || deaths > 8 {
			t.Errorf("it took %d deaths", deaths)
		}
		w.mustBe(store.Published, ids[:50]...)
		w.mustBe(store.Pending, ids[51])
		for id, e := range w.entries() {
			if e.Attempts > 0 {
				t.Errorf("event %s was charged %d attempts", id, e.Attempts)
			}
		}
		current.end()
	})
}

// While an event is alone in hand, no other relay of the process has anything
// in hand, and it waits until nobody has.
func TestAloneIsAloneInTheProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGate()
		w := func() *worker { return &worker{news: make(chan struct{}, 1)} }
		a, b, c := w(), w(), w()
		var pa, pb, pc pass
		if !g.enter(a, &pa, false) || !g.enter(b, &pb, false) {
			t.Fatal("two could not be in hand together")
		}
		if g.enter(c, &pc, true) {
			t.Fatal("alone beside two others")
		}
		var late pass
		if g.enter(a, &late, false) {
			t.Fatal("entered before one that waits to be alone")
		}
		g.leave(&pa)
		g.leave(&pb)
		<-c.news
		<-a.news
		if g.enter(a, &late, false) {
			t.Fatal("overtook one that waits to be alone")
		}
		if !g.enter(c, &pc, true) || g.enter(b, &pb, false) {
			t.Fatal("not alone")
		}
		g.leave(&pc)
		<-b.news
		if !g.enter(b, &pb, false) || !g.enter(a, &late, false) {
			t.Fatal("closed for ever")
		}
		g.leave(&pb)
		g.leave(&late)
		if g.shared != 0 || g.alone || g.wanted != 0 {
			t.Fatalf("%+v", g)
		}
	})
}

// While a suspect is in the sink's hands, nothing else of the process is sent,
// to whatever destination.
func TestSuspectIsAloneInTheProcess(t *testing.T) {
	var alone atomic.Bool
	inWorld(t, memsink.Config{Decide: func(ctx context.Context, m sink.Message) sink.Result {
		if m.Key == "killer" {
			alone.Store(true)
			sleep(ctx, time.Minute)
			alone.Store(false)
			return answer(sink.Unknown, sink.ClassStopped)
		}
		return memsink.Deliver
	}}, func(w *world) {
		beside := 0
		other := memsink.New(memsink.Config{Decide: func(ctx context.Context, _ sink.Message) sink.Result {
			if alone.Load() {
				beside++
			}
			return memsink.Deliver
		}})
		change := func(c *Config) {
			c.Destinations[0].PublishTimeout = 5 * time.Second
			c.Destinations = append(c.Destinations, Destination{Name: "other", Sink: other, FromEarliest: true})
		}
		w.add("killer")
		for range 2 {
			r := w.start(change)
			time.Sleep(4 * time.Second)
			w.kill(r)
			alone.Store(false)
		}
		beside = 0
		r := w.start(change)
		for !alone.Load() {
			time.Sleep(10 * time.Millisecond)
		}
		n := other.Len()
		w.add("x", "y")
		time.Sleep(3 * time.Second)
		if !alone.Load() {
			t.Fatal("the suspect was in hand too shortly for this test")
		}
		if beside != 0 || other.Len() != n {
			t.Errorf("%d messages were sent beside a suspect", beside)
		}
		time.Sleep(10 * time.Second)
		if other.Len() == n {
			t.Error("and none afterwards")
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

// A call that goes on after its lease was lost still counts as sending, so that
// a suspect which starts meanwhile is not blamed for what that call does.
func TestCallsOfLostLeasesHoldTheGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, sink: memsink.New(memsink.Config{}), store: newMemStore(), events: newEventLog()}
		s := &slowToReturn{}
		g := NewGate()
		w.add("a")
		r := w.start(func(c *Config) { c.Gate = g; c.Destinations[0].Sink = s })
		time.Sleep(time.Second)
		shared := func() int {
			g.mu.Lock()
			defer g.mu.Unlock()
			return g.shared
		}
		r.workers.each(func(w *worker) { w.lapse() })
		time.Sleep(time.Second)
		if n := shared(); n != 1 {
			t.Errorf("%d calls count as under way, not 1", n)
		}
		r.stop()
		r.Cut()
		<-r.done
		if n := shared(); n != 0 {
			t.Errorf("%d calls count as under way at the end", n)
		}
	})
}

// slowToReturn is a sink that takes 3 s to notice that its call was cut off.
type slowToReturn struct{}

func (slowToReturn) Capabilities() sink.Capabilities { return sink.Capabilities{} }
func (slowToReturn) Close(context.Context) error     { return nil }
func (slowToReturn) Publish(ctx context.Context, b sink.Batch) {
	<-ctx.Done()
	time.Sleep(3 * time.Second)
	for i := range b.Messages {
		b.Report(i, answer(sink.Unknown, sink.ClassStopped))
	}
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
