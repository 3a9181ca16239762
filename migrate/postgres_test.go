package migrate_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/migrate"
)

var pg = migrate.Options{Dialect: outrider.Postgres}

func TestPostgresUpAndDownLeaveNothing(t *testing.T) {
	db := openPostgres(t, testdb.Postgres(t), pgx.QueryExecModeCacheStatement)
	before := objects(t, db)
	if err := migrate.Check(t.Context(), db, pg); !errors.Is(err, migrate.ErrMissing) || !strings.Contains(outrider.Hint(err), "outrider migrate up") {
		t.Errorf("empty database: %v, hint %q", err, outrider.Hint(err))
	}
	up := mustUp(t, db, pg)
	if len(up) == 0 || up[0].Name != "outbox" || up[0].AppliedAt.IsZero() {
		t.Errorf("applied: %+v", up)
	}
	mustCheck(t, db, pg)
	if again := mustUp(t, db, pg); len(again) != 0 {
		t.Errorf("applied again: %+v", again)
	}
	mustDown(t, db, pg)
	if after := objects(t, db); after != before {
		t.Errorf("down left something:\n%s", after)
	}
	mustUp(t, db, pg)
	mustCheck(t, db, pg)
}

func TestPostgresDownRefusesWhileEventsExist(t *testing.T) {
	db := openPostgres(t, testdb.Postgres(t), pgx.QueryExecModeCacheStatement)
	mustUp(t, db, pg)
	plain, err := migrate.PlainInsert(pg)
	if err != nil {
		t.Fatal(err)
	}
	mustExec(t, db, plain, "order", "42", "OrderPlaced", []byte("{}"), nil)
	if _, err := migrate.Down(t.Context(), db, pg); !errors.Is(err, migrate.ErrPending) || outrider.Hint(err) == "" {
		t.Fatalf("got %v, want ErrPending with a hint", err)
	}
	mustCheck(t, db, pg)
	force := pg
	force.Force = true
	mustDown(t, db, force)
}

// Many runners at once: one works, the others wait and find nothing to do.
func TestPostgresRunnersAtOnce(t *testing.T) {
	db := openPostgres(t, testdb.Postgres(t), pgx.QueryExecModeCacheStatement)
	mustExec(t, db, "do $$ begin execute format('alter database %I set default_transaction_isolation = ''serializable''', current_database()); end $$")
	runAtOnce(t, db, pg)
}

// A connection of the pooler is another one in each transaction.
func TestPostgresBehindPooler(t *testing.T) {
	dsn := testdb.Postgres(t)
	pooler := testdb.Pooler(t, testdb.DatabaseName(t, dsn))
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeExec} {
		t.Run(mode.String(), func(t *testing.T) {
			db := openPostgres(t, pooler, mode)
			runAtOnce(t, db, pg)
			mustDown(t, db, pg)
		})
	}
}

