package relay

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/memstore"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// RTY-01: a delay lies within [base, cap plus its jitter], whatever the count.
func TestRTY01_DelayStaysInBounds(t *testing.T) {
	counts := []int{-1, 0, 1, 2, 30, 63, 64, 65, 100, 1000, math.MaxInt32, math.MaxInt}
	check := func(r Retry, n int, fatal func(string, ...any)) {
		top := max(r.Base, r.Cap)
		for range 10 {
			d := r.delay(n)
			if d < r.Base || float64(d) > 1.5*float64(top)+1 {
				fatal("base %v cap %v: delay %d is %v", r.Base, r.Cap, n, d)
			}
			if n > 1 && r.backoff(n) < r.backoff(n-1) {
				fatal("base %v cap %v: backoff %d is shorter than the one before", r.Base, r.Cap, n)
			}
		}
	}
	for _, r := range []Retry{
		{Base: time.Second, Cap: time.Hour},
		{Base: time.Minute, Cap: time.Hour},
		{Base: time.Hour, Cap: time.Second}, // cap below base
		{Base: 0, Cap: time.Hour},
		{Base: 0, Cap: 0},
		{Base: 1, Cap: math.MaxInt64},
		{Base: math.MaxInt64, Cap: math.MaxInt64},
	} {
		for _, n := range counts {
			check(r, n, t.Fatalf)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		r := Retry{Base: time.Duration(rapid.Int64Min(0).Draw(t, "base")), Cap: time.Duration(rapid.Int64Min(0).Draw(t, "cap"))}
		check(r, rapid.Int().Draw(t, "n"), t.Fatalf)
	})
	if d := (Retry{}).withDefaults(); d.Base != time.Second || d.Cap < d.Base || d.MaxAttempts != 20 {
		t.Errorf("defaults: %+v", d)
	}
	if d := (Retry{MaxAttempts: -1, Immediate: -1}).withDefaults(); d.MaxAttempts != math.MaxInt || d.Immediate != 0 {
		t.Errorf("no limits: %+v", d)
	}
}

// attempts notes when each message was tried, by fake time.
type attempts struct {
	mu sync.Mutex
	at map[string][]time.Duration
	t0 time.Time
}

func newAttempts() *attempts { return &attempts{at: map[string][]time.Duration{}, t0: time.Now()} }

func (a *attempts) note(key string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.at[key] = append(a.at[key], time.Since(a.t0))
	return len(a.at[key])
}

func (a *attempts) of(key string) []time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]time.Duration(nil), a.at[key]...)
}

// RTY-02: the interval of a row holds, however many relays there are.
func TestRTY02_IntervalHoldsForAnyNumberOfRelays(t *testing.T) {
	var tries *attempts
	inWorld(t, memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
		tries.note(m.Key)
		return answer(sink.Retry, sink.ClassRefused)
	}}, func(w *world) {
		tries = newAttempts()
		var relays []*running
		for range 12 {
			relays = append(relays, w.start(func(c *Config) {
				c.Destinations[0].Retry = Retry{Immediate: -1, Base: time.Minute, Cap: time.Minute, MaxAttempts: -1}
			}))
		}
		keys := many(5, 5)
		w.add(keys...)
		time.Sleep(15 * time.Minute)
		for _, k := range keys {
			at := tries.of(k)
			if len(at) < 9 || len(at) > 15 {
				t.Errorf("%s was tried %d times in 15 min", k, len(at))
			}
			for i := 1; i < len(at); i++ {
				if d := at[i] - at[i-1]; d < time.Minute || d > 95*time.Second {
					t.Errorf("%s was tried again after %v", k, d)
				}
			}
		}
		for _, r := range relays {
			r.end()
		}
	})
}

