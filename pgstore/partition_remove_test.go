package pgstore_test

import (
	"context"
	"strings"
	"testing"

	"github.com/outrider-dev/outrider/pgstore"
)

// What comes between the statement's two looks keeps the partition: an event of
// a transaction that was open, and a destination.
func TestRemovingAPartitionSeesWhatComesMeanwhile(t *testing.T) {
	_, db := twoPartitions(t, pgstore.Config{}, 30)
	remove := strings.Replace(removeSQL(t), "'2s'", "'60s'", 1)
	execAll(t, db, `insert into outbox_leases (destination, lanes, base) values ('main', -1, pg_current_snapshot())`)
	for _, c := range []struct{ held, beside, want string }{
		{`lock table outbox_events in row exclusive mode`,
			`insert into outbox_leases (destination, lanes, base) values ('late', -1, '3:3:')`, "late has just been added"},
		{`insert into outbox_events (id, aggregate_type, aggregate_id, event_type, payload) values (700, 'a', 'k1', 'T', '{}')`,
			`delete from outbox_leases where destination = 'late'`, "main has not read all of it"},
	} {
		tx, err := db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback() // after the commit it is a no-op
		if _, err := tx.Exec(c.held); err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(c.beside, "delete") {
			execAll(t, db, c.beside)
		}
		answer := make(chan error, 1)
		go func() {
			_, err := db.Exec(remove)
			answer <- err
		}()
		untilTrue(t, db, "the statement to wait for the lock", `select exists (select from pg_locks where relation = 'outbox_events'::regclass and not granted)`)
		if strings.HasPrefix(c.beside, "insert") {
			execAll(t, db, c.beside)
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		if err := <-answer; err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("it answers %v, want %q", err, c.want)
		}
	}
	if got := partitions(t, db); len(got) != 2 {
		t.Errorf("partitions are %q", got)
	}
}

// It takes the oldest alone, and tells the relays or does nothing. Where all of
// it has one snapshot it would not see what came before the lock.
func TestRemovingAPartitionHasItsConditions(t *testing.T) {
	s, db := twoPartitions(t, pgstore.Config{}, 0)
	execAll(t, db, `select setval('outbox_events_id_seq', 3000)`)
	if err := s.Maintain(context.Background()); err != nil {
		t.Fatal(err)
	}
	db.SetMaxOpenConns(1) // a transaction that fails is rolled back on it
	remove := removeSQL(t)
	second := strings.Replace(remove, "'outbox_events_p0'", "'outbox_events_p1600'", 1)
	// A partition is made ahead of need: the last but one is written to.
	if _, err := db.Exec(second); err == nil || !strings.Contains(err.Error(), "outbox_events_p1600 is the one that is written to") {
		t.Errorf("of the one that is written to it says %v", err)
	}
	execAll(t, db, `select setval('outbox_events_id_seq', 10000)`)
	for want, run := range map[string]string{
		"outbox_events_p1600 is not the oldest partition": second,
		"it has to run in READ COMMITTED":                 "begin isolation level repeatable read; " + remove + " commit",
		"no relay has ever joined":                        "begin; delete from outbox_source; " + remove + " commit",
	} {
		if _, err := db.Exec(run); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("it answers %v, want %q", err, want)
		}
		execAll(t, db, `rollback`)
	}
	if got := partitions(t, db); len(got) != 3 {
		t.Fatalf("partitions are %q", got)
	}
	execAll(t, db, remove, second)
	if got := partitions(t, db); len(got) != 1 {
		t.Errorf("partitions are %q", got)
	}
}
