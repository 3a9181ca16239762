package pgstore_test

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/store"
)

// waits holds until a session of an application waits for a lock.
func waits(t testing.TB, db *sql.DB, name string) {
	t.Helper()
	until(t, name+" to wait for a lock", func() bool {
		var n int
		if err := db.QueryRow(`select count(*) from pg_stat_activity where datname = current_database()
			and application_name = $1 and wait_event_type = 'Lock'`, name).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n > 0
	})
}

// halt runs a statement whose locks are held until go on.
func halt(t testing.TB, db *sql.DB, query string) (goOn func()) {
	t.Helper()
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback() })
	if _, err := tx.Exec(query); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := tx.Rollback(); err != nil {
			t.Fatal(err)
		}
	}
}

// joins is a relay that has joined and holds nothing, over a store of its own.
func joins(t testing.TB, s *pgstore.Store, name string) *person {
	t.Helper()
	ses, err := named(t, dsnOf(s), name).Join(t.Context(), store.JoinParams{Relay: name, TTL: time.Hour, Grace: time.Nanosecond,
		Destinations: []store.Destination{{Name: "main"}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ses.Leave(context.Background()) })
	return &person{t: t, Session: ses}
}

// begin runs what will wait; end is what became of it.
func begin[T any](t testing.TB, f func() (T, error)) (end func() T) {
	t.Helper()
	var out T
	done := make(chan error, 1)
	go func() {
		var err error
		out, err = f()
		done <- err
	}()
	return func() T {
		t.Helper()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		return out
	}
}

// takeOver begins to take all lanes.
func (p *person) takeOver() (end func() []store.Lease) {
	return begin(p.t, func() ([]store.Lease, error) {
		return p.Acquire(p.t.Context(), store.AcquireParams{Destination: "main", Lanes: 64})
	})
}

// settle begins to settle a claim of two: the first is published, the second
// waits.
func (p *person) settle(c *store.Claim) (end func() int) {
	s := settled(c, store.Published, store.Waiting)
	s.Outcomes[1].Due = time.Hour
	return begin(p.t, func() (int, error) {
		return 0, p.Commit(p.t.Context(), store.CommitParams{Lease: p.lease, Settle: []store.Settlement{s}})
	})
}

// wantSettled holds that what settle has written is as it was written.
func wantSettled(t testing.TB, db *sql.DB) {
	t.Helper()
	var n, attempts, starts, together int
	var state string
	if err := db.QueryRow(`select count(*), min(state), min(attempts), min(starts), min(together) from outbox_exceptions
		where due_at > clock_timestamp()`).Scan(&n, &state, &attempts, &starts, &together); err != nil {
		t.Fatal(err)
	}
	if n != 1 || state != "WAITING" || attempts != 1 || starts != 0 || together != 0 {
		t.Errorf("%d exceptions, %s after %d attempts, %d starts, together %d; want one, WAITING after 1", n, state, attempts, starts, together)
	}
}

// LSE-01: a take-over that is halted between its look and its update, while the
// owner goes on. What the owner has settled meanwhile is not sent again.
func TestHaltedTakeOver(t *testing.T) {
	// inHand is an owner with two events in hand, and one who will look.
	inHand := func(t *testing.T) (s *pgstore.Store, db *sql.DB, owner, heir *person, c *store.Claim) {
		s, db = open(t, pgstore.Config{})
		insert(t, db, "a", "a1")
		insert(t, db, "b", "b1")
		owner = joined(t, named(t, dsnOf(s), "owner"), 64)
		c = owner.claim(store.ClaimParams{}, "a1", "b1")
		owner.commit(nil, c)
		return s, db, owner, joins(t, s, "heir"), c
	}
	// Somebody's row is in the way of the owner's commit, which has the lease's
	// row; the take-over has seen the row as it was and waits for it.
	const inTheWay = `insert into outbox_exceptions (destination, id, lane, event_key, event_id, event_type, state, created_at)
		select 'main', id, lane, 'b', event_id, event_type, 'WAITING', created_at from outbox_events where aggregate_id = 'b1'`

	t.Run("from one that only seemed dead", func(t *testing.T) {
		_, db, owner, heir, c := inHand(t)
		if _, err := db.Exec(`update outbox_leases set expires_at = clock_timestamp() - interval '1 second'`); err != nil {
			t.Fatal(err)
		}
		goOn := halt(t, db, inTheWay)
		settled := owner.settle(c)
		waits(t, db, "owner")
		taken := heir.takeOver()
		waits(t, db, "heir")
		goOn()
		settled()
		if l := taken(); len(l) != 0 {
			t.Fatalf("took over %+v from one that lives", l)
		}
		wantSettled(t, db)
		insert(t, db, "c", "c1")
		c = owner.claim(store.ClaimParams{}, "c1")
		owner.commit(nil, c)
	})
	t.Run("from one that settles before it is gone", func(t *testing.T) {
		_, db, owner, heir, c := inHand(t)
		pgstore.Kill(owner.Session)
		knowsDead(t, heir)
		goOn := halt(t, db, inTheWay)
		settled := owner.settle(c)
		waits(t, db, "owner")
		taken := heir.takeOver()
		waits(t, db, "heir")
		goOn()
		settled()
		l := taken()
		if len(l) != 1 || l[0].Lanes != store.AllLanes || l[0].Epoch <= owner.lease.Epoch {
			t.Fatalf("took over %+v of %+v", l, owner.lease)
		}
		wantSettled(t, db)
		insert(t, db, "c", "c1")
		heir.lease = l[0]
		heir.claim(store.ClaimParams{}, "c1")
	})
	t.Run("from one that settled and another who has it", func(t *testing.T) {
		s, db, owner, heir, c := inHand(t)
		third := joins(t, s, "third")
		pgstore.Kill(owner.Session)
		knowsDead(t, heir)
		knowsDead(t, third)
		// Both have looked, and queue up for the destination.
		goOn := halt(t, db, `select pg_advisory_xact_lock(hashtextextended('outrider destination main', 0))`)
		first := third.takeOver()
		waits(t, db, "third")
		second := heir.takeOver()
		waits(t, db, "heir")
		owner.settle(c)()
		goOn()
		l := first()
		if len(l) != 1 {
			t.Fatalf("took over %+v", l)
		}
		if l := second(); len(l) != 0 {
			t.Fatalf("took over %+v from one that has just taken it", l)
		}
		wantSettled(t, db)
		insert(t, db, "c", "c1")
		third.lease = l[0]
		c = third.claim(store.ClaimParams{}, "c1")
		third.commit(nil, c)
		third.commit([]store.Settlement{settled(c, store.Published)})
	})
}

// knowsDead has a relay see that another's connection has ended; its grace is
// over at once.
func knowsDead(t testing.TB, p *person) {
	t.Helper()
	until(t, "a relay to look dead", func() bool {
		if _, err := p.Renew(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		return pgstore.KnowsDead(p.Session)
	})
}
