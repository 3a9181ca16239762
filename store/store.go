// Package store is the seam between the relay and a database. A driver
// implements Store and passes storetest; the relay knows nothing else of it.
//
// Two kinds of driver serve the same interface. A stream never writes to an
// event's row: it keeps a position per lease and a small table of exceptions.
// A row store keeps the state in the event's row. Callers see no difference:
// they speak of claims and outcomes.
//
// Instants that decide anything come from the database's clock; the relay
// gives and gets durations only.
package store

import (
	"context"
	"errors"
	"math/bits"
	"slices"
	"time"

	"github.com/outrider-dev/outrider"
)

// ErrFenced says that a lease is not held any more: somebody took it over, or
// gave it up, since it was acquired. Nothing was written. What was in hand
// under it is no longer the caller's.
var ErrFenced = errors.New("lease is not held any more")

// Store is one outbox.
type Store interface {
	// Capabilities says what the driver promises; constant over its life.
	Capabilities() Capabilities

	// Join enters a relay. It checks the schema, the cluster and the
	// privileges first (errors carry a hint, see outrider.Hint) and makes the
	// destinations known that are not yet. Each Session is a relay of its own,
	// in the same process too.
	Join(ctx context.Context, p JoinParams) (Session, error)

	// Close gives up connections. Called once, after all sessions have left.
	Close() error
}

// Capabilities are a driver's promises. storetest tests each both ways.
type Capabilities struct {
	// FanOut: every destination gets every event. Without it the store
	// serves one destination.
	FanOut bool
	// Sequences: records carry a Sequence. It grows along the records of a
	// key in the order in which their claims are started. A delayed event
	// has none, or falls in line when it is due.
	Sequences bool
	// LiveTakeOver: a lease whose owner's connection has ended is taken over
	// after JoinParams.Grace; without it, only when it has expired.
	LiveTakeOver bool
}

// JoinParams introduce a relay.
type JoinParams struct {
	// Relay names it to people, such as host and pid. Identity does not rest
	// on it: two relays of one name are two.
	Relay string

	// Destinations to be served. Relays of one store may differ in them, as
	// they do while a deployment adds or removes one.
	Destinations []Destination

	// TTL is how long a lease lives without renewal. Needed.
	TTL time.Duration

	// Grace is how long after the end of its owner's connection a lease is
	// taken over, where LiveTakeOver. The owner must have stopped sending
	// within that time. Needed; the same for all relays, since a driver may
	// go by the owner's or by the taker's.
	Grace time.Duration
}

// Destination is what a store has to know of one.
type Destination struct {
	Name string
	// FromEarliest makes a new destination begin with the oldest event kept
	// instead of the next one. Without FanOut it is always so.
	FromEarliest bool
}

// Session is one relay's membership. Its methods may be called from many
// goroutines, but for one lease Claim and Commit are called one at a time
// each (a Claim may run beside a Commit).
//
// An error that is neither ErrFenced nor the context's says that the database
// could not be asked; the call may be repeated as it is, and a Commit whose
// answer was lost is then recognised instead of done twice.
type Session interface {
	// Acquire takes leases of a destination that nobody holds, or whose owner
	// is gone, with at most Lanes lanes together; a free lease that is larger
	// is split. Returns those taken, maybe none.
	Acquire(ctx context.Context, p AcquireParams) ([]Lease, error)

	// Renew keeps the given leases from running out: one of which less than
	// two thirds of the TTL are left has all of it again, others may stay as
	// they are. It tells how many relays are alive, and what they serve. It
	// uses a connection of its own, never one of those that carry Claim and
	// Commit. Cheap: meant for several calls per second.
	Renew(ctx context.Context, leases []Lease) (Renewal, error)

	// Release gives back a lease, or the lanes of it that are not in keep;
	// for keep == 0 the whole. Nothing of its claims may be on its way any
	// more; those that were not settled are handed out again by whoever has
	// the lanes then, in order and before anything else, and no death is
	// counted. The returned lease is what is left (Lanes 0: nothing).
	Release(ctx context.Context, l Lease, keep LaneSet) (Lease, error)

	// Claim reads what is to be sent next under a lease. It may return a
	// claim without records. Nothing of it may be sent before a Commit that
	// names it in Start has returned nil. A claim that is not to be started
	// is abandoned with Forget. One without records is never started, and
	// forgetting it is optional: what the store has to note of it, such as
	// events that are delayed, it notes by itself.
	//
	// Claims of kind Fresh follow each other: a later one may hold records
	// of a key that has records in hand under an earlier one, later in order.
	// Records of a key that is held back, by a failed, waiting or slow
	// message, are never among them. A Due claim may hold a key's head alone
	// or with some of what is behind it, and never what is behind records of
	// the key that are in hand elsewhere.
	Claim(ctx context.Context, p ClaimParams) (*Claim, error)

	// Commit writes, in one transaction, the outcomes of claims in hand and
	// the start of new ones. Fresh claims are started and first settled in
	// the order in which they were claimed.
	Commit(ctx context.Context, p CommitParams) error

	// Forget abandons a claim that was never started, and every Fresh claim
	// of its lease behind it, which must not have been started either.
	Forget(c *Claim)

	// Leave ends the membership; leases that are still held are given up as
	// after a death.
	Leave(ctx context.Context) error
}

