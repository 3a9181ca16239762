package sqlitestore_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
)

// What can be wrong with a file is said, with what to do about it.
func TestOpenErrors(t *testing.T) {
	dir := t.TempDir()
	text := filepath.Join(dir, "text")
	if err := os.WriteFile(text, []byte(strings.Repeat("not a database. ", 100)), 0o600); err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(dir, "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ path, want, hint string }{
		{"", "Config.Path is empty", ""},
		{":memory:", ":memory:", "memstore"},
		{filepath.Join(dir, "none"), "there is no file", "outrider migrate up"},
		{filepath.Join(dir, "none", "db"), "there is no file", "directory does not exist"},
		{dir, "is not a file", "path of a SQLite database"},
		{text, "not a database", "check the path"},
		{empty, "has no table", "outrider migrate up"},
		{makeDB(t, migrate.Rows).path, "has no table outbox_events", "outrider migrate up"},
	} {
		s, err := sqlitestore.OpenStream(context.Background(), sqlitestore.Config{Path: c.path})
		if err == nil {
			_ = s.Close()
		}
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(outrider.Hint(err), c.hint) {
			t.Errorf("%q: %v, hint %q", c.path, err, outrider.Hint(err))
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "none")); err == nil {
		t.Error("a missing file was made")
	}
}

// A path may have any characters.
func TestPath(t *testing.T) {
	db := makeDB(t, migrate.Stream)
	path := filepath.Join(t.TempDir(), "a b?c%41#d&e=f")
	db.exec(t, "vacuum into ?", path)
	open(t, migrate.Stream, sqlitestore.Config{Path: path})
}

// A file that is full says so, loses nothing, and goes on when there is room.
func TestFull(t *testing.T) {
	db := makeDB(t, migrate.Stream)
	s := open(t, migrate.Stream, sqlitestore.Config{Path: db.path})
	ses := join(t, s, time.Hour)
	l := acquire(t, ses)
	x := db.begin(t)
	for range 2000 {
		x.Add(t, outrider.Event{AggregateType: "t", AggregateID: "a", Type: "T"})
	}
	x.Commit(t)
	restore := sqlitestore.LimitPages(t, s, 20)
	c := claim(t, ses, l, 2000)
	p := store.CommitParams{Lease: l, Start: []*store.Claim{c}}
	if err := ses.Commit(context.Background(), p); err != nil {
		t.Fatal(err)
	}
	p = store.CommitParams{Lease: l, Settle: []store.Settlement{{Claim: c, Outcomes: make([]store.Outcome, len(c.Records))}}}
	for i := range p.Settle[0].Outcomes {
		p.Settle[0].Outcomes[i] = store.Outcome{State: store.Failed, Free: true, Message: strings.Repeat("x", 1000)}
	}
	err := ses.Commit(context.Background(), p)
	if err == nil || !strings.Contains(outrider.Hint(err), "disk is full") {
		t.Fatalf("commit to a full file: %v, hint %q", err, outrider.Hint(err))
	}
	restore()
	if err := ses.Commit(context.Background(), p); err != nil {
		t.Fatalf("with room again: %v", err)
	}
	if page, err := s.(store.Inspector).List(context.Background(), store.ListParams{State: store.Failed, Limit: 1000}); err != nil || len(page.Entries) != 1000 {
		t.Errorf("listed %d, %v", len(page.Entries), err)
	}
}

// While another process writes, a commit waits; when that takes too long it
// fails with a hint, and is done when it is repeated. No attempt is counted.
func TestBusy(t *testing.T) {
	for _, set := range []migrate.Set{migrate.Stream, migrate.Rows} {
		db := makeDB(t, set)
		s := open(t, set, sqlitestore.Config{Path: db.path, BusyTimeout: time.Millisecond})
		ses := join(t, s, time.Hour)
		l := acquire(t, ses)
		x := db.begin(t)
		x.Add(t, outrider.Event{AggregateType: "t", AggregateID: "a", Type: "T"})
		x.Commit(t)
		c := claim(t, ses, l, 10)
		other := db.begin(t)
		p := store.CommitParams{Lease: l, Start: []*store.Claim{c}}
		err := ses.Commit(context.Background(), p)
		if err == nil || errors.Is(err, store.ErrFenced) || !strings.Contains(outrider.Hint(err), "keep transactions short") {
			t.Errorf("%s: commit beside a writer: %v, hint %q", set, err, outrider.Hint(err))
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := ses.Commit(ctx, p); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: commit with a context that has ended: %v", set, err)
		}
		other.Rollback(t)
		if err := ses.Commit(context.Background(), p); err != nil {
			t.Errorf("%s: repeated: %v", set, err)
		}
		if d, err := s.(store.Inspector).Show(context.Background(), c.Records[0].ID); err != nil || d[0].Entries[0].Attempts != 0 || d[0].Entries[0].State != store.InHand {
			t.Errorf("%s: shown as %+v, %v", set, d, err)
		}
	}
}

