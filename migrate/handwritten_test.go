package migrate_test

import (
	"context"
	"database/sql"
	"path/filepath"
	"strings"
	"testing"

	_ "github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/migrate"
)

// A time that no reader could make sense of is refused where it is written, by
// the name of its column: once it is in the table it would hold up its lane.
func TestTimesByHand(t *testing.T) {
	ctx := context.Background()
	try := func(t *testing.T, db *sql.DB, o migrate.Options, values map[string]bool) {
		t.Helper()
		if _, err := migrate.Up(ctx, db, o); err != nil {
			t.Fatal(err)
		}
		table := "outbox_events"
		if o.Set == migrate.Rows {
			table = "outbox_rows"
		}
		for _, column := range []string{"available_at", "created_at"} {
			for value, ok := range values {
				_, err := db.ExecContext(ctx, `insert into `+table+` (aggregate_type, aggregate_id, event_type, payload, event_key, `+column+`)
					values ('order', '1', 'Placed', '{}', null, `+value+`)`)
				if (err == nil) != ok {
					t.Errorf("%s = %s: %v", column, value, err)
				}
				if err != nil && !strings.Contains(err.Error(), column) {
					t.Errorf("%s = %s: the error does not name the column: %v", column, value, err)
				}
			}
		}
	}
	t.Run("postgres", func(t *testing.T) {
		db, err := sql.Open("pgx", testdb.Postgres(t))
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		try(t, db, migrate.Options{Dialect: outrider.Postgres}, map[string]bool{`'infinity'`: false, `'-infinity'`: false, `'2030-01-01'`: true})
	})
	for _, set := range []migrate.Set{migrate.Stream, migrate.Rows} {
		t.Run("sqlite "+string(set), func(t *testing.T) {
			db, err := sql.Open("sqlite", filepath.Join(t.TempDir(), "outbox.db"))
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			try(t, db, migrate.Options{Dialect: outrider.SQLite, Set: set},
				map[string]bool{`'2030-01-01T00:00:00Z'`: false, `1.5`: false, `current_timestamp`: false, `1893456000000000`: true})
		})
	}
}
