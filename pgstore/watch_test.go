package pgstore_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/store"
)

// rung counts the notifications of a Watch that runs until the test ends.
func rung(t *testing.T, s *pgstore.Store) chan struct{} {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	out := make(chan struct{}, 1)
	go func() {
		defer close(done)
		_ = s.Watch(ctx, func() {
			select {
			case out <- struct{}{}:
			default:
			}
		})
	}()
	t.Cleanup(func() { cancel(); <-done })
	return out
}

func heard(t *testing.T, c chan struct{}, what string) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(time.Minute):
		t.Fatal("nothing was heard of " + what)
	}
}

const oneEvent = `insert into outbox_events (aggregate_type, aggregate_id, event_type, payload, event_key)
	values ('order', '1', 'Placed', '{}', null)`

func TestWatchHearsCommits(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	c := rung(t, s)
	for range 5 {
		if _, err := db.Exec(oneEvent); err != nil {
			t.Fatal(err)
		}
		heard(t, c, "a commit")
	}
}

// The flag is up while everybody sleeps, and a transaction that was open when
// it went up is heard though its trigger may have looked before.
func TestDoorbell(t *testing.T) {
	s, db := open(t, pgstore.Config{Doorbell: true, BusyPoll: 100 * time.Microsecond, IdlePoll: time.Millisecond})
	ctx := context.Background()
	for range 2 { // idempotent
		if err := migrate.Doorbell(ctx, db, true); err != nil {
			t.Fatal(err)
		}
	}
	c := rung(t, s)
	asleep := func() {
		t.Helper()
		until(t, "the flag to be raised", func() bool {
			var up bool
			if err := db.QueryRow(`select last_value = 2 from outbox_doorbell`).Scan(&up); err != nil {
				t.Fatal(err)
			}
			return up
		})
	}
	for range 3 {
		asleep()
		select {
		case <-c: // of the round before
		default:
		}
		if _, err := db.Exec(oneEvent); err != nil {
			t.Fatal(err)
		}
		heard(t, c, "a commit")
	}
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(oneEvent); err != nil {
		t.Fatal(err)
	}
	asleep()
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	heard(t, c, "a transaction that was open when the flag went up")
	if err := migrate.Doorbell(ctx, db, false); err != nil {
		t.Fatal(err)
	}
	_, err = s.Join(ctx, store.JoinParams{Relay: "r", TTL: time.Minute, Grace: time.Second})
	if err == nil || !strings.Contains(outrider.Hint(err), "migrate doorbell on") {
		t.Errorf("join without the trigger: %v, hint %q", err, outrider.Hint(err))
	}
}

// until waits for a condition.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatal("waited in vain for " + what)
		}
		<-time.After(time.Millisecond) // the pace of looking
	}
}
