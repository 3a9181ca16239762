package relay

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// sinkKinds are the three ways in which a sink may keep order.
var sinkKinds = map[string]memsink.Config{
	"in flight": {},
	"in a call": {NoOrderInFlight: true},
	"none":      {NoOrder: true},
}

// eachKind runs a test with every kind of sink.
func eachKind(t *testing.T, decide func(context.Context, sink.Message) sink.Result, f func(w *world)) {
	t.Helper()
	for name, cfg := range sinkKinds {
		cfg.Decide = decide
		t.Run(name, func(t *testing.T) { inWorld(t, cfg, f) })
	}
}

// ORD-03: events of one transaction arrive in the order of their inserts.
func TestORD03_OneTransactionKeepsItsOrder(t *testing.T) {
	eachKind(t, func(ctx context.Context, _ sink.Message) sink.Result {
		sleep(ctx, time.Millisecond)
		return memsink.Deliver
	}, func(w *world) {
		a, b := w.start(), w.start()
		var keys, ids []string
		for i := range 200 {
			var tx []string
			for range 20 {
				tx = append(tx, fmt.Sprintf("k%d", i%3))
			}
			keys, ids = append(keys, tx...), append(ids, w.add(tx...)...)
			time.Sleep(3 * time.Millisecond)
		}
		w.wait(len(ids), 2*time.Minute)
		w.mustArriveInOrder(keys, ids, 0)
		w.mustBe(store.Published, ids...)
		a.end()
		b.end()
	})
}

// ORD-07: a send that hangs delays its own key only, and no operation of the
// store is open meanwhile.
func TestORD07_SlowSendDelaysNoOtherKey(t *testing.T) {
	eachKind(t, func(ctx context.Context, m sink.Message) sink.Result {
		if m.Key == "slow" {
			sleep(ctx, time.Minute)
		}
		return memsink.Deliver
	}, func(w *world) {
		change := func(c *Config) { c.Destinations[0].PublishTimeout = 10 * time.Minute }
		a, b := w.start(change), w.start(change)
		time.Sleep(3 * time.Second)
		slow := w.add("slow", "slow")
		time.Sleep(100 * time.Millisecond)
		ids := w.add(many(50, 50)...)
		w.wait(50, 1500*time.Millisecond)
		time.Sleep(1500 * time.Millisecond)
		w.mustBe(store.Published, ids...)
		// From then on the others do not feel it at all.
		for range 20 {
			ids = append(ids, w.add(many(50, 50)...)...)
			w.wait(len(ids), 20*time.Millisecond)
		}
		w.mustBe(store.InHand, slow[0])
		w.mustBe(store.Pending, slow[1])
		time.Sleep(4 * time.Minute)
		w.mustBe(store.Published, slow...)
		w.mustArriveInOrder([]string{"slow", "slow"}, slow, 1)
		a.end()
		b.end()
	})
}

// No operation of the store is open while a sink works, but for renewals, which
// have a connection of their own.
func TestNothingIsHeldWhileSending(t *testing.T) {
	hang := make(chan struct{})
	inWorld(t, memsink.Config{Decide: func(context.Context, sink.Message) sink.Result {
		<-hang
		return memsink.Deliver
	}}, func(w *world) {
		hang = make(chan struct{})
		ops := &opCounter{open: map[string]int{}}
		w.store.SetFaults(ops.hooks())
		r := w.start()
		w.add(many(10, 10)...)
		time.Sleep(300 * time.Millisecond)
		synctest.Wait()
		if open := ops.now(); open != "" {
			t.Errorf("open while the sink works: %s", open)
		}
		close(hang)
		w.wait(10, time.Second)
		r.end()
	})
}

