package pgstore_test

import (
	"context"
	"database/sql"
	"net/url"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/faults"
	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/store"
	"github.com/outrider-dev/outrider/storetest"
)

func TestStore(t *testing.T) {
	storetest.Run(t, storetest.Harness{Binary: true, Short: 500 * time.Millisecond, Open: func(t testing.TB) *storetest.Outbox {
		t.Helper()
		dsn, err := url.Parse(testdb.Postgres(t))
		if err != nil {
			t.Fatal(err)
		}
		proxy := faults.NewProxy(t, dsn.Host)
		dsn.Host = proxy.Addr()
		s, db := open(t, pgstore.Config{DSN: dsn.String()})
		outbox, err := outrider.New(outrider.Config{Dialect: outrider.Postgres})
		if err != nil {
			t.Fatal(err)
		}
		return &storetest.Outbox{
			Store: s,
			Begin: func(t testing.TB) storetest.Tx {
				t.Helper()
				tx, err := db.Begin()
				if err != nil {
					t.Fatal(err)
				}
				return transaction{tx, outbox}
			},
			Kill: func(_ testing.TB, ses store.Session) { pgstore.Kill(ses) },
			SetNextID: func(t testing.TB, id int64) {
				t.Helper()
				if _, err := db.Exec(`select setval('outbox_events_id_seq', $1, false)`, id); err != nil {
					t.Fatal(err)
				}
			},
			LoseAnswer: func(testing.TB, store.Session) {
				proxy.LoseAnswer(func(b []byte) bool { return b[0] == 'B' || b[0] == 'P' })
			},
		}
	}})
}

// transaction is an application's.
type transaction struct {
	*sql.Tx
	outbox *outrider.Outbox
}

func (x transaction) Add(t testing.TB, events ...outrider.Event) {
	t.Helper()
	if err := x.outbox.Add(context.Background(), x.Tx, events...); err != nil {
		t.Fatal(err)
	}
}

func (x transaction) Commit(t testing.TB) {
	t.Helper()
	if err := x.Tx.Commit(); err != nil {
		t.Fatal(err)
	}
}

func (x transaction) Rollback(t testing.TB) {
	t.Helper()
	if err := x.Tx.Rollback(); err != nil {
		t.Fatal(err)
	}
}

// open makes an empty outbox in a database of its own.
func open(t testing.TB, cfg pgstore.Config) (*pgstore.Store, *sql.DB) {
	t.Helper()
	if cfg.DSN == "" {
		cfg.DSN = testdb.Postgres(t)
	}
	db, err := sql.Open("pgx", cfg.DSN)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	if _, err := migrate.Up(context.Background(), db, migrate.Options{Dialect: outrider.Postgres}); err != nil {
		t.Fatal(err)
	}
	s, err := pgstore.Open(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s, db
}
