package model

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

func TestPostgres(t *testing.T) { walk(t, "15", onPostgres(t)) }

// onPostgres makes subjects on one database, emptied between runs. The store
// goes by the database's clock: instead of letting time pass, all that waits
// for some is brought nearer.
func onPostgres(t *testing.T) maker {
	t.Helper()
	dsn := testdb.Postgres(t)
	db, err := sql.Open("pgx", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	if _, err := migrate.Up(t.Context(), db, migrate.Options{Dialect: outrider.Postgres}); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	proxy := faults.NewProxy(t, u.Host)
	u.Host = proxy.Addr()
	s, err := pgstore.Open(t.Context(), pgstore.Config{DSN: u.String()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	p := &postgres{db, proxy}
	return func(t testing.TB) *subject {
		p.exec(t, `
			delete from outbox_events; delete from outbox_leases; delete from outbox_relays;
			delete from outbox_exceptions; delete from outbox_held_keys; delete from outbox_journal;
			select setval(s, (nextval(s) + 63) / 64 * 64) from pg_get_serial_sequence('outbox_events', 'id') s;
			select setval(pg_get_serial_sequence('outbox_leases', 'lease'), 1, false)`)
		return &subject{Store: s, begin: p.begin, kill: p.kill, advance: p.advance, lose: p.lose, calm: p.calm, lazy: ttl/3 + time.Minute, loseAny: true}
	}
}

type postgres struct {
	*sql.DB
	proxy *faults.Proxy
}

func (p *postgres) exec(t testing.TB, query string, args ...any) {
	t.Helper()
	if _, err := p.ExecContext(context.Background(), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// kill ends the connection that holds a session's lock.
func (p *postgres) kill(t testing.TB, _ store.Session, name string) {
	t.Helper()
	p.exec(t, `
		select pg_terminate_backend(l.pid, 10000) from outbox_relays r
		join pg_locks l on l.locktype = 'advisory' and l.objsubid = 1 and l.granted
			and l.database = (select oid from pg_database where datname = current_database())
			and (l.classid::bigint << 32) + l.objid::bigint = r.lock
		where r.relay = $1`, name)
}

func (p *postgres) advance(t testing.TB, d time.Duration) {
	t.Helper()
	for _, what := range []string{
		`outbox_events set available_at = available_at - $1 * interval '1 microsecond' where available_at is not null`,
		`outbox_exceptions set due_at = due_at - $1 * interval '1 microsecond' where due_at is not null`,
		`outbox_leases set expires_at = expires_at - $1 * interval '1 microsecond' where expires_at is not null`,
		`outbox_relays set expires_at = expires_at - $1 * interval '1 microsecond'`,
	} {
		p.exec(t, `update `+what, d.Microseconds())
	}
}

func (p *postgres) lose(store.Session) {
	p.proxy.LoseAnswer(func(b []byte) bool { return b[0] == 'B' || b[0] == 'P' })
}

func (p *postgres) calm() { p.proxy.LoseAnswer(nil) }

func (p *postgres) begin(t testing.TB) storetest.Tx {
	t.Helper()
	tx, err := p.BeginTx(context.Background(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return sqlTx{tx, outrider.Config{Dialect: outrider.Postgres}}
}

// sqlTx is an application's transaction in a database.
type sqlTx struct {
	*sql.Tx
	cfg outrider.Config
}

func (x sqlTx) Add(t testing.TB, events ...outrider.Event) {
	t.Helper()
	o, err := outrider.New(x.cfg)
	if err == nil {
		err = o.Add(context.Background(), x.Tx, events...)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func (x sqlTx) Commit(t testing.TB) {
	t.Helper()
	if err := x.Tx.Commit(); err != nil {
		t.Fatal(err)
	}
}

func (x sqlTx) Rollback(t testing.TB) {
	t.Helper()
	if err := x.Tx.Rollback(); err != nil {
		t.Fatal(err)
	}
}
