package pgstore_test

import (
	"context"
	"database/sql"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/relay"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// named opens the store of a database once more, its connections under a name.
func named(t testing.TB, dsn, name string) *pgstore.Store {
	t.Helper()
	s, err := pgstore.Open(context.Background(), pgstore.Config{DSN: dsn + "&application_name=" + name, MaxConns: 2})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// hanging is a sink that does not answer for messages of keys that begin with
// "slow" until it is let go; stuck counts them.
func hanging() (sk *memsink.Sink, stuck *atomic.Int64, release func()) {
	gate := make(chan struct{})
	stuck = &atomic.Int64{}
	sk = memsink.New(memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
		if strings.HasPrefix(m.Key, "slow") {
			stuck.Add(1)
			<-gate
		}
		return memsink.Deliver
	}})
	return sk, stuck, sync.OnceFunc(func() { close(gate) })
}

// patient has sends that hang cut by nothing but the test, and settled without
// soon.
func patient() []relay.Destination {
	return []relay.Destination{{PublishTimeout: time.Hour, SlowAfter: 50 * time.Millisecond}}
}

// opened are the transactions and locks that the sessions of an application have
// at this moment, but for the locks that say that a relay lives.
func opened(t testing.TB, db *sql.DB, name string) map[string]bool {
	t.Helper()
	rows, err := db.Query(`
		select concat('transaction of ', pid, ' since ', xact_start, ', ', state, ': ', left(query, 60)) from pg_stat_activity
		where datname = current_database() and application_name = $1 and (xact_start is not null or state like 'idle in%')
		union all
		select concat(l.mode, ' on ', coalesce(l.relation::regclass::text, l.locktype), ' of ', l.virtualtransaction)
		from pg_locks l join pg_stat_activity a using (pid)
		where a.datname = current_database() and a.application_name = $1
		  and l.locktype <> 'advisory' or not l.granted and l.locktype = 'advisory'`, name)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	out := map[string]bool{}
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			t.Fatal(err)
		}
		out[s] = true
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

// nothingStays holds that whatever is open now ends by itself: the relay goes on
// asking and renewing, so that a look may find something, but never the same.
func nothingStays(t testing.TB, db *sql.DB, name string) {
	t.Helper()
	for range 5 {
		left := opened(t, db, name)
		deadline := time.Now().Add(30 * time.Second)
		for len(left) > 0 {
			now := opened(t, db, name)
			for what := range left {
				if !now[what] {
					delete(left, what)
				}
			}
			if time.Now().After(deadline) {
				for what := range left {
					t.Errorf("stays while the sink works: %s", what)
				}
				t.FailNow()
			}
		}
	}
}

// ORD-07: while sends hang for longer than the grace, no transaction of the
// relay's is open and nothing is locked, the rest goes on, and nobody who wants
// the same leases waits.
func TestNothingIsOpenWhileSending(t *testing.T) {
	admin, db := open(t, pgstore.Config{})
	s := named(t, dsnOf(admin), "hanging")
	sk, stuck, release := hanging()
	r, stop := relaying(t, s, sk, relay.Config{LeaseTTL: time.Minute, Grace: 400 * time.Millisecond, Destinations: patient()})
	t.Cleanup(release)
	insert(t, db, "slow-1", "1")
	insert(t, db, "slow-2", "2")
	until(t, "two sends to hang", func() bool { return stuck.Load() == 2 })
	var others []string
	for i := range 50 {
		others = append(others, fmt.Sprintf("other-%d", i))
		insert(t, db, others[i], others[i])
	}
	arrive(t, sk, len(others), "beside sends that hang")

	var began string
	if err := db.QueryRow(`select clock_timestamp() + interval '1 second'`).Scan(&began); err != nil {
		t.Fatal(err)
	}
	until(t, "sends to hang for longer than the grace", func() bool {
		nothingStays(t, db, "hanging")
		var over bool
		if err := db.QueryRow(`select clock_timestamp() > $1`, began).Scan(&over); err != nil {
			t.Fatal(err)
		}
		return over
	})
	notBlocked(t, admin, db)
	if h := r.Health().Destinations[0]; h.InFlight != 2 || h.Lanes != 64 {
		t.Errorf("while two sends hang: %+v", h)
	}
	release()
	arrive(t, sk, len(others)+2, "of the sends that hung")
	stop()
	if n := sk.Len(); n != len(others)+2 {
		t.Errorf("%d arrived, want %d", n, len(others)+2)
	}
}

