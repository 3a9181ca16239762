package relay

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrider-dev/outrider/sink"
)

// breaker guards one destination for all leases of the relay.
//
// It is not one of the libraries' breakers, for three reasons. What it refuses
// must stay in hand, in order, instead of failing. It judges by messages, of
// which one call brings thousands with results of all sorts, and only some
// sorts speak of the destination. And on recovery it lets through a growing
// portion instead of everything, or the backlog would knock the destination
// over again.
//
// Open: nothing is sent but one message now and then; the workers choose a
// different one each time, so that a message which itself is the cause cannot
// keep the breaker open. Ramping: portions of 1, 2, 4 ... messages, and a
// destination that throttles is taken back here too. Closed: no bound.
type breaker struct {
	cfg  Breaker
	dest *destination

	delivered atomic.Uint64 // messages, since the start

	mu       sync.Mutex
	state    CircuitState
	until    time.Duration // nothing is sent before
	failed   int           // probes or throttled portions in a row
	unknowns int           // in a row
	probe    *worker       // whose probe is out
	last     *worker       // whose was the last one
	asked    map[*worker]bool
	allow    int // Ramping: how many may be out
	out      int // how many of them are
	err      string

	closedAt    time.Duration // when it last began to recover; 0: never
	closedCount uint64        // delivered, then
	openedAt    time.Duration
	spans       []span // when it was open, for ages
}

type span struct{ from, to time.Duration }

// flapping is how soon after a recovery unreachable messages, with others
// getting through, mean that only a part of the destination is down.
const flapping = 30 * time.Second

// maxSpans bounds what is remembered of past outages; older ones grow together.
const maxSpans = 32

func newBreaker(cfg Breaker, d *destination) *breaker {
	return &breaker{cfg: cfg, dest: d, asked: map[*worker]bool{}}
}

// ticket is the right to send n messages.
type ticket struct {
	n     int
	state CircuitState // in which it was given
}

// take asks to send up to want messages. Without a right, wait is when to ask
// again; 0 means that the worker is poked.
func (b *breaker) take(w *worker, want int) (t ticket, wait time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.state == CircuitClosed {
		return ticket{want, CircuitClosed}, 0
	}
	if rests, wait := b.rests(w); rests {
		return ticket{}, wait
	}
	if b.state == CircuitOpen {
		b.probe, b.last = w, w
		delete(b.asked, w)
		return ticket{1, CircuitOpen}, 0
	}
	n := min(want, b.allow-b.out)
	if n <= 0 {
		return ticket{}, 0
	}
	b.out += n
	return ticket{n, CircuitRamping}, 0
}

// rests reports whether w may send nothing now, not even a probe, and for how
// long; 0 means that it is poked. mu is held.
func (b *breaker) rests(w *worker) (bool, time.Duration) {
	at := b.dest.relay.now()
	b.asked[w] = true
	switch {
	case at < b.until:
		return true, b.until - at
	case b.state != CircuitOpen:
		return false, 0
	case b.probe != nil:
		return true, 0
	}
	// Another worker's turn comes first, if it takes it.
	if turn := b.until + b.cfg.Base; b.last == w && len(b.asked) > 1 && at < turn {
		return true, turn - at
	}
	return false, 0
}

// unused gives back what was not needed of a ticket. Who has asked meanwhile may
// have it.
func (b *breaker) unused(w *worker, t ticket, n int) ticket {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case n == 0:
		return t
	case t.state == CircuitRamping:
		b.out = max(0, b.out-n)
	case t.state == CircuitOpen && b.probe == w:
		b.probe = nil
	}
	for o := range b.asked {
		if o != w {
			o.poke()
		}
	}
	t.n -= n
	return t
}

// tally is what a number of results say of the destination.
type tally struct {
	delivered   int
	answered    int // a definite no, which needs somebody who says it
	rejected    int // those that lie in the message
	unknown     int
	unreachable int
	throttled   int
	wish        time.Duration // longest RetryAfter among throttled ones
	err         error
}