func TestPostgresPayload(t *testing.T) {
	js, bytea := pg, pg
	js.Payload, bytea.Payload = outrider.PayloadJSON, outrider.PayloadBytea
	db := openPostgres(t, testdb.Postgres(t), pgx.QueryExecModeCacheStatement)
	mustUp(t, db, js)
	mustCheck(t, db, js)
	mustCheck(t, db, pg) // asks for neither
	for what, err := range map[string]error{
		"check": migrate.Check(t.Context(), db, bytea),
		"up":    func() error { _, err := migrate.Up(t.Context(), db, bytea); return err }(),
	} {
		if !errors.Is(err, migrate.ErrDrift) || !strings.Contains(err.Error(), "payload is of type json, and bytea") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestPostgresDrift(t *testing.T) {
	for _, c := range []struct{ name, change, want string }{
		{"column dropped", "alter table outbox_events drop column content_type", "column outbox_events.content_type is missing"},
		{"index dropped", "drop index outbox_events_tx_id_idx", "index outbox_events_tx_id_idx is missing"},
		{"type", "alter table outbox_exceptions alter attempts type bigint", "column outbox_exceptions.attempts was changed from: integer not null 0; to: bigint"},
		{"nullable", "alter table outbox_leases alter epoch drop not null", "column outbox_leases.epoch was changed"},
		{"default", "alter table outbox_events alter created_at set default now()", "column outbox_events.created_at was changed"},
		{"default dropped", "alter table outbox_events alter event_id drop default", "column outbox_events.event_id was changed"},
		{"check dropped", "alter table outbox_exceptions drop constraint outbox_exceptions_state_check", "constraint outbox_exceptions.outbox_exceptions_state_check is missing"},
		{"sequence caches", "alter sequence outbox_events_id_seq cache 20", "sequence outbox_events_id_seq was changed from: bigint cache 1"},
		{"table dropped", "drop table outbox_journal", "column outbox_journal.destination is missing"},
		{"needed column", "alter table outbox_events add tenant text not null", "column outbox_events.tenant was added"},
		{"unique index", "create unique index one_per_event on outbox_events (event_id, id)", "index one_per_event was added: unique"},
		{"other index definition", "drop index outbox_exceptions_due_idx; create index outbox_exceptions_due_idx on outbox_exceptions (due_at)", "index outbox_exceptions_due_idx was changed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			db := openPostgres(t, testdb.Postgres(t), pgx.QueryExecModeCacheStatement)
			mustUp(t, db, pg)
			mustExec(t, db, "drop view if exists outbox_state; "+c.change) // the server guards columns that a view uses
			err := migrate.Check(t.Context(), db, pg)
			if !errors.Is(err, migrate.ErrDrift) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got  %v\nwant %s", err, c.want)
			}
			if hint := outrider.Hint(err); !strings.Contains(hint, "outrider migrate status") {
				t.Errorf("hint %q", hint)
			}
			if st, err := migrate.Status(t.Context(), db, pg); err != nil || len(st.Drift) < 2 {
				t.Errorf("status: %q, %v", st.Drift, err)
			}
		})
	}
}

