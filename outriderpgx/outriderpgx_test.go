package outriderpgx_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"pgregory.net/rapid"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/outriderpgx"
)

var modes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
	pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

// perStatement is how many of the simplest events go into one statement.
const perStatement = 13107

// Payloads come back byte for byte, whatever pgx speaks, straight and through
// pgbouncer.
func TestRoundTrip(t *testing.T) {
	for _, kind := range []outrider.PayloadKind{outrider.PayloadBytea, outrider.PayloadJSON} {
		dsn := migrated(t, kind)
		pooler := testdb.Pooler(t, testdb.DatabaseName(t, dsn))
		for _, mode := range modes {
			t.Run(fmt.Sprintf("%s/%s", kind, mode), func(t *testing.T) { testRoundTrip(t, open(t, dsn, mode), kind) })
		}
		t.Run(fmt.Sprintf("%s/pooler", kind), func(t *testing.T) {
			testRoundTrip(t, open(t, pooler, pgx.QueryExecModeSimpleProtocol), kind)
		})
	}
}

func testRoundTrip(t *testing.T, pool *pgxpool.Pool, kind outrider.PayloadKind) {
	t.Helper()
	o := outbox(t, kind)
	ctx := t.Context()
	rapid.Check(t, func(t *rapid.T) {
		payload := rapid.SliceOf(rapid.Byte()).Draw(t, "payload")
		if kind == outrider.PayloadJSON {
			payload = []byte(rapid.StringMatching(` ?\{"a\\u0000":"('|\\"|\\\\|\$1|ü|x)*", "a" : 1\.[0-9]{1,30}\}`).Draw(t, "json"))
		}
		e := placed()
		e.ID, e.Payload, e.Key = outrider.NewID(), payload, rapid.StringMatching(`[a-z'"\\$ü]{0,9}`).Draw(t, "key")
		e.Headers = map[string]string{"x": e.Key}
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return o.Add(ctx, outriderpgx.Tx(tx), e, placed()) })
		if err != nil {
			t.Fatal(err)
		}
		var got []byte
		var key, header string
		err = pool.QueryRow(ctx, "select payload, coalesce(event_key, ''), headers ->> 'x' from outbox_events where event_id = $1::uuid", e.ID).Scan(&got, &key, &header)
		if err != nil || string(got) != string(payload) || key != e.Key || header != e.Key {
			t.Fatalf("%q, key %q, header %q: %v\nwant %q, %q", got, key, header, err, payload, e.Key)
		}
	})
}

