package pgstore_test

import (
	"context"
	"database/sql"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/pgstore"
)

// What a notification says of who rang.
const byWriter, byRelay = "", "relay"

// listening counts the notifications of a database from now on. so says how many
// had come before it was asked.
func listening(t testing.TB, db *sql.DB, dsn, by string) (so func() int64) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(ctx, `listen outrider_events`); err != nil {
		t.Fatal(err)
	}
	var n, asked atomic.Int64
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			m, err := conn.WaitForNotification(ctx)
			if err != nil {
				_ = conn.Close(context.WithoutCancel(ctx))
				return
			}
			switch m.Payload {
			case "asked":
				asked.Add(1)
			case by:
				n.Add(1)
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	return func() int64 {
		t.Helper()
		before := asked.Load()
		if _, err := db.Exec(`notify outrider_events, 'asked'`); err != nil {
			t.Fatal(err)
		}
		until(t, "the notification behind all others", func() bool { return asked.Load() > before })
		return n.Load()
	}
}

// flagged waits for the doorbell's flag.
func flagged(t testing.TB, db *sql.DB, up bool) {
	t.Helper()
	until(t, "the flag", func() bool {
		var is bool
		if err := db.QueryRow(`select last_value = 2 from outbox_doorbell`).Scan(&is); err != nil {
			t.Fatal(err)
		}
		return is == up
	})
}

// PGO-04: 200 producers with tiny transactions, some with more than a
// notification could carry, the doorbell on and off, and a listener that sits in
// a transaction, so that nothing leaves the queue. Whoever rings first is nearly
// the only one who notifies, since notifying is what serialises commits.
func TestDoorbellOfManyProducers(t *testing.T) {
	for name, on := range map[string]bool{"on": true, "off": false} {
		t.Run(name, func(t *testing.T) { testProducers(t, on) })
	}
}

// producersOn is how many a server has room for beside those of other tests.
func producersOn(t *testing.T, db *sql.DB) int {
	t.Helper()
	var room int
	if err := db.QueryRow(`select current_setting('max_connections')::int`).Scan(&room); err != nil {
		t.Fatal(err)
	}
	if room < 300 {
		t.Logf("80 producers, not 200: the server takes %d connections (scripts/servers sets up one of 400)", room)
		return 80
	}
	return 200
}

func testProducers(t *testing.T, on bool) {
	t.Helper()
	const each = 25
	ctx := context.Background()
	s, db := open(t, pgstore.Config{Doorbell: on})
	if on {
		if err := migrate.Doorbell(ctx, db, true); err != nil {
			t.Fatal(err)
		}
	}
	producers := producersOn(t, db)
	sits, err := pgx.Connect(ctx, dsnOf(s))
	if err != nil {
		t.Fatal(err)
	}
	defer sits.Close(ctx) // the database goes with the test
	for _, q := range []string{`listen outrider_events`, `begin`, `select 1`} {
		if _, err := sits.Exec(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	notified := listening(t, db, dsnOf(s), byWriter)
	if on {
		rung(t, s)
		flagged(t, db, true)
	}
	if _, err := db.Exec(oneEvent); err != nil {
		t.Fatal(err)
	}
	if on {
		flagged(t, db, false)
	}

	db.SetMaxOpenConns(producers)
	large := strings.Replace(oneEvent, `'{}'`, `convert_to(repeat('x', 9000), 'UTF8')`, 1)
	began := time.Now()
	var wg sync.WaitGroup
	for range producers {
		wg.Go(func() {
			for i := range each {
				event := oneEvent
				if i%5 == 0 {
					event = large
				}
				if _, err := db.Exec(event); err != nil {
					t.Errorf("a producer: %v", err)
					return
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d producers made %.0f commits a second", producers, float64(producers*each)/time.Since(began).Seconds())
	var events int
	if err := db.QueryRow(`select count(*) from outbox_events`).Scan(&events); err != nil {
		t.Fatal(err)
	}
	if events != 1+producers*each {
		t.Errorf("%d events, want %d", events, 1+producers*each)
	}
	// The relay may fall asleep in between, and a few ring while it wakes.
	switch got := notified(); {
	case on && (got < 1 || got > int64(producers*each)/20):
		t.Errorf("%d notifications of %d commits", got, events)
	case !on && got > 0:
		t.Errorf("%d notifications without the doorbell", got)
	}
}

// A relay that sees an event which may never be committed lowers the flag, and
// rings the others, as the event's writer will not if it rolls back.
func TestDoorbellOfWhoLooksWakesOthers(t *testing.T) {
	ctx := context.Background()
	s, db := open(t, pgstore.Config{Doorbell: true})
	if err := migrate.Doorbell(ctx, db, true); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(oneEvent); err != nil { // a sequence does not show its first value being taken
		t.Fatal(err)
	}
	tx, err := db.Begin() // keeps the relay looking, beside the flag
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback() // the database goes with the test
	if _, err := tx.Exec(`select pg_current_xact_id()`); err != nil {
		t.Fatal(err)
	}
	notified := listening(t, db, dsnOf(s), byRelay)
	rung(t, s)
	flagged(t, db, true)
	if _, err := tx.Exec(oneEvent); err != nil {
		t.Fatal(err)
	}
	flagged(t, db, false)
	if got := notified(); got != 1 {
		t.Errorf("%d notifications, want the relay's", got)
	}
}

// A queue of notifications that others have filled fails nobody's commit: the
// doorbell is silent, and the relay finds the event by itself.
func TestDoorbellLeavesAFullQueueAlone(t *testing.T) {
	ctx := context.Background()
	s, db := open(t, pgstore.Config{Doorbell: true})
	// In this search path the server's own function comes last.
	owner, err := sql.Open("pgx", dsnOf(s)+"&search_path=public,pg_catalog")
	if err != nil {
		t.Fatal(err)
	}
	defer owner.Close() // the database goes with the test
	for _, q := range []string{
		`create table usage (of_queue float8 not null)`, `insert into usage values (0.9)`,
		`create function public.pg_notification_queue_usage() returns float8 language sql as 'select of_queue from public.usage'`,
	} {
		if _, err := owner.Exec(q); err != nil {
			t.Fatal(err)
		}
	}
	if err := migrate.Doorbell(ctx, owner, true); err != nil {
		t.Fatal(err)
	}
	notified := listening(t, db, dsnOf(s), byWriter)
	c := rung(t, s)
	flagged(t, db, true)
	drained(c)
	for range 3 {
		if _, err := db.Exec(oneEvent); err != nil {
			t.Fatal(err)
		}
	}
	heard(t, c, "a commit that could not ring")
	if got := notified(); got != 0 {
		t.Errorf("%d notifications into a queue that is nearly full", got)
	}
	if _, err := db.Exec(`update usage set of_queue = 0.1`); err != nil {
		t.Fatal(err)
	}
	until(t, "a notification now that there is room", func() bool {
		flagged(t, db, true) // it may just be going down
		if _, err := db.Exec(oneEvent); err != nil {
			t.Fatal(err)
		}
		return notified() > 0
	})
}

// drained forgets what was heard before.
func drained(c chan struct{}) {
	select {
	case <-c:
	default:
	}
}
