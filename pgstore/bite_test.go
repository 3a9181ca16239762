package pgstore_test

import (
	"testing"
	"time"

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
