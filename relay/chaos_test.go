package relay

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/memstore"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// storm is one run of the chaos test.
type storm struct {
	Seed                     uint64
	Relays, Keys, Events     int
	NoOrder, NoOrderInFlight bool
	Skip                     bool
	MaxRecords               int
	BadClaims, BadCommits    float64 // share of calls that fail
	LostCommits              float64 // share of commits whose answer is lost
	Trouble                  float64 // share of deliveries that do not go well
	Outage, Kill, Restart    bool
}

func drawStorm(t *rapid.T) storm {
	s := storm{
		Seed:       rapid.Uint64().Draw(t, "seed"),
		Relays:     rapid.IntRange(1, 3).Draw(t, "relays"),
		Keys:       rapid.IntRange(1, 40).Draw(t, "keys"),
		Events:     rapid.IntRange(1, 600).Draw(t, "events"),
		Skip:       rapid.Bool().Draw(t, "skip"),
		MaxRecords: rapid.SampledFrom([]int{3, 20, 100, 5000}).Draw(t, "max records"),
		Outage:     rapid.Bool().Draw(t, "outage"),
		Kill:       rapid.Bool().Draw(t, "kill"),
		Restart:    rapid.Bool().Draw(t, "restart"),
	}
	s.NoOrder = rapid.IntRange(0, 3).Draw(t, "no order") == 0
	s.NoOrderInFlight = s.NoOrder || rapid.Bool().Draw(t, "no order in flight")
	share := rapid.SampledFrom([]float64{0, 0, 0.02, 0.2})
	s.BadClaims, s.BadCommits = share.Draw(t, "bad claims"), share.Draw(t, "bad commits")
	s.LostCommits, s.Trouble = share.Draw(t, "lost commits"), share.Draw(t, "trouble")
	return s
}

// dice are safe for many goroutines.
type dice struct {
	mu       sync.Mutex
	r        *rand.Rand
	troubled map[string]bool // messages that have met with trouble
}

func (d *dice) chance(p float64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.r.Float64() < p
}

func (d *dice) intn(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.r.IntN(n)
}

func (d *dice) upTo(t time.Duration) time.Duration { return time.Duration(d.intn(int(t))) }

// decide makes deliveries go wrong in every way that there is.
func (s storm) decide(d *dice) func(context.Context, sink.Message) sink.Result {
	if s.Trouble == 0 && s.Seed%2 == 0 {
		return nil
	}
	pause := func(ctx context.Context, most time.Duration) {
		sleep(ctx, d.upTo(most))
	}
	return func(ctx context.Context, m sink.Message) sink.Result {
		pause(ctx, 5*time.Millisecond)
		if !d.chance(s.Trouble) {
			return memsink.Deliver
		}
		d.mu.Lock()
		d.troubled[m.ID] = true
		d.mu.Unlock()
		switch d.intn(9) {
		case 0:
			return answer(sink.Reject, sink.ClassInvalid)
		case 1:
			pause(ctx, 4*time.Second)
			return answer(sink.Unknown, sink.ClassTimeout)
		case 2:
			return answer(sink.Unknown, sink.ClassOther)
		case 3:
			pause(ctx, 4*time.Second)
			return memsink.Deliver
		case 4:
			r := answer(sink.Retry, sink.ClassThrottled)
			r.RetryAfter = d.upTo(3 * time.Second)
			return r
		case 5:
			return answer(sink.NotSent, sink.ClassUnreachable)
		case 6:
			return answer(sink.NotSent, sink.ClassOther)
		default:
			return answer(sink.Retry, sink.ClassRefused)
		}
	}
}

func (s storm) faults(d *dice) (before, after memstore.Fault) {
	err := errors.New("database is away")
	before = func(ctx context.Context, op memstore.Op) error {
		p := map[memstore.Op]float64{memstore.OpClaim: s.BadClaims, memstore.OpCommit: s.BadCommits,
			memstore.OpAcquire: s.BadClaims, memstore.OpRenew: s.BadClaims}[op]
		if op == memstore.OpClaim || op == memstore.OpCommit {
			sleep(ctx, d.upTo(2*time.Millisecond))
		}
		if d.chance(p) {
			return err
		}
		return nil
	}
	after = func(_ context.Context, op memstore.Op) error {
		if op == memstore.OpCommit && d.chance(s.LostCommits) {
			return err
		}
		return nil
	}
	return before, after
}

// tune makes the relays of a storm quick to despair.
func (s storm) tune(c *Config) {
	c.MaxRecords = s.MaxRecords
	dest := &c.Destinations[0]
	dest.PublishTimeout = 3 * time.Second
	dest.Retry = Retry{Base: 100 * time.Millisecond, Cap: time.Second, MaxAttempts: 6}
	if s.Skip {
		dest.Order = Skip
	}
}

