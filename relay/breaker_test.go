package relay

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// testBreaker is a breaker with its destination, and workers that ask it.
func testBreaker(t *testing.T, n int) (*breaker, []*worker) {
	t.Helper()
	r, err := New(Config{Store: newMemStore(), Logger: (&lineCounter{}).logger(),
		Destinations: []Destination{{Name: "out", Sink: memsink.New(memsink.Config{})}}})
	if err != nil {
		t.Fatal(err)
	}
	var ws []*worker
	for range n {
		ws = append(ws, &worker{relay: r, dest: r.dests[0], news: make(chan struct{}, 1)})
	}
	return r.dests[0].brk, ws
}

// tell feeds the results of one call and ends it.
func (b *breaker) tell(w *worker, t ticket, sum tally) finding {
	c := &call{w: w, ticket: t, sum: sum, through: b.delivered.Load()}
	f := b.feed(c, sum, sum)
	b.done(w, c)
	return f
}

func TestBreakerStates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, ws := testBreaker(t, 1)
		w := ws[0]
		take := func(want, n int) ticket {
			t.Helper()
			tk, wait := b.take(w, want)
			if tk.n != n {
				t.Fatalf("asked for %d, got %d and to wait %v, in state %v", want, tk.n, wait, b.state)
			}
			return tk
		}
		if f := b.tell(w, take(5000, 5000), tally{unknown: 4}); f.down {
			t.Fatal("four unknown ends opened it")
		}
		b.tell(w, take(5000, 5000), tally{delivered: 1, unknown: 4})
		if f := b.tell(w, take(5000, 5000), tally{unknown: 5, err: errors.New("no answer")}); !f.down || b.err != "no answer" {
			t.Fatal("five unknown ends in a row did not open it")
		}
		take(5000, 0)
		time.Sleep(400 * time.Millisecond)
		probe := take(5000, 1)
		take(5000, 0)
		b.tell(w, probe, tally{unreachable: 1})
		time.Sleep(400 * time.Millisecond)
		take(5000, 0) // the second probe comes later than the first
		time.Sleep(400 * time.Millisecond)
		b.tell(w, take(5000, 1), tally{answered: 1}) // a definite no is an answer
		for n := 2; n < 5000; n *= 2 {
			if b.state != CircuitRamping {
				t.Fatalf("at %d it is %v", n, b.state)
			}
			b.tell(w, take(9000, n), tally{delivered: n})
		}
		take(9000, 9000)
		if f := b.tell(w, ticket{n: 10}, tally{throttled: 8, delivered: 2, wish: 2 * time.Second}); !f.slow || b.state != CircuitRamping {
			t.Fatalf("a destination that throttles is %v", b.state)
		}
		take(100, 0)
		time.Sleep(3 * time.Second)
		take(100, 2)
		if f := b.tell(w, ticket{n: 10}, tally{unreachable: 1}); !f.down {
			t.Fatal("unreachable, and not open")
		}
	})
}

// Workers take turns in probing, so that one which holds nothing but the cause
// cannot keep the others from finding out.
func TestProbesTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, ws := testBreaker(t, 2)
		b.tell(ws[0], ticket{n: 1}, tally{unreachable: 1})
		turns := map[int]int{}
		for range 20 {
			for probed := false; !probed; {
				time.Sleep(100 * time.Millisecond)
				for i, w := range ws { // the first one always asks first
					if tk, _ := b.take(w, 10); tk.n > 0 {
						turns[i]++
						b.tell(w, tk, tally{unknown: 1})
						probed = true
					}
				}
			}
		}
		if turns[0] < 8 || turns[1] < 8 {
			t.Errorf("turns: %v", turns)
		}
	})
}

