package model

import (
	"context"
	"database/sql"
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

// onSQLite makes subjects in one file, emptied between runs, each with a store
// and ids of its own: what has no key goes by its id. Its clock is the real one,
// by which events are written, and what the model has added to it. Locks of side
// files tell of a death only when a process ends, so here the expiry of leases
// does.
func onSQLite(t *testing.T, set migrate.Set, table string, open func(sqlitestore.Config) (store.Store, error)) maker {
	t.Helper()
	path := filepath.Join(t.TempDir(), "db")
	db, err := sql.Open("sqlite", path+"?_pragma=busy_timeout(60000)&_pragma=journal_mode(wal)&_pragma=synchronous(off)&_txlock=immediate")
	if err != nil {
		t.Fatal(err)
	}
	var s store.Store
	t.Cleanup(func() {
		if s != nil {
			_ = s.Close()
		}
		_ = db.Close()
	})
	if _, err := migrate.Up(t.Context(), db, migrate.Options{Dialect: outrider.SQLite, Set: set}); err != nil {
		t.Fatal(err)
	}
	added := &clock{}
	cfg := sqlitestore.Config{Path: path, Now: func() time.Time { return time.Now().Add(added.Now().Sub(time.Time{})) }}
	tables := tablesOf(t, db)
	return func(t testing.TB) *subject {
		if s != nil {
			_ = s.Close()
		}
		for _, name := range append(tables, "sqlite_sequence") {
			if _, err := db.ExecContext(context.Background(), `delete from `+name); err != nil {
				t.Fatal(err)
			}
		}
		added.now = time.Time{}
		var err error
		if s, err = open(cfg); err != nil {
			t.Fatal(err)
		}
		return &subject{Store: s, oneWriter: true, lazy: ttl/3 + time.Minute, advance: added.advance,
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

// tablesOf lists the outbox's tables.
func tablesOf(t *testing.T, db *sql.DB) []string {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), `select name from sqlite_master where type = 'table' and name like 'outbox_%'
		and name not like '%migrations%' and name not like '%schema%'`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var out []string
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			t.Fatal(err)
		}
		out = append(out, name)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}
