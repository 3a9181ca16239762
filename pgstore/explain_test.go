package pgstore

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/migrate"
)

// The plans of what relays ask again and again must not depend on how much was
// sent before, nor on the planner's luck: on an empty table, on a large one,
// and on one that grew in one transaction and was never analysed.
func TestPlans(t *testing.T) {
	const done = 200_000
	fill := func(n int) string {
		return fmt.Sprintf(`insert into outbox_events (aggregate_type, aggregate_id, event_type, payload, event_key)
			select 'order', (g %% 1000)::text, 'Placed', '{}', null from generate_series(1, %d) g`, n)
	}
	for name, prepare := range map[string][]string{
		"empty":          nil,
		"ids by hand":    {fill(done), `analyze`, `select setval('outbox_events_id_seq', 1)`},
		"large":          {fill(done), `analyze`},
		"never analysed": {`alter table outbox_events_p0 set (autovacuum_enabled = off)`, fill(done)},
	} {
		t.Run(name, func(t *testing.T) {
			s := openStore(t)
			ctx := context.Background()
			for _, sql := range prepare {
				if _, err := s.pool.Exec(ctx, sql); err != nil {
					t.Fatal(err)
				}
			}
			conn, err := s.pool.Acquire(ctx)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Release()
			var xmax, xmin uint64
			var hi int64
			var snap string
			if err := conn.QueryRow(ctx, `select pg_snapshot_xmax(s), pg_snapshot_xmin(s), s::text,
				(select coalesce(max(id), 0) from outbox_events) from pg_current_snapshot() s`).Scan(&xmax, &xmin, &snap, &hi); err != nil {
				t.Fatal(err)
			}
			const few = 250 // pages of the buffer that a look may touch
			all := fmt.Sprintf(`'%d:%d:'`, 3, 3)
			q := func(s string) string { return "'" + s + "'" }
			for _, c := range []struct {
				what, sql, args string
				pages           int
			}{
				{"idle poll", s.sql.fresh, fmt.Sprintf(`-1, 4096, '%d', 5001`, xmax), few},
				{"poll with much waiting", s.sql.fresh, `-1, 4096, '3', 1001`, 4 * 1001},
				{"late rows", s.sql.late, fmt.Sprintf(`-1, 4096, '{%d,%d,%d}', 5001`, xmax+1, xmax+2, xmax+3), few},
				{"first late row", s.sql.first, fmt.Sprintf(`'%d', '{%d}', %d`, xmax, xmax+1, hi), few},
				{"highest id", s.sql.now, ``, few},
				{"late page", s.sql.older, fmt.Sprintf(`-1, 4096, '%d', '{%d}', %d, 0, %s, 1000`, xmax, xmax+1, hi, q(snap)), few},
				{"fresh page", s.sql.newer, fmt.Sprintf(`-1, 4096, %d, %d, %s, 1000`, hi/2, hi, q(snap)), 200},
				{"page read again", s.sql.again, fmt.Sprintf(`-1, 4096, %d, %d, %s, %s, 5000`, hi/2, hi/2+1000, q(snap), all), 200},
				{"a key's successors", s.sql.key, fmt.Sprintf(`-1, 4096, '7', %d, %s, %s, 100`, hi-1, q(snap), all), few},
				{"rows of a window that were not seen", s.sql.unseen, fmt.Sprintf(`-1, '%d', '{%d}', '%d', %s, '{1,2,3}'`, xmax-1, xmax-2, xmax, q(snap)), 8000},
				{"rows behind a position", s.sql.behind, fmt.Sprintf(`-1, %d, %s, 'd', '{}'`, hi, q(snap)), few},
				{"rows behind an old position", s.sql.behind, fmt.Sprintf(`-1, 0, %s, 'd', '{}'`, all), 4 * sweepRows},
				{"the last id given out", s.sql.given, ``, few},
				{"which partitions there are", setSQL, ``, 60},
				{"due exceptions", s.sql.due, `-1, 4096, 'd', '{}', 1000, '{}'`, few},
			} {
				plan, pages := explain(t, conn.Conn(), c.sql, c.args)
				if wholeTable.MatchString(plan) {
					t.Errorf("%s walks the whole table:\n%s", c.what, plan)
				}
				if pages > c.pages {
					t.Errorf("%s touches %d pages, at most %d expected:\n%s", c.what, pages, c.pages, plan)
				}
			}
		})
	}
}

// wholeTable matches a walk over events; one over their sequence is one row.
var wholeTable = regexp.MustCompile(`"Seq Scan"[^{]*"outbox_events(_p\d+)?"`)

// explain runs a statement by its generic plan and says how many pages it
// touched.
func explain(t *testing.T, conn *pgx.Conn, sql, args string) (string, int) {
	t.Helper()
	ctx := context.Background()
	if _, err := conn.Exec(ctx, `deallocate all`); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(ctx, `prepare q as `+sql, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatalf("%v\n%s", err, sql)
	}
	if args != "" {
		args = "(" + args + ")"
	}
	var out []byte
	if err := conn.QueryRow(ctx, `explain (analyze, buffers, format json) execute q`+args, pgx.QueryExecModeSimpleProtocol).Scan(&out); err != nil {
		t.Fatalf("%v\n%s", err, sql)
	}
	var plans []struct {
		Plan struct {
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		}
	}
	if err := json.Unmarshal(out, &plans); err != nil {
		t.Fatal(err)
	}
	return string(out), plans[0].Plan.Hit + plans[0].Plan.Read
}

func openStore(t testing.TB) *Store {
	t.Helper()
	ctx := context.Background()
	dsn := testdb.Postgres(t)
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	db := stdlib.OpenDB(*cfg)
	defer db.Close()
	if _, err := migrate.Up(ctx, db, migrate.Options{Dialect: outrider.Postgres}); err != nil {
		t.Fatal(err)
	}
	s, err := Open(ctx, Config{DSN: dsn})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}
