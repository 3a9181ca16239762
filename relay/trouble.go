package relay

import (
	"fmt"
	"sync"
	"time"

	"github.com/outrider-dev/outrider/store"
)

// troubles is what the store cannot be asked for at the moment. What has one
// cause is said once when it begins and once when it is over, however many
// operations it stops: a cause is what the store has one advice for.
type troubles struct {
	log *logger
	now func() time.Duration

	mu  sync.Mutex
	all map[string]*trouble // by what is asked
}

// trouble is one thing that cannot be asked for.
type trouble struct {
	dest, op string
	err      error
	since    time.Duration
	causes   map[string]bool // that have been said since, for it or for another
}

func newTroubles(log *logger, now func() time.Duration) *troubles {
	return &troubles{log: log, now: now, all: map[string]*trouble{}}
}

// note takes what came of asking for something.
func (t *troubles) note(id, dest, op string, err error) {
	if err != nil {
		t.begin(id, dest, op, err)
	} else {
		t.end(id)
	}
}

func (t *troubles) begin(id, dest, op string, err error) {
	cause := hint(err)
	if cause == "" {
		cause = id // nobody can tell whether two of these are one
	}
	t.mu.Lock()
	x := t.all[id]
	if x == nil {
		x = &trouble{dest: dest, op: op, since: t.now(), causes: map[string]bool{}}
		t.all[id] = x
	}
	x.err = err
	said := x.causes[cause] || t.stands(cause)
	x.causes[cause] = true
	t.mu.Unlock()
	if !said {
		t.log.Warn("the store cannot be asked; waiting for it", "op", op, "destination", dest,
			"error", err, "hint", hint(err))
	}
}

func (t *troubles) end(id string) {
	t.mu.Lock()
	x := t.all[id]
	delete(t.all, id)
	over := x != nil
	if over {
		for c := range x.causes {
			over = over && !t.stands(c) // who has it too will say so
		}
	}
	t.mu.Unlock()
	if over {
		t.log.Info("the store can be asked again", "op", x.op, "destination", x.dest)
	}
}

// stands reports whether something suffers from a cause. Called with mu held.
func (t *troubles) stands(cause string) bool {
	for _, x := range t.all {
		if x.causes[cause] {
			return true
		}
	}
	return false
}

// told reports whether the cause of an error has been said, and is not over.
func (t *troubles) told(err error) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return hint(err) != "" && t.stands(hint(err))
}

// forget drops what nobody asks for any more.
func (t *troubles) forget(ids ...string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, id := range ids {
		delete(t.all, id)
	}
}

// show is the trouble that has lasted longest, of those that stop sending if
// there are any.
func (t *troubles) show(h *Health, stale time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var worst *trouble
	for _, x := range t.all {
		h.Stuck = h.Stuck || x.stops() && t.now()-x.since >= stale
		if worst == nil || x.stops() && !worst.stops() || x.stops() == worst.stops() && x.since < worst.since {
			worst = x
		}
	}
	if worst != nil {
		h.StoreError, h.StoreHint, h.StoreFailing = worst.err.Error(), hint(worst.err), t.now()-worst.since
	}
}

// stops reports whether nothing is sent for long without what it is about.
func (x *trouble) stops() bool {
	switch x.op {
	case "renew", "acquire", "claim", "settle":
		return true
	}
	return false
}

// storeError notes that the store could not be asked, or that it can again.
func (r *Relay) storeError(dest, op string, err error) {
	r.noteStoreError(op+" "+dest, dest, op, err)
}

// claimError does so for claims of a kind: the other may succeed all the while.
func (r *Relay) claimError(dest string, kind store.Kind, err error) {
	r.noteStoreError(claimID(dest, kind), dest, "claim", err)
}

// forgetErrors forgets those of a worker that has ended: its lease is somebody
// else's to ask for, who notes what comes of it.
func (r *Relay) forgetErrors(dest string) {
	r.troubles.forget("settle "+dest, claimID(dest, store.Fresh), claimID(dest, store.Due))
}

func claimID(dest string, kind store.Kind) string { return fmt.Sprintf("claim %d %s", kind, dest) }

func (r *Relay) noteStoreError(id, dest, op string, err error) {
	if err != nil && r.cfg.Hooks.StoreError != nil {
		r.cfg.Hooks.StoreError(dest, op)
	}
	r.troubles.note(id, dest, op, err)
}