// ORD-10: while relays come, go and die, no key is ever out of order.
func TestORD10_LanesMoveWithoutInversion(t *testing.T) {
	eachKind(t, func(ctx context.Context, _ sink.Message) sink.Result {
		sleep(ctx, 3*time.Millisecond)
		return memsink.Deliver
	}, func(w *world) {
		stop := make(chan struct{})
		var keys, ids []string
		var producer sync.WaitGroup
		producer.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				tx := many(10, 100)
				for j := range tx {
					tx[j] = fmt.Sprintf("k%d", (i*10+j)%100)
				}
				keys, ids = append(keys, tx...), append(ids, w.add(tx...)...)
				time.Sleep(20 * time.Millisecond)
			}
		})
		relays := []*running{w.start(), w.start(), w.start(func(c *Config) { c.Name = "victim" })}
		time.Sleep(5 * time.Second)
		w.store.Kill(w.store.Sessions()["victim"])
		for range 4 {
			time.Sleep(5 * time.Second)
			relays = append(relays, w.start())
			time.Sleep(5 * time.Second)
			relays[0].end()
			relays = relays[1:]
		}
		close(stop)
		producer.Wait()
		time.Sleep(20 * time.Second)
		w.mustBe(store.Published, ids...)
		// What the victim had in flight, and nothing else, may come twice.
		w.mustArriveInOrder(keys, ids, 200)
		for _, r := range relays {
			r.end()
		}
	})
}

// A key's FAILED head holds the key back (Block) or not (Skip), and no other.
func TestFailedHead(t *testing.T) {
	for _, order := range []Order{Block, Skip} {
		eachKind(t, func(_ context.Context, m sink.Message) sink.Result {
			if string(m.Payload) == "bad" {
				return answer(sink.Reject, sink.ClassInvalid)
			}
			return memsink.Deliver
		}, func(w *world) {
			tx := w.store.Begin()
			var ids []string
			for i := range 30 {
				e := outrider.Event{AggregateType: "order", AggregateID: fmt.Sprint(i % 3), Type: "T", Payload: []byte("good")}
				if i == 6 {
					e.Payload = []byte("bad") // of key "0"
				}
				recs, _ := tx.Add(e)
				ids = append(ids, recs[0].ID)
			}
			_ = tx.Commit()
			r := w.start(func(c *Config) { c.Destinations[0].Order = order })
			time.Sleep(10 * time.Second)
			w.mustBe(store.Failed, ids[6])
			for i, id := range ids {
				switch {
				case i == 6:
				case i%3 == 0 && i > 6 && order == Block:
					w.mustBe(store.Pending, id)
				default:
					w.mustBe(store.Published, id)
				}
			}
			e := w.entries()[ids[6]]
			if e.Attempts != 1 || e.Class != string(sink.ClassInvalid) {
				w.t.Errorf("failed with %d attempts and class %q", e.Attempts, e.Class)
			}
			r.end()
		})
	}
}

// What was decided without being sent, behind a message that then failed, goes
// back as well.
func TestSkippedBehindFailureGoesBack(t *testing.T) {
	eachKind(t, func(_ context.Context, m sink.Message) sink.Result {
		return answer(sink.Reject, sink.ClassInvalid)
	}, func(w *world) {
		r := w.start(func(c *Config) {
			c.Destinations[0].Match = func(r *outrider.Record) bool { return r.Row != "2" && r.Row != "5" }
			c.Destinations[0].To = func(r *outrider.Record) (string, error) {
				if r.Row == "3" {
					return "", errors.New("nowhere")
				}
				return "", nil
			}
		})
		ids := w.add("a", "a", "a", "a", "b")
		time.Sleep(5 * time.Second)
		w.mustBe(store.Failed, ids[0])
		w.mustBe(store.Pending, ids[1:4]...)
		w.mustBe(store.Published, ids[4])
		r.end()
	})
}

