package pgstore

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider/store"
)

const (
	detachAll = `alter table outbox_events detach partition outbox_events_p0`
	attachAll = `alter table outbox_events attach partition outbox_events_p0 for values from (minvalue) to (maxvalue)`
)

func execPool(t *testing.T, s *Store, queries ...string) {
	t.Helper()
	for _, q := range queries {
		if _, err := s.pool.Exec(context.Background(), q); err != nil {
			t.Fatalf("%v\n%s", err, q)
		}
	}
}

// A partition comes back behind a reading that lacked it, and another lease of
// the same store finds that all is there, before the first looks: what it knows
// by then is no proof of what was there when it read.
func TestWhatAnotherReadingFoundProvesNothing(t *testing.T) {
	ctx := context.Background()
	s := openStore(t)
	if err := s.checkPartitions(ctx); err != nil {
		t.Fatal(err)
	}
	execPool(t, s, `insert into outbox_events (aggregate_type, aggregate_id, event_type, payload) values ('a', 'k', 'T', '{}')`)
	gate, err := s.pool.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer gate.Release()
	if _, err := gate.Exec(ctx, `select pg_advisory_lock(hashtextextended('partition race', 0))`); err != nil {
		t.Fatal(err)
	}
	execPool(t, s, detachAll)
	rows := -1
	got := make(chan error, 1)
	go func() {
		var b pgx.Batch
		b.Queue(`select count(*) from outbox_events`).QueryRow(func(r pgx.Row) error { return r.Scan(&rows) })
		b.Queue(`select pg_advisory_xact_lock(hashtextextended('partition race', 0))`)
		got <- s.readEvents(ctx, &b)
	}()
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		var waits bool
		if err := s.pool.QueryRow(ctx, `select exists (select from pg_locks where locktype = 'advisory' and not granted
			and database = (select oid from pg_database where datname = current_database()))`).Scan(&waits); err != nil {
			t.Fatal(err)
		}
		if waits {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the reading does not wait")
		}
	}
	execPool(t, s, attachAll)
	if err := s.readEvents(ctx, &pgx.Batch{}); !errors.Is(err, errSetChanged) {
		t.Fatalf("the other reading: %v", err)
	}
	if _, err := gate.Exec(ctx, `select pg_advisory_unlock(hashtextextended('partition race', 0))`); err != nil {
		t.Fatal(err)
	}
	if err := <-got; !errors.Is(err, errSetChanged) || rows != 0 {
		t.Errorf("a reading that found %d rows of 1: %v, want that it is done again", rows, err)
	}
}

// Where a window begins and where it ends is asked by itself: of a table that
// lacks a partition the answer would leave rows out, though the rows are read
// when it is back.
func TestPartitionMissingForTheBordersOfAWindow(t *testing.T) {
	ctx := context.Background()
	s := openStore(t)
	j, err := s.Join(ctx, store.JoinParams{Relay: "a", TTL: time.Minute, Grace: time.Second, Destinations: []store.Destination{{Name: "d", FromEarliest: true}}})
	if err != nil {
		t.Fatal(err)
	}
	defer Kill(j)
	leases, err := j.Acquire(ctx, store.AcquireParams{Destination: "d", Lanes: store.AllLanes.Len()})
	if err != nil || len(leases) != 1 {
		t.Fatalf("acquire: %v, %v", leases, err)
	}
	l := j.(*session).lease(leases[0])
	pos := l.read
	pos.hi = 100
	execPool(t, s, detachAll)
	for what, err := range map[string]error{"first": errOf(l.lowest(ctx, pos)), "highest": errOf(l.highest(ctx))} {
		if err == nil || !strings.Contains(err.Error(), "no partition for the ids from 1 on") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func errOf[T any](_ T, err error) error { return err }
