package outrider_test

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"pgregory.net/rapid"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/migrate"
)

var (
	pgBytea = outrider.Config{Dialect: outrider.Postgres}
	pgJSON  = outrider.Config{Dialect: outrider.Postgres, Payload: outrider.PayloadJSON}
)

var modes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
	pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

// database/sql in every way in which pgx can talk.
func TestPostgresRoundTrip(t *testing.T) {
	for _, cfg := range []outrider.Config{pgBytea, pgJSON} {
		dsn := migrated(t, cfg.Payload)
		for _, mode := range modes {
			t.Run(cfg.Payload.String()+"/"+mode.String(), func(t *testing.T) { testRoundTrip(t, open(t, dsn, mode), cfg) })
		}
	}
}

func TestPostgresBehindPooler(t *testing.T) {
	for _, cfg := range []outrider.Config{pgBytea, pgJSON} {
		dsn := testdb.Pooler(t, testdb.DatabaseName(t, migrated(t, cfg.Payload)))
		t.Run(cfg.Payload.String(), func(t *testing.T) {
			testRoundTrip(t, open(t, dsn, pgx.QueryExecModeSimpleProtocol), cfg)
		})
	}
}

func TestPostgresDelay(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			testDelay(t, open(t, migrated(t, 0), mode), pgBytea, "select (extract(epoch from clock_timestamp()) * 1000000)::bigint")
		})
	}
}

func TestPostgresAllOrNothing(t *testing.T) {
	testAllOrNothing(t, open(t, migrated(t, 0), pgx.QueryExecModeCacheStatement), pgBytea,
		"alter table outbox_events add check (event_type <> 'bad')", 13107)
}

func TestPostgresBasics(t *testing.T) {
	testBasics(t, open(t, migrated(t, 0), pgx.QueryExecModeCacheStatement), pgBytea)
}

// Ids ascend over the rows of a statement and over statements.
func TestPostgresIDsAscend(t *testing.T) {
	db := open(t, migrated(t, 0), pgx.QueryExecModeCacheStatement)
	events := make([]outrider.Event, 15000)
	for i := range events {
		events[i] = placed()
		events[i].AggregateID = fmt.Sprint(i)
	}
	if err := mustNew(t, pgBytea).Add(t.Context(), db, events...); err != nil {
		t.Fatal(err)
	}
	rows := readAll(t, db, outrider.Postgres)
	for i, s := range rows {
		if s.AggregateID != fmt.Sprint(i) || i > 0 && (s.EventID <= rows[i-1].EventID || s.ID != rows[i-1].ID+1) {
			t.Fatalf("row %d is %+v behind %+v", i, s, rows[max(i-1, 0)])
		}
	}
	if len(rows) != len(events) {
		t.Errorf("%d rows", len(rows))
	}
}

// The lane that the database computes is the one that Lane says, for any text.
func TestPostgresLanes(t *testing.T) {
	db := open(t, migrated(t, 0), pgx.QueryExecModeCacheStatement)
	o := mustNew(t, pgBytea)
	check := func(t fataler, key string) {
		t.Helper()
		byKey, byID, unordered := placed(), placed(), placed()
		byKey.Key, byID.AggregateID, unordered.Unordered = key, key, true
		mustExec(t, db, "truncate outbox_events")
		if err := o.Add(context.Background(), db, byKey, byID, unordered); err != nil {
			t.Fatal(err)
		}
		rows, err := db.QueryContext(context.Background(), "select id, lane from outbox_events order by id")
		if err != nil {
			t.Fatal(err)
		}
		defer rows.Close()
		i := 0
		for ; rows.Next(); i++ {
			var id int64
			var lane int
			if err := rows.Scan(&id, &lane); err != nil {
				t.Fatal(err)
			}
			want := outrider.Lane(key)
			if i == 2 {
				want = int(id & 63)
			}
			if lane != want {
				t.Fatalf("%q, row %d: lane %d, want %d", key, i, lane, want)
			}
		}
		if err := rows.Err(); err != nil || i != 3 {
			t.Fatalf("%q: %d rows, want 3: %v", key, i, err)
		}
	}
	for _, v := range laneVectors {
		check(t, v.key)
	}
	rapid.Check(t, func(t *rapid.T) {
		check(t, "k"+strings.ReplaceAll(rapid.StringN(0, 100, 500).Draw(t, "key"), "\x00", ""))
	})
}

