package relay

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// failures says which events were given up: each of them, as long as they are
// not too many of one class in a minute, and then how many there were.
type failures struct {
	log *logger

	mu   sync.Mutex
	seen map[failure]int // in this minute
}

type failure struct{ destination, class string }

// failuresShown is how many of a destination's class are told one by one in a
// minute.
const failuresShown = 20

func newFailures(l *logger) *failures { return &failures{log: l, seen: map[failure]int{}} }

// note says that an event was given up.
func (f *failures) note(destination string, r *outrider.Record, o *store.Outcome) {
	k := failure{destination, o.Class}
	f.mu.Lock()
	f.seen[k]++
	n := f.seen[k]
	f.mu.Unlock()
	if n > failuresShown {
		return
	}
	f.log.Warn("an event was given up and needs somebody", "destination", destination, "event", r.ID, "row", r.Row,
		"type", r.Type, "key", r.Key, "class", o.Class, "attempts", o.Attempts, "error", o.Message)
}

// sum says how many were left out, and begins a new minute.
func (f *failures) sum() {
	f.mu.Lock()
	seen := f.seen
	f.seen = map[failure]int{}
	f.mu.Unlock()
	all := make([]failure, 0, len(seen))
	for k := range seen {
		all = append(all, k)
	}
	slices.SortFunc(all, func(a, b failure) int {
		return cmp.Or(cmp.Compare(a.destination, b.destination), cmp.Compare(a.class, b.class))
	})
	for _, k := range all {
		if more := seen[k] - failuresShown; more > 0 {
			f.log.Warn("more events were given up, which are not named here", "destination", k.destination, "class", k.class, "events", more)
		}
	}
}

// run sums up every minute.
func (f *failures) run(ctx context.Context) {
	for ctx.Err() == nil {
		sleep(ctx, time.Minute)
		if ctx.Err() == nil {
			f.sum()
		}
	}
}