// RTY-03: what is in flight on one relay is not sent by one that starts.
func TestRTY03_StartingRelaySendsNothingThatIsInFlight(t *testing.T) {
	inWorld(t, memsink.Config{Decide: func(ctx context.Context, m sink.Message) sink.Result {
		if sleep(ctx, 5*time.Second); ctx.Err() != nil {
			return answer(sink.Unknown, sink.ClassStopped)
		}
		return memsink.Deliver
	}}, func(w *world) {
		var relays []*running
		for range 3 {
			relays = append(relays, w.start())
		}
		time.Sleep(5 * time.Second)
		keys := many(1000, 1000)
		ids := w.add(keys...)
		time.Sleep(time.Second)
		for i := range relays {
			if i == 0 && w.sink.Len() > 0 {
				w.t.Fatal("some have arrived already: this test is of those in flight")
			}
			relays[i].end()
			relays[i] = w.start()
		}
		time.Sleep(time.Minute)
		w.mustArriveInOrder(keys, ids, 0)
		w.mustBe(store.Published, ids...)
		for _, r := range relays {
			r.end()
		}
	})
}

// startLog is a store that notes by which relays events are started.
type startLog struct {
	*memstore.Store
	mu sync.Mutex
	by map[string][]string
}

type startLogSession struct {
	store.Session
	log   *startLog
	relay string
}

func (s *startLog) Join(ctx context.Context, p store.JoinParams) (store.Session, error) {
	x, err := s.Store.Join(ctx, p)
	return &startLogSession{x, s, p.Relay}, err
}

func (s *startLogSession) Commit(ctx context.Context, p store.CommitParams) error {
	err := s.Session.Commit(ctx, p)
	if err == nil {
		s.log.mu.Lock()
		defer s.log.mu.Unlock()
		for _, c := range p.Start {
			for _, r := range c.Records {
				s.log.by[r.ID] = append(s.log.by[r.ID], s.relay)
			}
		}
	}
	return err
}

// started is how many events were started, by relay.
func (s *startLog) started() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := map[string]int{}
	for _, by := range s.by {
		for _, relay := range by {
			n[relay]++
		}
	}
	return n
}

// RTY-03: five that start at once, while one has events in flight and a
// thousand are pending, claim each of these once and none of those.
func TestRTY03_FiveStartAtOnceBesideABacklog(t *testing.T) {
	var open atomic.Bool
	inWorld(t, memsink.Config{Decide: func(ctx context.Context, _ sink.Message) sink.Result {
		for ; !open.Load() && ctx.Err() == nil; sleep(ctx, time.Second) {
		}
		if sleep(ctx, time.Second); ctx.Err() != nil {
			return answer(sink.Unknown, sink.ClassStopped)
		}
		return memsink.Deliver
	}}, func(w *world) {
		log := &startLog{Store: w.store, by: map[string][]string{}}
		start := func(name string) *running {
			return w.start(func(c *Config) {
				c.Store, c.Name, c.MaxRecords = log, name, 50
				c.Destinations[0].PublishTimeout, c.Destinations[0].SlowAfter = time.Hour, time.Hour
			})
		}
		relays := []*running{start("old")}
		time.Sleep(time.Second)
		keys := many(1200, 1200)
		ids := w.add(keys...)
		time.Sleep(time.Second)
		inFlight := log.started()["old"]
		for i := range 5 {
			relays = append(relays, start(fmt.Sprint("new", i)))
		}
		time.Sleep(10 * time.Second)
		if n := len(w.store.Sessions()); n != 6 || w.sink.Len() != 0 || inFlight == 0 || inFlight > 200 {
			w.t.Fatalf("%d relays, %d arrived, %d in flight: not what this test is of", n, w.sink.Len(), inFlight)
		}
		open.Store(true)
		w.wait(len(ids), 10*time.Minute)
		w.mustBe(store.Published, ids...)
		w.mustArriveInOrder(keys, ids, 0)
		for _, id := range ids {
			if by := log.by[id]; len(by) != 1 {
				t.Errorf("event %s was claimed by %v", id, by)
			}
		}
		if n := log.started(); len(n) != 6 {
			t.Errorf("not all had a part in it: %v", n)
		}
		for _, r := range relays {
			r.end()
		}
	})
}

