package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/memstore"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a store and a sink with relays between them, inside a bubble of
// fake time.
type world struct {
	t      *testing.T
	store  *memstore.Store
	sink   *memsink.Sink
	events *eventLog
	relays []*running
}

// inWorld runs a test in one.
func inWorld(t *testing.T, cfg memsink.Config, f func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, store: memstore.New(memstore.Config{}), sink: memsink.New(cfg), events: newEventLog()}
		defer func() { // those that a failed test has left
			for _, r := range w.relays {
				r.stop()
				r.Cut()
				<-r.done
			}
		}()
		f(w)
		if bad := w.store.Misuse(); len(bad) > 0 {
			t.Errorf("the store was misused: %v", bad)
		}
	})
}

// config is one of a relay that serves the world's sink, from the earliest
// event on.
func (w *world) config(change ...func(*Config)) Config {
	c := Config{
		Store:  w.store,
		Name:   "relay",
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
		Gate:   NewGate(),
		Hooks:  w.events.hooks(),
		Destinations: []Destination{{
			Name: "out", Sink: w.sink, FromEarliest: true,
		}},
	}
	for _, f := range change {
		f(&c)
	}
	return c
}

// running is a relay that runs.
type running struct {
	*Relay
	t    *testing.T
	stop context.CancelFunc
	done chan struct{}
	err  error
}

func (w *world) start(change ...func(*Config)) *running {
	w.t.Helper()
	r, err := New(w.config(change...))
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	run := &running{Relay: r, t: w.t, stop: stop, done: make(chan struct{})}
	w.relays = append(w.relays, run)
	go func() {
		defer close(run.done)
		run.err = r.Run(ctx)
	}()
	return run
}

// end stops a relay softly, which must go well.
func (r *running) end() {
	r.t.Helper()
	r.stop()
	<-r.done
	if r.err != nil {
		r.t.Errorf("Run: %v", r.err)
	}
}

// add commits events, each "key" or "key:payload"; "" is unordered.
func (w *world) add(keys ...string) []string {
	w.t.Helper()
	tx := w.store.Begin()
	var ids []string
	for _, k := range keys {
		e := outrider.Event{AggregateType: "order", AggregateID: "1", Type: "OrderPlaced", Key: k, Unordered: k == "",
			Payload: []byte("{}")}
		recs, err := tx.Add(e)
		if err != nil {
			w.t.Fatal(err)
		}
		ids = append(ids, recs[0].ID)
	}
	if err := tx.Commit(); err != nil {
		w.t.Fatal(err)
	}
	return ids
}

// many is n keys, k0 to k(mod-1) in turn.
func many(n, mod int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("k%d", i%mod)
	}
	return out
}

// wait waits until n messages have arrived, for at most d.
func (w *world) wait(n int, d time.Duration) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	if err := w.sink.Wait(ctx, n); err != nil {
		synctest.Wait()
		for _, r := range w.relays {
			w.t.Log(r.dump())
		}
		w.t.Fatalf("after %v: %v", d, err)
	}
}

// entries are the states of all events, by id.
func (w *world) entries() map[string]store.Entry {
	w.t.Helper()
	out := map[string]store.Entry{}
	p := store.ListParams{Limit: 1000}
	for {
		page, err := w.store.List(context.Background(), p)
		if err != nil {
			w.t.Fatal(err)
		}
		for _, e := range page.Entries {
			out[e.EventID] = e
		}
		if page.Next == "" {
			return out
		}
		p.AfterRow = page.Next
	}
}

// mustBe checks the states of events, once the relays have come to rest.
func (w *world) mustBe(s store.State, ids ...string) {
	w.t.Helper()
	time.Sleep(10 * time.Millisecond)
	synctest.Wait()
	all, wrong := w.entries(), 0
	for i, id := range ids {
		if e := all[id]; e.State != s {
			if wrong++; wrong == 1 {
				w.t.Errorf("event %d of key %q is %v, not %v: %s %s", i, e.Key, e.State, s, e.Class, e.Message)
			}
		}
	}
	if wrong > 1 {
		w.t.Errorf("%d of %d events are not %v", wrong, len(ids), s)
	}
}

