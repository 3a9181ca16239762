// Package relay carries events from an outbox to destinations. It knows the
// seams store and sink, and no driver.
//
// An application runs it in its own process:
//
//	r, err := relay.New(relay.Config{
//		Store:        st,
//		Destinations: []relay.Destination{{Name: "kafka", Sink: k, To: rules.To}},
//	})
//	...
//	err = r.Run(ctx)
//
// How it works. Lanes of keys are leased from the store, each lease has one
// worker, a goroutine that owns all that is known about it. A worker reads
// claims, commits their start, hands them to the sink and settles them, each
// step beside the others: while one claim is being sent the next is read, and
// one commit settles the one before and starts the one after.
//
// What it promises. Committed events are delivered at least once or end as
// FAILED with their reason. First deliveries of a key keep its order. No
// transaction, row lock or pooled connection is held while a sink works. See the
// doc comments of Config, Destination, Retry and Breaker for the bounds.
package relay

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// Relay is one relay. Make it with New.
type Relay struct {
	cfg   Config
	log   *logger
	dests []*destination

	failures *failures
	troubles *troubles

	made    time.Time
	ran     atomic.Bool
	cut     chan struct{}
	cutOnce sync.Once
	keeper  keeper

	mu       sync.Mutex
	maintain error // of the latest maintenance, for Health

	workers roster
	asking  sync.WaitGroup // calls of the store by workers
}

// New makes a relay, or says what is wrong with the configuration. Nothing is
// asked of the store yet.
func New(cfg Config) (*Relay, error) {
	c := cfg
	if c.Store != nil {
		c = c.withDefaults()
	}
	if err := c.validate(); err != nil {
		return nil, err
	}
	r := &Relay{
		cfg:  c,
		log:  newLogger(c.Logger),
		made: time.Now(),
		cut:  make(chan struct{}),
	}
	r.failures = newFailures(r.log)
	r.troubles = newTroubles(r.log, r.now)
	r.keeper.relay = r
	for _, d := range c.Destinations {
		r.dests = append(r.dests, newDestination(r, d))
	}
	return r, nil
}

// ErrRan says that Run was called twice; make a new Relay instead.
var ErrRan = errors.New("relay: Run has been called before")

// Run joins the store and relays until ctx ends, then stops softly: nothing
// new is taken, what was begun may end within Config.SoftTimeout, what is known
// is settled, leases are given back. It returns nil after an orderly stop, an
// error if the store could not be joined, or one that tells what was left
// undone; events are not lost by that, but may be delivered again.
func (r *Relay) Run(ctx context.Context) error {
	if !r.ran.CompareAndSwap(false, true) {
		return ErrRan
	}
	return r.run(ctx)
}

// Cut ends the soft part of the stop: calls to sinks are cut off, and Run
// returns within Config.SettleTimeout. Has no effect before the end of Run's
// context, except that the stop will be that short.
func (r *Relay) Cut() { r.cutOnce.Do(func() { close(r.cut) }) }

// Wake makes the relay look for new events at once. An application calls it
// after a commit that has added some. It does not block, and may be called at
// any time from anywhere.
func (r *Relay) Wake() { r.wake("wake") }

func (r *Relay) wake(source string) {
	r.wokeUp(source)
	r.workers.each(func(w *worker) { w.wake() })
}

// Health is a snapshot of what the relay does.
func (r *Relay) Health() Health {
	h := Health{Name: r.cfg.Name}
	h.Running, h.Relays, h.Renewed = r.keeper.show()
	h.Starved = h.Running && !r.keeper.fresh()
	r.mu.Lock()
	if r.maintain != nil {
		h.MaintainError, h.MaintainHint = r.maintain.Error(), hint(r.maintain)
	}
	r.mu.Unlock()
	r.troubles.show(&h, r.keeper.stale())
	for _, d := range r.dests {
		h.Destinations = append(h.Destinations, d.health())
	}
	return h
}

// destination is what the workers of one destination share.
type destination struct {
	Destination
	relay    *Relay
	brk      *breaker
	budget   *budget
	ordered  bool // sink.Capabilities.Order
	inFlight bool // sink.Capabilities.OrderInFlight

	serving     atomic.Int64 // relays that do, this one included
	held        atomic.Int64 // events in hand
	calling     atomic.Int64 // calls of the sink
	hung        atomic.Int64 // those that have not returned although their time was over
	lastSuccess atomic.Int64 // by Relay.now; 0: never
}

func newDestination(r *Relay, d Destination) *destination {
	c := d.Sink.Capabilities()
	out := &destination{Destination: d, relay: r, ordered: c.Order, inFlight: c.Order && c.OrderInFlight}
	out.brk = newBreaker(d.Breaker, out)
	n := len(r.cfg.Destinations)
	out.budget = newBudget(r.cfg.MaxRecordsInFlight/n, r.cfg.MaxBytesInFlight/n)
	return out
}

// each calls f for the destination's workers.
func (d *destination) each(f func(*worker)) {
	d.relay.workers.each(func(w *worker) {
		if w.dest == d {
			f(w)
		}
	})
}

func (d *destination) health() DestinationHealth {
	h := DestinationHealth{Name: d.Name, InFlight: int(d.held.Load()), LastSuccess: -1}
	d.each(func(w *worker) {
		h.Leases++
		h.Lanes += int(w.lanes.Load())
	})
	d.brk.show(&h)
	if at := d.lastSuccess.Load(); at != 0 {
		h.LastSuccess = d.relay.now() - time.Duration(at)
	}
	return h
}

// now is monotonic time since New, never 0, for timers and bounds of this
// process only: due, expiry and age are the store's.
func (r *Relay) now() time.Duration { return time.Since(r.made) + 1 }

// roster is the set of running workers.
type roster struct {
	mu  sync.Mutex
	all map[*worker]bool
}

func (r *roster) add(w *worker) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.all == nil {
		r.all = map[*worker]bool{}
	}
	r.all[w] = true
}

func (r *roster) remove(w *worker) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.all, w)
}

func (r *roster) each(f func(*worker)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for w := range r.all {
		f(w)
	}
}

func (r *Relay) wokeUp(source string) {
	if r.cfg.Hooks.WakeUp != nil {
		r.cfg.Hooks.WakeUp(source)
	}
}
