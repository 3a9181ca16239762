package store

import (
	"context"
	"time"

	"github.com/outrider-dev/outrider"
)

// Inspector is a Store that shows operators what it holds. No call grows with
// history: lists are paged, counts are capped or estimated, and each query has
// a time-out.
type Inspector interface {
	// Status sums up each destination, the one with the oldest pending event
	// first.
	Status(ctx context.Context) (Status, error)
	// List pages through events, in order of row id. With several
	// destinations a page ends with a whole row, even if that is more than
	// the limit.
	List(ctx context.Context, p ListParams) (Page, error)
	// Show gives one event with its payload and how it stands with each
	// destination; id is the event's id or its row's. Several events can
	// share an id. None of it: an error that says so, or an empty list.
	Show(ctx context.Context, id string) ([]Detail, error)
}

// Operator is a Store in which an operator can act on failed events.
type Operator interface {
	// Retry makes FAILED events due at once with a fresh attempt budget; an
	// event that waits for its next attempt is hurried, its count kept.
	Retry(ctx context.Context, t Target) (int, error)
	// Skip discards FAILED or waiting events and lets their keys go on.
	Skip(ctx context.Context, t Target) (int, error)
}

// Rebaser is a Store whose position belongs to one database cluster and can be
// moved to another, after a restore.
type Rebaser interface {
	// Rebase computes what is pending from the old position and makes a new
	// one here. Nobody may hold a lease. dry only counts.
	Rebase(ctx context.Context, dry bool) (RebaseReport, error)
}

// Count is a number that may be capped or estimated, and says so.
type Count struct {
	N        int64 `json:"n"`
	Estimate bool  `json:"estimate,omitempty"` // at least N, or about N
}

// Status is the state of one store.
type Status struct {
	Destinations []DestinationStatus `json:"destinations"`
	Relays       []RelayStatus       `json:"relays"`
	// OldestTransaction is for how long the oldest transaction has been open
	// that keeps the database from tidying up; 0: none that is known.
	OldestTransaction time.Duration `json:"oldest_transaction_ns"`
	// Storage is what the outbox takes up.
	Storage Storage `json:"storage"`
	// Warnings are findings that need somebody, each with its fix.
	Warnings []string `json:"warnings,omitempty"`
}

// Storage is what the outbox takes up. All of it is 0 in a store that does not
// know.
type Storage struct {
	// Bytes are those of the outbox's tables with their indexes; of a database
	// that is one file, those of the file.
	Bytes int64 `json:"bytes"`
	// Partitions are those of the events' table. 0: the database has none, and
	// keeps no dead rows either, so the next two say nothing.
	Partitions int `json:"partitions"`
	// DeadRows is about how many rows await vacuum.
	DeadRows int64 `json:"dead_rows"`
	// LastPartitionIDs is how many ids have been handed out since the last
	// partition's first. It has no end, so no insert fails for want of one; but
	// while this grows beyond a partition's size none is made ahead. -1: there
	// is no such partition, and inserts beyond the last will fail.
	LastPartitionIDs int64 `json:"last_partition_ids"`
}

// DestinationStatus is how one destination stands. Ages are by the database's
// clock; 0 where there is none.
type DestinationStatus struct {
	Name          string        `json:"name"`
	OldestPending time.Duration `json:"oldest_pending_ns"` // not delivered, due, not failed
	OldestBlocked time.Duration `json:"oldest_blocked_ns"` // of the failed or waiting heads that hold keys back
	OldestFailed  time.Duration `json:"oldest_failed_ns"`
	Pending       Count         `json:"pending"`
	Publishing    Count         `json:"publishing"`
	Stuck         Count         `json:"stuck"` // of those Publishing, the ones that nobody who lives has in hand
	Waiting       Count         `json:"waiting"`
	Scheduled     Count         `json:"scheduled"`
	Failed        Count         `json:"failed"`
	BlockedKeys   Count         `json:"blocked_keys"`
	Leases        []LeaseStatus `json:"leases"`
}

// LeaseStatus shows who has which lanes.
type LeaseStatus struct {
	ID      int64         `json:"id"`
	Lanes   LaneSet       `json:"-"`
	Count   int           `json:"lanes"`
	Owner   string        `json:"owner,omitempty"` // "" = free
	Epoch   int64         `json:"epoch"`
	Expires time.Duration `json:"expires_ns"` // 0 or negative: expired, free to be taken
	// Gone: the owner's connection has ended, and nobody has taken the lease
	// over yet. Never set where that cannot be told.
	Gone bool `json:"gone,omitempty"`
}

// Held reports whether somebody who lives has the lease.
func (l LeaseStatus) Held() bool { return l.Owner != "" && l.Expires > 0 && !l.Gone }

// Unheld are the lanes of those leases that nobody who lives has.
func Unheld(leases []LeaseStatus) LaneSet {
	var out LaneSet
	for _, l := range leases {
		if !l.Held() {
			out |= l.Lanes
		}
	}
	return out
}

// RelayStatus shows a relay that has joined and not left.
type RelayStatus struct {
	Name string        `json:"name"`
	Seen time.Duration `json:"seen_ns"` // since its last sign of life
	// Gone: it ended without leaving, or was not heard of for as long as a
	// lease lives.
	Gone bool `json:"gone,omitempty"`
}

// ListParams select events; zero values mean any.
type ListParams struct {
	Destination string
	State       State // exactly this one: Pending without Waiting and Scheduled
	Key         string
	Type        string
	AfterRow    string // page behind this row id
	Limit       int    // 0: 50; at most 1000
}

// Page is one page of a list.
type Page struct {
	Entries []Entry
	Next    string // AfterRow of the next page; "" at the end
}

// Entry is how one event stands with one destination.
type Entry struct {
	Destination string
	Row         string
	EventID     string
	Type        string
	AggregateType,
	AggregateID string
	Key       string
	Unordered bool
	State     State
	// Reason says why a pending one waits: "new", "retry", "due later",
	// "held behind ROW".
	Reason    string
	Attempts  int
	Class     string
	Message   string
	CreatedAt time.Time
	// LastFailure is when the last attempt failed; zero: never.
	LastFailure time.Time
	// DueIn is how long until the next attempt; 0: now or none.
	DueIn time.Duration
}

// Detail is one event in full.
type Detail struct {
	Record  outrider.Record
	Entries []Entry // one per destination
}

// Target says which events of a destination an operator means.
type Target struct {
	Destination string // "" = every one
	// One of these:
	ID string // event id or row id
	// Key means the head of this key, and only one that is FAILED and holds the
	// key back: neither one that waits for its next attempt nor one that failed
	// and let the key go on.
	Key string
}

// RebaseReport says what Rebase found.
type RebaseReport struct {
	From, To string // cluster identities
	Pending  map[string]int64
	Changed  bool
}
