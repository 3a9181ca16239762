package pgstore_test

import (
	"testing"
	"time"

	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/store"
)

// These hold what no other test was found to miss when its line was taken out
// of the code: see docs/BITES.md.

// What commits while a window is being read, with an id that lies in it, is not
// part of it: whoever read the page again after a death would else read
// another page, and the next window would bring it once more.
func TestWindowLeavesOutWhatCommitsMeanwhile(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	p := joined(t, s, 64)
	insert(t, db, "a", "a1", "a2")
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback() // ends it if the test fails
	insert(t, tx, "b", "b1")
	insert(t, db, "a", "a3", "a4")
	two := store.ClaimParams{MaxRecords: 2}
	first := p.claim(two, "a1", "a2")
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	second := p.claim(two, "a3", "a4")
	p.commit(nil, first, second)
	p.commit([]store.Settlement{settled(first, store.Published, store.Published), settled(second, store.Published, store.Published)})
	third := p.claim(two, "b1")
	p.commit(nil, third)
	p.commit([]store.Settlement{settled(third, store.Published)})
	p.claim(two)
}

// A page that is read again after a death leaves out what had been done before
// it, though that lies between its bounds.
func TestPageReadAgainLeavesOutWhatWasDone(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	p := joined(t, s, 64)
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback() // ends it if the test fails
	insert(t, tx, "b", "b1")
	insert(t, db, "a", "a1", "a2")
	c := p.claim(store.ClaimParams{}, "a1", "a2")
	p.commit(nil, c)
	p.commit([]store.Settlement{settled(c, store.Published, store.Published)})
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	insert(t, db, "a", "a3")
	p.commit(nil, p.claim(store.ClaimParams{}, "b1", "a3"))
	pgstore.Kill(p.Session)

	p = joined(t, s, 64)
	for _, name := range []string{"b1", "a3"} { // in pieces
		c := p.claim(store.ClaimParams{}, name)
		p.commit(nil, c)
		p.commit([]store.Settlement{settled(c, store.Published)})
	}
	p.claim(store.ClaimParams{})
}

// Pieces of what was in hand at a death are handed out one at a time: with two
// in hand the next death would not tell which of them was the cause.
func TestPiecesComeOneAtATime(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	p := joined(t, s, 64)
	insert(t, db, "a", "a1")
	insert(t, db, "b", "b1")
	p.commit(nil, p.claim(store.ClaimParams{}, "a1", "b1"))
	pgstore.Kill(p.Session)

	p = joined(t, s, 64)
	c := p.claim(store.ClaimParams{}, "a1")
	p.claim(store.ClaimParams{})
	p.commit(nil, c)
	p.claim(store.ClaimParams{})
	p.commit([]store.Settlement{settled(c, store.Published)})
	p.claim(store.ClaimParams{}, "b1")
}

// Renewal moves the time at which a lease expires.
func TestRenewalProlongs(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	ses, err := s.Join(t.Context(), store.JoinParams{Relay: "relay", TTL: time.Second, Grace: time.Second,
		Destinations: []store.Destination{{Name: "main", FromEarliest: true}}})
	if err != nil {
		t.Fatal(err)
	}
	defer ses.Leave(t.Context()) //nolint:errcheck // the database goes with the test
	leases, err := ses.Acquire(t.Context(), store.AcquireParams{Destination: "main", Lanes: 64})
	if err != nil || len(leases) != 1 {
		t.Fatalf("acquired %v, %v", leases, err)
	}
	expires := func() (at time.Time) {
		t.Helper()
		if err := db.QueryRowContext(t.Context(), `select expires_at from outbox_leases`).Scan(&at); err != nil {
			t.Fatal(err)
		}
		return at
	}
	first := expires()
	until(t, "the lease to be prolonged", func() bool {
		if _, err := ses.Renew(t.Context(), leases); err != nil {
			t.Fatal(err)
		}
		return expires().After(first)
	})
}

