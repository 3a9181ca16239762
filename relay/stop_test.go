package relay

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
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

// LIF-01: what was acknowledged during the stop is marked, though the database
// is slow; the rest is handed back; nothing comes twice.
func TestLIF01_StopSettlesWhatIsFinishing(t *testing.T) {
	for i := range 100 {
		inWorld(t, memsink.Config{Decide: func(ctx context.Context, m sink.Message) sink.Result {
			sleep(ctx, time.Duration(len(m.ID)+int(m.Row[0]))*7*time.Millisecond)
			return memsink.Deliver
		}}, func(w *world) {
			w.store.SetFaults(func(ctx context.Context, op memstore.Op) error {
				if op == memstore.OpCommit || op == memstore.OpClaim {
					sleep(ctx, 150*time.Millisecond)
				}
				return nil
			}, nil)
			keys := many(200, 200)
			ids := w.add(keys...)
			r := w.start()
			time.Sleep(time.Duration(i) * 10 * time.Millisecond)
			r.end()
			arrived := w.arrived("*")
			w.mustBe(store.Published, arrived...)
			w.store.SetFaults(nil, nil)
			r = w.start()
			time.Sleep(10 * time.Second)
			w.mustArriveInOrder(keys, ids, 0)
			r.end()
		})
	}
}

// stubborn is a sink that does not return for an hour, whatever its context.
type stubborn struct {
	mu      sync.Mutex
	batches []sink.Batch
	take    func(sink.Message) bool // those that it answers at once
}

func (s *stubborn) Capabilities() sink.Capabilities { return sink.Capabilities{Order: true} }
func (s *stubborn) Close(context.Context) error     { return nil }
func (s *stubborn) Publish(_ context.Context, b sink.Batch) {
	s.mu.Lock()
	s.batches = append(s.batches, b)
	s.mu.Unlock()
	var late []int
	for i, m := range b.Messages {
		if s.take(m) {
			b.Report(i, sink.Result{Status: sink.Delivered})
		} else {
			late = append(late, i)
		}
	}
	time.Sleep(time.Hour)
	for _, i := range late {
		b.Report(i, sink.Result{Status: sink.Delivered})
	}
}

// LIF-02 and LIF-03: a sink that ignores the end does not keep the relay from
// ending in time. What it had answered is marked, the rest handed back without
// a charge, and what it says later touches nothing.
func TestLIF02_StubbornSinkDoesNotHoldTheStop(t *testing.T) {
	for _, cut := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := &world{t: t, events: newEventLog(), store: newMemStore(), sink: memsink.New(memsink.Config{})}
			s := &stubborn{take: func(m sink.Message) bool { return m.Key != "k3" && m.Key != "k4" }}
			ids := w.add(many(20, 10)...)
			r := w.start(func(c *Config) {
				c.Destinations[0].Sink = s
				c.Destinations[0].SlowAfter = time.Hour // nothing is settled before the stop
			})
			time.Sleep(300 * time.Millisecond)
			from := time.Now()
			r.stop()
			limit := 25 * time.Second
			if cut {
				time.Sleep(time.Second)
				r.Cut()
				limit = 6 * time.Second
			}
			<-r.done
			if took := time.Since(from); took > limit {
				t.Errorf("the stop took %v", took)
			}
			if r.err == nil || !strings.Contains(r.err.Error(), "have not returned") {
				t.Errorf("Run returned %v", r.err)
			}
			check := func() {
				t.Helper()
				for i, id := range ids {
					if i%10 == 3 || i%10 == 4 {
						w.mustBeOneOf(id, store.Pending, store.Waiting)
					} else {
						w.mustBe(store.Published, id)
					}
					if e := w.entries()[id]; e.Attempts != 0 {
						t.Errorf("event %d was charged %d attempts", i, e.Attempts)
					}
				}
			}
			check()
			time.Sleep(2 * time.Hour) // the late answers come
			check()
			next := w.start()
			time.Sleep(10 * time.Second)
			w.mustBe(store.Published, ids...)
			w.mustArriveInOrder([]string{"k3", "k4", "k3", "k4"}, []string{ids[3], ids[4], ids[13], ids[14]}, 0)
			next.end()
		})
	}
}

