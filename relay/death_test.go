package relay

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

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
