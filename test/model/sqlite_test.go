package model

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
	"github.com/outrider-dev/outrider/storetest"
)

func TestSQLite(t *testing.T) {
	t.Run("Stream", func(t *testing.T) {
		walk(t, "12", onSQLite(t, migrate.Stream, "outbox_events", func(c sqlitestore.Config) (store.Store, error) {
			return sqlitestore.OpenStream(context.Background(), c)
		}))
	})
	t.Run("Rows", func(t *testing.T) {
		walk(t, "12", onSQLite(t, migrate.Rows, "outbox_rows", func(c sqlitestore.Config) (store.Store, error) {
			return sqlitestore.OpenRows(context.Background(), c)
		}))
	})
}

// onSQLite makes subjects in files of their own: what has no key goes by its id,
// so ids begin anew, too. The clock is the real one, by which events are written,
// and what the model has added to it. Locks of side files tell of a death only
// when a process ends, so here the expiry of leases does.
func onSQLite(t *testing.T, set migrate.Set, table string, open func(sqlitestore.Config) (store.Store, error)) maker {
	t.Helper()
	dir := t.TempDir()
	empty := emptyDB(t, filepath.Join(dir, "empty"), set)
	var last []io.Closer
	done := func() {
		for _, c := range last {
			_ = c.Close()
		}
		last = nil
	}
	t.Cleanup(done)
	n := 0
	return func(t testing.TB) *subject {
		done()
		_ = os.Remove(filepath.Join(dir, fmt.Sprint(n)))
		n++
		path := filepath.Join(dir, fmt.Sprint(n))
		if err := os.WriteFile(path, empty, 0o600); err != nil {
			t.Fatal(err)
		}
		db := openDB(t, path)
		last = append(last, db)
		added := &clock{}
		s, err := open(sqlitestore.Config{Path: path, Now: func() time.Time { return time.Now().Add(added.Now().Sub(time.Time{})) }})
		if err != nil {
			t.Fatal(err)
		}
		last = append(last, s)
		var losing loser
		return &subject{Store: s, oneWriter: true, lazy: ttl/3 + time.Minute, advance: added.advance, loseAny: true,
			lose: func(s store.Session) { losing = s.(loser); losing.LoseAnswer(true) },
			calm: func() {
				if losing != nil {
					losing.LoseAnswer(false)
				}
			},
			begin: func(t testing.TB) storetest.Tx {
				t.Helper()
				tx, err := db.BeginTx(context.Background(), nil)
				if err != nil {
					t.Fatal(err)
				}
				return sqlTx{tx, outrider.Config{Dialect: outrider.SQLite, Table: table}}
			}}
	}
}

// loser is a session of a store that can lose answers.
type loser interface{ LoseAnswer(lose bool) }

func openDB(t testing.TB, path string) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", path+"?_pragma=busy_timeout(60000)&_pragma=journal_mode(wal)&_pragma=synchronous(off)&_txlock=immediate")
	if err != nil {
		t.Fatal(err)
	}
	return db
}

// emptyDB is an outbox without events.
func emptyDB(t *testing.T, path string, set migrate.Set) []byte {
	t.Helper()
	db := openDB(t, path)
	if _, err := migrate.Up(t.Context(), db, migrate.Options{Dialect: outrider.SQLite, Set: set}); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