// Ids that were set back, and a file that was replaced, are found.
func TestSource(t *testing.T) {
	db := makeDB(t, migrate.Stream)
	s := open(t, migrate.Stream, sqlitestore.Config{Path: db.path}).(*sqlitestore.Stream)
	db.fill(t, 10)
	if err := s.Maintain(context.Background()); err != nil {
		t.Fatal(err)
	}
	db.exec(t, "delete from outbox_events")
	db.exec(t, "delete from sqlite_sequence where name = 'outbox_events'")
	want := func(err error, text string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), text) || outrider.Hint(err) == "" {
			t.Errorf("got %v, hint %q", err, outrider.Hint(err))
		}
	}
	want(s.Maintain(context.Background()), "set back, from 10")
	_, err := s.Join(context.Background(), store.JoinParams{TTL: time.Hour, Grace: time.Hour})
	want(err, "set back, from 10")
	db.exec(t, "insert into sqlite_sequence (name, seq) values ('outbox_events', 10)")
	want(s.Maintain(context.Background()), "set back, from 10") // until somebody says that it is put right
	db.exec(t, "update outbox_source set seen_id = 10")
	if err := s.Maintain(context.Background()); err != nil {
		t.Error(err)
	}
	other := filepath.Join(t.TempDir(), "other")
	db.exec(t, "vacuum into ?", other)
	if err := os.Rename(other, db.path); err != nil {
		t.Fatal(err)
	}
	want(s.Maintain(context.Background()), "was replaced")
	if st, err := s.Status(context.Background()); err != nil || len(st.Warnings) != 1 {
		t.Errorf("status: %+v, %v", st, err)
	}
}

// A backup that is put into the open file leaves nothing in it that tells.
func TestSourceRestoredWhileOpen(t *testing.T) {
	db := makeDB(t, migrate.Stream)
	s := open(t, migrate.Stream, sqlitestore.Config{Path: db.path}).(*sqlitestore.Stream)
	db.fill(t, 10)
	maintain := func() error { return s.Maintain(context.Background()) }
	if err := maintain(); err != nil {
		t.Fatal(err)
	}
	for _, q := range []string{
		"delete from outbox_events where id > 5",
		"update sqlite_sequence set seq = 5 where name = 'outbox_events'",
		"update outbox_source set seen_id = 5",
	} {
		db.exec(t, q)
	}
	for range 2 { // it is said until somebody does something
		if err := maintain(); err == nil || !strings.Contains(err.Error(), "set back, from 10") || outrider.Hint(err) == "" {
			t.Errorf("got %v, hint %q", err, outrider.Hint(err))
		}
	}
	db.fill(t, 5)
	if err := maintain(); err == nil {
		t.Error("all is well when the ids have come as far again")
	}
	db.exec(t, "update outbox_source set seen_id = 10")
	if err := maintain(); err != nil {
		t.Errorf("when it was put right: %v", err)
	}
}

// Locks of relays leave no files behind, those of the dead neither.
func TestLockFiles(t *testing.T) {
	db := makeDB(t, migrate.Stream)
	s := open(t, migrate.Stream, sqlitestore.Config{Path: db.path})
	if !s.Capabilities().LiveTakeOver {
		t.Skip("file locks do not work here")
	}
	one := join(t, s, time.Hour)
	acquire(t, one)
	sqlitestore.Kill(one)
	two := join(t, s, time.Hour)
	acquire(t, two)
	if left := lockFiles(t, db); len(left) != 1 {
		t.Errorf("lock files beside the living one: %v", left)
	}
	if err := two.Leave(context.Background()); err != nil {
		t.Fatal(err)
	}
	if left := lockFiles(t, db); len(left) != 0 {
		t.Errorf("lock files at the end: %v", left)
	}
}

func lockFiles(t *testing.T, db *testDB) []string {
	t.Helper()
	left, err := filepath.Glob(db.path + "-outrider-*.lock")
	if err != nil {
		t.Fatal(err)
	}
	return left
}

func join(t testing.TB, s store.Store, ttl time.Duration) store.Session {
	t.Helper()
	ses, err := s.Join(context.Background(), store.JoinParams{Relay: "r", TTL: ttl, Grace: time.Nanosecond,
		Destinations: []store.Destination{{Name: "main", FromEarliest: true}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ses.Leave(context.Background()) })
	return ses
}

// acquire takes all lanes; from the dead it takes a second look.
func acquire(t testing.TB, ses store.Session) store.Lease {
	t.Helper()
	for range 2 {
		leases, err := ses.Acquire(context.Background(), store.AcquireParams{Destination: "main", Lanes: 64})
		if err != nil {
			t.Fatal(err)
		}
		if len(leases) == 1 {
			return leases[0]
		}
	}
	t.Fatal("no lease")
	return store.Lease{}
}

func claim(t testing.TB, ses store.Session, l store.Lease, n int) *store.Claim {
	t.Helper()
	c, err := ses.Claim(context.Background(), store.ClaimParams{Lease: l, MaxRecords: n, MaxBytes: 1 << 20})
	if err != nil || len(c.Records) == 0 {
		t.Fatalf("claim: %+v, %v", c, err)
	}
	return c
}
