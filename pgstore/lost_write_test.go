package pgstore_test

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/faults"
	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/store"
)

// handler works a lease step by step.
type handler struct {
	t     *testing.T
	ctx   context.Context
	s     *pgstore.Store
	db    *sql.DB
	ses   store.Session
	lease store.Lease
}

func newHandler(t *testing.T, cfg pgstore.Config) *handler {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	h := &handler{t: t, ctx: ctx}
	h.s, h.db = open(t, cfg)
	var err error
	h.ses, err = h.s.Join(ctx, store.JoinParams{Relay: "r", TTL: time.Hour, Grace: time.Second,
		Destinations: []store.Destination{{Name: "d", FromEarliest: true}}})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *handler) add(keys ...string) {
	h.t.Helper()
	for _, k := range keys {
		_, err := h.db.Exec(`insert into outbox_events (aggregate_type, aggregate_id, event_type, payload) values ('a', $1, 'T', '{}')`, k)
		if err != nil {
			h.t.Fatal(err)
		}
	}
}

func (h *handler) params(kind store.Kind, share int) store.ClaimParams {
	return store.ClaimParams{Lease: h.lease, Kind: kind, MaxRecords: 10, MaxBytes: 1 << 20, KeyShare: share}
}

func (h *handler) claim(kind store.Kind, share int) *store.Claim {
	h.t.Helper()
	c, err := h.ses.Claim(h.ctx, h.params(kind, share))
	if err != nil {
		h.t.Fatal(err)
	}
	return c
}

func (h *handler) commit(p store.CommitParams) {
	h.t.Helper()
	p.Lease = h.lease
	if err := h.ses.Commit(h.ctx, p); err != nil {
		h.t.Fatal(err)
	}
}

// all settles a claim with one outcome for every record.
func all(c *store.Claim, o store.Outcome) store.CommitParams {
	out := make([]store.Outcome, len(c.Records))
	for i := range out {
		out[i] = o
	}
	return store.CommitParams{Settle: []store.Settlement{{Claim: c, Outcomes: out}}}
}

var (
	done    = store.Outcome{State: store.Published}
	waiting = store.Outcome{State: store.Waiting, Attempts: 1, Class: "refused", Due: time.Millisecond}
	refused = store.Outcome{State: store.Failed, Attempts: 1, Class: "refused"}
)

// pump claims and settles for some rounds; it returns the keys that came.
func (h *handler) pump(o store.Outcome, share int) (keys []string) {
	h.t.Helper()
	for range 10 {
		for _, kind := range []store.Kind{store.Fresh, store.Due} {
			c := h.claim(kind, share)
			if len(c.Records) == 0 {
				continue
			}
			for i := range c.Records {
				keys = append(keys, c.Records[i].Key)
			}
			h.commit(store.CommitParams{Start: []*store.Claim{c}})
			h.commit(all(c, o))
		}
	}
	return keys
}

// blocked waits until n sessions of the database wait for a lock.
func (h *handler) blocked(n int) {
	h.t.Helper()
	for waiting := -1; waiting < n; {
		err := h.db.QueryRowContext(h.ctx, `select count(*) from pg_stat_activity
			where datname = current_database() and wait_event_type = 'Lock'`).Scan(&waiting)
		if err != nil {
			h.t.Fatalf("%d sessions wait for a lock, %d are to: %v", waiting, n, err)
		}
	}
}

// lock holds what a statement locks until release is called.
func (h *handler) lock(query string, args ...any) (release func()) {
	h.t.Helper()
	tx, err := h.db.Begin()
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = tx.Rollback() })
	if _, err := tx.Exec(query, args...); err != nil {
		h.t.Fatal(err)
	}
	return func() { _ = tx.Commit() }
}

