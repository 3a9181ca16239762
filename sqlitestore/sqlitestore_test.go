package sqlitestore_test

import (
	"context"
	"database/sql"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
	"github.com/outrider-dev/outrider/storetest"
)

func TestStream(t *testing.T) { run(t, migrate.Stream) }
func TestRows(t *testing.T)   { run(t, migrate.Rows) }

func run(t *testing.T, set migrate.Set) {
	t.Helper()
	storetest.Run(t, storetest.Harness{
		OneWriter: true, Binary: true,
		Open: func(t testing.TB) *storetest.Outbox {
			db := makeDB(t, set)
			return &storetest.Outbox{
				Store:      open(t, set, sqlitestore.Config{Path: db.path}),
				Begin:      db.begin,
				Kill:       func(_ testing.TB, s store.Session) { sqlitestore.Kill(s) },
				LoseAnswer: func(_ testing.TB, s store.Session) { sqlitestore.LoseAnswer(s) },
				SetNextID:  db.setNextID,
			}
		},
	})
}

// testDB is a file with an outbox, as an application uses it.
type testDB struct {
	*sql.DB
	path  string
	set   migrate.Set
	clock *clock // by which delays count; nil: SQLite's
}

func makeDB(t testing.TB, set migrate.Set) *testDB {
	t.Helper()
	return makeDBIn(t, set, t.TempDir())
}

func makeDBIn(t testing.TB, set migrate.Set, dir string) *testDB {
	t.Helper()
	path := filepath.Join(dir, "db")
	db, err := sql.Open("sqlite", path+"?_pragma=busy_timeout(60000)&_pragma=journal_mode(wal)&_pragma=synchronous(off)&_txlock=immediate")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	if _, err := migrate.Up(context.Background(), db, migrate.Options{Dialect: outrider.SQLite, Set: set}); err != nil {
		t.Fatal(err)
	}
	return &testDB{db, path, set, nil}
}

func (db *testDB) table() string {
	if db.set == migrate.Rows {
		return "outbox_rows"
	}
	return "outbox_events"
}

func (db *testDB) outbox(t testing.TB) *outrider.Outbox {
	t.Helper()
	o, err := outrider.New(outrider.Config{Dialect: outrider.SQLite, Table: db.table(), MaxPayload: -1, MaxKey: 2048})
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// testTx is an application's transaction.
type testTx struct {
	*sql.Tx
	outbox *outrider.Outbox
	clock  *clock
}

func (db *testDB) begin(t testing.TB) storetest.Tx {
	t.Helper()
	o := db.outbox(t)
	tx, err := db.BeginTx(context.Background(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return testTx{tx, o, db.clock}
}

func (x testTx) Add(t testing.TB, events ...outrider.Event) {
	t.Helper()
	events = slices.Clone(events)
	for i := range events {
		if e := &events[i]; x.clock != nil && e.Delay > 0 {
			e.AvailableAt, e.Delay = x.clock.Now().Add(e.Delay), 0
		}
	}
	if err := x.outbox.Add(context.Background(), x.Tx, events...); err != nil {
		t.Fatal(err)
	}
}

func (x testTx) Commit(t testing.TB) {
	t.Helper()
	if err := x.Tx.Commit(); err != nil {
		t.Fatal(err)
	}
}

func (x testTx) Rollback(t testing.TB) {
	t.Helper()
	if err := x.Tx.Rollback(); err != nil {
		t.Fatal(err)
	}
}

func (db *testDB) setNextID(t testing.TB, id int64) {
	t.Helper()
	db.exec(t, "insert into sqlite_sequence (name, seq) select ?1, 0 where not exists (select 1 from sqlite_sequence where name = ?1)", db.table())
	db.exec(t, "update sqlite_sequence set seq = ? where name = ?", id-1, db.table())
}

func (db *testDB) exec(t testing.TB, query string, args ...any) {
	t.Helper()
	if _, err := db.ExecContext(context.Background(), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// A file that has been closed by all is whole by itself: who copies it then need
// not know of its WAL.
func TestCloseLeavesTheFileAlone(t *testing.T) {
	for _, set := range []migrate.Set{migrate.Stream, migrate.Rows} {
		t.Run(string(set), func(t *testing.T) {
			db := makeDB(t, set)
			if err := db.Close(); err != nil {
				t.Fatal(err)
			}
			var s store.Store
			var err error
			if cfg := (sqlitestore.Config{Path: db.path}); set == migrate.Rows {
				s, err = sqlitestore.OpenRows(t.Context(), cfg)
			} else {
				s, err = sqlitestore.OpenStream(t.Context(), cfg)
			}
			if err != nil {
				t.Fatal(err)
			}
			ses := join(t, s, time.Hour)
			acquire(t, ses)
			if _, err := ses.Renew(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			if err := ses.Leave(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			if left, err := filepath.Glob(db.path + "?*"); err != nil || len(left) > 0 {
				t.Errorf("left beside the file: %v, %v", left, err)
			}
		})
	}
}

// What was begun on a connection that is given up is in nobody's way.
func TestDroppedWriterLeavesTheFile(t *testing.T) {
	db := makeDB(t, migrate.Stream)
	s := open(t, migrate.Stream, sqlitestore.Config{Path: db.path})
	if err := sqlitestore.DropWriter(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if _, err := impatient(t, db).ExecContext(t.Context(), oneEvent); err != nil {
		t.Error(err)
	}
	acquire(t, join(t, s, time.Hour))
}