// Which records a key's failures hold back, over claims in hand, being read and
// still to come.
func TestHolds(t *testing.T) {
	w := &worker{held: map[string]*hold{}}
	claim := func(seq int64) *work {
		c := &store.Claim{Records: []outrider.Record{{Event: outrider.Event{Key: "a"}}, {Event: outrider.Event{Key: "a"}}}}
		return &work{claim: c, seq: seq, state: make([]recState, 2)}
	}
	check := func(when string, want map[int64][2]bool) {
		t.Helper()
		for seq, w2 := range want {
			for i, held := range w2 {
				if w.isHeld(claim(seq), i) != held {
					t.Errorf("%s: record %d of claim %d: held %v", when, i, seq, !held)
				}
			}
		}
	}
	w.holdKey(claim(4), 0)
	check("failed", map[int64][2]bool{3: {}, 4: {false, true}, 5: {true, true}, 9: {true, true}})
	w.seq = 5 // is being read
	w.known(4)
	check("known", map[int64][2]bool{4: {false, true}, 5: {true, true}, 6: {}})
	w.holdKey(claim(6), 0) // the key's Due claim fails before claim 5 has been read
	check("failed again", map[int64][2]bool{5: {true, true}, 6: {false, true}, 7: {true, true}})
	w.reading = &reading{seq: 5}
	w.seq = 7
	w.known(6)
	w.release()
	check("known again", map[int64][2]bool{5: {true, true}, 6: {false, true}, 7: {true, true}, 8: {}})
	w.reading = nil
	w.fresh = []*work{claim(8)}
	w.release()
	if len(w.held) != 0 {
		t.Errorf("still held: %v", w.held)
	}
}

// An operator's skip, done behind the relay's back, lets the key go on.
func TestOperatorFreesKey(t *testing.T) {
	inWorld(t, memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
		if string(m.Payload) == "{}" && m.Row == "1" {
			return answer(sink.Reject, sink.ClassInvalid)
		}
		return memsink.Deliver
	}}, func(w *world) {
		r := w.start()
		ids := w.add("a", "a", "a")
		time.Sleep(3 * time.Second)
		w.mustBe(store.Pending, ids[1:]...)
		if n, err := w.store.Skip(context.Background(), store.Target{Key: "a"}); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		w.wait(2, 600*time.Millisecond)
		w.mustBe(store.Published, ids[1:]...)
		r.end()
	})
}

// A delayed event does not hold its key, and comes when it is due: LSE-07.
func TestLSE07_DelayedEventsComeOnceAndWhenDue(t *testing.T) {
	var tries *attempts
	inWorld(t, memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
		n := tries.note(string(m.Payload))
		if string(m.Payload) == "later" && n == 1 {
			r := answer(sink.Retry, sink.ClassThrottled)
			r.RetryAfter = time.Minute
			return r
		}
		if string(m.Payload) == "backoff" && n == 1 {
			return answer(sink.Retry, sink.ClassRefused)
		}
		return memsink.Deliver
	}}, func(w *world) {
		tries = newAttempts()
		change := func(c *Config) {
			c.Destinations[0].Retry = Retry{Immediate: -1, Base: 50 * time.Second, Cap: 50 * time.Second}
		}
		a, b := w.start(change), w.start(change)
		time.Sleep(3 * time.Second)
		tx := w.store.Begin()
		add := func(key, payload string, delay time.Duration) string {
			recs, err := tx.Add(outrider.Event{AggregateType: "order", AggregateID: key, Type: "T", Payload: []byte(payload), Delay: delay})
			if err != nil {
				t.Fatal(err)
			}
			return recs[0].ID
		}
		ids := []string{add("a", "delayed", 45*time.Second), add("a", "now", 0), add("b", "later", 0), add("c", "backoff", 0)}
		_ = tx.Commit()
		t0 := time.Since(tries.t0)
		time.Sleep(10 * time.Second)
		w.mustBe(store.Published, ids[1])
		a.end()
		a = w.start(change)
		time.Sleep(3 * time.Minute)
		w.mustBe(store.Published, ids...)
		for what, want := range map[string][]time.Duration{
			"delayed": {45 * time.Second}, "now": {0}, "later": {0, time.Minute}, "backoff": {0, 50 * time.Second},
		} {
			at := tries.of(what)
			if len(at) != len(want) {
				t.Errorf("%s was sent %d times: %v", what, len(at), at)
				continue
			}
			for i, d := range want {
				if got := at[i] - t0; got < d || got > d*3/2+2*time.Second {
					t.Errorf("%s came after %v, want %v", what, got, d)
				}
			}
		}
		a.end()
		b.end()
	})
}