// RTY-04: a message that always fails, and one that never ends, cost the good
// ones nothing, and the log few lines.
func TestRTY04_UnsendableMessagesStarveNobody(t *testing.T) {
	for _, noInFlight := range []bool{false, true} {
		var tries *attempts
		lines := &lineCounter{}
		inWorld(t, memsink.Config{NoOrderInFlight: noInFlight, Decide: func(ctx context.Context, m sink.Message) sink.Result {
			tries.note(m.Key)
			switch m.Key {
			case "bad":
				return answer(sink.Retry, sink.ClassRefused)
			case "slow":
				<-ctx.Done()
				return answer(sink.Unknown, sink.ClassTimeout)
			}
			return memsink.Deliver
		}}, func(w *world) {
			tries = newAttempts()
			keys := append([]string{"bad", "slow"}, many(1000, 300)...)
			ids := w.add(keys...)
			r := w.start(func(c *Config) { c.MaxRecords = 50; c.Logger = lines.logger() })
			w.wait(1000, 3*time.Second)
			w.mustBe(store.Published, ids[2:]...)
			time.Sleep(2 * time.Minute)
			more := w.add(many(100, 100)...)
			w.wait(1100, 2*time.Second)
			w.mustBe(store.Published, more...)
			if n := len(tries.of("bad")); n < 5 || n > 15 {
				t.Errorf("the bad one was tried %d times in 2 min", n)
			}
			if n := lines.count(); n > 20 {
				t.Errorf("%d lines were logged in 2 min", n)
			}
			r.end()
		})
	}
}

// However many events fail for one reason, the log says so now and then.
func TestFailuresAreLoggedSeldom(t *testing.T) {
	lines := &lineCounter{}
	inWorld(t, memsink.Config{Decide: func(context.Context, sink.Message) sink.Result {
		return answer(sink.Reject, sink.ClassInvalid)
	}}, func(w *world) {
		r := w.start(func(c *Config) { c.Logger = lines.logger() })
		for range 20 {
			w.add(many(50, 50)...)
			w.add("", "", "")
			time.Sleep(10 * time.Second)
		}
		if n := lines.count(); n < failuresShown || n > 5*(failuresShown+1) {
			t.Errorf("%d lines were logged in 200 s", n)
		}
		r.end()
	})
}

// RTY-05: after an outage the backlog comes in growing portions, never before
// what the destination asked for, and does not knock it over again.
func TestRTY05_RecoveryIsSpread(t *testing.T) {
	const capacity = 200 // a second
	var (
		mu       sync.Mutex
		tokens   float64
		last     time.Time
		notUntil map[string]time.Time
		early    int
		refused  int
		perSec   map[int]int
	)
	inWorld(t, memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
		mu.Lock()
		defer mu.Unlock()
		now := time.Now()
		tokens, last = min(capacity, tokens+now.Sub(last).Seconds()*capacity), now
		perSec[int(now.Unix())]++
		if now.Before(notUntil[m.ID]) {
			early++
		}
		if tokens >= 1 {
			tokens--
			return memsink.Deliver
		}
		refused++
		r := answer(sink.Retry, sink.ClassThrottled)
		r.RetryAfter = time.Second
		notUntil[m.ID] = now.Add(r.RetryAfter)
		return r
	}}, func(w *world) {
		last, notUntil, perSec = time.Now(), map[string]time.Time{}, map[int]int{}
		w.sink.Break(nil)
		r := w.start()
		keys := many(5000, 1000)
		ids := w.add(keys...)
		time.Sleep(2 * time.Minute)
		if n := w.sink.Len(); n != 0 {
			t.Fatalf("%d arrived while it was down", n)
		}
		w.sink.Mend()
		w.wait(len(ids), 5*time.Minute)
		synctest.Wait()
		if early > 0 {
			t.Errorf("%d messages were sent before they were asked for", early)
		}
		if refused > len(ids)*13/20 { // 150 runs had 53 to 55 of 100
			t.Errorf("%d messages were refused on the way to %d deliveries", refused, len(ids))
		}
		for s, n := range perSec {
			if n > 4*capacity {
				t.Errorf("%d messages were tried in second %d", n, s)
			}
		}
		w.mustBe(store.Published, ids...)
		w.mustArriveInOrder(keys, ids, 0)
		for id, e := range w.entries() {
			if e.Attempts != 0 {
				t.Errorf("event %s was charged %d attempts", id, e.Attempts)
				break
			}
		}
		r.end()
	})
}

