package sqlitestore

import (
	"slices"
	"sync"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// lease is what a session knows of a lease that it holds. The database has all
// of it as well, except for claims that were not started.
type lease struct {
	fence
	ses *session

	// mu guards the rest, and is held for work in memory only.
	mu   sync.Mutex
	done int64    // all up to this id is settled; the database may lag behind
	read int64    // up to where claims have been handed out
	page int64    // number of the last page
	buf  []row    // for the next scan
	open []*fresh // claims handed out and not settled, in order
	redo []page   // to be read again before anything new
	was  []page   // all that was in hand when the lease was acquired

	held     map[string]*heldKey
	borrowed map[string]bool    // those of held that the database may not know of
	joined   map[string]int64   // keys that move with the lease again, beyond an id
	noted    map[string]bool    // those of joined that the database knows of
	inHand   map[int64]bool     // exceptions in hand
	waiting  map[int64]struct{} // exceptions that wait or are in hand
	claims   int64              // number of the last fresh claim
	watched  watched
	stop     int64         // Merge: fresh claims end here; 0: nowhere
	stopTill time.Duration // for how long (database.since)
	saved    int64         // done, as in the database
}

// fresh is the driver's part of a Fresh claim.
type fresh struct {
	l         *lease
	no        int64
	page      page
	before    int64 // where the lease's reading stood
	ids       []int64
	records   *store.Claim
	seen      []int64    // all rows of the page, while one is to be sampled
	scheduled []row      // rows of the page that are not due yet
	burst     []*heldKey // keys with more than their share
	redo      bool
	started   bool
	settled   bool // its page is done; slow records may still be in hand
}

// has reports whether a key has a row in the page that is not held back.
func (f *fresh) has(key string) bool {
	return slices.ContainsFunc(f.records.Records, func(r outrider.Record) bool { return r.Key == key }) ||
		slices.ContainsFunc(f.scheduled, func(r row) bool { return r.rec.Key == key })
}

// empty reports whether there is nothing to be sent of the page.
func (f *fresh) empty() bool { return len(f.ids) == 0 }

func newLease(ses *session) *lease {
	return &lease{
		fence: fence{db: ses.st.database, table: "outbox_leases", member: ses.member},
		ses:   ses, held: map[string]*heldKey{}, borrowed: map[string]bool{}, joined: map[string]int64{}, noted: map[string]bool{},
		inHand: map[int64]bool{}, waiting: map[int64]struct{}{},
	}
}