// What falls due is asked for then, not only now and then.
func TestNextDueIsKept(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		tx := w.store.Begin()
		_, _ = tx.Add(outrider.Event{AggregateType: "order", AggregateID: "1", Type: "T", Delay: 10 * time.Second})
		_ = tx.Commit()
		r := w.start(func(c *Config) { c.DuePoll = 8 * time.Second })
		w.wait(1, 10100*time.Millisecond)
		r.end()
	})
}

// A sink that delivers behind a failure has broken its promise: nothing is lost
// by it, the key is repeated in order.
func TestSinkThatBreaksOrderLosesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		liar := &liar{}
		w := &world{t: t, sink: memsink.New(memsink.Config{}), events: newEventLog()}
		w.store = newMemStore()
		ids := w.add("a", "a", "a", "b")
		r := w.start(func(c *Config) { c.Destinations[0].Sink = liar })
		time.Sleep(10 * time.Second)
		w.mustBe(store.Published, ids...)
		if n := w.events.get(&w.events.broken); n != 2 {
			t.Errorf("%d broken promises were counted, not 2", n)
		}
		if got := liar.delivered("a"); fmt.Sprint(got) != "[2 3 1 2 3]" {
			t.Errorf("delivered %v", got)
		}
		r.end()
	})
}

// liar fails the first message it sees and delivers everything else.
type liar struct {
	mu    sync.Mutex
	calls int
	seen  []string
}

func (l *liar) Capabilities() sink.Capabilities { return sink.Capabilities{Order: true} }
func (l *liar) Close(context.Context) error     { return nil }
func (l *liar) Publish(_ context.Context, b sink.Batch) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls++
	for i, m := range b.Messages {
		if l.calls == 1 && i == 0 {
			b.Report(i, answer(sink.Retry, sink.ClassRefused))
			continue
		}
		l.seen = append(l.seen, m.Key+m.Row)
		b.Report(i, sink.Result{Status: sink.Delivered})
	}
}

func (l *liar) delivered(key string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for _, s := range l.seen {
		if s[:len(key)] == key {
			out = append(out, s[len(key):])
		}
	}
	return out
}

// A sink that says nothing, or says it twice, is counted; the message that was
// not reported may have been delivered.
func TestSinkThatDoesNotReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &mute{}
		w := &world{t: t, sink: memsink.New(memsink.Config{}), events: newEventLog()}
		w.store = newMemStore()
		ids := w.add("a", "b", "c")
		r := w.start(func(c *Config) { c.Destinations[0].Sink = s })
		time.Sleep(10 * time.Second)
		w.mustBe(store.Published, ids...)
		if n := w.events.get(&w.events.broken); n != 2 {
			t.Errorf("%d broken promises were counted, not 2", n)
		}
		if !s.redelivered {
			t.Error("the message that was not reported came again as if it had not been sent")
		}
		r.end()
	})
}

// mute reports the first message twice and the second not at all, once.
type mute struct {
	calls       int
	redelivered bool
}

func (m *mute) Capabilities() sink.Capabilities { return sink.Capabilities{Order: true} }
func (m *mute) Close(context.Context) error     { return nil }
func (m *mute) Publish(_ context.Context, b sink.Batch) {
	m.calls++
	for i := range b.Messages {
		m.redelivered = m.redelivered || b.Messages[i].Redelivery
		if m.calls == 1 && i == 1 {
			continue
		}
		b.Report(i, sink.Result{Status: sink.Delivered})
		if m.calls == 1 && i == 0 {
			b.Report(i, sink.Result{Status: sink.Delivered})
		}
	}
}
