package sqlitestore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/outrider-dev/outrider/store"
)

// fence is the right to write under a lease, of either store.
type fence struct {
	store.Lease
	db     *database
	table  string
	member *member

	// writing serialises what writes to the database under the lease.
	writing sync.Mutex
	writes  int64    // the table's writes as last known
	unsure  *written // a write whose answer was lost
	last    *written // the last one that was recognised as done after all
}

// written is one write under a lease: what it was for, and what it changes in
// memory once it is known to be in the database.
type written struct {
	params store.CommitParams // empty for others than Commit
	apply  func()
}

// resolve finds out what became of a write whose answer was lost. Called with
// writing held, before any other write.
func (l *fence) resolve(ctx context.Context) error {
	if l.unsure == nil {
		return nil
	}
	var writes, epoch int64
	err := l.db.row(ctx, []any{&writes, &epoch}, `select writes, epoch from `+l.table+` where lease = ?`, l.ID)
	if errors.Is(err, sql.ErrNoRows) {
		return store.ErrFenced // joined with another, or retired
	}
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
func (l *fence) write(ctx context.Context, what *written, f func(*tx) error) error {
	db := l.db
	l.unsure = what
	err := db.write(ctx, db.writer, func(t *tx) error {
		n, err := t.exec(`update `+l.table+` set writes = writes + 1 where lease = ? and epoch = ? and writes = ?`, l.ID, l.Epoch, l.writes)
		if err != nil {
			return err
		}
		if n == 0 {
			return store.ErrFenced
		}
		return f(t)
	})
	if err == nil {
		err = l.member.lost()
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

// move is write for what moves lanes: claims of before, and of others, depend on
// whether it took effect, so that is found out at once. lose is called when nobody
// can tell, or the lease has gone by it: it is not to be used any more.
func (l *fence) move(ctx context.Context, what *written, lose func(), f func(*tx) error) error {
	err := l.write(ctx, what, f)
	if !errors.Is(err, errUnknown) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.db.cfg.BusyTimeout+time.Second)
	defer cancel()
	switch unclear := l.resolve(ctx); {
	case errors.Is(unclear, store.ErrFenced):
		lose()
		return store.ErrFenced
	case unclear != nil:
		lose()
	case l.last == what:
		return nil
	}
	return err
}

// recognised reports whether a commit has been done already: its answer was
// lost.
func (l *fence) recognised(p store.CommitParams) bool {
	if l.last != nil && sameCommit(l.last.params, p) {
		return true
	}
	l.last = nil
	return false
}

// locked is a mutex-guarded map of the leases that a session holds.
type locked[L interface{ lease() *store.Lease }] struct {
	sync.Mutex
	m map[int64]L
}

func (l *fence) lease() *store.Lease { return &l.Lease }

// get finds the session's own state of a lease. false: it is not held.
func (l *locked[L]) get(sl store.Lease) (out L, ok bool) {
	l.Lock()
	defer l.Unlock()
	x, ok := l.m[sl.ID]
	if !ok || x.lease().Epoch != sl.Epoch {
		return out, false
	}
	return x, true
}

// epochs are those of the leases held.
func (l *locked[L]) epochs() map[int64]int64 {
	l.Lock()
	defer l.Unlock()
	out := make(map[int64]int64, len(l.m))
	for id, x := range l.m {
		out[id] = x.lease().Epoch
	}
	return out
}

// all are those held.
func (l *locked[L]) all() []L {
	l.Lock()
	defer l.Unlock()
	return slices.Collect(maps.Values(l.m))
}

func (l *locked[L]) put(x L) {
	l.Lock()
	defer l.Unlock()
	l.m[x.lease().ID] = x
}

// drop forgets a lease, unless it has been acquired anew.
func (l *locked[L]) drop(sl store.Lease) {
	l.Lock()
	defer l.Unlock()
	if x, ok := l.m[sl.ID]; ok && x.lease().Epoch == sl.Epoch {
		delete(l.m, sl.ID)
	}
}
