package sqlitestore

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrider-dev/outrider/store"
)

// lease is what a session knows of a lease that it holds. The database has all
// of it as well, except for claims that were not started.
type lease struct {
	store.Lease
	ses *session

	// writing serialises what writes to the database under the lease.
	writing sync.Mutex
	writes  int64    // outbox_leases.writes as last known
	unsure  *written // a write whose answer was lost
	last    *written // the last one that was recognised as done after all

	// mu guards the rest, and is held for work in memory only.
	mu   sync.Mutex
	done int64    // all up to this id is settled; the database may lag behind
	read int64    // up to where claims have been handed out
	page int64    // number of the last page
	open []*fresh // claims handed out and not settled, in order
	redo []page   // to be read again before anything new
	was  []page   // all that was in hand when the lease was acquired

	held     map[string]*heldKey
	joined   map[string]int64   // keys that move with the lease again, beyond an id
	noted    map[string]bool    // those of joined that the database knows of
	inHand   map[int64]bool     // exceptions in hand
	waiting  map[int64]struct{} // exceptions that wait or are in hand
	claims   int64              // number of the last fresh claim
	stop     int64              // Merge: fresh claims end here; 0: nowhere
	stopTill time.Duration      // for how long (database.since)
	saved    int64              // done, as in the database
}

// fresh is the driver's part of a Fresh claim.
type fresh struct {
	l         *lease
	no        int64
	page      page
	before    int64 // where the lease's reading stood
	ids       []int64
	records   *store.Claim
	scheduled []row      // rows of the page that are not due yet
	burst     []*heldKey // keys with more than their share
	redo      bool
	started   bool
	settled   bool // its page is done; slow records may still be in hand
}

// empty reports whether there is nothing to be sent of the page.
func (f *fresh) empty() bool { return len(f.ids) == 0 }

func newLease(ses *session) *lease {
	return &lease{
		ses: ses, held: map[string]*heldKey{}, joined: map[string]int64{}, noted: map[string]bool{},
		inHand: map[int64]bool{}, waiting: map[int64]struct{}{},
	}
}

// written is one write under a lease: what it was for, and what it changes in
// memory once it is known to be in the database.
type written struct {
	params store.CommitParams // empty for others than Commit
	apply  func()
}

// resolve finds out what became of a write whose answer was lost. Called with
// writing held, before any other write.
func (l *lease) resolve(ctx context.Context) error {
	if l.unsure == nil {
		return nil
	}
	var writes, epoch int64
	err := l.ses.st.row(ctx, []any{&writes, &epoch}, `select writes, epoch from outbox_leases where lease = ?`, l.ID)
	if err != nil {
		return fmt.Errorf("sqlitestore: read back lease %d: %w", l.ID, explain(err))
	}
	if epoch != l.Epoch {
		return store.ErrFenced
	}
	if writes == l.writes+1 {
		l.unsure.apply()
		l.last = l.unsure
	}
	l.writes, l.unsure = writes, nil
	return nil
}

// write runs f in one transaction under the lease's fence: nothing of it takes
// effect unless the lease still has its epoch. what is applied when all is
// done, or when that is found out later.
func (l *lease) write(ctx context.Context, what *written, f func(*tx) error) error {
	db := l.ses.st.database
	l.unsure = what
	err := db.write(ctx, db.writer, func(t *tx) error {
		n, err := t.exec(`update outbox_leases set writes = writes + 1 where lease = ? and epoch = ? and writes = ?`, l.ID, l.Epoch, l.writes)
		if err != nil {
			return err
		}
		if n == 0 {
			return store.ErrFenced
		}
		return f(t)
	})
	if err == nil && l.ses.loseAnswer.CompareAndSwap(true, false) {
		err = fmt.Errorf("%w: its answer was lost", errUnknown)
	}
	if err != nil {
		if !errors.Is(err, errUnknown) {
			l.unsure = nil // nothing was written
		}
		if errors.Is(err, store.ErrFenced) {
			return err
		}
		return fmt.Errorf("sqlitestore: lease %d: %w", l.ID, err)
	}
	l.writes++
	l.unsure = nil
	what.apply()
	return nil
}

// locked is a mutex-guarded map of the leases that a session holds.
type locked struct {
	sync.Mutex
	m map[int64]*lease
}

func (l *locked) get(id int64) *lease {
	l.Lock()
	defer l.Unlock()
	return l.m[id]
}

// drop forgets a lease, unless it has been acquired anew.
func (l *locked) drop(sl store.Lease) {
	l.Lock()
	defer l.Unlock()
	if x := l.m[sl.ID]; x != nil && x.Epoch == sl.Epoch {
		delete(l.m, sl.ID)
	}
}

// hook is a fault that a test asks for.
type hook = atomic.Bool
