package migrate_test

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	_ "modernc.org/sqlite"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
)

var (
	lite     = migrate.Options{Dialect: outrider.SQLite}
	liteRows = migrate.Options{Dialect: outrider.SQLite, Set: migrate.Rows}
)

func TestSQLiteUpAndDownLeaveNothing(t *testing.T) {
	db := openSQLite(t, filepath.Join(t.TempDir(), "db"))
	for _, o := range []migrate.Options{lite, liteRows} {
		if err := migrate.Check(t.Context(), db, o); !errors.Is(err, migrate.ErrMissing) || !strings.Contains(outrider.Hint(err), "outrider migrate up") {
			t.Errorf("%s: %v, hint %q", o.Set, err, outrider.Hint(err))
		}
		if up := mustUp(t, db, o); len(up) == 0 || up[0].AppliedAt.IsZero() {
			t.Errorf("%s: applied: %+v", o.Set, up)
		}
		mustCheck(t, db, o)
		if again := mustUp(t, db, o); len(again) != 0 {
			t.Errorf("%s: applied again: %+v", o.Set, again)
		}
	}
	mustDown(t, db, lite)
	mustCheck(t, db, liteRows) // the sets know nothing of each other
	mustDown(t, db, liteRows)
	if left := sqliteObjects(t, db); left != "" {
		t.Errorf("down left %s", left)
	}
}

func TestSQLiteDownRefusesWhileEventsExist(t *testing.T) {
	for _, o := range []migrate.Options{lite, liteRows} {
		db := openSQLite(t, filepath.Join(t.TempDir(), "db"))
		mustUp(t, db, o)
		plain, err := migrate.PlainInsert(o)
		if err != nil {
			t.Fatal(err)
		}
		mustExec(t, db, plain, "order", "42", "OrderPlaced", []byte("{}"), nil)
		if _, err := migrate.Down(t.Context(), db, o); !errors.Is(err, migrate.ErrPending) || outrider.Hint(err) == "" {
			t.Fatalf("got %v, want ErrPending with a hint", err)
		}
		mustCheck(t, db, o)
		o.Force = true
		mustDown(t, db, o)
	}
}

// The defaults that a plain INSERT relies on, of which SQLite has none built in.
func TestSQLiteDefaults(t *testing.T) {
	db := openSQLite(t, filepath.Join(t.TempDir(), "db"))
	for table, o := range map[string]migrate.Options{"outbox_events": lite, "outbox_rows": liteRows} {
		mustUp(t, db, o)
		plain, err := migrate.PlainInsert(o)
		if err != nil {
			t.Fatal(err)
		}
		const n = 300
		for range n {
			mustExec(t, db, plain, "order", "42", "OrderPlaced", []byte("{}"), nil)
		}
		var ids, wrong int
		err = db.QueryRowContext(t.Context(), `select count(distinct event_id),
			count(*) filter (where event_id not glob replace('xxxxxxxx-xxxx-4xxx-[89ab]xxx-xxxxxxxxxxxx', 'x', '[0-9a-f]')
				or abs(created_at - unixepoch('subsec') * 1000000) > 600000000
				or created_at % 1000 != 0 or typeof(created_at) != 'integer'
				or content_type != 'application/json' or headers is not null or available_at is not null)
			from `+table).Scan(&ids, &wrong)
		if err != nil || ids != n || wrong != 0 {
			t.Errorf("%s: %d ids, %d wrong rows, %v", table, ids, wrong, err)
		}
	}
}

// Two processes share no pool, and SQLite by itself doesn't wait.
func TestSQLiteRunnersAtOnce(t *testing.T) {
	for range 5 {
		path := filepath.Join(t.TempDir(), "db")
		var wg sync.WaitGroup
		var mu sync.Mutex
		applied := 0
		for range 6 {
			db := openSQLite(t, path)
			wg.Go(func() {
				done, err := migrate.Up(t.Context(), db, lite)
				if err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				applied += len(done)
				var ms int
				if err := db.QueryRowContext(t.Context(), "pragma busy_timeout").Scan(&ms); err != nil || ms != 0 {
					t.Errorf("busy_timeout is left at %d, %v", ms, err)
				}
			})
		}
		wg.Wait()
		st, err := migrate.Status(t.Context(), openSQLite(t, path), lite)
		if err != nil || applied != st.Newest || st.Version != st.Newest || len(st.Drift) != 0 {
			t.Errorf("%d applied by all: %+v, %v", applied, st, err)
		}
	}
}

