package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/memstore"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// An outage costs no attempts, makes no exceptions and few tries; afterwards
// everything arrives once and in order.
func TestOutageCostsNothing(t *testing.T) {
	eachKind(t, nil, func(w *world) {
		r := w.start(func(c *Config) { c.Destinations[0].Retry.MaxAttempts = 3 })
		w.add("a")
		w.wait(1, time.Second)
		w.sink.Break(nil)
		keys := many(12000, 100)
		ids := w.add(keys...)
		time.Sleep(30 * time.Minute)
		st, err := w.store.Status(context.Background())
		if err != nil {
			w.t.Fatal(err)
		}
		if d := st.Destinations[0]; d.Failed.N+d.Waiting.N != 0 {
			w.t.Errorf("the outage has made %d failed and %d waiting ones", d.Failed.N, d.Waiting.N)
		}
		if h := r.Health().Destinations[0]; h.Circuit != "open" || h.Down < 29*time.Minute || h.Error == "" {
			w.t.Errorf("health: %+v", h)
		}
		w.sink.Mend()
		w.wait(len(ids)+1, time.Minute)
		w.mustBe(store.Published, ids...)
		w.mustArriveInOrder(keys, ids, 0)
		for _, e := range w.entries() {
			if e.Attempts != 0 {
				w.t.Fatalf("charged: %+v", e)
			}
		}
		if c := w.events.circuit; !slices.Equal(c, []CircuitState{CircuitOpen, CircuitRamping, CircuitClosed}) {
			w.t.Errorf("the circuit went %v", c)
		}
		r.end()
	})
}

// While it is open, single messages go out now and then, and a different one
// each time.
func TestProbes(t *testing.T) {
	var tries *attempts
	inWorld(t, memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
		tries.note(m.Key)
		return answer(sink.Unknown, sink.ClassTimeout)
	}}, func(w *world) {
		tries = newAttempts()
		r := w.start()
		w.add(many(40, 8)...)
		time.Sleep(time.Hour)
		total := 0
		for _, k := range many(8, 8) {
			n := len(tries.of(k))
			if n < 10 {
				t.Errorf("%s was tried %d times only", k, n)
			}
			total += n
		}
		if total > 8+3600/15+20 {
			t.Errorf("%d tries in an hour", total)
		}
		r.end()
	})
}

// A message that alone ends without an answer pays for it only if others got
// through.
func TestTimeoutCostsOnlyWhereOthersGetThrough(t *testing.T) {
	for _, others := range []bool{false, true} {
		inWorld(t, memsink.Config{Decide: func(ctx context.Context, m sink.Message) sink.Result {
			if m.Key != "lost" {
				sleep(ctx, 10*time.Millisecond)
				return memsink.Deliver
			}
			sleep(ctx, 100*time.Millisecond)
			return answer(sink.Unknown, sink.ClassTimeout)
		}}, func(w *world) {
			r := w.start(func(c *Config) {
				c.Destinations[0].Retry = Retry{Base: time.Second, Cap: time.Second, MaxAttempts: 5}
			})
			ids := w.add("lost")
			for range 6000 {
				if others {
					w.add("good")
				}
				time.Sleep(10 * time.Millisecond)
			}
			e := w.entries()[ids[0]]
			if others && (e.State != store.Failed || e.Attempts != 5) {
				t.Errorf("with others it ended as %v after %d attempts", e.State, e.Attempts)
			}
			if !others && (e.State == store.Failed || e.Attempts != 0) {
				t.Errorf("alone it ended as %v after %d attempts", e.State, e.Attempts)
			}
			r.end()
		})
	}
}

// A part of the destination that cannot be reached does not stop the rest for
// long.
func TestPartialOutage(t *testing.T) {
	inWorld(t, memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
		if m.Key == "k0" {
			return answer(sink.NotSent, sink.ClassUnreachable)
		}
		return memsink.Deliver
	}}, func(w *world) {
		r := w.start()
		var ids []string
		for range 100 {
			ids = append(ids, w.add(many(10, 10)...)...)
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(10 * time.Second)
		w.mustBe(store.Published, slices.DeleteFunc(slices.Clone(ids), func(id string) bool {
			return slices.Index(ids, id)%10 == 0
		})...)
		if e := w.entries()[ids[0]]; e.Attempts != 0 {
			t.Errorf("the unreachable one was charged %d attempts", e.Attempts)
		}
		r.end()
	})
}

// Two destinations: one that is down holds up the other in nothing.
func TestDestinationsAreIndependent(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		down := memsink.New(memsink.Config{})
		down.Break(nil)
		r := w.start(func(c *Config) {
			c.Destinations = append(c.Destinations, Destination{Name: "down", Sink: down, FromEarliest: true})
		})
		time.Sleep(time.Second)
		for range 20 {
			w.add(many(5000, 50)...)
		}
		w.wait(100000, time.Second)
		if n := down.Len(); n != 0 {
			t.Errorf("%d went to the one that is down", n)
		}
		r.end()
	})
}

// An outage of many probes is said when it begins and when it ends, and no more.
func TestOutageIsSaidOnce(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		lines := &lineCounter{}
		r := w.start(func(c *Config) { c.Logger = lines.logger() })
		w.add("a")
		w.wait(1, time.Second)
		for i := range 3 {
			before := lines.count()
			w.sink.Break(nil)
			ids := w.add(many(200, 20)...)
			time.Sleep(30 * time.Minute)
			if n := lines.count() - before; n != 1 {
				t.Errorf("outage %d: %d lines while it lasted, want 1", i, n)
			}
			w.sink.Mend()
			ids = append(ids, w.add(many(20000, 100)...)...) // the ramp ends with a full portion
			time.Sleep(5 * time.Minute)
			w.mustBe(store.Published, ids...)
			if n := lines.count() - before; n != 2 {
				t.Errorf("outage %d: %d lines when it had ended, want 2", i, n)
			}
		}
		r.end()
	})
}