// notBlocked does what others do with leases that somebody holds.
func notBlocked(t testing.TB, s *pgstore.Store, db *sql.DB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	ses, err := s.Join(ctx, store.JoinParams{Relay: "other", TTL: time.Minute, Grace: time.Second,
		Destinations: []store.Destination{{Name: "main"}}})
	if err != nil {
		t.Fatal(err)
	}
	defer ses.Leave(ctx) //nolint:errcheck // the database goes with the test
	leases, err := ses.Acquire(ctx, store.AcquireParams{Destination: "main", Lanes: 64})
	if err != nil || len(leases) > 0 {
		t.Errorf("acquired %+v, %v; all is held", leases, err)
	}
	if _, err := s.Status(ctx); err != nil {
		t.Error(err)
	}
	// A renewal may have the row for an instant.
	until(t, "a lock on the leases' rows", func() bool {
		_, err := db.ExecContext(ctx, `select from outbox_leases for update nowait`)
		return err == nil
	})
}

// LSE-09: with every connection of the pool taken, sends that hang and all
// processors busy, leases are renewed beyond the time at which they would have
// expired, and stay where they are.
func TestRenewalNeedsNoPool(t *testing.T) {
	admin, db := open(t, pgstore.Config{})
	a, b := named(t, dsnOf(admin), "busy"), named(t, dsnOf(admin), "idle")
	sk, stuck, release := hanging()
	var lost atomic.Int64
	cfg := relay.Config{Name: "busy", LeaseTTL: 6 * time.Second, Grace: 2 * time.Second, Destinations: patient(),
		Hooks: relay.Hooks{LeaseLost: func(string) { lost.Add(1) }, Fenced: func(string) { lost.Add(1) }}}
	_, stopA := relaying(t, a, sk, cfg)
	held := func(name string) (lanes int, leases string, sure bool) {
		t.Helper()
		if err := db.QueryRow(`select coalesce(sum(length(replace((lanes::bit(64))::text, '0', ''))), 0),
				coalesce(string_agg(lease || ' ' || lanes || ' ' || epoch, ', ' order by lease), ''),
				coalesce(bool_and(expires_at > clock_timestamp()), false)
			from outbox_leases where owner = $1`, name).Scan(&lanes, &leases, &sure); err != nil {
			t.Fatal(err)
		}
		return lanes, leases, sure
	}
	lanes := func(name string) int { n, _, _ := held(name); return n }
	until(t, "all lanes to be held", func() bool { return lanes("busy") == 64 })
	cfg.Name, cfg.Destinations = "idle", patient()
	_, stopB := relaying(t, b, sk, cfg)
	until(t, "lanes to be shared", func() bool { return lanes("busy") == 32 && lanes("idle") == 32 })
	t.Cleanup(release)

	const slow = 20
	for i := range slow {
		insert(t, db, fmt.Sprintf("slow-%d", i), fmt.Sprint(i))
	}
	until(t, "sends to hang", func() bool { return stuck.Load() == slow })
	free := pgstore.Occupy(t, a)
	t.Cleanup(free)
	idle := burn()
	t.Cleanup(idle)
	_, before, _ := held("busy")
	var expiry time.Time
	if err := db.QueryRow(`select max(expires_at) from outbox_leases`).Scan(&expiry); err != nil {
		t.Fatal(err)
	}
	until(t, "leases to be older than they live", func() bool {
		var over bool
		if err := db.QueryRow(`select clock_timestamp() > $1`, expiry).Scan(&over); err != nil {
			t.Fatal(err)
		}
		if _, now, sure := held("busy"); now != before || !sure {
			t.Fatalf("leases held by a relay that is busy: %q, all valid: %v; before: %q", now, sure, before)
		}
		return over
	})
	idle()
	free()
	release()
	arrive(t, sk, slow, "of the sends that hung")
	stopA()
	stopB()
	if n := lost.Load(); n != 0 || sk.Len() != slow {
		t.Errorf("%d leases lost, %d arrived; want none, %d", n, sk.Len(), slow)
	}
}

// burn keeps all processors busy until stop.
func burn() (stop func()) {
	var done atomic.Bool
	var wg sync.WaitGroup
	for range 2 * runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for n := 0; !done.Load(); n++ {
				_ = fmt.Sprint(n)
			}
		})
	}
	return sync.OnceFunc(func() { done.Store(true); wg.Wait() })
}