func TestChaos(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s := drawStorm(rt)
		var failures []string
		synctest.Test(t, func(t *testing.T) { failures = s.run(t) })
		if len(failures) > 0 {
			rt.Fatalf("%+v:\n%v", s, failures[:min(len(failures), 10)])
		}
	})
}

func (s storm) run(t *testing.T) []string { //nolint:thelper // the body of a test: its own lines tell more
	d := &dice{troubled: map[string]bool{}, r: rand.New(rand.NewPCG(s.Seed, 1))}
	w := &world{t: t, store: memstore.New(memstore.Config{}), events: newEventLog(),
		sink: memsink.New(memsink.Config{Decide: s.decide(d), NoOrder: s.NoOrder, NoOrderInFlight: s.NoOrderInFlight})}
	before, after := s.faults(d)
	w.store.SetFaults(before, after)
	relays := make([]*running, s.Relays)
	for i := range relays {
		relays[i] = w.start(s.tune, func(c *Config) { c.Name = fmt.Sprint("relay", i) })
	}
	var keys, ids []string
	for len(ids) < s.Events {
		var batch []string
		for range 1 + d.intn(20) {
			batch = append(batch, fmt.Sprintf("k%d", d.intn(s.Keys)))
		}
		keys, ids = append(keys, batch...), append(ids, w.add(batch...)...)
		if d.chance(0.5) {
			time.Sleep(d.upTo(50 * time.Millisecond))
		}
	}
	relays = s.disturb(w, d, relays)
	w.sink.Mend()
	w.store.SetFaults(nil, nil)
	time.Sleep(3 * time.Minute)
	if pending := s.unfinished(w, keys, ids); len(pending) > 0 {
		synctest.Wait()
		for _, r := range relays {
			pending = append([]string{r.dump()}, pending...)
		}
		for _, r := range relays {
			r.stop()
			<-r.done
		}
		return pending
	}
	for _, r := range relays {
		r.stop()
		<-r.done
	}
	return append(s.check(w, d, ids), w.store.Misuse()...)
}

// disturb does what befalls relays from outside.
func (s storm) disturb(w *world, d *dice, relays []*running) []*running {
	if s.Outage {
		w.sink.Break(nil)
		time.Sleep(d.upTo(20 * time.Second))
		w.sink.Mend()
	}
	if s.Kill {
		for _, sess := range w.store.Sessions() {
			w.store.Kill(sess) // the relay lives on, but is cut off
			break
		}
		time.Sleep(d.upTo(20 * time.Second))
	}
	if s.Restart {
		relays[0].stop()
		<-relays[0].done
		relays[0] = w.start(s.tune)
		time.Sleep(d.upTo(10 * time.Second))
	}
	return relays
}

// unfinished lists the events that should have come to an end by now: all but
// those behind a FAILED one.
func (s storm) unfinished(w *world, keys, ids []string) []string {
	all := w.entries()
	blocked := map[string]bool{}
	var out []string
	for i, id := range ids {
		switch e := all[id]; {
		case e.State == store.Failed:
			blocked[keys[i]] = blocked[keys[i]] || !s.Skip
		case e.State != store.Published && !blocked[keys[i]]:
			out = append(out, fmt.Sprintf("event %d of %s is %v (%s), attempts %d, %s", i, keys[i], e.State, e.Reason, e.Attempts, e.Class))
		}
	}
	return out
}

// check looks at what has arrived: everything that counts as published, and the
// first deliveries of each key in order.
func (s storm) check(w *world, d *dice, ids []string) []string {
	var out []string
	place := map[string]int{}
	for i, id := range ids {
		place[id] = i
	}
	last, seen := map[string]int{}, map[string]bool{}
	for _, m := range w.sink.Messages() {
		if seen[m.ID] {
			continue
		}
		seen[m.ID] = true
		i := place[m.ID]
		// A FAILED event that was skipped is sent once more, out of its place,
		// if the relay died before it could write that down.
		if before, ok := last[m.Key]; ok && i < before && !(s.Skip && d.troubled[m.ID]) {
			out = append(out, fmt.Sprintf("event %d of %s was first delivered behind %d", i, m.Key, before))
		}
		last[m.Key] = max(last[m.Key], i)
	}
	for id, e := range w.entries() {
		if e.State == store.Published && !seen[id] {
			out = append(out, fmt.Sprintf("event %d is published and never arrived", place[id]))
		}
	}
	return out
}