// A rebase waits for writers that are under way and keeps others out: a row that
// committed behind its count would be neither done nor pending.
func TestRebaseKeepsWritersOut(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	p := joined(t, s, 64)
	if err := p.Leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback() // ends it if the test fails
	insert(t, tx, "a", "a1")
	type answer struct {
		store.RebaseReport
		err error
	}
	done := make(chan answer, 1)
	go func() {
		r, err := s.Rebase(t.Context(), false)
		done <- answer{r, err}
	}()
	until(t, "the rebase to wait for the writer", func() bool {
		select {
		case a := <-done:
			t.Fatalf("a rebase went on beside an open writer: %+v, %v", a.RebaseReport, a.err)
		default:
		}
		var waits bool
		err := db.QueryRowContext(t.Context(), `select exists (select from pg_locks
			where relation = 'outbox_events'::regclass and not granted)`).Scan(&waits)
		if err != nil {
			t.Fatal(err)
		}
		return waits
	})
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	if a := <-done; a.err != nil || a.Pending["main"] != 1 {
		t.Errorf("rebase behind the writer: %+v, %v, want its event pending", a.RebaseReport, a.err)
	}
	joined(t, s, 64).claim(store.ClaimParams{}, "a1")
}

// A delayed event whose time has come waits for the head of its key, if that
// has failed meanwhile.
func TestDelayedEventWaitsForItsHead(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	insert(t, db, "a", "a1", "a2")
	if _, err := db.ExecContext(t.Context(), `update outbox_events set available_at = clock_timestamp() + interval '1 hour' where aggregate_id = 'a1'`); err != nil {
		t.Fatal(err)
	}
	p := joined(t, s, 64)
	c := p.claim(store.ClaimParams{}, "a2")
	p.commit(nil, c)
	p.commit([]store.Settlement{{Claim: c, Outcomes: []store.Outcome{{State: store.Waiting, Attempts: 1, Due: time.Hour}}}})
	due := func(name string) {
		t.Helper()
		res, err := db.ExecContext(t.Context(), `update outbox_exceptions x set due_at = clock_timestamp() - interval '1 hour'
			from outbox_events e where e.id = x.id and e.aggregate_id = $1`, name)
		if err != nil {
			t.Fatal(err)
		}
		if n, _ := res.RowsAffected(); n != 1 {
			t.Fatalf("%d exceptions of %s", n, name)
		}
	}
	due("a1")
	p.claim(store.ClaimParams{Kind: store.Due})
	due("a2")
	p.claim(store.ClaimParams{Kind: store.Due}, "a2")
}

// How long an event has been failing is counted from its first failure.
func TestFirstFailureStays(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	insert(t, db, "a", "a1")
	p := joined(t, s, 64)
	c := p.claim(store.ClaimParams{}, "a1")
	p.commit(nil, c)
	failures := func() (first, last time.Time) {
		t.Helper()
		p.commit([]store.Settlement{{Claim: c, Outcomes: []store.Outcome{{State: store.Waiting, Attempts: 1, Class: "refused"}}}})
		if err := db.QueryRowContext(t.Context(), `select first_failed, last_failed from outbox_exceptions`).Scan(&first, &last); err != nil {
			t.Fatal(err)
		}
		return first, last
	}
	began, _ := failures()
	c = p.claim(store.ClaimParams{Kind: store.Due}, "a1")
	p.commit(nil, c)
	if first, last := failures(); !first.Equal(began) || !last.After(began) {
		t.Errorf("failed first at %v, last at %v; it had failed first at %v", first, last, began)
	}
}

// Leases are joined where both stand at one place: what one of them has read
// and the other has not would else be lost, or sent twice.
func TestMergeWaitsForOnePlace(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	p := joined(t, s, 32)
	ahead, behind := p.lease, p.acquire(32)[0]
	key := "a"
	for behind.Lanes&lane(key) == 0 {
		key += "a"
	}
	insert(t, db, key, "k1")
	p.claim(store.ClaimParams{}) // it has seen that there is nothing for it
	merger := p.Session.(store.Merger)
	if _, ok, err := merger.Merge(t.Context(), ahead, behind); ok || err != nil {
		t.Fatalf("joined at two places: %v, %v", ok, err)
	}
	p.lease = behind
	c := p.claim(store.ClaimParams{}, "k1")
	p.commit(nil, c)
	p.commit([]store.Settlement{settled(c, store.Published)})
}