// arrived are the ids that arrived, of one key or of all ("*").
func (w *world) arrived(key string) []string {
	var out []string
	for _, m := range w.sink.Messages() {
		if key == "*" || m.Key == key {
			out = append(out, m.ID)
		}
	}
	return out
}

// mustArriveInOrder checks that exactly these arrived of each key, in order,
// with repetitions as many as allowed.
func (w *world) mustArriveInOrder(keys, ids []string, repeats int) {
	w.t.Helper()
	want := map[string][]string{}
	for i, k := range keys {
		want[k] = append(want[k], ids[i])
	}
	got, seen := map[string][]string{}, map[string]bool{}
	extra := 0
	for _, m := range w.sink.Messages() {
		if seen[m.ID] {
			extra++
			continue
		}
		seen[m.ID] = true
		got[m.Key] = append(got[m.Key], m.ID)
	}
	for k := range want {
		if k == "" {
			slices.Sort(want[k])
			slices.Sort(got[k])
		}
		if !slices.Equal(got[k], want[k]) {
			w.t.Errorf("key %q: arrived %s, want %s", k, places(got[k], want[k]), places(want[k], want[k]))
		}
	}
	if extra > repeats {
		w.t.Errorf("%d messages arrived more than once, at most %d may", extra, repeats)
	}
}

// places shows ids by their place in the order they should have.
func places(ids, order []string) string {
	var out []string
	for _, id := range ids {
		out = append(out, fmt.Sprint(slices.Index(order, id)))
	}
	if len(out) > 60 {
		out = append(out[:60], fmt.Sprintf("... %d", len(out)))
	}
	return strings.Join(out, " ")
}

// eventLog counts what hooks tell.
type eventLog struct {
	mu       sync.Mutex
	outcomes map[Outcome]int
	fenced   int
	lost     int
	broken   int
	circuit  []CircuitState
	storeErr int
}

func newEventLog() *eventLog { return &eventLog{outcomes: map[Outcome]int{}} }

func (l *eventLog) hooks() Hooks {
	locked := func(f func()) {
		l.mu.Lock()
		defer l.mu.Unlock()
		f()
	}
	return Hooks{
		Event: func(_ string, rec *outrider.Record, o EventOutcome) {
			locked(func() { l.outcomes[o.Outcome]++ })
		},
		Fenced:     func(string) { locked(func() { l.fenced++ }) },
		LeaseLost:  func(string) { locked(func() { l.lost++ }) },
		Broken:     func(string) { locked(func() { l.broken++ }) },
		Circuit:    func(_ string, s CircuitState) { locked(func() { l.circuit = append(l.circuit, s) }) },
		StoreError: func(string, string) { locked(func() { l.storeErr++ }) },
	}
}

func (l *eventLog) count(o Outcome) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.outcomes[o]
}

// get reads one of the counters.
func (l *eventLog) get(p *int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return *p
}

// answer makes results.
func answer(s sink.Status, c sink.Class) sink.Result {
	return sink.Result{Status: s, Class: c, Err: errors.New("as scripted")}
}

// lineCounter counts what is logged.
type lineCounter struct {
	mu sync.Mutex
	n  int
}

func (l *lineCounter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.n++
	return len(p), nil
}

func (l *lineCounter) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

func (l *lineCounter) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.n
}

func newMemStore() *memstore.Store { return memstore.New(memstore.Config{}) }

// opCounter counts the operations of the store that are open.
type opCounter struct {
	mu   sync.Mutex
	open map[string]int
	all  map[memstore.Op]int
}

func (o *opCounter) hooks() (before, after memstore.Fault) {
	o.all = map[memstore.Op]int{}
	count := func(n int) memstore.Fault {
		return func(_ context.Context, op memstore.Op) error {
			o.mu.Lock()
			defer o.mu.Unlock()
			o.open[string(op)] += n
			if n > 0 {
				o.all[op]++
			}
			return nil
		}
	}
	return count(1), count(-1)
}

// now lists what is open.
func (o *opCounter) now() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	var out []string
	for op, n := range o.open {
		if n != 0 {
			out = append(out, fmt.Sprintf("%s %d", op, n))
		}
	}
	return strings.Join(out, ", ")
}

func (o *opCounter) of(op memstore.Op) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.all[op]
}