// mustBeOneOf checks a state.
func (w *world) mustBeOneOf(id string, states ...store.State) {
	w.t.Helper()
	e := w.entries()[id]
	for _, s := range states {
		if e.State == s {
			return
		}
	}
	w.t.Errorf("event %s of %q is %v", id, e.Key, e.State)
}

// A sink that answers within the soft limit leaves nothing that was delivered
// unmarked (LIF-03), and one that returns on the cut is not charged.
func TestLIF03_CutOffCallsAreNotCharged(t *testing.T) {
	var tries *attempts
	inWorld(t, memsink.Config{NoOrderInFlight: true, Decide: func(ctx context.Context, m sink.Message) sink.Result {
		if tries.note(m.Key) > 1 || m.Key == "quick" {
			return memsink.Deliver
		}
		sleep(ctx, time.Hour)
		return answer(sink.Unknown, sink.ClassStopped)
	}}, func(w *world) {
		tries = newAttempts()
		ids := w.add("quick", "a", "b", "a", "quick")
		r := w.start(func(c *Config) {
			c.SoftTimeout = 2 * time.Second
			c.Destinations[0].SlowAfter = time.Minute
			c.Destinations[0].PublishTimeout = time.Hour
		})
		time.Sleep(500 * time.Millisecond)
		r.end()
		w.mustBe(store.Published, ids[0], ids[4])
		for _, i := range []int{1, 2, 3} {
			if e := w.entries()[ids[i]]; e.Attempts != 0 || e.State == store.Failed {
				t.Errorf("event %d: %+v", i, e)
			}
		}
		r = w.start()
		w.wait(5, 3*time.Second)
		w.mustBe(store.Published, ids...)
		r.end()
	})
}

// A stop during an outage does not wait for the destination.
func TestStopDuringOutage(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		w.sink.Break(nil)
		ids := w.add(many(1000, 100)...)
		r := w.start()
		time.Sleep(10 * time.Second)
		from := time.Now()
		r.end()
		if took := time.Since(from); took > time.Second {
			t.Errorf("the stop took %v", took)
		}
		w.sink.Mend()
		r = w.start()
		w.wait(1000, 10*time.Second)
		w.mustArriveInOrder(many(1000, 100), ids, 0)
		r.end()
	})
}

// A stop while the database is away ends in time too, and says what is left.
func TestStopWithoutDatabase(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		r := w.start()
		w.add("a")
		w.wait(1, time.Second)
		time.Sleep(100 * time.Millisecond)
		w.store.SetFaults(func(ctx context.Context, op memstore.Op) error {
			<-ctx.Done()
			return errors.New("no answer")
		}, nil)
		w.add("a")
		time.Sleep(time.Second)
		from := time.Now()
		r.stop()
		<-r.done
		if took := time.Since(from); took > 25*time.Second {
			t.Errorf("the stop took %v", took)
		}
		if r.err == nil {
			t.Error("Run returned nil although nothing could be given back")
		}
		w.store.SetFaults(nil, nil)
	})
}

// So does one with results in hand that cannot be settled: a commit asks the
// database without end, and is left.
func TestStopWithResultsAndWithoutDatabase(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		var away atomic.Bool
		w.store.SetFaults(func(ctx context.Context, op memstore.Op) error {
			if away.Load() {
				return errors.New("no database")
			}
			return nil
		}, func(_ context.Context, op memstore.Op) error {
			if op == memstore.OpCommit {
				away.Store(true) // it is gone behind the start
			}
			return nil
		})
		r := w.start()
		w.add("a")
		w.wait(1, time.Minute)
		time.Sleep(time.Second)
		from := time.Now()
		r.stop()
		<-r.done
		if took := time.Since(from); took > 25*time.Second {
			t.Errorf("the stop took %v", took)
		}
		if r.err == nil || !strings.Contains(r.err.Error(), "1 events of out were left in hand") {
			t.Errorf("Run returned %v, which does not say what is left", r.err)
		}
	})
}

