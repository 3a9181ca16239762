package pgstore_test

import (
	"context"
	"database/sql"
	"testing"

	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/pgstore"
)

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
