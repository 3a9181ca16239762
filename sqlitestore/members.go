package sqlitestore

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// members knows who has joined, and who of them is still alive: each keeps a
// side file locked. A lock that is free says that its process has ended; one
// that is taken, or a file that is gone, says nothing, and the leases' expiry
// decides.
type members struct {
	db             *database
	relays, leases string // tables
	locks          bool   // file locks work here
}

func newMembers(db *database, relays, leases string) members {
	m := members{db: db, relays: relays, leases: leases}
	m.locks = m.tryLocks()
	return m
}

func (m *members) path(lock int64) string {
	return fmt.Sprintf("%s-outrider-%x.lock", m.db.cfg.Path, lock)
}

// tryLocks finds out whether a lock keeps others out.
func (m *members) tryLocks() bool {
	lock := randomLock()
	f, err := m.take(lock)
	if err != nil {
		return false
	}
	free := m.free(lock)
	m.giveUp(f, lock)
	return !free
}

// take locks the side file of a number.
func (m *members) take(lock int64) (*os.File, error) {
	f, err := os.OpenFile(m.path(lock), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o660)
	if err != nil {
		return nil, fmt.Errorf("sqlitestore: make a lock file: %w", err)
	}
	if ok, err := flock(f, true); err != nil || !ok {
		m.giveUp(f, lock)
		return nil, fmt.Errorf("sqlitestore: lock %s: %w", f.Name(), errors.Join(err, errors.ErrUnsupported))
	}
	return f, nil
}

func (m *members) giveUp(f *os.File, lock int64) {
	_ = os.Remove(m.path(lock))
	_ = f.Close()
}

// free reports whether the side file of a number is there and not locked.
func (m *members) free(lock int64) bool {
	f, err := os.OpenFile(m.path(lock), os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer f.Close() //nolint:errcheck // nothing was written
	ok, err := flock(f, false)
	return ok && err == nil
}

// randomLock is a number that no two relays share.
func randomLock() int64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails: see crypto/rand
	return int64(binary.BigEndian.Uint64(b[:]) >> 1)
}

// member is one relay's membership, of either store.
type member struct {
	*members
	params store.JoinParams
	names  string // of its destinations, as JSON

	// acquiring has the calls of Acquire follow each other: what one has taken
	// and not noted yet would be the other's to find.
	acquiring sync.Mutex
	losing    atomic.Bool // see LoseAnswer

	mu   sync.Mutex
	lock int64
	file *os.File // nil: file locks do not work here, or it was killed
	left bool
	// gone is when a relay's lock was first found free, by its lock's number.
	gone map[int64]time.Duration
}

// LoseAnswer lets the answer to what is written next be lost, until it is called
// with false. It is for tests, of other packages too.
func (b *member) LoseAnswer(lose bool) { b.losing.Store(lose) }

// lost is the error of an answer that a test has lost.
func (b *member) lost() error {
	if b.losing.CompareAndSwap(true, false) {
		return fmt.Errorf("%w: its answer was lost", errUnknown)
	}
	return nil
}

// join enters a relay.
func (m *members) join(ctx context.Context, p store.JoinParams) (*member, error) {
	names, err := json.Marshal(p.Names())
	if err != nil {
		return nil, fmt.Errorf("sqlitestore: join: %w", err)
	}
	b := &member{members: m, params: p, names: string(names), lock: randomLock(), gone: map[int64]time.Duration{}}
	if m.locks {
		if b.file, err = m.take(b.lock); err != nil {
			return nil, outrider.WithHint(err, "the relay makes small files beside the database: check that it may")
		}
	}
	err = m.db.write(ctx, m.db.renewer, func(t *tx) error {
		_, err := t.exec(`insert into `+m.relays+` (lock, relay, destinations, seen_at, expires_at, grace) values (?, ?, ?, ?, ?, ?)`,
			b.lock, p.Relay, b.names, t.now, t.now+p.TTL.Microseconds(), p.Grace.Microseconds())
		return err
	})
	if err != nil {
		if b.file != nil {
			m.giveUp(b.file, b.lock)
		}
		return nil, fmt.Errorf("sqlitestore: join: %w", err)
	}
	return b, nil
}

// alive tells how many relays are, and what they serve.
func (b *member) alive(ctx context.Context) (store.Renewal, error) {
	now, err := b.db.time(ctx, b.db.aside)
	if err != nil {
		return store.Renewal{}, err
	}
	out := b.params.Alone()
	err = b.db.aside.query(ctx, func(r *sql.Rows) (bool, error) {
		var lock, expires int64
		var text string
		if err := r.Scan(&lock, &expires, &text); err != nil {
			return false, err
		}
		if expires <= now || b.locks && b.free(lock) {
			return true, nil
		}
		var destinations []string
		if err := json.Unmarshal([]byte(text), &destinations); err != nil {
			return false, fmt.Errorf("%s.destinations of lock %d: %w", b.relays, lock, err)
		}
		out.Count(destinations)
		return true, nil
	}, `select lock, expires_at, destinations from `+b.relays+` where lock <> ?`, b.lock)
	return out, err
}

// look notes which relays have gone, and since when. Called with mu held.
func (b *member) look(graces map[int64]time.Duration) {
	seen := map[int64]time.Duration{}
	for lock := range graces {
		if lock == b.lock || !b.locks || !b.free(lock) {
			continue
		}
		first, ok := b.gone[lock]
		if !ok {
			first = b.db.since()
		}
		seen[lock] = first
	}
	b.gone = seen
}