// Several statements are all or nothing, without a transaction too; where there is
// one, it is left to its owner.
func TestAllOrNothing(t *testing.T) {
	ctx := t.Context()
	dsn := migrated(t, outrider.PayloadBytea)
	pool := open(t, dsn, pgx.QueryExecModeCacheStatement)
	if _, err := pool.Exec(ctx, "alter table outbox_events add check (event_type <> 'bad')"); err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	pooled, err := pool.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer pooled.Release()
	count := func() (n int) {
		t.Helper()
		if err := pool.QueryRow(ctx, "select count(*) from outbox_events").Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	exec := func(c outriderpgx.Conn, query string) {
		t.Helper()
		if _, err := c.Exec(ctx, query); err != nil {
			t.Fatal(err)
		}
	}
	o := outbox(t, outrider.PayloadBytea)
	good := make([]outrider.Event, perStatement+1)
	for i := range good {
		good[i] = placed()
	}
	bad := append([]outrider.Event(nil), good...)
	bad[perStatement].Type = "bad"

	for name, c := range map[string]outriderpgx.Conn{"pool": pool, "pooled": pooled, "conn": conn} {
		if err := o.Add(ctx, outriderpgx.Tx(c), bad...); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("insert event %d into", perStatement)) || count() != 0 {
			t.Errorf("%s: %v, %d rows are left", name, err, count())
		}
		if err := o.Add(ctx, outriderpgx.Tx(c), good...); err != nil || count() != len(good) {
			t.Errorf("%s: %v, %d rows", name, err, count())
		}
		exec(pool, "delete from outbox_events")
		if name == "pool" {
			continue
		}
		exec(c, "begin")
		if err := o.Add(ctx, outriderpgx.Tx(c), good...); err != nil || count() != 0 {
			t.Errorf("%s, in a transaction: %v, %d rows are committed", name, err, count())
		}
		exec(c, "rollback")
		if n := count(); n != 0 {
			t.Errorf("%s, rolled back: %d rows", name, n)
		}
	}
	tx, err := pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	// An error fails the transaction, as it does with one statement: there is no
	// savepoint around the call.
	if err := o.Add(ctx, outriderpgx.Tx(tx), bad...); err == nil || tx.Conn().PgConn().TxStatus() != 'E' {
		t.Errorf("pgx.Tx: %v, status %c", err, tx.Conn().PgConn().TxStatus())
	}
	if err := tx.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	if tx, err = pool.Begin(ctx); err != nil {
		t.Fatal(err)
	}
	if err := o.Add(ctx, outriderpgx.Tx(tx), good...); err != nil || count() != 0 {
		t.Errorf("pgx.Tx: %v, %d rows are committed", err, count())
	}
	if err := tx.Rollback(ctx); err != nil || count() != 0 {
		t.Errorf("pgx.Tx, rolled back: %v, %d rows", err, count())
	}
}

// What the driver answers is handed on.
func TestResult(t *testing.T) {
	pool := open(t, migrated(t, outrider.PayloadBytea), pgx.QueryExecModeCacheStatement)
	res, err := outriderpgx.Tx(pool).ExecContext(t.Context(), "insert into outbox_events (aggregate_type, aggregate_id, event_type) values ($1, '1', 'x'), ('b', '2', 'y')", "a")
	if err != nil {
		t.Fatal(err)
	}
	if n, err := res.RowsAffected(); n != 2 || err != nil {
		t.Errorf("%d rows, %v", n, err)
	}
	if _, err := res.LastInsertId(); err == nil {
		t.Error("PostgreSQL gave a last insert id")
	}
	err = outbox(t, outrider.PayloadJSON).Add(t.Context(), outriderpgx.Tx(pool), placed())
	if hint := outrider.Hint(err); !strings.Contains(hint, "Config.Payload") {
		t.Errorf("%v, hint %q", err, hint)
	}
}

func Example() {
	var (
		ctx    context.Context
		pool   *pgxpool.Pool
		outbox *outrider.Outbox
	)
	place := func() error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "insert into orders (id) values ($1)", "42"); err != nil {
				return err
			}
			return outbox.Add(ctx, outriderpgx.Tx(tx), outrider.Event{
				AggregateType: "order", AggregateID: "42", Type: "OrderPlaced", Payload: []byte(`{}`),
			})
		})
	}
	_ = place
}

func placed() outrider.Event {
	return outrider.Event{AggregateType: "order", AggregateID: "42", Type: "OrderPlaced", Payload: []byte(`{}`)}
}

func outbox(t testing.TB, kind outrider.PayloadKind) *outrider.Outbox {
	t.Helper()
	o, err := outrider.New(outrider.Config{Dialect: outrider.Postgres, Payload: kind})
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func migrated(t testing.TB, kind outrider.PayloadKind) string {
	t.Helper()
	dsn := testdb.Postgres(t)
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	db := stdlib.OpenDB(*config)
	defer db.Close()
	if _, err := migrate.Up(t.Context(), db, migrate.Options{Dialect: outrider.Postgres, Payload: kind}); err != nil {
		t.Fatal(err)
	}
	return dsn
}

func open(t testing.TB, dsn string, mode pgx.QueryExecMode) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	config.ConnConfig.DefaultQueryExecMode = mode
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}
