package pgstore_test

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/store"
)

// sole is the only relay of an outbox, with all lanes of one destination.
type sole struct {
	t     testing.TB
	ctx   context.Context
	store *pgstore.Store
	db    *sql.DB
	ses   store.Session
	lease store.Lease
	p     store.ClaimParams
}

func newSole(t testing.TB, p store.ClaimParams) *sole {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	s, db := open(t, pgstore.Config{})
	p.MaxRecords, p.MaxBytes = max(p.MaxRecords, 2), 1<<20
	x := &sole{t: t, ctx: ctx, store: s, db: db, p: p}
	x.join()
	return x
}

func (x *sole) join() {
	x.t.Helper()
	var err error
	x.ses, err = x.store.Join(x.ctx, store.JoinParams{Relay: "r", TTL: time.Hour, Grace: 100 * time.Millisecond,
		Destinations: []store.Destination{{Name: "d", FromEarliest: true}}})
	if err != nil {
		x.t.Fatal(err)
	}
	x.lease = acquire(x.t, x.ses)
}

// anew gives all lanes back and takes them again.
func (x *sole) anew() {
	x.t.Helper()
	if _, err := x.ses.Release(x.ctx, x.lease, 0); err != nil {
		x.t.Fatal(err)
	}
	x.lease = acquire(x.t, x.ses)
}

func (x *sole) exec(sql string, args ...any) {
	x.t.Helper()
	if _, err := x.db.ExecContext(x.ctx, sql, args...); err != nil {
		x.t.Fatal(err)
	}
}

// add inserts an event per key, all in one transaction.
func (x *sole) add(keys ...string) {
	x.t.Helper()
	x.exec(`insert into outbox_events (aggregate_type, aggregate_id, event_type, payload)
		select 'a', k, 'T', '{}' from unnest($1::text[]) with ordinality as u(k, n) order by n`, keys)
}

func (x *sole) claim(kind store.Kind) *store.Claim {
	x.t.Helper()
	p := x.p
	p.Lease, p.Kind = x.lease, kind
	c, err := x.ses.Claim(x.ctx, p)
	if err != nil {
		x.t.Fatal(err)
	}
	return c
}

func (x *sole) commit(p store.CommitParams) {
	x.t.Helper()
	p.Lease = x.lease
	if err := x.ses.Commit(x.ctx, p); err != nil {
		x.t.Fatal(err)
	}
}

func (x *sole) settle(c *store.Claim, o store.Outcome) {
	x.t.Helper()
	x.commit(store.CommitParams{Settle: []store.Settlement{{Claim: c, Outcomes: slices.Repeat([]store.Outcome{o}, len(c.Records))}}})
}

// round claims of both kinds once and gives all of it one outcome.
func (x *sole) round(o store.Outcome) (keys []string) {
	x.t.Helper()
	for _, kind := range []store.Kind{store.Fresh, store.Due} {
		c := x.claim(kind)
		if len(c.Records) == 0 {
			continue
		}
		for i := range c.Records {
			keys = append(keys, c.Records[i].Key)
		}
		x.commit(store.CommitParams{Start: []*store.Claim{c}})
		x.settle(c, o)
	}
	return keys
}

// publish goes on until n more events have come, or nothing comes any more.
func (x *sole) publish(n int) (keys []string) {
	x.t.Helper()
	for idle := 0; len(keys) < n && idle < 50; idle++ {
		if got := x.round(store.Outcome{State: store.Published}); len(got) > 0 {
			keys, idle = append(keys, got...), 0
		}
	}
	return append(keys, x.round(store.Outcome{State: store.Published})...)
}

// want publishes what is left, which are these keys in some order.
func (x *sole) want(what string, keys ...string) {
	x.t.Helper()
	got := x.publish(len(keys))
	slices.Sort(got)
	slices.Sort(keys)
	if !slices.Equal(got, keys) {
		x.t.Fatalf("%s: %v came, want %v", what, got, keys)
	}
}

func (x *sole) operate(f func(context.Context, store.Target) (int, error), keys ...string) {
	x.t.Helper()
	for _, k := range keys {
		if n, err := f(x.ctx, store.Target{Destination: "d", Key: k}); n != 1 || err != nil {
			x.t.Fatalf("key %s: %d, %v", k, n, err)
		}
	}
}

// numbered are n keys.
func numbered(prefix string, n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprintf("%s%05d", prefix, i)
	}
	return keys
}

