// Package memstore keeps an outbox in memory: for tests, for demonstrations,
// and as the reference of what package store asks for. It is a row store: each
// event has a state for each destination.
//
// By default it keeps every promise of store.Capabilities; Config can take
// each away. Events come in through Begin, faults through SetFaults and Kill.
package memstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// Config sets up a Store. The zero value is a store with every capability.
type Config struct {
	// NoFanOut makes a store of one destination.
	NoFanOut bool

	// NoSequences leaves Record.Sequence zero.
	NoSequences bool

	// NoLiveTakeOver makes leases outlive their owner's connection until
	// they expire.
	NoLiveTakeOver bool

	// Now is the clock by which everything is decided. Default: time.Now.
	Now func() time.Time
}

// Op names an operation to the hooks of SetFaults.
type Op string

// The operations that can be disturbed.
const (
	OpJoin    Op = "join"
	OpAcquire Op = "acquire"
	OpRenew   Op = "renew"
	OpRelease Op = "release"
	OpClaim   Op = "claim"
	OpCommit  Op = "commit"
	OpLeave   Op = "leave"
	OpMerge   Op = "merge"
	OpInspect Op = "inspect" // Status, List, Show
	OpOperate Op = "operate" // Retry, Skip, Retire
)

// Fault disturbs an operation. It may block until ctx, the operation's, ends.
// Called without any lock held.
type Fault func(ctx context.Context, op Op) error

// Store is a store.Store, Watcher, Inspector, Operator and Retirer. Its methods may be
// called from any goroutine.
type Store struct {
	cfg Config

	mu           sync.Mutex
	lastID       int64
	lastLease    int64
	rows         []*row // committed, by id
	destinations []*destination
	sessions     []*session // joined and not left
	watchers     map[*watcher]struct{}
	misuse       []string
	before       Fault
	after        Fault
}

// The interfaces that it serves.
var (
	_ store.Store     = (*Store)(nil)
	_ store.Watcher   = (*Store)(nil)
	_ store.Inspector = (*Store)(nil)
	_ store.Operator  = (*Store)(nil)
	_ store.Retirer   = (*Store)(nil)
	_ store.Merger    = (*session)(nil)
)

// New makes an empty Store.
func New(cfg Config) *Store {
	if cfg.Now == nil {
		cfg.Now = time.Now //nolint:forbidigo // the store is a process of its own memory: its clock is the database's
	}
	return &Store{cfg: cfg, watchers: map[*watcher]struct{}{}}
}

// Capabilities implements store.Store.
func (s *Store) Capabilities() store.Capabilities {
	return store.Capabilities{
		FanOut:       !s.cfg.NoFanOut,
		Sequences:    !s.cfg.NoSequences,
		LiveTakeOver: !s.cfg.NoLiveTakeOver,
	}
}

// Close implements store.Store. What is kept stays readable.
func (s *Store) Close() error { return nil }

// SetFaults sets hooks that are called around every operation, nil for none.
// An error from before is returned and the operation does not happen. An error
// from after is returned although it has happened: its answer was lost.
func (s *Store) SetFaults(before, after Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before, s.after = before, after
}

// Kill ends a session's connection, as the death of its process or of the
// network does: it does not leave, and cannot renew any more. Claim and Commit
// go on until somebody takes its leases over, as those of a process that was
// merely cut off would.
func (s *Store) Kill(sess store.Session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ss := sess.(*session); ss.killed.IsZero() { //nolint:errcheck // a session of another store is misuse
		ss.killed = s.cfg.Now()
	}
}

// Sessions are those that have joined and not left, by the name of their
// relay; of several with one name the latest.
func (s *Store) Sessions() map[string]store.Session {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[string]store.Session{}
	for _, ss := range s.sessions {
		out[ss.params.Relay] = ss
	}
	return out
}

// Misuse tells what a caller has done against the rules of package store. Each
// such call was answered with an error and changed nothing.
func (s *Store) Misuse() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.misuse)
}