// count adds a result.
func (t *tally) count(r *sink.Result) {
	switch {
	case r.Status == sink.Delivered:
		t.delivered++
		return
	case r.Status == sink.Reject:
		t.answered++
		t.rejected++
		return
	case r.Class == sink.ClassUnreachable:
		t.unreachable++
	case r.Class == sink.ClassThrottled:
		t.throttled++
		t.wish = max(t.wish, r.RetryAfter)
	case r.Status == sink.NotSent && r.Class == sink.ClassHeld:
		return
	case r.Status == sink.Retry && r.Class != sink.ClassTimeout:
		t.answered++
		return
	default:
		t.unknown++
	}
	if r.Err != nil {
		t.err = r.Err
	}
}

func (t *tally) add(o tally) {
	t.delivered += o.delivered
	t.answered += o.answered
	t.rejected += o.rejected
	t.unknown += o.unknown
	t.unreachable += o.unreachable
	t.throttled += o.throttled
	t.wish = max(t.wish, o.wish)
	if o.err != nil {
		t.err = o.err
	}
}

// finding is what the breaker makes of results.
type finding struct {
	down    bool // keep what was not delivered in hand
	through bool // others got through since the call began
	slow    bool // the destination throttles as a whole: keep in hand too
}

// feed tells the breaker of new results of a call, of which sum are all so far.
func (b *breaker) feed(c *call, t, sum tally) finding {
	total := b.delivered.Add(uint64(t.delivered))
	f := finding{through: total > c.through}
	if t.delivered > 0 {
		b.dest.lastSuccess.Store(int64(b.dest.relay.now()))
	}
	if t.delivered > 0 && t.unreachable+t.unknown+t.throttled == 0 && c.ticket.state == CircuitClosed {
		b.mu.Lock()
		b.unknowns = 0
		b.mu.Unlock()
		return f
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if t.delivered+t.answered > 0 {
		b.unknowns = 0
	} else {
		b.unknowns += t.unknown
	}
	switch {
	case t.unreachable > 0 && !b.partial(f.through, total):
		b.open(t.err)
	case b.unknowns >= b.cfg.Unknowns:
		b.open(t.err)
	case t.throttled > 0 && sum.throttled >= sum.delivered && t.wish <= b.cfg.Cap && b.state != CircuitOpen:
		b.throttle(sum)
		f.slow = true
	}
	f.down = b.state == CircuitOpen
	return f
}

// partial reports whether only a part of the destination is unreachable, so
// that stopping all of it again would help nobody.
func (b *breaker) partial(through bool, total uint64) bool {
	return through && b.state != CircuitOpen && b.closedAt != 0 && total > b.closedCount &&
		b.dest.relay.now()-b.closedAt < flapping
}

// open begins an outage. mu is held.
func (b *breaker) open(err error) {
	if err != nil {
		b.err = text(err)
	}
	if b.state == CircuitOpen {
		return
	}
	at := b.dest.relay.now()
	b.failed, b.allow, b.out = 0, 0, 0
	b.openedAt, b.until = at, at+jitter(b.cfg.Base)
	b.become(CircuitOpen)
}

// throttle makes portions small and rests, for at least as long as asked. mu
// is held.
func (b *breaker) throttle(sum tally) {
	at, pause := b.dest.relay.now(), sum.wish
	if b.state == CircuitClosed || at >= b.until {
		if sum.delivered > 0 {
			b.failed = 0
		}
		pause = max(pause, doubled(b.cfg.Base, b.cfg.Cap, b.failed))
		b.failed++
		b.allow = max(1, sum.delivered)
	}
	b.until = max(b.until, at+jitter(pause))
	if b.state == CircuitClosed {
		b.out = 0
	}
	b.become(CircuitRamping)
}

// done tells the breaker that a call has ended, with all its results.
func (b *breaker) done(w *worker, c *call) {
	if c.ticket.state == CircuitClosed {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	sum := &c.sum
	if c.ticket.state == CircuitRamping {
		b.out = max(0, b.out-c.ticket.n)
		if b.state == CircuitRamping && sum.throttled == 0 && sum.delivered+sum.rejected > 0 {
			b.grow()
		}
		b.pokeAll()
		return
	}
	if b.probe != w {
		return
	}
	b.probe = nil
	if b.state != CircuitOpen {
		return
	}
	if sum.delivered+sum.answered+sum.throttled == 0 {
		b.failed++
		b.until = b.dest.relay.now() + jitter(doubled(b.cfg.Base, b.cfg.Cap, b.failed))
		b.pokeAll()
		return
	}
	b.recover(sum.throttled > 0, sum.wish)
}

// recover ends an outage: somebody has answered. mu is held.
func (b *breaker) recover(throttled bool, wish time.Duration) {
	at := b.dest.relay.now()
	b.note(span{b.openedAt, at})
	b.openedAt, b.until, b.failed, b.unknowns = 0, 0, 0, 0
	b.closedAt, b.closedCount = at, b.delivered.Load()
	b.allow, b.out = 2, 0
	if throttled {
		b.allow, b.until = 1, at+jitter(max(wish, b.cfg.Base))
	}
	b.become(CircuitRamping)
}

// grow doubles the portion, and ends the ramp when it is a full claim. mu is
// held.
func (b *breaker) grow() {
	b.failed = 0
	b.allow *= 2
	if b.allow > b.dest.relay.cfg.MaxRecords {
		b.err = ""
		b.become(CircuitClosed)
	}
}

// become changes the state and tells everybody. mu is held.
func (b *breaker) become(s CircuitState) {
	if b.state != s {
		b.state = s
		r := b.dest.relay
		if r.cfg.Hooks.Circuit != nil {
			r.cfg.Hooks.Circuit(b.dest.Name, s)
		}
		switch s {
		case CircuitOpen:
			r.log.seldom("open "+b.dest.Name, "the destination counts as down; events wait without losing attempts",
				"destination", b.dest.Name, "error", b.err)
		case CircuitClosed:
			r.log.seldom("closed "+b.dest.Name, "the destination is back", "destination", b.dest.Name)
		}
	}
	b.pokeAll()
}

// pokeAll makes workers ask again. mu is held.
func (b *breaker) pokeAll() {
	for w := range b.asked {
		w.poke()
	}
	if b.state != CircuitOpen {
		clear(b.asked)
	}
}

// note remembers an outage. mu is held.
func (b *breaker) note(s span) {
	if len(b.spans) == maxSpans {
		b.spans[1].from = b.spans[0].from
		b.spans = append(b.spans[:0], b.spans[1:]...)
	}
	b.spans = append(b.spans, s)
}

// wasOpen is for how much of the last d the breaker was open.
func (b *breaker) wasOpen(d time.Duration) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	at := b.dest.relay.now()
	sum := time.Duration(0)
	for _, s := range b.spans {
		if from := max(s.from, at-d); from < s.to {
			sum += s.to - from
		}
	}
	if b.openedAt != 0 {
		sum += at - max(b.openedAt, at-d)
	}
	return sum
}

// forget takes out a worker that has ended.
func (b *breaker) forget(w *worker) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.asked, w)
	if b.last == w {
		b.last = nil
	}
	if b.probe == w {
		b.probe = nil
		b.pokeAll()
	}
}

func (b *breaker) show(h *DestinationHealth) {
	b.mu.Lock()
	defer b.mu.Unlock()
	h.Circuit, h.Error, h.Delivered = b.state.String(), b.err, b.delivered.Load()
	if b.openedAt != 0 {
		h.Down = b.dest.relay.now() - b.openedAt
	}
}

// mayRest is rests for who does not send at once.
func (b *breaker) mayRest(w *worker) (bool, time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.state == CircuitClosed {
		return false, 0
	}
	return b.rests(w)
}

func (b *breaker) isOpen() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state == CircuitOpen
}
