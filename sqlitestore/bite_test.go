package sqlitestore_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
)

// These hold what no other test was found to miss when its line was taken out
// of the code: see docs/BITES.md.

// impatient is a connection to the file that does not wait for others.
func impatient(t *testing.T, db *testDB) *sql.DB {
	t.Helper()
	other, err := sql.Open("sqlite", db.path+"?_pragma=busy_timeout(0)")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = other.Close() })
	return other
}

const oneEvent = `insert into outbox_events (aggregate_type, aggregate_id, event_type, payload) values ('t', 'a', 'T', '{}')`

// A writer has the file from its beginning on: if it got it with its first write
// only, somebody who wrote in between would make it fail at once.
func TestWritersBeginAsWriters(t *testing.T) {
	db := makeDB(t, migrate.Stream)
	s := open(t, migrate.Stream, sqlitestore.Config{Path: db.path})
	other := impatient(t, db)
	err := sqlitestore.InsideWrite(t.Context(), s, func() error {
		if _, err := other.ExecContext(t.Context(), oneEvent); err == nil {
			t.Error("somebody wrote beside a writer that had begun")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.ExecContext(t.Context(), oneEvent); err != nil {
		t.Fatal(err)
	}
}

// A file that is busy is tried again for as long as was asked for.
func TestBusyIsTriedAgain(t *testing.T) {
	db := makeDB(t, migrate.Stream)
	x := db.begin(t)
	_, busy := impatient(t, db).ExecContext(t.Context(), oneEvent)
	x.Rollback(t)
	if busy == nil {
		t.Fatal("the file was not busy")
	}
	tries := 0
	err := sqlitestore.Retry(t.Context(), time.Hour, func() error {
		if tries++; tries < 5 {
			return busy
		}
		return nil
	})
	if err != nil || tries != 5 {
		t.Errorf("given up after %d tries: %v", tries, err)
	}
	tries = 0
	if err := sqlitestore.Retry(t.Context(), 0, func() error { tries++; return busy }); !errors.Is(err, busy) || tries > 2 {
		t.Errorf("no time was left, and it was tried %d times: %v", tries, err)
	}
}

// What was committed is on the disk: an outcome that a power cut takes back
// would be a repetition without a bound.
func TestCommitsAreSynchronous(t *testing.T) {
	db := makeDB(t, migrate.Stream)
	modes, err := sqlitestore.Synchronous(t.Context(), open(t, migrate.Stream, sqlitestore.Config{Path: db.path}))
	if err != nil {
		t.Fatal(err)
	}
	for name, mode := range modes {
		if mode < 2 {
			t.Errorf("the %s's commits are of mode %d, not FULL", name, mode)
		}
	}
}

// The id of a row that was deleted does not come again: whoever stands behind
// it would take the new one for done.
func TestIDsNeverComeAgain(t *testing.T) {
	db := makeDB(t, migrate.Stream)
	last := func() (id int64) {
		t.Helper()
		db.exec(t, oneEvent)
		if err := db.QueryRowContext(t.Context(), `select max(id) from outbox_events`).Scan(&id); err != nil {
			t.Fatal(err)
		}
		return id
	}
	before := last()
	db.exec(t, `delete from outbox_events`)
	if id := last(); id <= before {
		t.Errorf("id %d came again behind %d", id, before)
	}
}

// A lease whose owner is gone is fenced off as a whole when a part of it is
// taken over.
func TestTakeOverOfAPartFencesTheRest(t *testing.T) {
	db := makeDB(t, migrate.Stream)
	s := open(t, migrate.Stream, sqlitestore.Config{Path: db.path})
	if !s.Capabilities().LiveTakeOver {
		t.Skip("file locks do not work here")
	}
	db.exec(t, oneEvent)
	old := join(t, s, time.Hour)
	l := acquire(t, old)
	c := claim(t, old, l, 10)
	if err := old.Commit(t.Context(), store.CommitParams{Lease: l, Start: []*store.Claim{c}}); err != nil {
		t.Fatal(err)
	}
	sqlitestore.Kill(old)
	heir := join(t, s, time.Hour)
	for end := time.Now().Add(time.Minute); ; { // the grace passes
		got, err := heir.Acquire(t.Context(), store.AcquireParams{Destination: "main", Lanes: 8})
		if err != nil {
			t.Fatal(err)
		}
		if len(got) > 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatal("nothing can be taken over")
		}
	}
	err := old.Commit(t.Context(), store.CommitParams{Lease: l, Settle: []store.Settlement{{Claim: c, Outcomes: []store.Outcome{{State: store.Published}}}}})
	if !errors.Is(err, store.ErrFenced) {
		t.Errorf("settled under a lease of which lanes were taken over: %v, want ErrFenced", err)
	}
}

// A head that an operator has skipped does not come back by what the relay, which
// has not heard of it yet, writes of the key.
func TestFreedHeadStaysAway(t *testing.T) {
	ctx := context.Background()
	db := makeDB(t, migrate.Stream)
	s := open(t, migrate.Stream, sqlitestore.Config{Path: db.path})
	ses := join(t, s, time.Hour)
	l := acquire(t, ses)
	for range 2 {
		db.exec(t, oneEvent)
	}
	head, next := claim(t, ses, l, 1), claim(t, ses, l, 1)
	commit := func(c store.CommitParams) {
		t.Helper()
		c.Lease = l
		if err := ses.Commit(ctx, c); err != nil {
			t.Fatal(err)
		}
	}
	commit(store.CommitParams{Start: []*store.Claim{head, next}})
	commit(store.CommitParams{Settle: []store.Settlement{{Claim: head, Outcomes: []store.Outcome{{State: store.Failed, Attempts: 1}}}}})
	if n, err := s.(store.Operator).Skip(ctx, store.Target{ID: head.Records[0].Row}); n != 1 || err != nil {
		t.Fatalf("skipped %d, %v", n, err)
	}
	commit(store.CommitParams{Settle: []store.Settlement{{Claim: next, Outcomes: []store.Outcome{{State: store.Pending}}}}})
	var back sql.NullInt64
	if err := db.QueryRowContext(ctx, `select head from outbox_held_keys`).Scan(&back); err != nil {
		t.Fatal(err)
	}
	if back.Valid {
		t.Errorf("the key is held by row %d again, which was skipped", back.Int64)
	}
	c, err := ses.Claim(ctx, store.ClaimParams{Lease: l, Kind: store.Due, MaxRecords: 10, MaxBytes: 1 << 20})
	if err != nil || len(c.Records) != 1 || c.Records[0].Row != next.Records[0].Row {
		t.Errorf("behind the skipped head came %+v, %v", c, err)
	}
}