// What a worker gives back of its right to send is had by another one, which has
// asked meanwhile, at once: nothing else would wake it.
func TestRightsGivenBackWakeOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, ws := testBreaker(t, 2)
		a, o := ws[0], ws[1]
		b.tell(a, ticket{n: 1}, tally{unreachable: 1})
		time.Sleep(time.Second)
		giveBack := func(what string) {
			t.Helper()
			tk, _ := b.take(a, 2)
			if got, wait := b.take(o, 2); tk.n == 0 || got.n != 0 || wait != 0 {
				t.Fatalf("%s: one had %d, the other %d and to wait %v", what, tk.n, got.n, wait)
			}
			clearNews(a)
			clearNews(o)
			b.unused(a, tk, tk.n)
			mustBePoked(t, o, what+" that is given back")
			if len(a.news) > 0 {
				t.Errorf("%s: who has no use for it is asked again", what)
			}
		}
		giveBack("a probe")
		probe, _ := b.take(o, 1)
		if probe.n != 1 {
			t.Fatal("the probe was not to be had")
		}
		b.tell(o, probe, tally{delivered: 1})
		giveBack("a portion")
		if tk, _ := b.take(o, 9); tk.n != 2 {
			t.Errorf("the portion was %d, not 2", tk.n)
		}
	})
}

// A destination that refuses each message for what it is answers: it is not sent
// two at a time for ever. Where it says that it will pass, it is.
func TestRampGrowsWithRejections(t *testing.T) {
	for class, closed := range map[sink.Status]bool{sink.Reject: true, sink.Retry: false} {
		inWorld(t, memsink.Config{Decide: func(ctx context.Context, m sink.Message) sink.Result {
			sleep(ctx, 10*time.Millisecond)
			return answer(class, sink.ClassRefused)
		}}, func(w *world) {
			r := w.start(func(c *Config) {
				c.MaxRecords = 100
				c.Destinations[0].Retry = Retry{Base: time.Hour, Cap: time.Hour}
			})
			w.sink.Break(nil)
			w.add(many(2000, 2000)...)
			time.Sleep(time.Minute)
			w.sink.Mend()
			time.Sleep(time.Minute)
			if h := r.Health().Destinations[0]; (h.Circuit == "closed") != closed || h.Circuit == "open" {
				t.Errorf("all answers are %v: the breaker is %s", class, h.Circuit)
			}
			r.end()
		})
	}
}

// The breaker remembers for how long it was open, bounded and never less.
func TestWasOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, ws := testBreaker(t, 1)
		for range 100 {
			b.tell(ws[0], ticket{n: 1}, tally{unreachable: 1})
			time.Sleep(time.Minute)
			tk, _ := b.take(ws[0], 1)
			b.tell(ws[0], tk, tally{delivered: 1})
			time.Sleep(time.Minute)
		}
		if d := b.wasOpen(90 * time.Second); d != 30*time.Second {
			t.Errorf("of the last 90 s it was open for %v", d)
		}
		if d := b.wasOpen(20 * time.Minute); d != 10*time.Minute {
			t.Errorf("of the last 20 min it was open for %v", d)
		}
		if d := b.wasOpen(1000 * time.Minute); d < 100*time.Minute || len(b.spans) > maxSpans {
			t.Errorf("in all it was open for %v, kept in %d spans", d, len(b.spans))
		}
	})
}

// A message that the sink holds back for reasons of its own is offered again,
// soon and then with pauses, at no cost.
func TestHeldBySinkForItsOwnReasons(t *testing.T) {
	var tries *attempts
	inWorld(t, memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
		if n := tries.note(m.Key); m.Key == "soon" && n == 2 || m.Key == "good" {
			return memsink.Deliver
		}
		return answer(sink.NotSent, sink.ClassHeld)
	}}, func(w *world) {
		tries = newAttempts()
		r := w.start()
		from := time.Now()
		ids := w.add("soon", "never", "good")
		w.wait(2, 100*time.Millisecond)
		if time.Since(from) > 50*time.Millisecond {
			t.Errorf("the second offer came after %v", time.Since(from))
		}
		time.Sleep(time.Minute)
		if n := len(tries.of("never")); n < 20 || n > 300 {
			t.Errorf("offered %d times in a minute", n)
		}
		w.mustBe(store.Published, ids[0], ids[2])
		if e := w.entries()[ids[1]]; e.State == store.Failed || e.Attempts != 0 {
			t.Errorf("the other: %+v", e)
		}
		r.end()
	})
}
