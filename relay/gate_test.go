package relay

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/memstore"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// suspect is a claim of one event that has to be alone, read and not started.
func (w *worker) suspect() *work {
	k := w.newWork(&store.Claim{Alone: true, Exclusive: true, Kind: store.Fresh}, 1, share{})
	w.fresh = append(w.fresh, k)
	return k
}

// busyGate is a gate that somebody has passed, and reports whether others may.
func busyGate(r *Relay) (p *pass, others func() bool) {
	g := NewGate()
	r.cfg.Gate = g
	w := &worker{relay: r, news: make(chan struct{}, 1)}
	p = &pass{}
	g.enter(w, p, false)
	return p, func() bool {
		var p pass
		ok := g.enter(w, &p, false)
		g.leave(&p)
		return ok
	}
}

// What waits to be alone keeps others waiting. It does so only while it could
// be sent: not while its destination rests or another's probe is out, also if
// that comes when it waits already.
func TestSuspectWaitsOnlyWhereItCouldBeSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, ws := testBreaker(t, 2)
		w, prober := ws[0], ws[1]
		busy, others := busyGate(w.relay)
		k := w.suspect()
		wait := func(what string, waits bool) {
			t.Helper()
			w.nextAt = 0
			if w.mayStart(k) {
				t.Fatalf("%s: started beside others", what)
			}
			if others() == waits {
				t.Errorf("%s: others waiting for it: %v", what, !waits)
			}
		}
		wait("closed", true)
		b.tell(prober, ticket{n: 1}, tally{unreachable: 1})
		wait("open", false)
		if w.nextAt == 0 {
			t.Error("it does not look again when the breaker has rested")
		}
		time.Sleep(time.Second)
		wait("open, and its turn", true)
		probe, _ := b.take(prober, 1)
		if probe.n != 1 {
			t.Fatal("no probe")
		}
		wait("another's probe is out", false)
		clearNews(w)
		b.tell(prober, probe, tally{unknown: 1})
		mustBePoked(t, w, "the end of another's probe")
		time.Sleep(time.Second)
		wait("open, and its turn again", true)
		w.dest.hung.Store(maxHung)
		wait("with calls that do not return", false)
		w.dest.hung.Store(0)
		wait("when they have returned", true)
		w.draining = true
		w.addStarts(&commit{})
		if !others() {
			t.Error("others wait for one that will not start")
		}
		w.draining = false
		wait("going on", true)
		w.commit = &commit{}
		w.settle()
		if !others() {
			t.Error("others wait for one that cannot start yet")
		}
		w.commit = nil
		w.relay.cfg.Gate.leave(busy)
		if !w.mayStart(k) || others() {
			t.Error("not alone, though nobody else was there")
		}
	})
}

// A Due claim that is started while a suspect waits to be alone would wait for
// the suspect, and the suspect for it, and everybody for them.
func TestSuspectDoesNotWaitForItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ws := testBreaker(t, 1)
		w := ws[0]
		_, others := busyGate(w.relay)
		k := w.suspect()
		if w.mayStart(k) || others() {
			t.Fatal("it does not wait")
		}
		w.due = w.newWork(&store.Claim{Kind: store.Due}, 2, share{})
		if !w.mayStart(w.due) {
			t.Fatal("the Due claim is not started, which this test is of")
		}
		w.due.stage = started
		w.mayStart(k)
		if !others() {
			t.Error("the Due claim waits for the suspect that waits for it")
		}
	})
}

func clearNews(w *worker) {
	select {
	case <-w.news:
	default:
	}
}

func mustBePoked(t *testing.T, w *worker, by string) {
	t.Helper()
	select {
	case <-w.news:
	default:
		t.Errorf("%s wakes nobody", by)
	}
}

// A suspect whose destination turns out to be down makes way at once: the others
// do not wait for the next probe.
func TestSuspectOfADeadDestinationMakesWay(t *testing.T) {
	var hang, down atomic.Bool
	inWorld(t, memsink.Config{Decide: func(ctx context.Context, m sink.Message) sink.Result {
		if hang.Load() {
			<-ctx.Done()
			return answer(sink.Unknown, sink.ClassStopped)
		}
		if !down.Load() {
			sleep(ctx, 500*time.Millisecond)
		}
		down.Store(true)
		return answer(sink.NotSent, sink.ClassUnreachable)
	}}, func(w *world) {
		var late atomic.Int64
		other := memsink.New(memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
			late.Store(max(late.Load(), int64(time.Since(m.CreatedAt)))) // one at a time: they are of one key
			return memsink.Deliver
		}})
		change := func(c *Config) {
			c.Destinations = append(c.Destinations, Destination{Name: "other", Sink: other, FromEarliest: true})
		}
		hang.Store(true)
		w.add(many(12, 12)...)
		for range 2 { // deaths
			r := w.start(change)
			time.Sleep(4 * time.Second)
			w.kill(r)
		}
		hang.Store(false)
		r := w.start(change)
		for !down.Load() {
			time.Sleep(time.Millisecond)
		}
		late.Store(0)
		n := other.Len()
		for range 3000 {
			w.add("d")
			time.Sleep(10 * time.Millisecond)
		}
		if d := time.Duration(late.Load()); d > 100*time.Millisecond {
			t.Errorf("another destination's event came %v late", d)
		}
		if got := other.Len(); got < n+3000 {
			t.Errorf("%d of 3000 arrived at the other", got-n)
		}
		r.end()
	})
}