// Run says why the store cannot be joined, and runs once.
func TestRunFailsToJoin(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		w.store.SetFaults(func(_ context.Context, op memstore.Op) error { return errors.New("no such table") }, nil)
		r := w.start()
		<-r.done
		if r.err == nil || !strings.Contains(r.err.Error(), "no such table") {
			t.Errorf("Run returned %v", r.err)
		}
		if err := r.Run(context.Background()); !errors.Is(err, ErrRan) {
			t.Errorf("the second Run returned %v", err)
		}
	})
}

// slowToLeave is a store whose sessions take their time to give a lease back.
type slowToLeave struct{ store.Store }

type slowToLeaveSession struct{ store.Session }

func (s slowToLeave) Join(ctx context.Context, p store.JoinParams) (store.Session, error) {
	ses, err := s.Store.Join(ctx, p)
	return slowToLeaveSession{ses}, err
}

func (s slowToLeaveSession) Release(ctx context.Context, l store.Lease, keep store.LaneSet) (store.Lease, error) {
	left, err := s.Session.Release(ctx, l, keep)
	time.Sleep(600 * time.Millisecond)
	return left, err
}

// A stop that takes its time is not told of as if leases had been lost, though
// renewals meanwhile find them given back.
func TestStopLosesNoLease(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		lost, errors := 0, 0
		r := w.start(func(c *Config) {
			c.Store = slowToLeave{w.store}
			c.Hooks.LeaseLost = func(string) { lost++ }
			c.Hooks.StoreError = func(string, string) { errors++ }
		})
		w.add("a")
		time.Sleep(5 * time.Second)
		r.stop()
		<-r.done
		if lost > 0 || errors > 0 {
			t.Errorf("a stop was told of as %d leases lost and %d errors of the store", lost, errors)
		}
	})
}

// Run waits for a hook that a call's end has begun: nothing is told to who has
// left.
func TestNoHookAfterRun(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		var open atomic.Int32
		r := w.start(func(c *Config) {
			c.Hooks.Publish = func(string, int, time.Duration) {
				open.Add(1)
				time.Sleep(3 * time.Second)
				open.Add(-1)
			}
		})
		w.add("a")
		w.wait(1, time.Minute)
		time.Sleep(time.Second)
		if open.Load() != 1 {
			t.Fatal("the hook is not under way, which this test is of")
		}
		r.end()
		if n := open.Load(); n != 0 {
			t.Errorf("%d hooks were under way when Run had returned", n)
		}
	})
}

// A sink that panics ends the process, as Destination.Sink says.
func TestPanicOfASinkEndsTheProcess(t *testing.T) {
	if os.Getenv("OUTRIDER_TEST_PANIC") == "" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), "OUTRIDER_TEST_PANIC=1")
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), "panic: as scripted") {
			t.Errorf("the process ended with %v: %s", err, out)
		}
		return
	}
	s := memstore.New(memstore.Config{})
	tx := s.Begin()
	if _, err := tx.Add(outrider.Event{AggregateType: "a", AggregateID: "1", Type: "T", Payload: []byte("{}")}); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	r, err := New(Config{Store: s, Destinations: []Destination{{Name: "out", Sink: panics{}, FromEarliest: true}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Error(r.Run(t.Context())) // never returns
}

// panics is a sink that does.
type panics struct{}

func (panics) Capabilities() sink.Capabilities     { return sink.Capabilities{} }
func (panics) Close(context.Context) error         { return nil }
func (panics) Publish(context.Context, sink.Batch) { panic("as scripted") }
