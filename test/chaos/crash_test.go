//go:build linux

package chaos_test

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/pgstore"
)

// TestCrash has two relays carry from PostgreSQL to Kafka what sixteen writers
// commit, and kills them, one after the other, while the traffic goes on; the
// broker and the database are killed too. The long form, 30 kills in 50,000
// events, is make crash.
func TestCrash(t *testing.T) {
	p := size(plan{kills: 4, events: 4000}, plan{kills: 30, events: 50_000})
	seed := crashSeed(t)
	srv := ownServers(t)
	db, err := sql.Open("pgx", srv.postgres)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	db.SetMaxOpenConns(24)
	db.SetMaxIdleConns(24)
	w := newWriters(t, db, outrider.Postgres, 16, 60, seed)
	topic := makeTopic(t, srv.kafka)
	seen := followTopic(t, srv.kafka, topic)
	sup := supervise(t, relaySpec{Postgres: srv.postgres, Kafka: srv.kafka, Topic: topic,
		TTL: 5 * time.Second, Grace: time.Second}, 2)

	c := &campaign{t: t, r: rand.New(rand.NewPCG(seed, 99)), writers: w, seen: seen, sup: sup, plan: p}
	c.during(max(1, p.kills/3), func() { srv.crash("kafka") })
	c.during(max(2, p.kills*2/3), func() { srv.crash("postgres") })
	c.run()
	nothingFailed(t, srv.postgres)
	noExceptions(t, db)
	c.judge(readTopic(t, srv.kafka, topic))
}

func crashSeed(t testing.TB) uint64 {
	t.Helper()
	seed := rand.Uint64N(1e6)
	if text := os.Getenv("OUTRIDER_CRASH_SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("OUTRIDER_CRASH_SEED: %v", err)
		}
	}
	t.Logf("OUTRIDER_CRASH_SEED=%d", seed)
	return seed
}

// campaign is a series of kills under traffic.
type campaign struct {
	t       testing.TB
	r       *rand.Rand
	writers *writers
	seen    *tail
	sup     *supervisor
	plan    plan
	kinds   []point        // that are to come, in turns
	others  map[int]func() // by stage: what else is killed
	deaths  map[point]int  // kills by where they happened
	began   time.Time
}

// during has something done in the middle of a stage.
func (c *campaign) during(stage int, f func()) {
	if c.others == nil {
		c.others = map[int]func(){}
	}
	c.others[stage] = f
}

// run has a part of the events written in each stage, and kills a relay in the
// middle of it; the next stage begins at once.
func (c *campaign) run() {
	c.deaths, c.began = map[point]int{}, time.Now()
	chunk := c.plan.events / (c.plan.kills + 1)
	for stage := range c.plan.kills {
		if c.quiet() {
			c.seen.rest()
		}
		c.writers.allow(chunk * (stage + 1))
		before := c.seen.arrived()
		if f := c.others[stage]; f != nil {
			await(c.t, patience, "some of the stage's events", func() bool { return c.seen.arrived() > before+chunk/10 || c.quiet() })
			c.writers.allow(chunk * (stage + 2)) // so that there is traffic all the while
			f()
			c.logf("a server was killed and is up again; %d have arrived", c.seen.arrived())
		}
		c.kill(before, chunk)
		if c.t.Failed() {
			break // what there is is judged
		}
	}
	c.writers.allow(c.plan.events)
	if !awaited(patience, func() bool { _, all := c.writers.written(); return all }) {
		c.t.Fatalf("the writers do not get on: %v", c.writers)
	}
	c.writers.close()
	want := 0
	var err error
	if !awaited(patience, func() (ok bool) {
		want, err = c.writers.count()
		return err == nil && c.seen.arrived() >= want
	}) {
		c.t.Errorf("%d of %d events have arrived (%v)", c.seen.arrived(), want, err)
	}
	c.logf("%d events have arrived", c.seen.arrived())
	if c.t.Failed() {
		c.sup.logs()
	}
	c.sup.stop()
}

// quiet reports whether all that was allowed has been written and has arrived.
func (c *campaign) quiet() bool {
	n, all := c.writers.written()
	return all && c.seen.arrived() >= n
}

