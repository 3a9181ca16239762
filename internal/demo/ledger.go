package demo

import (
	"slices"
	"sync"
	"time"
)

// ledger compares what the shop committed with what the consumer got. It is the
// judge of the demonstration, and knows nothing of how events travel.
type ledger struct {
	mu         sync.Mutex
	events     map[string]*event
	keys       map[string]*key
	placed     int // transactions begun
	committed  int
	rolledBack int
	delivered  int // first deliveries of committed events
	duplicates int
	breaks     int // first deliveries behind a later one of their key
	ghosts     int // delivered though rolled back, or never placed
	skipped    int // poison, given up by the operator
	waiting    map[*event]bool
	first      time.Time       // of the first delivery; zero: there was none
	latencies  []time.Duration // a ring
	next       int
}

// latencyWindow is over how many deliveries the percentiles are.
const latencyWindow = 2000

type event struct {
	key   string
	n     int // its place in the key
	begun time.Time

	committed, rolledBack, delivered, poison, skipped bool
}

// key is what the consumer knows of a customer.
type key struct {
	high   int          // the highest n that was delivered
	gaps   map[int]bool // below high, and not delivered
	poison map[int]bool
}

func newLedger() *ledger {
	return &ledger{events: map[string]*event{}, keys: map[string]*key{}, waiting: map[*event]bool{}}
}

// place notes an event before its transaction ends: it may be delivered before
// the commit has returned here.
func (l *ledger) place(id, k string, n int, poison bool, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.placed++
	l.events[id] = &event{key: k, n: n, begun: now, poison: poison}
	if poison {
		l.key(k).poison[n] = true
	}
}

func (l *ledger) key(name string) *key {
	k := l.keys[name]
	if k == nil {
		k = &key{gaps: map[int]bool{}, poison: map[int]bool{}}
		l.keys[name] = k
	}
	return k
}

func (l *ledger) commit(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.events[id]
	e.committed = true
	l.committed++
	if !e.delivered {
		l.waiting[e] = true
	}
}

func (l *ledger) rollBack(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.events[id]
	e.rolledBack = true
	l.rolledBack++
	if e.poison {
		delete(l.key(e.key).poison, e.n)
	}
	if e.delivered {
		l.delivered--
		l.ghosts++
	}
}

// skip notes that an operator gave the event up.
func (l *ledger) skip(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.events[id]; e != nil && !e.delivered && !e.skipped {
		e.skipped = true
		l.skipped++
		delete(l.waiting, e)
	}
}

// deliver notes what the consumer got.
func (l *ledger) deliver(id string, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.events[id]
	switch {
	case e == nil || e.rolledBack:
		l.ghosts++
		return
	case e.delivered:
		l.duplicates++
		return
	}
	e.delivered = true
	l.delivered++
	if l.first.IsZero() {
		l.first = now
	}
	delete(l.waiting, e)
	l.latency(now.Sub(e.begun))
	k := l.key(e.key)
	switch {
	case e.n > k.high:
		for n := k.high + 1; n < e.n; n++ {
			if !k.poison[n] {
				k.gaps[n] = true
			}
		}
		k.high = e.n
	case k.gaps[e.n]:
		delete(k.gaps, e.n)
		l.breaks++
	}
}

func (l *ledger) latency(d time.Duration) {
	if len(l.latencies) < latencyWindow {
		l.latencies = append(l.latencies, d)
		return
	}
	l.latencies[l.next] = d
	l.next = (l.next + 1) % latencyWindow
}

// Report is how the demonstration stands, or ended.
type Report struct {
	Committed  int `json:"committed"`
	Delivered  int `json:"delivered"`
	Waiting    int `json:"waiting"` // committed, on their way
	Duplicates int `json:"duplicates"`
	Breaks     int `json:"order_breaks"`
	// Lost are events that a later one of their key has overtaken; at the end,
	// all that did not come.
	Lost       int `json:"lost"`
	RolledBack int `json:"rolled_back"`
	Ghosts     int `json:"sent_though_rolled_back"`
	Skipped    int `json:"skipped"`
	Kills      int `json:"relay_kills"`
	Outages    int `json:"broker_stops"`

	// First is from the start to the first delivery. 0: there was none.
	First time.Duration `json:"-"`

	P50 time.Duration `json:"-"`
	P95 time.Duration `json:"-"`
	P99 time.Duration `json:"-"`
}

func (l *ledger) report() Report {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := Report{
		Committed: l.committed, Delivered: l.delivered, Waiting: len(l.waiting), Duplicates: l.duplicates,
		Breaks: l.breaks, RolledBack: l.rolledBack, Ghosts: l.ghosts, Skipped: l.skipped,
	}
	for _, k := range l.keys {
		r.Lost += len(k.gaps)
	}
	sorted := slices.Clone(l.latencies)
	slices.Sort(sorted)
	if n := len(sorted); n > 0 {
		r.P50, r.P95, r.P99 = sorted[n/2], sorted[n*95/100], sorted[n*99/100]
	}
	return r
}

// firstDelivery is when the first event came; zero: none has.
func (l *ledger) firstDelivery() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.first
}

// behind is how many committed events of a key have not been delivered.
func (l *ledger) behind(key string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for e := range l.waiting {
		if e.key == key {
			n++
		}
	}
	return n
}

// poisoned are the ids of poison that nobody has given up yet.
func (l *ledger) poisoned() map[string]string {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[string]string{}
	for id, e := range l.events {
		if e.poison && e.committed && !e.skipped && !e.delivered {
			out[id] = e.key
		}
	}
	return out
}