// TestManyHeldKeys has more keys held than a lease goes on with. When they are
// free again they go back to it, and it reads on. It never did, even after a
// restart: nothing took them out before the bound was looked at.
func TestManyHeldKeys(t *testing.T) {
	refused := store.Outcome{State: store.Failed, Attempts: 1, Class: "refused"}
	held := numbered("k", 5)
	t.Run("Failed", func(t *testing.T) {
		x := newSole(t, store.ClaimParams{MaxExceptions: 1, MaxRecords: 10})
		x.add(held...)
		x.round(refused)
		x.add("new")
		x.want("while all have failed")
		x.operate(x.store.Retry, held...)
		x.want("when they are retried", append(held, "new")...)
	})
	t.Run("Acquired", func(t *testing.T) {
		x := newSole(t, store.ClaimParams{MaxExceptions: 1, MaxRecords: 10})
		x.add(held...)
		x.round(refused)
		x.operate(x.store.Retry, held...)
		for n := 0; n < len(held); {
			c := x.claim(store.Due)
			x.commit(store.CommitParams{Start: []*store.Claim{c}})
			x.settle(c, store.Outcome{State: store.Published})
			n += len(c.Records)
		}
		x.anew()
		x.add("new")
		x.want("after the lease was acquired anew", "new")
	})
	t.Run("Bursts", func(t *testing.T) {
		x := newSole(t, store.ClaimParams{MaxExceptions: 10, MaxRecords: 200, KeyShare: 1})
		keys := numbered("k", 45)
		keys = append(keys, keys...)
		x.add(keys...)
		x.want("the bursts", keys...)
		x.add("new")
		x.want("behind the bursts", "new")
	})
	// Pages of one window: no key goes back before its end.
	t.Run("Window", func(t *testing.T) {
		x := newSole(t, store.ClaimParams{MaxExceptions: 1, MaxRecords: 4, KeyShare: 1})
		var keys []string
		for _, k := range numbered("k", 20) {
			keys = append(keys, k, k)
		}
		x.add(keys...)
		x.want("the window", keys...)
	})
}

// elsewhere is a key that is in none of these keys' lanes.
func elsewhere(keys ...string) string {
	for i := 0; ; i++ {
		k := fmt.Sprint("other-", i)
		if !slices.ContainsFunc(keys, func(o string) bool { return outrider.Lane(o) == outrider.Lane(k) }) {
			return k
		}
	}
}

// give gives away the lanes of keys.
func (x *sole) give(keys ...string) {
	x.t.Helper()
	keep := x.lease.Lanes
	for _, k := range keys {
		keep &^= 1 << outrider.Lane(k)
	}
	var err error
	if x.lease, err = x.ses.Release(x.ctx, x.lease, keep); err != nil {
		x.t.Fatal(err)
	}
}

// beside is another lease, of the lanes that were given away.
func (x *sole) beside() *sole {
	x.t.Helper()
	leases, err := x.ses.Acquire(x.ctx, store.AcquireParams{Destination: "d", Lanes: 64})
	if err != nil || len(leases) != 1 {
		x.t.Fatal(leases, err)
	}
	other := *x
	other.lease = leases[0]
	return &other
}