// Lease is the right to send the events of some lanes to one destination, until
// it expires or is fenced off.
type Lease struct {
	ID          int64
	Destination string
	Lanes       LaneSet
	// Epoch fences: it grows each time the lease changes hands.
	Epoch int64
}

// AcquireParams bound an Acquire.
type AcquireParams struct {
	Destination string
	Lanes       int
}

// Renewal answers Renew.
type Renewal struct {
	// Lost are the ids of those leases that are held no more.
	Lost []int64
	// Relays is how many relays are alive, this one included.
	Relays int
	// Serving is how many of them have joined for each destination of this
	// session's own, this one included. A destination's lanes are shared out
	// among those, and among nobody else.
	Serving map[string]int
}

// Alone is the Renewal of a relay that is the only one. Drivers begin with it.
func (p JoinParams) Alone() Renewal {
	r := Renewal{Relays: 1, Serving: map[string]int{}}
	for _, d := range p.Destinations {
		r.Serving[d.Name] = 1
	}
	return r
}

// Count adds another living relay, and the destinations that it has joined for.
func (r *Renewal) Count(destinations []string) {
	r.Relays++
	for name := range r.Serving {
		if slices.Contains(destinations, name) {
			r.Serving[name]++
		}
	}
}

// Names are those of Destinations; not nil.
func (p JoinParams) Names() []string {
	names := make([]string, 0, len(p.Destinations))
	for _, d := range p.Destinations {
		names = append(names, d.Name)
	}
	return names
}

// Kind of a claim.
type Kind uint8

const (
	// Fresh claims hold events that come up for the first time, and after a
	// take-over those that were in hand when the former owner ended.
	Fresh Kind = iota
	// Due claims hold exceptions whose time has come: retries, delayed
	// events, and the successors of a key that was held back.
	Due
)

// ClaimParams bound a claim.
type ClaimParams struct {
	Lease Lease
	Kind  Kind

	// MaxRecords and MaxBytes (of Record.Size) bound it. One record is handed
	// out however large it is.
	MaxRecords int
	MaxBytes   int

	// KeyShare is how many records of one key it holds at most: what a
	// burst of one key has beyond it is held back and comes as Due claims, so
	// that it delays nobody else. 0: no limit.
	KeyShare int

	// MaxExceptions is from how many exceptions of the lease on a Fresh claim
	// stays empty. 0: no limit. An event that waits for another try or is slow
	// counts, and a held key may count beside it; a driver may bear a few times
	// as many held keys. What waits for its time alone (scheduled) or for
	// somebody (failed, without a key that it holds) does not count: reading
	// nothing would make them no fewer. It is judged anew for each claim, so
	// that a lease goes on however they have ended.
	MaxExceptions int
}

// Claim is a number of records handed out together.
type Claim struct {
	Lease   Lease
	Kind    Kind
	Records []outrider.Record // in the order to be sent

	// Exclusive: no other claim of the lease may be in hand beside it. Set
	// while events that were in hand when a process died are sent again.
	Exclusive bool

	// Alone: nothing else at all may be in hand in this process beside it, so
	// that a further death counts against its one record.
	Alone bool

	// Redelivery: records may have been delivered before.
	Redelivery bool

	// More says that it is worth claiming this kind again at once. It is not
	// false while more could be handed out, and not true for ever while
	// nothing can.
	More bool

	// NextDue is, in a Due claim, when the next exception falls due that has
	// not yet; 0: none is known. A Fresh claim that held back what a key has
	// beyond its share may set it, so that Due claims are asked for as soon
	// as it is settled.
	NextDue time.Duration

	// Driver is the driver's own.
	Driver any
}

// State is where an event stands with a destination.
type State uint8