// do runs an operation under the lock and between the hooks.
func (s *Store) do(ctx context.Context, op Op, f func(now time.Time) error) error {
	s.mu.Lock()
	before, after := s.before, s.after
	s.mu.Unlock()
	if before != nil {
		if err := before(ctx, op); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	err := f(s.cfg.Now())
	if m := (*misuseError)(nil); errors.As(err, &m) {
		s.misuse = append(s.misuse, m.Error())
	}
	s.mu.Unlock()
	if err == nil && after != nil {
		err = after(ctx, op)
	}
	return err
}

// misuseError is an error of the caller.
type misuseError struct{ text string }

func (e *misuseError) Error() string { return "memstore: misuse: " + e.text }

func misuse(format string, args ...any) error {
	return &misuseError{fmt.Sprintf(format, args...)}
}

// row is one event.
type row struct {
	id     int64
	record outrider.Record // what is the same for every destination
	cells  []*cell
}

// cell is how a row stands with one destination.
type cell struct {
	row  *row
	dest *destination
	key  *key // nil: unordered

	state store.State
	claim *claim // that holds it, read or in hand; nil: none

	// seq is its place among the deliveries of its key, from when it was
	// first in hand.
	seq outrider.Sequence

	// again: it was in hand when its owner ended, and goes before whatever
	// was not. piece, if not 0, is with how many such at most, itself
	// included, and with nothing beside: somebody died with it in hand.
	again bool
	piece int

	attempts, starts int
	due              time.Time // Waiting, Scheduled
	class, message   string
	free             bool // Failed, and its key goes on
	firstFailed      time.Time
	lastFailed       time.Time
}

// key is what is kept in order towards one destination.
type key struct {
	name string
	lane int
	// cells are the key's unfinished ones, by row id.
	cells []*cell
	// held: its records are no part of Fresh claims, they come as Due ones.
	held   bool
	share  *claim    // that holds it by its KeyShare, and is not started yet
	served time.Time // when it was held, or last part of a Due claim
}

// destination is one, with its events and leases.
type destination struct {
	name   string
	leases []*lease

	open       []*cell // by row id, without what was published or discarded
	done       int     // how many of open are so since, and still there
	keys       map[string]*key
	held       map[*key]struct{}
	exceptions map[*cell]struct{} // Waiting, Scheduled, Failed, or slow in hand
	again      map[*cell]struct{} // those with again set
}

// lease is the state of a store.Lease.
type lease struct {
	id      int64
	dest    *destination
	lanes   store.LaneSet
	owner   *session // nil: free
	unheard bool     // it does not know, the answer was lost
	epoch   int64
	expires time.Time
	page    int64
	claims  []*claim // read or in hand, in the order in which they were claimed

	// last is the latest Commit, to recognise one that is repeated.
	last store.CommitParams
}

// find gives a destination, or nil.
func (s *Store) find(name string) *destination {
	for _, d := range s.destinations {
		if d.name == name {
			return d
		}
	}
	return nil
}

// introduce makes a destination known. It begins with the rows given.
func (s *Store) introduce(name string, rows []*row) {
	d := &destination{
		name:       name,
		keys:       map[string]*key{},
		held:       map[*key]struct{}{},
		exceptions: map[*cell]struct{}{},
		again:      map[*cell]struct{}{},
	}
	s.destinations = append(s.destinations, d)
	s.newLease(d, store.AllLanes)
	for _, r := range rows {
		d.add(r)
	}
}

func (s *Store) newLease(d *destination, lanes store.LaneSet) *lease {
	s.lastLease++
	l := &lease{id: s.lastLease, dest: d, lanes: lanes}
	d.leases = append(d.leases, l)
	return l
}

func byRow(a, b *cell) int { return cmp.Compare(a.row.id, b.row.id) }

// insert puts a cell into its place by row id, which is mostly the end.
func insert(cells []*cell, c *cell) []*cell {
	if n := len(cells); n == 0 || byRow(cells[n-1], c) < 0 {
		return append(cells, c)
	}
	i, _ := slices.BinarySearchFunc(cells, c, byRow)
	return slices.Insert(cells, i, c)
}

// add lets a destination see a row.
func (d *destination) add(r *row) {
	c := &cell{row: r, dest: d, state: store.Pending}
	if !r.record.Unordered {
		k := d.keys[r.record.Key]
		if k == nil {
			k = &key{name: r.record.Key, lane: r.record.Lane}
			d.keys[k.name] = k
		}
		c.key = k
		k.cells = insert(k.cells, c)
	}
	r.cells = append(r.cells, c)
	d.open = insert(d.open, c)
}

// finish ends a cell for good.
func (c *cell) finish(state store.State) {
	d := c.dest
	c.state, c.again, c.piece = state, false, 0
	delete(d.exceptions, c)
	delete(d.again, c)
	if c.key != nil {
		if i, ok := slices.BinarySearchFunc(c.key.cells, c, byRow); ok {
			if i == 0 {
				c.key.cells = c.key.cells[1:]
			} else {
				c.key.cells = slices.Delete(c.key.cells, i, i+1)
			}
		}
		d.rest(c.key)
	}
	if state != store.Failed {
		d.forget()
	}
}

// forget drops what is done out of open, once that is much.
func (d *destination) forget() {
	d.done++
	if d.done > 64 && d.done > len(d.open)/2 {
		d.open = slices.DeleteFunc(d.open, func(c *cell) bool {
			return c.state == store.Published || c.state == store.Discarded
		})
		d.done = 0
	}
}

// reopen takes back the end of a cell that failed and let its key go on.
func (c *cell) reopen() {
	c.free = false
	if c.key == nil {
		return
	}
	if k := c.dest.keys[c.key.name]; k != nil {
		c.key = k
	}
	c.dest.keys[c.key.name] = c.key
	c.key.cells = insert(c.key.cells, c)
}

func (c *cell) finished() bool {
	return c.state == store.Published || c.state == store.Discarded || c.state == store.Failed && c.free
}

// head reports whether the cell holds its key back by itself.
func (c *cell) head() bool {
	return c.state == store.Waiting || c.state == store.InHand || c.state == store.Failed && !c.free
}

// hold takes the cell's key out of Fresh claims.
func (c *cell) hold(now time.Time) {
	k := c.key
	if k == nil {
		return
	}
	if !k.held {
		k.held, k.served = true, now
		c.dest.held[k] = struct{}{}
	}
	k.share = nil
}

// free lets a key return to Fresh claims.
func (d *destination) free(k *key) {
	k.held, k.share = false, nil
	delete(d.held, k)
}

// rest frees a key that has caught up: it has no unfinished events but
// delayed ones. A key without any is forgotten.
func (d *destination) rest(k *key) {
	for _, c := range k.cells {
		if c.state != store.Scheduled || c.claim != nil {
			return
		}
	}
	d.free(k)
	if len(k.cells) == 0 && d.keys[k.name] == k {
		delete(d.keys, k.name)
	}
}
