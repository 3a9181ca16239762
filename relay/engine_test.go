package relay

import (
	"context"
	"errors"
	"slices"
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

// The way that almost all events go.
func TestEventsArriveInOrder(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		keys := many(1000, 7)
		ids := w.add(keys...)
		r := w.start()
		w.wait(len(ids), time.Second)
		more := w.add(many(500, 7)...)
		w.wait(len(ids)+len(more), time.Second)
		synctest.Wait()
		r.end()
		ids = append(ids, more...)
		w.mustArriveInOrder(append(keys, many(500, 7)...), ids, 0)
		w.mustBe(store.Published, ids...)
		if n := w.events.count(Published); n != len(ids) {
			t.Errorf("hooks were told of %d published events, not %d", n, len(ids))
		}
	})
}

// A lone event waits for nothing: two commits, no timer.
func TestLoneEventIsSentAtOnce(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		r := w.start()
		time.Sleep(time.Second)
		synctest.Wait()
		ops := &opCounter{open: map[string]int{}}
		w.store.SetFaults(ops.hooks())
		from := time.Now()
		ids := w.add("a")
		synctest.Wait()
		if w.entries()[ids[0]].State != store.Published || time.Since(from) != 0 {
			t.Errorf("after no time it is %v", w.entries()[ids[0]].State)
		}
		if n := ops.of(memstore.OpCommit); n != 2 {
			t.Errorf("it took %d commits", n)
		}
		r.end()
	})
}

// Without a Watcher the relay polls: quickly after work, slowly when idle; and
// Wake is heard at once.
func TestPollsWhereTheStoreCannotTell(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		ops := &opCounter{open: map[string]int{}}
		w.store.SetFaults(ops.hooks())
		r := w.start(func(c *Config) { c.Store = plain{w.store}; c.DuePoll = time.Hour })
		time.Sleep(time.Minute)
		n := ops.of(memstore.OpClaim)
		if n < 500 || n > 700 {
			t.Errorf("%d claims in an idle minute, want one every 100 ms", n)
		}
		w.add("a")
		w.wait(1, 101*time.Millisecond)
		time.Sleep(time.Minute)
		from := time.Now()
		w.add("a")
		r.Wake()
		synctest.Wait()
		if w.sink.Len() != 2 || time.Since(from) != 0 {
			t.Error("Wake was not heard at once")
		}
		r.end()
	})
}

// plain is a store that can do nothing but what is needed.
type plain struct{ store.Store }

// With a Watcher it polls all the same, but hardly ever.
func TestSafetyPoll(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		r := w.start(func(c *Config) { c.Store = deaf{w.store} })
		time.Sleep(10 * time.Second)
		w.add("a")
		w.wait(1, 1001*time.Millisecond)
		r.end()
	})
}

// deaf is a Watcher that tells nothing.
type deaf struct{ *memstore.Store }

func (deaf) Watch(ctx context.Context, _ func()) error {
	<-ctx.Done()
	return ctx.Err()
}

// Match and To: what is not wanted counts as published, what has no place is
// FAILED, and neither reaches the sink.
func TestRules(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		r := w.start(func(c *Config) {
			c.Destinations[0].Match = func(r *outrider.Record) bool { return r.Key != "other" }
			c.Destinations[0].To = func(r *outrider.Record) (string, error) {
				if r.Key == "nowhere" {
					return "", errors.New("no rule matches")
				}
				return "to-" + r.Key, nil
			}
		})
		ids := w.add("a", "other", "nowhere", "other", "nowhere", "b")
		time.Sleep(2 * time.Second)
		w.mustBe(store.Published, ids[0], ids[1], ids[3], ids[5])
		w.mustBe(store.Failed, ids[2])
		w.mustBe(store.Pending, ids[4])
		if e := w.entries()[ids[2]]; e.Class != string(sink.ClassNoTarget) || e.Attempts != 0 || e.Message != "no rule matches" {
			t.Errorf("failed as %+v", e)
		}
		var to []string
		for _, m := range w.sink.Messages() {
			to = append(to, m.To)
		}
		slices.Sort(to)
		if !slices.Equal(to, []string{"to-a", "to-b"}) {
			t.Errorf("sent to %v", to)
		}
		if n := w.events.count(Skipped); n != 2 {
			t.Errorf("%d were counted as skipped", n)
		}
		r.end()
	})
}

// overtaking is a sink with order in flight in which the failure of the first
// message is reported when the second call has been made and not come in yet.
type overtaking struct {
	mu    sync.Mutex
	first sink.Batch
	calls int
	log   []string
	stale int
	done  chan struct{}
}

func (o *overtaking) Capabilities() sink.Capabilities {
	return sink.Capabilities{Order: true, OrderInFlight: true}
}
func (o *overtaking) Close(context.Context) error { return nil }
func (o *overtaking) Publish(_ context.Context, b sink.Batch) {
	o.mu.Lock()
	o.calls++
	n := o.calls
	if n == 1 {
		o.first, o.done = b, make(chan struct{})
		done := o.done
		o.mu.Unlock()
		b.Accepted()
		<-done
		return
	}
	if n == 2 {
		o.first.Report(0, answer(sink.Retry, sink.ClassRefused))
		close(o.done)
	}
	if b.Stale() {
		o.stale++
		for i := range b.Messages {
			b.Report(i, sink.Result{Status: sink.NotSent, Class: sink.ClassHeld})
		}
		o.mu.Unlock()
		return
	}
	for i, m := range b.Messages {
		o.log = append(o.log, m.Row)
		b.Report(i, sink.Result{Status: sink.Delivered})
	}
	o.mu.Unlock()
	b.Accepted()
}

