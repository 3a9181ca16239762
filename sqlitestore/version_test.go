package sqlitestore_test

import (
	"context"
	"database/sql/driver"
	"os"
	"os/exec"
	"strings"
	"testing"

	"modernc.org/sqlite"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
)

func TestVersionCheck(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"3.7.17", "SQLite 3.7.17 is too old"},
		{"3.42.0", "too old"},
		{"3.42.999", "too old"},
		{"2.99.99", "too old"},
		{"3.43", ""},
		{"3.43.0", ""},
		{"3.43.2-debian", ""},
		{"3.51.0 2025-11-04", ""},
		{"3.100.0", ""},
		{"4.0.0", ""},
		{"", "cannot be understood"},
		{"3", "cannot be understood"},
		{"3beta", "cannot be understood"},
		{"v3.50.1", "cannot be understood"},
		{"libsql 3.50.1", "cannot be understood"},
		{"99999999999999999999.1.1", "cannot be understood"},
	} {
		err := sqlitestore.CheckVersion(c.text)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%q is refused: %v", c.text, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%q: %v, want %q", c.text, err, c.want)
		case err != nil && !strings.Contains(outrider.Hint(err), "3.43 or newer"):
			t.Errorf("%q: hint %q", c.text, outrider.Hint(err))
		}
	}
}

// A SQLite that says that it is old is refused at start, in a process of its
// own: what a function is to SQLite it is to the whole process.
func TestOldSQLiteIsRefused(t *testing.T) {
	for _, set := range []migrate.Set{migrate.Stream, migrate.Rows} {
		cmd := exec.Command(os.Args[0], string(set), makeDB(t, set).path)
		cmd.Env = append(os.Environ(), roleEnv+"=old")
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), "SQLite 3.42.0 is too old") {
			t.Errorf("%s: %v, %s", set, err, out)
		}
	}
}

// openOld opens a file with a SQLite that is too old.
func openOld(ctx context.Context, set migrate.Set, path string) error {
	sqlite.MustRegisterScalarFunction("sqlite_version", 0, func(*sqlite.FunctionContext, []driver.Value) (driver.Value, error) {
		return "3.42.0", nil
	})
	var s store.Store
	var err error
	if set == migrate.Rows {
		s, err = sqlitestore.OpenRows(ctx, sqlitestore.Config{Path: path})
	} else {
		s, err = sqlitestore.OpenStream(ctx, sqlitestore.Config{Path: path})
	}
	if err != nil {
		return err
	}
	return s.Close()
}
