//go:build linux

package chaos_test

import (
	"context"
	"database/sql"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/testdb"
)

// TestPause halts a relay by SIGSTOP in the middle of a batch for longer than
// its lease lives, so that the other one takes over while the halted one still
// believes that it holds its lanes, and lets it go on then. What it sends late
// can only repeat a run, and what it settles late changes nothing.
func TestPause(t *testing.T) {
	for _, at := range []point{pointStarted, pointAcked, pointSettling} {
		t.Run(string(at), func(t *testing.T) { pause(t, at) })
	}
}

func pause(t *testing.T, at point) { //nolint:thelper // the body of a test: its own lines tell more
	broker := testdb.Kafka(t)
	dsn := testdb.Postgres(t)
	db, err := sql.Open("pgx", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	w := newWriters(t, db, outrider.Postgres, 8, 20, 1)
	topic := makeTopic(t, broker)
	seen := followTopic(t, broker, topic)
	sup := supervise(t, relaySpec{Postgres: dsn, Kafka: broker, Topic: topic,
		TTL: 2 * time.Second, Grace: time.Second}, 2)
	c := &campaign{t: t, writers: w, seen: seen, sup: sup, plan: plan{events: 1500}, began: time.Now()}

	await(t, patience, "both relays to have lanes", func() bool { return owners(t, db) == 2 })
	seen.rest()
	w.allow(500)
	await(t, patience, "the first events", c.quiet)
	halted := sup.get(first(t, db))
	halted.arm(syscall.SIGSTOP, at, 2)
	// Written bit by bit, or all of it might be in one batch of the other.
	for n := 550; !halted.stopped(); n += 50 {
		w.allow(n)
		await(t, patience, "the halt", func() bool { return halted.stopped() || c.quiet() })
	}
	c.logf("a relay is halted, with %d in hand", halted.gauges.InHand.Load())
	await(t, patience, "the other relay to have all lanes", func() bool { return owners(t, db) == 1 })
	await(t, patience, "all events", c.quiet)
	c.logf("the other one has taken over, and delivered the rest")
	before := positions(t, db)

	if err := halted.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	await(t, patience, "the relay to find that its lease is gone", func() bool { return halted.gauges.Fenced.Load() > 0 })
	await(t, patience, "it to have lanes again", func() bool { return owners(t, db) == 2 })
	c.logf("it goes on; %d commits with settlements were refused", halted.gauges.Stale.Load())
	notBack(t, before, positions(t, db))

	w.allow(1500)
	await(t, patience, "the last events", c.quiet)
	w.close()
	sup.stop()
	nothingFailed(t, dsn)
	c.judge(readTopic(t, broker, topic))
}

// first is the slot of the relay that has the first lease. It is the other one
// whose row goes when the two are joined.
func first(t testing.TB, db *sql.DB) int {
	t.Helper()
	var owner string
	if err := db.QueryRow(`select owner from outbox_leases order by lease limit 1`).Scan(&owner); err != nil {
		t.Fatal(err)
	}
	var slot, start int
	if _, err := fmt.Sscanf(owner, "relay-%d-%d", &slot, &start); err != nil {
		t.Fatalf("%s: %v", owner, err)
	}
	return slot
}

// owners is how many relays have lanes.
func owners(t testing.TB, db *sql.DB) (n int) {
	t.Helper()
	if err := db.QueryRow(`select count(distinct owner) from outbox_leases`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// positions is where each lane stands: the page and the highest id done.
func positions(t testing.TB, db *sql.DB) (at [outrider.Lanes][2]int64) {
	t.Helper()
	rows, err := db.QueryContext(context.Background(), `
		select lane, page, hi from outbox_leases, generate_series(0, 63) lane where (lanes >> lane) & 1 = 1`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var lane, page, hi int64
		if err := rows.Scan(&lane, &page, &hi); err != nil {
			t.Fatal(err)
		}
		at[lane] = [2]int64{page, hi}
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return at
}

// notBack checks that no lane stands behind where it stood.
func notBack(t testing.TB, before, after [outrider.Lanes][2]int64) {
	t.Helper()
	for lane := range before {
		for i, what := range []string{"page", "id"} {
			if after[lane][i] < before[lane][i] {
				t.Error(fmt.Sprintf("lane %d went back from %s", lane, what), before[lane][i], "to", after[lane][i])
			}
		}
	}
}