// While a transaction is open that may have looked at the flag before it went
// up, the relay does not sleep.
func TestDoorbellPollsWhileOthersAreOpen(t *testing.T) {
	s, db := open(t, pgstore.Config{Doorbell: true, BusyPoll: 100 * time.Microsecond, IdlePoll: time.Millisecond})
	if err := migrate.Doorbell(t.Context(), db, true); err != nil {
		t.Fatal(err)
	}
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback() // ends it if the test fails
	if _, err := tx.ExecContext(t.Context(), oneEvent); err != nil {
		t.Fatal(err)
	}
	rung(t, s)
	var looks int
	var last time.Time
	until(t, "a hundred looks beside an open transaction", func() bool {
		var at time.Time
		err := db.QueryRowContext(t.Context(), `select coalesce(max(query_start), '-infinity'::timestamptz + interval '0') from pg_stat_activity
			where datname = current_database() and query like 'select pg_snapshot_xmin%'`).Scan(&at)
		if err != nil {
			return false // nobody has looked yet
		}
		if at.After(last) {
			looks, last = looks+1, at
		}
		return looks > 100
	})
}

// A held key that is being drained stops at a failure: what comes behind it comes
// behind it again.
func TestDrainStopsAtAFailure(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	insert(t, db, "a", "a1", "a2", "a3", "a4")
	p := joined(t, s, 64)
	c := p.claim(store.ClaimParams{}, "a1", "a2", "a3", "a4")
	p.commit(nil, c)
	p.commit([]store.Settlement{settled(c, store.Waiting, store.Pending, store.Pending, store.Pending)})
	due := store.ClaimParams{Kind: store.Due}
	c = p.claim(due, "a1", "a2", "a3", "a4")
	p.commit(nil, c)
	p.commit([]store.Settlement{settled(c, store.Published, store.Published, store.Waiting, store.Pending)})
	c = p.claim(due, "a3", "a4")
	p.commit(nil, c)
	p.commit([]store.Settlement{settled(c, store.Published, store.Published)})
}

// When a lease ends is worked out by the database, when it is taken and when it
// is renewed.
func TestLeaseEndsByTheDatabasesClock(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	joined(t, s, 64) // for an hour
	var left float64
	if err := db.QueryRowContext(t.Context(), `select extract(epoch from expires_at - clock_timestamp()) from outbox_leases`).Scan(&left); err != nil {
		t.Fatal(err)
	}
	if left <= 0 || left > time.Hour.Seconds() {
		t.Errorf("a lease of an hour ends in %v s", left)
	}
}

// An operator who acts on an exception while a claim is taking it comes before:
// it is not sent any more.
func TestOperatorComesBeforeADueClaim(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	insert(t, db, "a", "a1")
	insert(t, db, "b", "b1")
	p := joined(t, s, 64)
	c := p.claim(store.ClaimParams{}, "a1", "b1")
	p.commit(nil, c)
	p.commit([]store.Settlement{settled(c, store.Waiting, store.Waiting)})
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback() // ends it if the test fails
	if _, err := tx.ExecContext(t.Context(), `update outbox_exceptions x set state = 'FAILED'
		from outbox_events e where e.id = x.id and e.aggregate_id = 'a1'`); err != nil {
		t.Fatal(err)
	}
	type answer struct {
		c   *store.Claim
		err error
	}
	done := make(chan answer, 1)
	go func() {
		c, err := p.Claim(t.Context(), store.ClaimParams{Lease: p.lease, Kind: store.Due, MaxRecords: 10, MaxBytes: 1 << 20})
		done <- answer{c, err}
	}()
	until(t, "the claim to wait for the operator", func() (waits bool) {
		err := db.QueryRowContext(t.Context(), `select exists (select from pg_locks where not granted and pid in
			(select pid from pg_stat_activity where datname = current_database()))`).Scan(&waits)
		if err != nil {
			t.Fatal(err)
		}
		return waits
	})
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	a := <-done
	if a.err != nil {
		t.Fatal(a.err)
	}
	if len(a.c.Records) != 1 || a.c.Records[0].AggregateID != "b1" {
		t.Errorf("claimed %+v, want b1 alone: an operator was quicker for a1", a.c.Records)
	}
}
