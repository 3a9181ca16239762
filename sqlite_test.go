package outrider_test

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	_ "modernc.org/sqlite"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
)

var lite = outrider.Config{Dialect: outrider.SQLite}

func TestSQLiteRoundTrip(t *testing.T) { testRoundTrip(t, openSQLite(t, migrate.Stream), lite) }

func TestSQLiteDelay(t *testing.T) {
	testDelay(t, openSQLite(t, migrate.Stream), lite, "select cast(unixepoch('subsec') * 1000 as integer) * 1000")
}

func TestSQLiteAllOrNothing(t *testing.T) {
	testAllOrNothing(t, openSQLite(t, migrate.Stream), lite,
		"create trigger refuse before insert on outbox_events when new.event_type = 'bad' begin select raise(abort, 'refused'); end", 6553)
}

func TestSQLiteBasics(t *testing.T) { testBasics(t, openSQLite(t, migrate.Stream), lite) }

// A statement for another database is a syntax error, which says nothing of why.
func TestSQLiteWrongDialect(t *testing.T) {
	o := mustNew(t, outrider.Config{Dialect: outrider.Postgres})
	err := o.Add(t.Context(), openSQLite(t, migrate.Stream), placed())
	if want := "the statement is written for Config.Dialect postgres: set the one of the database"; !strings.HasPrefix(outrider.Hint(err), want) {
		t.Errorf("hint %q of %v", outrider.Hint(err), err)
	}
}

// saying is a driver whose every statement ends with the same error.
type saying string

func (s saying) ExecContext(context.Context, string, ...any) (sql.Result, error) {
	return nil, errors.New(string(s))
}

// Drivers say it in words of their own, and other things that are no such hint.
func TestWrongDialectByOtherDrivers(t *testing.T) {
	o := mustNew(t, outrider.Config{Dialect: outrider.Postgres})
	for text, want := range map[string]bool{
		"Error 1064 (42000): You have an error in your SQL syntax; check the manual": true,
		`near "::": syntax error`:                        true,
		`unrecognized token: ":"`:                        true,
		"not enough args to execute query: want 5 got 0": true,
		"sql: expected 0 arguments, got 5":               true,
		"write tcp 127.0.0.1:5432: invalid argument":     false,
		"disk is full":                                   false,
	} {
		hint := outrider.Hint(o.Add(t.Context(), saying(text), placed()))
		if got := strings.Contains(hint, "Config.Dialect"); got != want {
			t.Errorf("%q: hint %q", text, hint)
		}
	}
}

// The row set takes the same INSERT.
func TestSQLiteRows(t *testing.T) {
	db := openSQLite(t, migrate.Rows)
	e := placed()
	e.Key, e.Headers, e.ContentType, e.Delay = "k", map[string]string{"x": "y"}, "text/plain", 1
	if err := mustNew(t, outrider.Config{Dialect: outrider.SQLite, Table: "main.outbox_rows"}).Add(t.Context(), db, placed(), e); err != nil {
		t.Fatal(err)
	}
	var n int
	if err := db.QueryRowContext(t.Context(), "select count(*) from outbox_rows where state = 'PENDING' and lane is null").Scan(&n); err != nil || n != 2 {
		t.Errorf("%d rows, %v", n, err)
	}
}

func openSQLite(t testing.TB, set migrate.Set) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", filepath.Join(t.TempDir(), "db")+"?_pragma=journal_mode(wal)&_pragma=synchronous(off)&_pragma=busy_timeout(10000)")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	if _, err := migrate.Up(t.Context(), db, migrate.Options{Dialect: outrider.SQLite, Set: set}); err != nil {
		t.Fatal(err)
	}
	return db
}