// The database goes away and comes back: one line is logged for each operation,
// as it gives no advice by which they were known to have one cause, and nothing
// is lost.
func TestDatabaseOutage(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		lines := &lineCounter{}
		r := w.start(func(c *Config) { c.Logger = lines.logger() })
		keys := many(1000, 10)
		ids := w.add(keys...)
		w.wait(1000, time.Second)
		var away atomic.Bool
		w.store.SetFaults(func(context.Context, memstore.Op) error {
			if away.Load() {
				return errors.New("connection refused")
			}
			return nil
		}, nil)
		for range 5 {
			away.Store(true)
			keys, ids = append(keys, many(100, 10)...), append(ids, w.add(many(100, 10)...)...)
			time.Sleep(10 * time.Minute)
			away.Store(false)
			w.wait(len(ids), 30*time.Second)
		}
		w.mustBe(store.Published, ids...)
		w.mustArriveInOrder(keys, ids, 0)
		if n := lines.count(); n < 5*2 || n > 5*8 { // for each of up to four operations one when it fails, one when it is well
			t.Errorf("%d lines were logged for 5 outages", n)
		}
		r.end()
	})
}

// Memory is bounded in bytes, however large payloads are and however much
// waits.
func TestMemoryIsBounded(t *testing.T) {
	const mb = 1 << 20
	inWorld(t, memsink.Config{Discard: true, Decide: func(ctx context.Context, _ sink.Message) sink.Result {
		sleep(ctx, 50*time.Millisecond)
		return memsink.Deliver
	}}, func(w *world) {
		payload := make([]byte, mb/2)
		tx := w.store.Begin()
		for i := range 300 {
			if _, err := tx.Add(outrider.Event{AggregateType: "a", AggregateID: string(rune('a' + i%20)), Type: "T", Payload: payload}); err != nil {
				t.Fatal(err)
			}
		}
		_ = tx.Commit()
		var most atomic.Int64
		var held atomic.Pointer[atomic.Int64]
		note := func() {
			if n := held.Load(); n != nil {
				most.Store(max(most.Load(), n.Load()))
			}
		}
		// Claims that wait for a slow commit leave room in number, but none in
		// bytes: only the budget keeps the next one small.
		w.store.SetFaults(func(ctx context.Context, op memstore.Op) error {
			if op == memstore.OpCommit {
				sleep(ctx, 200*time.Millisecond)
				note()
			}
			return nil
		}, nil)
		r := w.start(func(c *Config) {
			c.MaxBytes, c.MaxBytesInFlight = 4*mb, 8*mb
			c.Hooks.Claim = func(string, int, time.Duration) { note() }
			c.Hooks.Publish = func(string, int, time.Duration) { note() }
		})
		held.Store(&r.dests[0].held)
		w.wait(300, 10*time.Minute)
		time.Sleep(time.Second)
		if n := most.Load(); n > 16 || n < 8 {
			t.Errorf("%d events of half a megabyte were in hand, with room for 16", n)
		}
		r.end()
		if b := r.dests[0].budget; b.records != b.maxRecords || b.bytes != b.maxBytes {
			t.Errorf("%d of %d records and %d of %d bytes were given back", b.records, b.maxRecords, b.bytes, b.maxBytes)
		}
	})
}

// What outages keep in hand leaves the other destinations their room.
func TestOutagesLeaveRoomForOthers(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		var down []*memsink.Sink
		r := w.start(func(c *Config) {
			c.MaxRecords, c.MaxRecordsInFlight = 100, 400
			for i := range 6 {
				s := memsink.New(memsink.Config{})
				s.Break(nil)
				down = append(down, s)
				c.Destinations = append(c.Destinations, Destination{Name: fmt.Sprint("down", i), Sink: s, FromEarliest: true})
			}
		})
		time.Sleep(time.Second)
		for range 10 {
			w.add(many(1000, 50)...)
			time.Sleep(time.Second)
		}
		w.wait(10000, time.Second)
		for _, s := range down {
			s.Mend()
		}
		time.Sleep(time.Minute)
		for i, s := range down {
			if s.Len() != 10000 {
				t.Errorf("%d arrived at destination %d", s.Len(), i)
			}
		}
		r.end()
	})
}

// Suspects are sent alone, but what is down keeps nobody waiting: neither a
// suspect for what another destination cannot send, nor the others for a
// suspect that cannot be sent.
func TestSuspectsAndOutages(t *testing.T) {
	var hang atomic.Bool
	inWorld(t, memsink.Config{Decide: func(ctx context.Context, m sink.Message) sink.Result {
		if hang.Load() {
			<-ctx.Done()
			return answer(sink.Unknown, sink.ClassStopped)
		}
		return memsink.Deliver
	}}, func(w *world) {
		other := memsink.New(memsink.Config{})
		other.Break(nil)
		change := func(c *Config) {
			c.Destinations = append(c.Destinations, Destination{Name: "down", Sink: other, FromEarliest: true})
		}
		hang.Store(true)
		ids := w.add(many(12, 12)...)
		for range 2 { // deaths
			r := w.start(change)
			time.Sleep(4 * time.Second)
			w.kill(r)
		}
		hang.Store(false)
		r := w.start(change)
		w.wait(12, 10*time.Second)
		for i := range 120 {
			w.add("d")
			w.wait(13+i, time.Second)
			time.Sleep(500 * time.Millisecond)
		}
		other.Mend()
		time.Sleep(2 * time.Minute)
		w.mustBe(store.Published, ids...)
		if other.Len() < 132 {
			t.Errorf("%d arrived at the other", other.Len())
		}
		r.end()
	})
}