// suspectAway is a world with a suspect whose database goes away when it is in
// hand, and another world, of the same process, with a database of its own.
type suspectAway struct {
	w, other *world
	suspect  []string
	hang     atomic.Bool // the suspect, until its process dies
	away     atomic.Bool
	atStart  atomic.Bool // it goes away when the suspect is started, not when it is sent
	sending  atomic.Bool
	beside   atomic.Int64 // sent by the other while the suspect is
	change   func(*Config)
}

func inSuspectAway(t *testing.T, atStart bool, f func(s *suspectAway)) {
	t.Helper()
	s := &suspectAway{}
	s.atStart.Store(atStart)
	inWorld(t, memsink.Config{Decide: func(ctx context.Context, m sink.Message) sink.Result {
		if s.hang.Load() {
			<-ctx.Done()
			return answer(sink.Unknown, sink.ClassStopped)
		}
		s.sending.Store(true)
		sleep(ctx, time.Second)
		s.sending.Store(false)
		s.away.Store(!atStart)
		return memsink.Deliver
	}}, func(w *world) {
		gate := NewGate()
		s.w, s.change = w, func(c *Config) { c.Gate, c.LeaseTTL, c.Grace = gate, 20*time.Second, 4*time.Second }
		s.other = &world{t: t, store: newMemStore(), events: newEventLog(), sink: memsink.New(memsink.Config{
			Decide: func(context.Context, sink.Message) sink.Result {
				if s.sending.Load() {
					s.beside.Add(1)
				}
				return memsink.Deliver
			}})}
		s.begin()
		f(s)
	})
}

// begin has the suspect die twice, and the database go away in the next try.
func (s *suspectAway) begin() {
	gone := errors.New("the database is away")
	fault := func(context.Context, memstore.Op) error {
		if s.away.Load() {
			return gone
		}
		return nil
	}
	s.w.store.SetFaults(fault, func(ctx context.Context, op memstore.Op) error {
		if s.atStart.Load() && op == memstore.OpCommit && !s.hang.Load() && !s.sending.Load() && s.w.sink.Len() == 0 {
			s.away.Store(true) // and the answer is lost
		}
		return fault(ctx, op)
	})
	s.hang.Store(true)
	s.suspect = s.w.add("a")
	for range 2 { // deaths
		r := s.w.start(s.change)
		time.Sleep(10 * time.Second)
		s.w.kill(r)
	}
	s.hang.Store(false)
	s.w.start(s.change)
	for !s.away.Load() {
		time.Sleep(time.Millisecond)
	}
}

// A suspect whose database goes away before it is settled keeps others of the
// process, which have databases of their own, waiting until its lease has run out,
// and no longer. It is settled all the same when the database is back.
func TestSuspectOfADatabaseThatIsAwayMakesWay(t *testing.T) {
	inSuspectAway(t, false, func(s *suspectAway) {
		began := time.Now()
		s.w.relays = append(s.w.relays, s.other.start(s.change))
		s.other.add("b")
		time.Sleep(10 * time.Second)
		if s.other.sink.Len() > 0 {
			t.Fatal("another was sent beside the suspect, which this test is of")
		}
		s.other.wait(1, 15*time.Second)
		s.other.add(many(100, 10)...)
		s.other.wait(101, 100*time.Millisecond)
		if d := time.Since(began); d > 21*time.Second {
			t.Errorf("others waited %v", d)
		}
		s.away.Store(false)
		time.Sleep(10 * time.Second)
		s.w.mustBe(store.Published, s.suspect...)
		if n := s.w.sink.Len(); n != 1 {
			t.Errorf("the suspect was delivered %d times", n)
		}
	})
}

// One that has been started and not sent when its database goes away is alone
// again when it is sent.
func TestSuspectThatMadeWayIsAloneAgain(t *testing.T) {
	inSuspectAway(t, true, func(s *suspectAway) {
		s.w.relays = append(s.w.relays, s.other.start(s.change))
		s.other.add("b")
		s.other.wait(1, 30*time.Second)
		if s.w.sink.Len() > 0 {
			t.Fatal("the suspect was sent before its start was known")
		}
		s.atStart.Store(false)
		s.away.Store(false)
		for n := 2; s.w.sink.Len() == 0; n++ {
			s.other.add("b")
			time.Sleep(10 * time.Millisecond)
			if n > 3000 {
				t.Fatal("the suspect is not sent")
			}
		}
		if n := s.beside.Load(); n > 0 {
			t.Errorf("%d messages were sent beside the suspect", n)
		}
		s.away.Store(false)
		time.Sleep(10 * time.Second)
		s.w.mustBe(store.Published, s.suspect...)
	})
}