// dead are the relays that have been gone for at least their grace.
func (b *member) dead(t *tx) (map[int64]bool, error) {
	graces := map[int64]time.Duration{}
	err := t.rows(func(r *sql.Rows) error {
		var lock, grace int64
		err := r.Scan(&lock, &grace)
		graces[lock] = time.Duration(grace) * time.Microsecond
		return err
	}, `select lock, grace from `+b.relays)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.look(graces)
	out := map[int64]bool{}
	for lock, since := range b.gone {
		if b.db.since()-since >= graces[lock] {
			out[lock] = true
		}
	}
	return out, nil
}

// bury forgets relays that have gone and hold nothing any more.
func (b *member) bury(t *tx, dead map[int64]bool) error {
	for lock := range dead {
		n, err := t.exec(`delete from `+b.relays+` where lock = ? and not exists (select 1 from `+b.leases+` where owner_lock = ?)`, lock, lock)
		if err != nil {
			return err
		}
		if n > 0 {
			_ = os.Remove(b.path(lock))
		}
	}
	// Where there are no locks, time has to tell.
	_, err := t.exec(`delete from `+b.relays+` where expires_at < ? and not exists (select 1 from `+b.leases+` where owner_lock = lock)`,
		t.now-(24*time.Hour).Microseconds())
	return err
}

// renew prolongs leases; lost is called with those that are not held any more.
func (b *member) renew(ctx context.Context, leases []store.Lease, lost func(store.Lease)) (store.Renewal, error) {
	held, r, err := b.tryRenew(ctx, leases)
	if err != nil {
		return store.Renewal{}, fmt.Errorf("sqlitestore: renew: %w", explain(err))
	}
	for _, l := range leases {
		if held[l.ID] != l.Epoch {
			r.Lost = append(r.Lost, l.ID)
			lost(l)
		}
	}
	return r, nil
}

// tryRenew tells which of the leases are held, with their epochs, and who is alive.
func (b *member) tryRenew(ctx context.Context, leases []store.Lease) (held map[int64]int64, out store.Renewal, err error) {
	b.mu.Lock()
	left := b.left
	b.mu.Unlock()
	if left {
		return nil, out, errors.New("sqlitestore: the session has left")
	}
	// Leases of a file that is not at its path any more are nobody's: another
	// relay may have those of the one that is.
	if err := b.db.sameFile(); err != nil {
		return nil, out, err
	}
	due, err := b.renewalDue(ctx, leases)
	if err != nil {
		return nil, out, err
	}
	if due {
		if err := b.prolong(ctx, leases); err != nil {
			return nil, out, err
		}
	}
	if out, err = b.alive(ctx); err != nil {
		return nil, out, err
	}
	held = map[int64]int64{}
	for _, l := range leases {
		var epoch int64
		err := b.db.aside.row(ctx, []any{&epoch}, `select epoch from `+b.leases+` where lease = ? and owner_lock = ?`, l.ID, b.lock)
		switch {
		case err == nil:
			held[l.ID] = epoch
		case !errors.Is(err, sql.ErrNoRows):
			return nil, out, err
		}
	}
	return held, out, nil
}

// renewalDue reports whether anything is past a third of its time, so that most
// calls need not write.
func (b *member) renewalDue(ctx context.Context, leases []store.Lease) (bool, error) {
	now, err := b.db.time(ctx, b.db.aside)
	if err != nil {
		return false, err
	}
	early := now + 2*b.params.TTL.Microseconds()/3
	var due bool
	err = b.db.aside.row(ctx, []any{&due}, `select coalesce((select min(expires_at) from `+b.relays+` where lock = ?), 0) < ?`, b.lock, early)
	for _, l := range leases {
		if err != nil || due {
			break
		}
		err = b.db.aside.row(ctx, []any{&due}, `select exists (select 1 from `+b.leases+` where lease = ? and owner_lock = ? and expires_at < ?)`, l.ID, b.lock, early)
	}
	return due, err
}

func (b *member) prolong(ctx context.Context, leases []store.Lease) error {
	return b.db.write(ctx, b.db.renewer, func(t *tx) error {
		until := t.now + b.params.TTL.Microseconds()
		_, err := t.exec(`
			insert into `+b.relays+` (lock, relay, destinations, seen_at, expires_at, grace) values (?, ?, ?, ?, ?, ?)
			on conflict (lock) do update set seen_at = excluded.seen_at, expires_at = excluded.expires_at`,
			b.lock, b.params.Relay, b.names, t.now, until, b.params.Grace.Microseconds())
		if err != nil {
			return err
		}
		for _, l := range leases {
			if _, err := t.exec(`update `+b.leases+` set expires_at = ? where lease = ? and owner_lock = ? and epoch = ?`, until, l.ID, b.lock, l.Epoch); err != nil {
				return err
			}
		}
		return nil
	})
}

// leave ends the membership. What is still held may be taken over at once.
func (b *member) leave(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.left {
		return nil
	}
	err := b.db.write(ctx, b.db.renewer, func(t *tx) error {
		if _, err := t.exec(`update `+b.leases+` set expires_at = 0 where owner_lock = ?`, b.lock); err != nil {
			return err
		}
		_, err := t.exec(`delete from `+b.relays+` where lock = ?`, b.lock)
		return err
	})
	b.left = true
	if b.file != nil {
		b.giveUp(b.file, b.lock)
	}
	if err != nil {
		return fmt.Errorf("sqlitestore: leave: %w", err)
	}
	return nil
}

// kill ends the membership as the death of the process does.
func (b *member) kill() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.left {
		return
	}
	b.left = true
	if b.file != nil {
		_ = b.file.Close()
	}
}

func (b *member) hasLeft() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.left
}
