package relay

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/memstore"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// While something is in flight, what arrives rides together, and one commit
// settles and starts.
func TestLoadRidesTogether(t *testing.T) {
	inWorld(t, memsink.Config{Decide: func(ctx context.Context, _ sink.Message) sink.Result {
		sleep(ctx, 5*time.Millisecond)
		return memsink.Deliver
	}}, func(w *world) {
		ops := &opCounter{open: map[string]int{}}
		before, after := ops.hooks()
		w.store.SetFaults(func(ctx context.Context, op memstore.Op) error {
			if op == memstore.OpCommit || op == memstore.OpClaim {
				sleep(ctx, time.Millisecond)
			}
			return before(ctx, op)
		}, after)
		r := w.start()
		var ids []string
		for range 2000 { // one every 0.5 ms
			ids = append(ids, w.add(fmt.Sprint("k", len(ids)))...)
			time.Sleep(500 * time.Microsecond)
		}
		w.wait(2000, time.Second)
		w.mustBe(store.Published, ids...)
		if n := ops.of(memstore.OpCommit); n > 600 {
			t.Errorf("%d commits for 1 s of events", n)
		}
		r.end()
	})
}

// Under a backlog the slowest of reading, sending and committing is never idle:
// the others go on beside it.
func TestPipelineKeepsTheSlowestBusy(t *testing.T) {
	const claims = 100
	for _, c := range []struct{ read, send, commit time.Duration }{
		{20 * time.Millisecond, 15 * time.Millisecond, 5 * time.Millisecond},
		{20 * time.Millisecond, 5 * time.Millisecond, 15 * time.Millisecond},
		{10 * time.Millisecond, 20 * time.Millisecond, 5 * time.Millisecond},
		{5 * time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond},
	} {
		for _, inFlight := range []bool{true, false} {
			synctest.Test(t, func(t *testing.T) {
				src := newSource(claims * 5000)
				src.read, src.commit = c.read, c.commit
				r, err := New(Config{Store: src, Logger: (&lineCounter{}).logger(),
					Destinations: []Destination{{Name: "out", Sink: drain{inFlight: inFlight, took: c.send}}}})
				if err != nil {
					t.Fatal(err)
				}
				ctx, stop := context.WithCancel(t.Context())
				done := make(chan error)
				from := time.Now()
				go func() { done <- r.Run(ctx) }()
				<-src.done
				if took, least := time.Since(from), claims*max(c.read, c.send, c.commit); took > least*115/100 {
					t.Errorf("%+v, in flight %v: took %v, the slowest alone takes %v", c, inFlight, took, least)
				}
				stop()
				if err := <-done; err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// Starts are counted before anything is sent: nothing leaves while the Commit
// that starts the claim has not returned.
func TestNothingIsSentBeforeItsStart(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		hold := make(chan struct{})
		w.store.SetFaults(func(ctx context.Context, op memstore.Op) error {
			if op == memstore.OpCommit {
				select {
				case <-hold:
				case <-ctx.Done():
				}
			}
			return ctx.Err()
		}, nil)
		r := w.start()
		w.add("a")
		time.Sleep(5 * time.Second)
		if n := w.sink.Len(); n != 0 {
			t.Errorf("%d messages were sent before the start was written", n)
		}
		close(hold)
		w.wait(1, time.Second)
		r.end()
	})
}

// A key's burst delays others by no more than a few claims.
func TestBurstOfOneKeyDelaysNoOther(t *testing.T) {
	inWorld(t, memsink.Config{Decide: func(ctx context.Context, _ sink.Message) sink.Result {
		sleep(ctx, 5*time.Millisecond)
		return memsink.Deliver
	}}, func(w *world) {
		r := w.start(func(c *Config) { c.MaxRecords = 200; c.KeyShare = 20 })
		burst := make([]string, 5000)
		for i := range burst {
			burst[i] = "hot"
		}
		hot := w.add(burst...)
		time.Sleep(200 * time.Millisecond)
		for range 20 {
			n, from := len(w.arrived("cold")), time.Now()
			w.add("cold")
			for len(w.arrived("cold")) == n {
				time.Sleep(time.Millisecond)
			}
			if d := time.Since(from); d > 500*time.Millisecond {
				t.Errorf("delayed by %v", d)
			}
		}
		time.Sleep(2 * time.Minute)
		w.mustBe(store.Published, hot...)
		w.mustArriveInOrder(burst, hot, 0)
		r.end()
	})
}

// Retries that are due and new events share the way out: neither starves.
func TestDueAndFreshAreFair(t *testing.T) {
	var failing atomic.Bool
	inWorld(t, memsink.Config{Decide: func(ctx context.Context, m sink.Message) sink.Result {
		sleep(ctx, 2*time.Millisecond)
		if failing.Load() && strings.HasPrefix(m.Key, "due") {
			return answer(sink.Retry, sink.ClassRefused)
		}
		return memsink.Deliver
	}}, func(w *world) {
		failing.Store(true)
		r := w.start(func(c *Config) {
			c.MaxRecords = 10
			c.Destinations[0].Retry = Retry{Immediate: -1, Base: time.Second, Cap: time.Second}
		})
		var due []string
		for i := range 300 {
			due = append(due, fmt.Sprint("due", i))
		}
		ids := w.add(due...)
		time.Sleep(time.Second)
		failing.Store(false)
		stop := time.Now().Add(10 * time.Second)
		worst := time.Duration(0)
		for i := 0; time.Now().Before(stop); i++ {
			key, from := fmt.Sprint("fresh", i), time.Now()
			w.add(key)
			for len(w.arrived(key)) == 0 {
				time.Sleep(time.Millisecond)
			}
			worst = max(worst, time.Since(from))
		}
		if worst > 100*time.Millisecond {
			t.Errorf("a new event waited %v beside retries", worst)
		}
		w.mustBe(store.Published, ids...)
		r.end()
	})
}

// Beside a backlog that fills every call, what is due has its turn as well.
func TestDueIsSentBesideABacklog(t *testing.T) {
	var tries *attempts
	inWorld(t, memsink.Config{NoOrderInFlight: true, Decide: func(ctx context.Context, m sink.Message) sink.Result {
		sleep(ctx, 2*time.Millisecond)
		if strings.HasPrefix(m.Key, "due") && tries.note(m.Key) == 1 {
			return answer(sink.Retry, sink.ClassRefused)
		}
		return memsink.Deliver
	}}, func(w *world) {
		tries = newAttempts()
		r := w.start(func(c *Config) {
			c.MaxRecords = 10
			c.Destinations[0].Retry = Retry{Immediate: -1, Base: 100 * time.Millisecond, Cap: 100 * time.Millisecond}
		})
		var due []string
		for i := range 50 {
			due = append(due, fmt.Sprint("due", i))
		}
		ids := w.add(append(due, many(20000, 500)...)...)
		time.Sleep(time.Second)
		if w.sink.Len() > 15000 {
			t.Fatal("the backlog is gone too soon for this test")
		}
		w.mustBe(store.Published, ids[:50]...)
		w.wait(20050, time.Minute)
		r.end()
	})
}

// A settlement does not wait long for a claim that is being read.
func TestLingerIsShort(t *testing.T) {
	inWorld(t, memsink.Config{Decide: func(ctx context.Context, _ sink.Message) sink.Result {
		sleep(ctx, 5*time.Millisecond)
		return memsink.Deliver
	}}, func(w *world) {
		r := w.start()
		time.Sleep(time.Second)
		ids := w.add("a")
		time.Sleep(time.Millisecond)
		w.store.SetFaults(func(ctx context.Context, op memstore.Op) error {
			if op == memstore.OpClaim {
				sleep(ctx, time.Second)
			}
			return nil
		}, nil)
		w.add("b")
		time.Sleep(7 * time.Millisecond)
		synctest.Wait()
		if s := w.entries()[ids[0]].State; s != store.Published {
			t.Errorf("8 ms after it came, 3 ms after it was delivered, it is %v", s)
		}
		w.wait(2, 3*time.Second)
		r.end()
	})
}