// A write whose answer was lost is still on its way, behind a lock of somebody's,
// and takes effect when the next write has been sent. That one was taken for the
// other then, and what it settled was never written.
func TestLateWriteIsNotTakenForAnother(t *testing.T) {
	dsn, err := url.Parse(testdb.Postgres(t))
	if err != nil {
		t.Fatal(err)
	}
	direct := dsn.String()
	proxy := faults.NewProxy(t, dsn.Host)
	dsn.Host = proxy.Addr()
	h := newHandler(t, pgstore.Config{DSN: dsn.String()})
	if h.db, err = sql.Open("pgx", direct); err != nil {
		t.Fatal(err)
	}
	defer h.db.Close()
	h.lease = acquire(t, h.ses)
	h.add("w")
	c := h.claim(store.Fresh, 0)
	h.commit(store.CommitParams{Start: []*store.Claim{c}})
	h.commit(all(c, waiting))
	h.add("x")
	x := h.claim(store.Fresh, 0)
	h.commit(store.CommitParams{Start: []*store.Claim{x}})
	release := h.lock(`select from outbox_exceptions for update`)
	marked := make(chan error, 1)
	go func() {
		for { // until it has something to mark
			if c, err := h.ses.Claim(h.ctx, h.params(store.Due, 0)); err != nil || len(c.Records) > 0 {
				marked <- err
				return
			}
		}
	}()
	h.blocked(1)
	proxy.SetDown(true)
	if err := <-marked; err == nil {
		t.Fatal("the mark was answered")
	}
	for proxy.Refused() == 0 && h.ctx.Err() == nil { // nor must the client's request to cancel get through
		time.Sleep(time.Millisecond)
	}
	proxy.SetDown(false)
	settled := make(chan error, 1)
	go func() {
		p := all(x, refused)
		p.Lease = h.lease
		err := h.ses.Commit(h.ctx, p)
		for err != nil && h.ctx.Err() == nil { // as a relay repeats it
			err = h.ses.Commit(h.ctx, p)
		}
		settled <- err
	}()
	h.blocked(2)
	release()
	if err := <-settled; err != nil {
		t.Fatal(err)
	}
	var n int
	if err := h.db.QueryRow(`select count(*) from outbox_exceptions where event_key = 'x' and state = 'FAILED'`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	if n != 1 {
		t.Error("the event that was refused is not FAILED: its settlement was never written")
	}
}

// An idle lease looks for new events while a settlement of something that waited
// is on its way, and is then joined with one that has not looked. What came in
// between for that one was passed over.
func TestMergeAfterIdleLookBesideCommit(t *testing.T) {
	h := newHandler(t, pgstore.Config{})
	var leases []store.Lease
	for range 2 {
		l, err := h.ses.Acquire(h.ctx, store.AcquireParams{Destination: "d", Lanes: 32})
		if err != nil || len(l) != 1 {
			t.Fatal(l, err)
		}
		leases = append(leases, l[0])
	}
	keyIn := func(l store.Lease) string {
		for i := 0; ; i++ {
			if k := fmt.Sprint("k", i); l.Lanes.Has(outrider.Lane(k)) {
				return k
			}
		}
	}
	ka, kb := keyIn(leases[0]), keyIn(leases[1])
	h.lease = leases[0]
	h.add(ka)
	c := h.claim(store.Fresh, 0)
	h.commit(store.CommitParams{Start: []*store.Claim{c}})
	h.commit(all(c, waiting))
	due := h.claim(store.Due, 0)
	for len(due.Records) == 0 && h.ctx.Err() == nil {
		due = h.claim(store.Due, 0)
	}
	h.commit(store.CommitParams{Start: []*store.Claim{due}})
	for _, l := range []store.Lease{leases[1], leases[0]} { // both idle, at one snapshot
		h.lease = l
		if c := h.claim(store.Fresh, 0); len(c.Records) > 0 {
			t.Fatalf("lease %d has %d events", l.ID, len(c.Records))
		}
	}
	release := h.lock(`select from outbox_leases where lease = $1 for update`, h.lease.ID)
	settled := make(chan error, 1)
	go func() {
		p := all(due, done)
		p.Lease = leases[0]
		settled <- h.ses.Commit(h.ctx, p)
	}()
	h.blocked(1)
	h.add(kb)
	if c := h.claim(store.Fresh, 0); len(c.Records) > 0 {
		t.Fatal("the first lease has an event of the second")
	}
	release()
	if err := <-settled; err != nil {
		t.Fatal(err)
	}
	joined, ok, err := h.ses.(store.Merger).Merge(h.ctx, leases[0], leases[1])
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	if ok {
		h.lease = joined
	} else {
		got = h.pump(done, 0)
		h.lease = leases[1]
	}
	if got = append(got, h.pump(done, 0)...); len(got) != 1 || got[0] != kb {
		t.Errorf("joined %v: keys %v came, want %s", ok, got, kb)
	}
}

// A claim that was read ahead is forgotten after others have got higher numbers:
// these are not given out again, or a consumer that goes by the sequence drops
// what is new.
func TestPagesNeverFall(t *testing.T) {
	const share = 1
	h := newHandler(t, pgstore.Config{})
	h.lease = acquire(t, h.ses)
	last := map[string]string{}
	look := func(c *store.Claim) {
		t.Helper()
		for i := range c.Records {
			r := &c.Records[i]
			if s := r.Sequence.String(); s <= last[r.Key] {
				t.Errorf("the sequence of key %s fell from %s to %s", r.Key, last[r.Key], s)
			} else {
				last[r.Key] = s
			}
		}
		h.commit(store.CommitParams{Start: []*store.Claim{c}})
		h.commit(all(c, done))
	}
	h.add("a", "a", "a", "a", "a", "a")
	look(h.claim(store.Fresh, share))
	h.add("b")
	ahead := h.claim(store.Fresh, share)
	for c := h.claim(store.Due, share); len(c.Records) > 0; c = h.claim(store.Due, share) {
		look(c)
	}
	h.ses.Forget(ahead)
	h.add("a", "c")
	for range 20 {
		for _, kind := range []store.Kind{store.Fresh, store.Due} {
			if c := h.claim(kind, share); len(c.Records) > 0 {
				look(c)
			}
		}
		h.add("a")
	}
}