// A column of another type than is configured is an error at once: JSON put into
// bytea as a text would have its backslashes taken for escapes.
func TestPostgresOtherPayloadType(t *testing.T) {
	e := placed()
	e.Payload = []byte(`{"a":"\\x41"}`)
	for _, c := range []struct {
		made outrider.PayloadKind
		cfg  outrider.Config
	}{{outrider.PayloadBytea, pgJSON}, {outrider.PayloadJSON, pgBytea}} {
		dsn := migrated(t, c.made)
		for _, mode := range modes {
			db := open(t, dsn, mode)
			err := mustNew(t, c.cfg).Add(t.Context(), db, e)
			if err == nil || !strings.Contains(outrider.Hint(err), "Config.Payload") {
				t.Errorf("%s into %s, %s: %v, hint %q", c.cfg.Payload, c.made, mode, err, outrider.Hint(err))
			}
		}
	}
}

func TestPostgresMissingTable(t *testing.T) {
	db := open(t, testdb.Postgres(t), pgx.QueryExecModeCacheStatement)
	for _, table := range []string{"", "nowhere.events"} {
		cfg := pgBytea
		cfg.Table = table
		err := mustNew(t, cfg).Add(t.Context(), db, placed())
		if err == nil || !strings.Contains(outrider.Hint(err), "outrider migrate up") {
			t.Errorf("%q: %v, hint %q", table, err, outrider.Hint(err))
		}
	}
}

// A name that needs quotes, in a schema of its own.
func TestPostgresWrongDialect(t *testing.T) {
	dsn := migrated(t, outrider.PayloadBytea)
	for _, mode := range modes {
		err := mustNew(t, outrider.Config{Dialect: outrider.SQLite}).Add(t.Context(), open(t, dsn, mode), placed())
		if want := "the statement is written for Config.Dialect sqlite: set the one of the database"; !strings.HasPrefix(outrider.Hint(err), want) {
			t.Errorf("%s: hint %q of %v", mode, outrider.Hint(err), err)
		}
	}
}

func TestPostgresQualifiedTable(t *testing.T) {
	db := open(t, migrated(t, 0), pgx.QueryExecModeCacheStatement)
	mustExec(t, db, `create schema "my.App"; create table "my.App"."the ""box""" (like outbox_events including all)`)
	cfg := pgBytea
	cfg.Table = `"my.App"."the ""box"""`
	if err := mustNew(t, cfg).Add(t.Context(), db, placed()); err != nil {
		t.Fatal(err)
	}
	var n int
	if err := db.QueryRowContext(t.Context(), "select count(*) from "+cfg.Table).Scan(&n); err != nil || n != 1 {
		t.Errorf("%d rows, %v", n, err)
	}
}

func migrated(t testing.TB, payload outrider.PayloadKind) string {
	t.Helper()
	dsn := testdb.Postgres(t)
	db := open(t, dsn, pgx.QueryExecModeCacheStatement)
	if _, err := migrate.Up(t.Context(), db, migrate.Options{Dialect: outrider.Postgres, Payload: payload}); err != nil {
		t.Fatal(err)
	}
	return dsn
}

func open(t testing.TB, dsn string, mode pgx.QueryExecMode) *sql.DB {
	t.Helper()
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	config.DefaultQueryExecMode = mode
	db := stdlib.OpenDB(*config)
	t.Cleanup(func() { db.Close() })
	return db
}