// A call that was made before a failure was reported does not overtake it.
func TestStaleCallIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := &overtaking{}
		w := &world{t: t, sink: memsink.New(memsink.Config{}), store: newMemStore(), events: newEventLog()}
		r := w.start(func(c *Config) { c.Destinations[0].Sink = o })
		time.Sleep(time.Second)
		ids := w.add("a")
		synctest.Wait()
		ids = append(ids, w.add("a")...)
		time.Sleep(5 * time.Second)
		w.mustBe(store.Published, ids...)
		if !slices.Equal(o.log, []string{"1", "2"}) || o.stale != 1 {
			t.Errorf("delivered %v, %d calls were stale", o.log, o.stale)
		}
		if n := w.events.get(&w.events.broken); n != 0 {
			t.Errorf("%d promises were counted as broken", n)
		}
		r.end()
	})
}

// A sink that never returns costs its lease the time-out, not everything.
func TestHangingCallIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n atomic.Int64
		s := &stubborn{take: func(m sink.Message) bool { return m.Key != "hang" || n.Load() > 0 }}
		w := &world{t: t, sink: memsink.New(memsink.Config{}), store: newMemStore(), events: newEventLog()}
		ids := w.add("hang", "a", "b")
		r := w.start(func(c *Config) { c.Destinations[0].Sink = s })
		time.Sleep(20 * time.Second)
		w.mustBe(store.Published, ids[1:]...)
		n.Store(1)
		time.Sleep(2 * time.Minute)
		w.mustBe(store.Published, ids...)
		broken := w.events.get(&w.events.broken)
		if broken == 0 {
			t.Error("nobody counted that the sink does not return")
		}
		time.Sleep(2 * time.Hour) // the late answers come
		if n := w.events.get(&w.events.broken); n != broken {
			t.Errorf("late answers were counted as %d more faults", n-broken)
		}
		r.stop()
		<-r.done
	})
}

// positions is a store whose leases stand at the same place only after a while.
type positions struct {
	*memstore.Store
	refusals int
}

type positionedSession struct {
	store.Session
	p *positions
}

func (p *positions) Join(ctx context.Context, q store.JoinParams) (store.Session, error) {
	s, err := p.Store.Join(ctx, q)
	if err != nil {
		return nil, err
	}
	return &positionedSession{s, p}, nil
}

func (s *positionedSession) Merge(ctx context.Context, a, b store.Lease) (store.Lease, bool, error) {
	if s.p.refusals > 0 {
		s.p.refusals--
		return store.Lease{}, false, nil
	}
	return s.Session.(store.Merger).Merge(ctx, a, b)
}

// A Merge that comes too early is repeated, and the workers go on meanwhile.
func TestMergeIsRepeated(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		p := &positions{Store: w.store, refusals: 3}
		use := func(c *Config) { c.Store = p }
		a, b := w.start(use), w.start(use)
		time.Sleep(5 * time.Second)
		b.end()
		var ids []string
		for range 100 {
			ids = append(ids, w.add(many(64, 64)...)...)
			time.Sleep(100 * time.Millisecond)
		}
		w.wait(len(ids), time.Second)
		w.mustBe(store.Published, ids...)
		if p.refusals != 0 || a.Health().Destinations[0].Leases != 1 {
			t.Errorf("%d refusals left, %d leases", p.refusals, a.Health().Destinations[0].Leases)
		}
		a.end()
	})
}

// complaining is a store whose maintenance fails until told otherwise.
type complaining struct {
	*memstore.Store
	mu    sync.Mutex
	err   error
	calls int
}

func (c *complaining) Maintain(context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls++
	return c.err
}

// Maintenance runs now and then; its complaint is logged once and shown.
func TestMaintenance(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		c := &complaining{Store: w.store, err: outrider.WithHint(errors.New("partitions run out"), "make some")}
		lines := &lineCounter{}
		r := w.start(func(cfg *Config) { cfg.Store = c; cfg.Logger = lines.logger() })
		time.Sleep(10 * time.Minute)
		if h := r.Health(); h.MaintainError != "partitions run out" || h.MaintainHint != "make some" {
			t.Errorf("health: %+v", h)
		}
		if n := lines.count(); n != 1 {
			t.Errorf("%d lines were logged", n)
		}
		c.mu.Lock()
		if c.calls < 19 || c.calls > 21 {
			t.Errorf("%d runs in 10 min", c.calls)
		}
		c.err = nil
		c.mu.Unlock()
		time.Sleep(time.Minute)
		if h := r.Health(); h.MaintainError != "" {
			t.Errorf("health: %+v", h)
		}
		r.end()
	})
}