func TestSQLiteDrift(t *testing.T) {
	for _, c := range []struct{ name, change, want string }{
		{"column dropped", "alter table outbox_events drop column content_type", "column outbox_events.content_type is missing"},
		{"column renamed", "alter table outbox_events rename column headers to meta", "column outbox_events.headers is missing"},
		{"index dropped", "drop index outbox_events_key_idx", "index outbox_events_key_idx is missing"},
		{"index changed", "drop index outbox_exceptions_due_idx; create index outbox_exceptions_due_idx on outbox_exceptions (due_at)", "index outbox_exceptions_due_idx was changed"},
		{"table dropped", "drop table outbox_journal", "column outbox_journal.destination is missing"},
		{"ids may come again", "drop table outbox_journal; create table outbox_journal (entry integer not null primary key)", "table outbox_journal was changed from: autoincrement"},
		{"unique index", "create unique index one on outbox_events (event_id)", "index one was added: unique"},
		{"harmless", "create index mine on outbox_events (created_at); alter table outbox_events add tenant text; alter table outbox_events add region text not null default 'eu'", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			db := openSQLite(t, filepath.Join(t.TempDir(), "db"))
			mustUp(t, db, lite)
			mustExec(t, db, c.change)
			st, err := migrate.Status(t.Context(), db, lite)
			if err != nil || len(st.Drift) == 0 {
				t.Errorf("status: %+v, %v", st, err)
			}
			err = migrate.Check(t.Context(), db, lite)
			if c.want == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if !errors.Is(err, migrate.ErrDrift) || !strings.Contains(strings.Join(st.Drift, "\n"), c.want) {
				t.Errorf("got  %v\nwant %s\nin   %q", err, c.want, st.Drift)
			}
		})
	}
}

func TestSQLiteHistory(t *testing.T) {
	testHistory(t, openSQLite(t, filepath.Join(t.TempDir(), "db")), lite)
}

func TestSQLiteSQL(t *testing.T) {
	for _, o := range []migrate.Options{lite, liteRows} {
		db := openSQLite(t, filepath.Join(t.TempDir(), "db"))
		text, err := migrate.SQL(o)
		if err != nil {
			t.Fatal(err)
		}
		mustExec(t, db, text)
		mustCheck(t, db, o)
		if again := mustUp(t, db, o); len(again) != 0 {
			t.Errorf("applied again: %+v", again)
		}
	}
}

// A migration that fails leaves nothing of itself, not even a table for its
// history.
func TestSQLiteFailureLeavesNothing(t *testing.T) {
	db := openSQLite(t, filepath.Join(t.TempDir(), "db"))
	mustExec(t, db, "create table outbox_exceptions_due_idx (x)")
	before := sqliteObjects(t, db)
	if _, err := migrate.Up(t.Context(), db, lite); err == nil || !strings.Contains(err.Error(), "version 1 (outbox)") {
		t.Errorf("got %v, want an error that names the migration", err)
	}
	if after := sqliteObjects(t, db); after != before {
		t.Errorf("left %s", after)
	}
}

func TestOptions(t *testing.T) {
	for _, c := range []struct {
		o    migrate.Options
		want string
	}{
		{migrate.Options{}, "Options.Dialect: Dialect(0)"},
		{migrate.Options{Dialect: 9}, "Options.Dialect: Dialect(9)"},
		{migrate.Options{Dialect: outrider.Postgres, Set: "x"}, `Options.Set: "x"`},
		{migrate.Options{Dialect: outrider.Postgres, Set: migrate.Rows}, `Options.Dialect: postgres with Options.Set "rows"`},
		{migrate.Options{Dialect: outrider.Postgres, Payload: 7}, "Options.Payload: PayloadKind(7)"},
		{migrate.Options{Dialect: outrider.SQLite, Payload: outrider.PayloadJSON}, "Options.Payload: json"},
		{migrate.Options{Dialect: outrider.SQLite, To: -1}, "Options.To: -1"},
	} {
		if _, err := migrate.SQL(c.o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %q", c.o, err, c.want)
		}
	}
	tooFar := lite
	tooFar.To = 99
	for name, move := range map[string]func(context.Context, *sql.DB, migrate.Options) ([]migrate.Step, error){"up": migrate.Up, "down": migrate.Down} {
		_, err := move(t.Context(), openSQLite(t, filepath.Join(t.TempDir(), "db")), tooFar)
		if !errors.Is(err, migrate.ErrNoVersion) || err.Error() != "migrate "+name+": there is no such version: 99, the newest is 1" {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func openSQLite(t *testing.T, path string) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func sqliteObjects(t *testing.T, db *sql.DB) string {
	t.Helper()
	var s string
	err := db.QueryRowContext(t.Context(), "select coalesce(group_concat(type || ' ' || name), '') from sqlite_master where name != 'sqlite_sequence'").Scan(&s)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