// A wish of the destination is a floor: the delay is never shorter.
func TestRetryAfterIsAFloor(t *testing.T) {
	r := Retry{Base: time.Second, Cap: time.Minute}
	for range 1000 {
		if d := r.after(1, 10*time.Minute); d < 10*time.Minute || d > 15*time.Minute {
			t.Fatalf("asked for 10 min, would come after %v", d)
		}
	}
}

// Three tries at once, then backoff, then FAILED with what happened.
func TestRetryPolicy(t *testing.T) {
	var tries *attempts
	inWorld(t, memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
		tries.note(m.Key)
		return answer(sink.Retry, sink.ClassRefused)
	}}, func(w *world) {
		tries = newAttempts()
		r := w.start(func(c *Config) {
			c.Destinations[0].Retry = Retry{Base: 10 * time.Second, Cap: 20 * time.Second, MaxAttempts: 7}
		})
		ids := w.add("a")
		time.Sleep(10 * time.Minute)
		at := tries.of("a")
		if len(at) != 7 {
			t.Fatalf("tried %d times, not 7: %v", len(at), at)
		}
		if d := at[3] - at[0]; d > 10*time.Millisecond {
			t.Errorf("the immediate tries took %v", d)
		}
		for i, want := range []time.Duration{10 * time.Second, 20 * time.Second, 20 * time.Second} {
			if d := at[4+i] - at[3+i]; d < want || d > want*3/2+time.Second {
				t.Errorf("delay %d is %v, want %v and up to half", i, d, want)
			}
		}
		e := w.entries()[ids[0]]
		if e.State != store.Failed || e.Attempts != 7 || e.Class != string(sink.ClassRefused) || e.Message != "as scripted" {
			t.Errorf("ended as %+v", e)
		}
		if n := w.events.count(Failed); n != 1 {
			t.Errorf("hooks were told of %d failures", n)
		}
		r.end()
	})
}

// The maximum age ends retries, and an outage does not use it up.
func TestMaxAge(t *testing.T) {
	var tries *attempts
	inWorld(t, memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
		if m.Key == "good" {
			return memsink.Deliver
		}
		tries.note(m.Key)
		return answer(sink.Retry, sink.ClassRefused)
	}}, func(w *world) {
		tries = newAttempts()
		r := w.start(func(c *Config) {
			c.Destinations[0].Retry = Retry{Immediate: -1, Base: 10 * time.Second, Cap: 10 * time.Second,
				MaxAttempts: -1, MaxAge: time.Minute}
		})
		ids := w.add("a")
		time.Sleep(20 * time.Second)
		w.sink.Break(nil)
		w.add("good") // finds out that it is down
		time.Sleep(10 * time.Minute)
		if e := w.entries()[ids[0]]; e.State == store.Failed {
			t.Fatalf("failed during the outage: %+v", e)
		}
		before := len(tries.of("a"))
		w.sink.Mend()
		time.Sleep(2 * time.Minute)
		e := w.entries()[ids[0]]
		if n := len(tries.of("a")) - before; n < 2 {
			t.Errorf("the outage used up the age: tried %d times after it", n)
		}
		if e.State != store.Failed || e.Class != string(sink.ClassExpired) {
			t.Errorf("ended as %v %s: %s", e.State, e.Class, e.Message)
		}
		r.end()
	})
}