const (
	// Unchanged, in an outcome: nothing to say of this record now.
	Unchanged State = iota
	// Pending: not sent yet. In an outcome: it was not sent, and stays behind
	// the one that holds its key back; at most what a relay gives back.
	Pending
	// InHand (shown as PUBLISHING): sent, and its end is not known yet. In a
	// claim's first settlement it sets a slow record apart from the rest,
	// which holds its key back; a later settlement of the same claim ends it.
	InHand
	// Published: the destination confirmed it, or its rules do not want it.
	Published
	// Waiting: to be tried again after Outcome.Due.
	Waiting
	// Scheduled: not to be sent yet, its AvailableAt is to come.
	Scheduled
	// Failed: given up; a person has to look.
	Failed
	// Discarded by an operator.
	Discarded
)

// String is the state's name as people see it.
func (s State) String() string {
	switch s {
	case Pending, Waiting, Scheduled:
		return "PENDING"
	case InHand:
		return "PUBLISHING"
	case Published:
		return "PUBLISHED"
	case Failed:
		return "FAILED"
	case Discarded:
		return "DISCARDED"
	default:
		return "UNCHANGED"
	}
}

// Outcome is what became of one record of a claim.
type Outcome struct {
	State State

	// For Waiting and Failed.
	Attempts int           // the new count
	Due      time.Duration // Waiting: from now
	Class    string        // sink.Class of the failure
	Message  string        // evidence; any bytes, kept as text of MaxMessage bytes at most

	// Free, with Failed, lets the key go on without this record.
	Free bool
}

// MaxMessage is how much of an error's text is kept.
const MaxMessage = 1000

// Settlement gives the outcomes of a claim in hand.
//
// The first settlement of a claim has an outcome for every record; those that
// are InHand are ended by later ones, in which all others are Unchanged. In a
// key's records, what follows the first one that is not Published, Scheduled
// or Failed with Free is Pending, in the claims behind it too.
type Settlement struct {
	Claim    *Claim
	Outcomes []Outcome // one per record, same order
	Receipts []string  // where it went, compacted; for the journal
}

// CommitParams are what one Commit writes.
type CommitParams struct {
	Lease  Lease
	Settle []Settlement
	Start  []*Claim
}

// Watcher is a Store that can tell when something new may have been committed.
type Watcher interface {
	// Watch calls notify after each commit that may have brought an event,
	// soon, and at other times too, until ctx ends; it returns ctx's error.
	// Events that were there before it began are told of once it has.
	// notify does not block. A hint: it can be late or missing while the
	// database is away, so the relay polls behind it.
	Watch(ctx context.Context, notify func()) error
}

// Maintainer is a Store with work to be done by some relay now and then, such
// as making partitions ahead.
type Maintainer interface {
	// Maintain does what is due. Safe beside other relays doing the same. An
	// error says what will go wrong if nobody acts, with a hint.
	Maintain(ctx context.Context) error
}

// Sweeper is a Session that can look whether events were passed over: are
// behind a position without ever having been handed out. None should ever be;
// this is how a fault of a store, or rows that were written by hand with values
// that only the database gives, come to light.
type Sweeper interface {
	// Sweep looks at a bounded part of what the session's leases have got
	// through since the last call, in a way that shares as little as it can
	// with Claim. Meant to be called seldom.
	Sweep(ctx context.Context) (Swept, error)
}

// Swept is what a sweep found.
type Swept struct {
	Found int      // events passed over
	Rows  []string // the first of them, as DESTINATION ROW
}

// Add notes one.
func (s *Swept) Add(destination, row string) {
	s.Found++
	if len(s.Rows) < 10 {
		s.Rows = append(s.Rows, destination+" "+row)
	}
}

// Merger is a Session that can join leases, so that a relay that took some over
// does not read the same table once for each.
type Merger interface {
	// Merge joins lease b into a, of the same destination, both held and with
	// nothing in hand. It reports false while they do not stand at the same
	// place: it then marks a place ahead of both at which their Fresh claims
	// stop (empty, More false), and is to be called again once both have got
	// there and are settled. Forgotten when the session ends.
	Merge(ctx context.Context, a, b Lease) (Lease, bool, error)
}

// LaneSet is a set of lanes, a bit each.
type LaneSet uint64

// AllLanes holds every lane.
const AllLanes = ^LaneSet(0)

// Has reports whether the lane is in the set.
func (s LaneSet) Has(lane int) bool { return s>>uint(lane)&1 == 1 }

// Len is the number of lanes in the set.
func (s LaneSet) Len() int { return bits.OnesCount64(uint64(s)) }

// First is the set's n lowest lanes.
func (s LaneSet) First(n int) LaneSet {
	var out LaneSet
	for ; n > 0 && s != 0; n-- {
		low := s & -s
		out |= low
		s &^= low
	}
	return out
}