// What does no harm is listed, and stops nobody.
func TestPostgresHarmlessAdditions(t *testing.T) {
	db := openPostgres(t, testdb.Postgres(t), pgx.QueryExecModeCacheStatement)
	mustUp(t, db, pg)
	for _, change := range []string{
		"create index mine on outbox_events (created_at)",
		"alter table outbox_events add tenant text, add region text not null default 'eu'",
		"alter table outbox_events_p0 set (autovacuum_enabled = false)",
		"alter table outbox_leases set (fillfactor = 70)",
		"alter table outbox_events detach partition outbox_events_p0; drop table outbox_events_p0",
		"drop view outbox_state",
		"create table outbox_events_p1 partition of outbox_events for values from (minvalue) to (1000)",
		"create table outbox_events_p2 partition of outbox_events for values from (1000) to (maxvalue)",
	} {
		mustExec(t, db, change)
		mustCheck(t, db, pg)
	}
	st, err := migrate.Status(t.Context(), db, pg)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(st.Drift) - 1; n < 0 || !strings.HasPrefix(st.Drift[n], "view outbox_state is missing") {
		t.Errorf("got %q, want the view too", st.Drift)
	} else {
		st.Drift = st.Drift[:n]
	}
	want := "column outbox_events.region was added: text not null 'eu'::text\n" +
		"column outbox_events.tenant was added: text\n" +
		"index mine was added: plain CREATE INDEX mine ON ONLY outbox_events USING btree (created_at)"
	if got := strings.Join(st.Drift, "\n"); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// The doorbell is the project's own: no difference, unless somebody has made
// another trigger of its name.
func TestPostgresDoorbellIsNoDrift(t *testing.T) {
	db := openPostgres(t, testdb.Postgres(t), pgx.QueryExecModeCacheStatement)
	mustUp(t, db, pg)
	drift := func(want string) {
		t.Helper()
		st, err := migrate.Status(t.Context(), db, pg)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(st.Drift, "\n"); got != "" && want == "" || !strings.HasPrefix(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
		mustCheck(t, db, pg)
	}
	if err := migrate.Doorbell(t.Context(), db, true); err != nil {
		t.Fatal(err)
	}
	drift("")
	mustExec(t, db, "create or replace trigger outbox_ring after insert on outbox_events for each row execute function outbox_ring()")
	drift("trigger outbox_events.outbox_ring was added")
	if err := migrate.Doorbell(t.Context(), db, false); err != nil {
		t.Fatal(err)
	}
	drift("")
	mustExec(t, db, "create function mine() returns trigger language plpgsql as 'begin return null; end'")
	mustExec(t, db, "create trigger outbox_ring after insert on outbox_events for each statement execute function mine()")
	drift("trigger outbox_events.outbox_ring was added")
	mustExec(t, db, "drop trigger outbox_ring on outbox_events")

	// The tables were migrated while it was there, and it was removed since.
	mustExec(t, db, `update outbox_migrations set fingerprint = fingerprint || E'\ntrigger outbox_events.outbox_ring\t\t'
		|| 'CREATE TRIGGER outbox_ring AFTER INSERT ON outbox_events FOR EACH STATEMENT EXECUTE FUNCTION outbox_ring()'`)
	drift("")
}

// A server of another major version may print an expression otherwise; what is
// made of which types is compared even so.
func TestPostgresOtherServerVersion(t *testing.T) {
	db := openPostgres(t, testdb.Postgres(t), pgx.QueryExecModeCacheStatement)
	mustUp(t, db, pg)
	mustExec(t, db, `update outbox_migrations set fingerprint = regexp_replace(fingerprint, 'server\t\d+', E'server\t9')`)
	mustExec(t, db, `alter table outbox_events alter created_at set default now()`)
	mustCheck(t, db, pg)
	mustExec(t, db, `alter table outbox_events alter created_at drop not null`)
	if err := migrate.Check(t.Context(), db, pg); !errors.Is(err, migrate.ErrDrift) {
		t.Errorf("got %v, want ErrDrift", err)
	}
}

func TestPostgresHistory(t *testing.T) {
	db := openPostgres(t, testdb.Postgres(t), pgx.QueryExecModeCacheStatement)
	testHistory(t, db, pg)
}

// A migration that fails leaves nothing of itself.
func TestPostgresFailureLeavesNothing(t *testing.T) {
	db := openPostgres(t, testdb.Postgres(t), pgx.QueryExecModeCacheStatement)
	mustExec(t, db, "create table outbox_exceptions_due_idx (x int)")
	before := objects(t, db)
	if _, err := migrate.Up(t.Context(), db, pg); err == nil || !strings.Contains(err.Error(), "version 1 (outbox)") {
		t.Errorf("got %v, want an error that names the migration", err)
	}
	if after := objects(t, db); after != before {
		t.Errorf("left %s", after)
	}
}

// What migrate.SQL prints is what Up does.
func TestPostgresSQL(t *testing.T) {
	db := openPostgres(t, testdb.Postgres(t), pgx.QueryExecModeCacheStatement)
	text, err := migrate.SQL(migrate.Options{Dialect: outrider.Postgres, Payload: outrider.PayloadJSON})
	if err != nil {
		t.Fatal(err)
	}
	mustExec(t, db, text)
	mustCheck(t, db, migrate.Options{Dialect: outrider.Postgres, Payload: outrider.PayloadJSON})
	if again := mustUp(t, db, pg); len(again) != 0 {
		t.Errorf("applied again: %+v", again)
	}
	mustExec(t, db, "drop table outbox_migrations")
	err = migrate.Check(t.Context(), db, pg)
	if !errors.Is(err, migrate.ErrMissing) || !strings.Contains(outrider.Hint(err), "outrider migrate sql") {
		t.Errorf("got %v, hint %q", err, outrider.Hint(err))
	}
	if _, err := migrate.Up(t.Context(), db, pg); !errors.Is(err, migrate.ErrMissing) || outrider.Hint(err) == "" {
		t.Errorf("up on tables that something else made: %v", err)
	}
}

// The role of a relay can't make tables; nothing is asked of it that needs it.
func TestPostgresCheckNeedsOnlyToRead(t *testing.T) {
	dsn := testdb.Postgres(t)
	db := openPostgres(t, dsn, pgx.QueryExecModeCacheStatement)
	mustUp(t, db, pg)
	role := testdb.DatabaseName(t, dsn) // as unique as the database, roles being the cluster's
	mustExec(t, db, "create role "+role+"; grant select on outbox_migrations to "+role)
	t.Cleanup(func() { mustExec(t, db, "drop owned by "+role+"; drop role "+role) })
	limited := openPostgres(t, dsn+"&options=-c%20role%3D"+role+"%20-c%20default_transaction_read_only%3Don", pgx.QueryExecModeExec)
	mustCheck(t, limited, pg)
}

func openPostgres(t *testing.T, dsn string, mode pgx.QueryExecMode) *sql.DB {
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

// objects lists what there is in the schema.
func objects(t *testing.T, db *sql.DB) string {
	t.Helper()
	var s string
	err := db.QueryRowContext(t.Context(), `select coalesce(string_agg(o, E'\n' order by o), '') from (
		select relkind::text || ' ' || relname from pg_class where relnamespace = 'public'::regnamespace
		union all select 'function ' || proname from pg_proc where pronamespace = 'public'::regnamespace
		union all select 'type ' || typname from pg_type where typnamespace = 'public'::regnamespace) x (o)`).Scan(&s)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func runAtOnce(t *testing.T, db *sql.DB, o migrate.Options) {
	t.Helper()
	const runners = 6
	var wg sync.WaitGroup
	steps := make([]int, runners)
	for i := range runners {
		wg.Go(func() {
			done, err := migrate.Up(t.Context(), db, o)
			if err != nil {
				t.Errorf("runner %d: %v", i, err)
			}
			steps[i] = len(done)
		})
	}
	wg.Wait()
	total := 0
	for _, n := range steps {
		total += n
	}
	st, err := migrate.Status(t.Context(), db, o)
	if err != nil || total != st.Newest || st.Version != st.Newest || len(st.Drift) != 0 {
		t.Errorf("%d applied by all: %+v, %v", total, st, err)
	}
}

func testHistory(t *testing.T, db *sql.DB, o migrate.Options) {
	t.Helper()
	mustUp(t, db, o)
	for _, c := range []struct {
		name, change string
		want         error
		hint         string
		stopsUp      bool
	}{
		{"newer", "insert into outbox_migrations (set_name, version, name, checksum, fingerprint) select set_name, 9, 'later', 'x', '' from outbox_migrations where version = 1", migrate.ErrNewer, "newer release", true},
		{"gap", "update outbox_migrations set version = 0 where version = 1", migrate.ErrDrift, "missing row", true},
		{"other text", "update outbox_migrations set checksum = 'x', version = 1 where version = 0", migrate.ErrDrift, "release of outrider", true},
	} {
		mustExec(t, db, "delete from outbox_migrations where version = 9")
		mustExec(t, db, c.change)
		err := migrate.Check(t.Context(), db, o)
		if !errors.Is(err, c.want) || !strings.Contains(outrider.Hint(err), c.hint) {
			t.Errorf("%s: %v, hint %q", c.name, err, outrider.Hint(err))
		}
		if _, err := migrate.Up(t.Context(), db, o); errors.Is(err, c.want) != c.stopsUp {
			t.Errorf("%s: up: %v", c.name, err)
		}
		if _, err := migrate.Down(t.Context(), db, o); errors.Is(err, c.want) != c.stopsUp {
			t.Errorf("%s: down: %v", c.name, err)
		}
		if _, err := migrate.Status(t.Context(), db, o); err != nil {
			t.Errorf("%s: status: %v", c.name, err)
		}
	}
	mustExec(t, db, "delete from outbox_migrations")
	if err := migrate.Check(t.Context(), db, o); !errors.Is(err, migrate.ErrMissing) {
		t.Errorf("no row: %v", err)
	}
}

func mustUp(t *testing.T, db *sql.DB, o migrate.Options) []migrate.Step {
	t.Helper()
	steps, err := migrate.Up(t.Context(), db, o)
	if err != nil {
		t.Fatal(err)
	}
	return steps
}

func mustDown(t *testing.T, db *sql.DB, o migrate.Options) {
	t.Helper()
	if _, err := migrate.Down(t.Context(), db, o); err != nil {
		t.Fatal(err)
	}
}

func mustCheck(t *testing.T, db *sql.DB, o migrate.Options) {
	t.Helper()
	if err := migrate.Check(t.Context(), db, o); err != nil {
		t.Fatal(err)
	}
}

func mustExec(t *testing.T, db *sql.DB, query string, args ...any) {
	t.Helper()
	if _, err := db.ExecContext(context.WithoutCancel(t.Context()), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}
