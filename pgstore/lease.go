package pgstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// lease is what a session knows of a lease that it holds. The database has all
// of it as well, except for claims that were not started.
type lease struct {
	store.Lease
	ses    *session
	reader *reader
	size   int // rows of the last page

	// writing serialises what writes to the database under the lease.
	writing sync.Mutex
	writes  int64        // outbox_leases.writes as last known
	seen    atomic.Int64 // the same, for renewals
	unsure  *written     // a write whose answer was lost
	moving  atomic.Bool  // it may have moved lanes: nothing is read until that is known
	last    *written     // the last one that is known to be done

	// mu guards the rest, and is held for work in memory only.
	mu   sync.Mutex
	done position // up to where all is settled; as in the database
	read position // up to where claims have been handed out
	open []*fresh // claims handed out and not settled, in order
	redo []page   // to be read again before anything new

	held      map[string]*heldKey
	waiting   laned          // exceptions that wait or are in hand
	inHand    laned          // those in hand
	pass      laned          // events to pass over, see Rebase
	counted   time.Time      // when the waiting ones were last counted anew
	counts    map[string]int // of a page's keys, while it is handed out
	claims    int64          // number of the last fresh claim
	rejoined  []string       // held keys to be deleted with the next start
	sinceJoin int            // claims since keys last had an occasion to rejoin
	joining   int            // claims refused so that keys can rejoin
	watched   watched
	stop      *snapshot // Merge: fresh claims end here
	stopUntil time.Time
}

// laned is ids of events, each with its lane.
type laned map[int64]int

func (ids laned) has(id int64) bool {
	_, ok := ids[id]
	return ok
}

func (ids laned) keep(lanes store.LaneSet) {
	maps.DeleteFunc(ids, func(_ int64, lane int) bool { return !lanes.Has(lane) })
}

// fresh is the driver's part of a Fresh claim.
type fresh struct {
	l         *lease
	no        int64
	page      page
	before    position // where the lease's reading stood
	after     position
	ids       []int64 // of the claim's records
	records   *store.Claim
	seen      []int64          // all rows of the page, while a window is sampled
	scheduled []row            // rows of the page that are not due yet
	passed    []int64          // rows to pass over
	skipped   map[string]int64 // lowest id passed over of each held key
	burst     []*heldKey       // keys with more than their share
	started   bool
	settled   bool // its page is done; slow records may still be in hand
}

// nextPage numbers the lease's pages, of either kind.
func (l *lease) nextPage() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.nextPageLocked()
}

func (l *lease) nextPageLocked() int64 {
	l.read.page++
	return l.read.page
}

// keep shrinks the lease to some of its lanes.
func (l *lease) keep(lanes store.LaneSet) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.Lanes = lanes
	for key, k := range l.held {
		if !lanes.Has(k.lane) {
			delete(l.held, key)
		}
	}
	l.waiting.keep(lanes)
	l.inHand.keep(lanes)
	l.pass.keep(lanes)
	// What was to be done about keys that have gone is for their owner to do.
	l.rejoined = slices.DeleteFunc(l.rejoined, func(key string) bool { return !lanes.Has(outrider.Lane(key)) })
}

// written is one write under a lease: what it was for, and what it changes in
// memory once it is known to be in the database.
type written struct {
	params store.CommitParams // empty for others than Commit
	apply  func()
}

// wrote notes how often the lease's row has been written. Called with writing
// held.
func (l *lease) wrote(n int64) {
	l.writes = n
	l.seen.Store(n)
}

// resolve finds out what became of a write whose answer was lost. Called with
// writing held, before any other write. To read how often the row was written
// is not enough: the write may still be on its way, and take effect later. So
// the number it relies on is raised, by two, to tell that from the write itself.
func (l *lease) resolve(ctx context.Context) error {
	if l.unsure == nil {
		return nil
	}
	_, err := l.ses.st.pool.Exec(ctx, `update outbox_leases set writes = writes + 2
		where lease = $1 and epoch = $2 and writes = $3 and gen = $3::bigint >> 5`, l.ID, l.Epoch, l.writes)
	if err != nil {
		return fmt.Errorf("pgstore: fence off a write of lease %d: %w", l.ID, err)
	}
	var writes, epoch int64
	err = l.ses.st.pool.QueryRow(ctx, `select writes, epoch from outbox_leases where lease = $1`, l.ID).Scan(&writes, &epoch)
	if errors.Is(err, pgx.ErrNoRows) {
		return store.ErrFenced // merged into another, or retired
	}
	if err != nil {
		return fmt.Errorf("pgstore: read back lease %d: %w", l.ID, err)
	}
	if epoch != l.Epoch {
		return store.ErrFenced
	}
	if writes == l.writes+1 {
		l.unsure.apply()
		l.last = l.unsure
	}
	l.wrote(writes)
	l.unsure = nil
	l.moving.Store(false)
	return nil
}

// whereabouts finds out where lanes have gone that a call without an answer may
// have moved, before anything is read of them.
func (l *lease) whereabouts(ctx context.Context) error {
	if !l.moving.Load() {
		return nil
	}
	l.writing.Lock()
	defer l.writing.Unlock()
	return l.resolve(ctx)
}

// move notes a change of lanes that is about to be written, and moved what
// became of it. Called with writing held; done is nil, ErrFenced if nothing was
// written, or any other error if that is not known.
func (l *lease) move(what *written) {
	l.unsure = what
	l.moving.Store(true)
}

func (l *lease) moved(done error) {
	switch {
	case done == nil:
		l.wrote(l.writes + 1)
		l.last = l.unsure
		l.unsure.apply()
	case !errors.Is(done, store.ErrFenced):
		return
	}
	l.unsure = nil
	l.moving.Store(false)
}

// write runs statements in one transaction under the lease's fence: they take
// effect only if the lease still has its epoch. first updates outbox_leases by
// $1 lease, $2 epoch, $3 writes; the others carry fenced in their conditions.
// what is applied when all is done, or when that is found out later.
func (l *lease) write(ctx context.Context, what *written, first func(*pgx.Batch) *pgx.QueuedQuery, others ...func(*pgx.Batch)) error {
	var b pgx.Batch
	alone := len(others) == 0
	if !alone {
		b.Queue(`begin isolation level read committed`)
	}
	held := true
	first(&b).Exec(func(tag commandTag) error {
		held = tag.RowsAffected() == 1
		return nil
	})
	for _, o := range others {
		o(&b)
	}
	if !alone {
		b.Queue(`commit`)
	}
	l.unsure = what
	err := l.ses.st.pool.SendBatch(ctx, &b).Close()
	switch {
	case err != nil && serverSaid(err):
		l.unsure = nil // the server refused it: nothing was written
		return fmt.Errorf("pgstore: lease %d: %w", l.ID, err)
	case err != nil:
		return fmt.Errorf("pgstore: lease %d: %w", l.ID, err)
	case !held:
		l.unsure = nil
		return store.ErrFenced
	}
	l.wrote(l.writes + 1)
	l.unsure, l.last = nil, what
	what.apply()
	return nil
}

// fenced is the condition under which a write beside the lease's own row takes
// effect; $1 lease, $2 epoch, $3 writes as they are after the first statement.
// The row has to be of this transaction: where a write comes late, the next one
// may have brought the lease to the same number.
const fenced = `exists (select from outbox_leases where lease = $1 and epoch = $2 and writes = $3 and gen = $3::bigint >> 5
	and xmin = pg_current_xact_id_if_assigned()::xid)`