// TestWaitingAreCounted ends exceptions in ways that the lease's owner does not
// see as it happens: they must not count for ever, nor twice.
func TestWaitingAreCounted(t *testing.T) {
	later := store.Outcome{State: store.Waiting, Attempts: 1, Class: "refused", Due: time.Hour}
	keys := []string{"a", "b", "c"}
	three := store.ClaimParams{MaxExceptions: 3, MaxRecords: 10}
	t.Run("Skipped", func(t *testing.T) {
		x := newSole(t, three)
		x.add(keys...)
		x.round(later)
		for _, row := range []string{"1", "2", "3"} {
			if n, err := x.store.Skip(x.ctx, store.Target{ID: row}); n != 1 || err != nil {
				t.Fatal(n, err)
			}
		}
		x.add("new")
		x.want("behind the skipped ones", "new")
	})
	t.Run("Gone", func(t *testing.T) {
		x := newSole(t, three)
		x.add(keys...)
		x.round(later)
		x.exec(`delete from outbox_events`)
		x.exec(`update outbox_exceptions set due_at = clock_timestamp()`)
		x.claim(store.Fresh) // counts, and would not again for a while
		x.claim(store.Due)
		x.add("new")
		x.want("when their rows are gone", "new")
	})
	t.Run("GivenAway", func(t *testing.T) {
		x := newSole(t, three)
		x.add(keys...)
		x.round(later)
		x.claim(store.Fresh)
		x.give(keys...)
		next := elsewhere(keys...)
		x.add(next)
		x.want("when others have them", next)
	})
	t.Run("Retried", func(t *testing.T) {
		x := newSole(t, store.ClaimParams{MaxRecords: 20})
		failed := numbered("f", 10)
		x.add(failed...)
		x.round(store.Outcome{State: store.Failed, Attempts: 1, Class: "refused"})
		x.operate(x.store.Retry, failed...)
		x.want("the retried ones", failed...)
		x.p.MaxExceptions, x.p.MaxRecords = 5, 2
		x.add(numbered("w", 40)...)
		for range 20 {
			x.round(later)
		}
		var n int
		if err := x.db.QueryRow(`select count(*) from outbox_exceptions where state = 'WAITING'`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		if n < 5 || n > 6 {
			t.Errorf("%d wait, of 5 and a page of 2 at most", n)
		}
	})
}

// TestGivenAway gives lanes away while something of theirs is noted: what is in
// hand kept the lease from ever being joined with another, and a key that had
// gone back was deleted under its new owner, which had it held by then.
func TestGivenAway(t *testing.T) {
	later := store.Outcome{State: store.Waiting, Attempts: 1, Class: "refused"}
	published := store.Outcome{State: store.Published}
	t.Run("InHand", func(t *testing.T) {
		x := newSole(t, store.ClaimParams{MaxRecords: 10})
		x.add("a")
		x.settle(x.start(store.Fresh, 1), later)
		x.start(store.Due, 1)
		x.give("a")
		y := x.beside()
		y.want("at its new owner", "a")
		for range 50 {
			joined, ok, err := x.ses.(store.Merger).Merge(x.ctx, x.lease, y.lease)
			if err != nil {
				t.Fatal(err)
			}
			if ok {
				x.lease = joined
				x.add("a")
				x.want("when the leases are one again", "a")
				return
			}
			x.round(published)
			y.round(published)
		}
		t.Error("the leases are never joined")
	})
	t.Run("BackFromHold", func(t *testing.T) {
		x := newSole(t, store.ClaimParams{MaxRecords: 10})
		x.add("a")
		x.settle(x.start(store.Fresh, 1), later)
		x.settle(x.start(store.Due, 1), published)
		x.start(store.Due, 0)
		x.start(store.Fresh, 0) // the key goes back, its row goes with the next commit
		x.give("a")
		y := x.beside()
		y.add("a")
		for range 3 {
			y.round(later)
		}
		next := elsewhere("a")
		x.add(next)
		x.want("at its former owner", next)
		var n int
		if err := x.db.QueryRow(`select count(*) from outbox_held_keys where event_key = 'a'`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		if n != 1 {
			t.Error("the key's row is gone, and its head waits")
		}
	})
}

// start claims n records and starts them.
func (x *sole) start(kind store.Kind, n int) *store.Claim {
	x.t.Helper()
	c := x.claim(kind)
	if len(c.Records) != n {
		x.t.Fatalf("%d records came, want %d", len(c.Records), n)
	}
	if n > 0 {
		x.commit(store.CommitParams{Start: []*store.Claim{c}})
	}
	return c
}

// TestManyFreedKeys has an operator skip the heads of more keys than are looked
// at together. Those behind the first thousand waited for a commit about
// something else, and at rest there is none.
func TestManyFreedKeys(t *testing.T) {
	published := store.Outcome{State: store.Published}
	x := newSole(t, store.ClaimParams{MaxRecords: 5000})
	x.add(numbered("k", 2500)...)
	x.round(store.Outcome{State: store.Failed, Attempts: 1, Class: "refused"})
	last := numbered("k", 2500)[2499]
	x.add(last)
	x.want("while all are held")
	x.add("other")
	hand := x.start(store.Fresh, 1) // as long as it is, none goes back
	// As Skip does, for all at once.
	x.exec(`update outbox_exceptions set state = 'DISCARDED', due_at = null`)
	x.exec(`update outbox_held_keys set at = head, head = null, freed = true`)
	var got []string
	for range 50 {
		if c := x.claim(store.Due); len(c.Records) > 0 {
			got = append(got, c.Records[0].Key)
			x.settle(c, published)
			break
		}
	}
	if !slices.Equal(got, []string{last}) {
		t.Fatalf("when all are free: %v came, want %s", got, last)
	}
	x.settle(hand, published)
	for range 10 {
		x.claim(store.Due)
		x.claim(store.Fresh)
	}
	var n int
	if err := x.db.QueryRow(`select count(*) from outbox_held_keys`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	if n >= 2500 {
		t.Errorf("%d rows of free keys are left at rest", n)
	}
}

// TestSkipBesideDueClaim has an operator skip a head between its being read and
// its being marked, and the process die. The mark wrote the head back: the key
// was held by an event that nobody had to deal with any more.
func TestSkipBesideDueClaim(t *testing.T) {
	x := newSole(t, store.ClaimParams{MaxRecords: 10})
	x.add("a", "b", "a")
	x.settle(x.start(store.Fresh, 3), store.Outcome{State: store.Waiting, Attempts: 1, Class: "refused"})
	tx, err := x.db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.Exec(`select from outbox_leases for update`); err != nil {
		t.Fatal(err)
	}
	p := x.p
	p.Lease, p.Kind = x.lease, store.Due
	done := make(chan error, 1)
	go func() {
		c, err := x.ses.Claim(x.ctx, p)
		if err == nil && slices.ContainsFunc(c.Records, func(r outrider.Record) bool { return r.Row == "1" }) {
			err = fmt.Errorf("the skipped event is claimed")
		}
		done <- err
	}()
	for waiting := 0; waiting == 0; {
		if err := x.db.QueryRowContext(x.ctx, `select count(*) from pg_stat_activity
			where datname = current_database() and wait_event_type = 'Lock'`).Scan(&waiting); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := x.store.Skip(x.ctx, store.Target{ID: "1"}); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	pgstore.Kill(x.ses)
	x.exec(`update outbox_leases set expires_at = clock_timestamp() - interval '1 hour'`)
	x.join()
	x.want("after the death", "a", "b")
}