// kill picks a relay and a moment. If the moment does not come, the relay is
// killed when all is quiet. One that ends by itself, as it may while the
// database is away, does not count: its successor is the one then.
func (c *campaign) kill(before, chunk int) {
	if len(c.kinds) == 0 {
		for _, i := range c.r.Perm(len(points)) {
			c.kinds = append(c.kinds, points[i])
		}
	}
	at := c.kinds[0]
	c.kinds = c.kinds[1:]
	slot, nth, mark := c.r.IntN(len(c.sup.slots)), 1+c.r.IntN(3), before+c.r.IntN(chunk)
	for killed := false; !killed; {
		victim := c.sup.get(slot)
		if at != pointRandom {
			victim.arm(syscall.SIGKILL, at, nth)
		}
		now := func() bool { return c.quiet() || at == pointRandom && c.seen.arrived() >= mark }
		if !awaited(patience, func() bool { return victim.hasEnded() || now() }) {
			n, _ := c.writers.written()
			c.t.Errorf("nothing moves: %d events committed, %d have arrived", n, c.seen.arrived())
		}
		if !victim.hasEnded() {
			if at != pointRandom {
				at = "quiet"
			}
			victim.kill()
			await(c.t, patience, "the end of a relay that was killed", victim.hasEnded)
		}
		killed = victim.killed
	}
	c.deaths[at]++
	c.logf("a relay was killed, %s", at)
}

// logf tells what happened when.
func (c *campaign) logf(format string, args ...any) {
	c.t.Helper()
	c.t.Logf("%8v: %s", time.Since(c.began).Round(time.Millisecond), fmt.Sprintf(format, args...))
}

// judge prints the figures and fails the test for whatever is wrong with what
// arrived.
func (c *campaign) judge(got []delivery) {
	c.t.Helper()
	want := c.writers.truth(c.t)
	c.writers.mu.Lock()
	rolled := c.writers.rolled
	c.writers.mu.Unlock()
	f := audit(want, rolled, got)
	s := c.sup
	s.mu.Lock()
	defer s.mu.Unlock()
	c.t.Logf("%v; %d relay processes, %d kills (%v), %d ended before they had joined",
		c.writers, s.starts, s.kills, c.deaths, s.unjoined)
	c.t.Logf("%d committed, %d delivered, %d duplicates; at most %d by what was in hand at the kills (at most %d of %d in a relay); longest stall %v",
		len(want), f.delivered, f.duplicates, s.bound, s.most, maxRecordsInFlight, c.seen.longest().Round(time.Millisecond))
	if len(f.faults) > 0 {
		c.t.Errorf("%v", f)
	}
	if int64(f.duplicates) > s.bound {
		c.t.Errorf("%d duplicates, more than the %d that had been in hand", f.duplicates, s.bound)
	}
	if s.most > 2*maxRecordsInFlight {
		c.t.Errorf("%d events in hand, more than twice the limit of %d", s.most, maxRecordsInFlight)
	}
	if s.kills != c.plan.kills {
		c.t.Errorf("%d kills, want %d", s.kills, c.plan.kills)
	}
	if len(want) < c.plan.events {
		c.t.Errorf("%d events committed, want %d", len(want), c.plan.events)
	}
}

// nothingFailed looks into the store of relays that have ended.
func nothingFailed(t testing.TB, dsn string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s, err := pgstore.Open(ctx, pgstore.Config{DSN: dsn})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close() // the test ends
	status, err := s.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range status.Destinations {
		if n := d.Failed.N + d.BlockedKeys.N + d.Waiting.N + d.Publishing.N + d.Pending.N; n != 0 {
			t.Errorf("the destination is not as after an orderly end: %+v", d)
		}
	}
	if len(status.Destinations) != 1 {
		t.Errorf("%d destinations, want 1", len(status.Destinations))
	}
}

// noExceptions checks that no event failed, waits or is in hand, and that no
// key is held back. A key that has caught up may be on its list still.
func noExceptions(t testing.TB, db *sql.DB) {
	t.Helper()
	for _, query := range []string{
		`select count(*) from outbox_exceptions`,
		`select count(*) from outbox_held_keys where head is not null or in_hand > 0`,
	} {
		var n int
		if err := db.QueryRow(query).Scan(&n); err != nil {
			t.Fatal(err)
		}
		if n != 0 {
			t.Errorf("%d rows are left: %s", n, query)
		}
	}
}
