package main

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
)

const (
	keys       = 1000
	partitions = 8
	payload    = 300
)

// database is one run's own.
type database struct {
	name, dsn string
	conn      *pgx.Conn
	drop      func()
}

// settle waits until what the last side has left is written out, so that no
// side pays for the other's writes.
func (e *env) settle(ctx context.Context, s scenario) error {
	if s.needs == needsNothing {
		return nil
	}
	return e.admin(ctx, `checkpoint`)
}

// look finds out how the server copies a database without writing all of it to
// its log, whose checkpoints would fall into the measurement.
func (e *env) look(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, e.postgres)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var version int
	var level string
	if err := conn.QueryRow(ctx, `select current_setting('server_version_num')::int, current_setting('wal_level')`).Scan(&version, &level); err != nil {
		return err
	}
	if level != "logical" {
		return fmt.Errorf("the server has wal_level = %s, and logical is needed, in all scenarios alike", level)
	}
	if version >= 150000 {
		e.copies = " strategy file_copy"
	}
	return nil
}

func (e *env) admin(ctx context.Context, statement string) error {
	conn, err := pgx.Connect(ctx, e.postgres)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	_, err = conn.Exec(ctx, statement)
	return err
}

// create makes a database, as a copy of another if that is named.
func (e *env) create(ctx context.Context, template string) (*database, error) {
	u, err := url.Parse(e.postgres)
	if err != nil {
		return nil, err
	}
	name := fmt.Sprintf("outrider_bench_%d", time.Now().UnixNano())
	if template == "" {
		template = "template0"
	}
	if err := e.admin(ctx, "create database "+name+" template "+template+e.copies); err != nil {
		return nil, err
	}
	u.Path = "/" + name
	d := &database{name: name, dsn: u.String()}
	d.drop = func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		defer cancel()
		d.close(ctx)
		if err := e.dropDatabase(ctx, name); err != nil {
			fmt.Fprintf(os.Stderr, "database %s is left: %v\n", name, err)
		}
	}
	if d.conn, err = pgx.Connect(ctx, d.dsn); err != nil {
		d.drop()
		return nil, err
	}
	return d, nil
}

func (d *database) close(ctx context.Context) {
	if d.conn != nil {
		_ = d.conn.Close(ctx)
		d.conn = nil
	}
}

// dropDatabase drops a database and its slots, which would keep it. A slot is
// in use for a moment after its connection has ended.
func (e *env) dropDatabase(ctx context.Context, name string) error {
	for {
		err := e.admin(ctx, `select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = '`+name+`'`)
		if err == nil {
			return e.admin(ctx, "drop database if exists "+name+" with (force)")
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// template is a database that is made once by fill, and copied for each run:
// each has a fresh table, and all have the same.
func (e *env) template(ctx context.Context, what, from string, fill func(*database) error) (string, error) {
	if name, ok := e.templates[what]; ok {
		return name, nil
	}
	d, err := e.create(ctx, from)
	if err != nil {
		return "", err
	}
	if err := fill(d); err != nil {
		d.drop()
		return "", err
	}
	d.close(ctx) // a database in use cannot be copied
	if e.templates == nil {
		e.templates = map[string]string{}
	}
	e.templates[what] = d.name
	return d.name, nil
}

// close drops what was kept for all runs.
func (e *env) close() {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, name := range e.templates {
		if err := e.dropDatabase(ctx, name); err != nil {
			fmt.Fprintf(os.Stderr, "database %s is left: %v\n", name, err)
		}
	}
	if e.dir != "" {
		_ = os.RemoveAll(e.dir)
	}
}

// migrated is the template of a database with Outrider's tables.
func (e *env) migrated(ctx context.Context) (string, error) {
	return e.template(ctx, "empty", "", func(d *database) error {
		cfg, err := pgx.ParseConfig(d.dsn)
		if err != nil {
			return err
		}
		db := stdlib.OpenDB(*cfg)
		defer db.Close()
		_, err = migrate.Up(ctx, db, migrate.Options{Dialect: outrider.Postgres})
		return err
	})
}

// empty is a database with Outrider's tables.
func (e *env) empty(ctx context.Context) (*database, error) {
	name, err := e.migrated(ctx)
	if err != nil {
		return nil, err
	}
	return e.create(ctx, name)
}

// filled is a database with Outrider's tables and a backlog.
func (e *env) filled(ctx context.Context, n int) (*database, error) {
	migrated, err := e.migrated(ctx)
	if err != nil {
		return nil, err
	}
	name, err := e.template(ctx, fmt.Sprint("events ", n), migrated, func(d *database) error { return d.fill(ctx, n) })
	if err != nil {
		return nil, err
	}
	return e.create(ctx, name)
}

// plain is a database with a table such as everybody writes by hand, filled.
func (e *env) plain(ctx context.Context, n int) (*database, error) {
	name, err := e.template(ctx, fmt.Sprint("plain ", n), "", func(d *database) error {
		if err := d.makePlain(ctx); err != nil {
			return err
		}
		return d.fillPlain(ctx, n)
	})
	if err != nil {
		return nil, err
	}
	return e.create(ctx, name)
}

// The number of an event is in its id, for the consumer to see the order by.
const numberAsID = `lpad(to_hex(n), 32, '0')::uuid`

func (d *database) fill(ctx context.Context, n int) error {
	return d.insert(ctx, n, "outbox_events", `
		insert into outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, event_key)
		select `+numberAsID+`, 'order', ((random() * 1e9)::int % $3)::text, 'OrderPlaced', decode(repeat('ab', $4), 'hex'), null
		from generate_series($1::bigint, $2::bigint) n`)
}

func (d *database) makePlain(ctx context.Context) error {
	_, err := d.conn.Exec(ctx, `
		create table outbox (id bigint generated always as identity primary key, event_id uuid not null default gen_random_uuid(),
			aggregate_id text not null, event_type text not null, payload bytea not null, created_at timestamptz not null default now())`)
	return err
}

func (d *database) fillPlain(ctx context.Context, n int) error {
	return d.insert(ctx, n, "outbox", `
		insert into outbox (event_id, aggregate_id, event_type, payload)
		select `+numberAsID+`, ((random() * 1e9)::int % $3)::text, 'OrderPlaced', decode(repeat('ab', $4), 'hex')
		from generate_series($1::bigint, $2::bigint) n`)
}

// expect makes sure that a side did what it was measured for.
func (d *database) expect(ctx context.Context, want int, query string) error {
	var n int
	if err := d.conn.QueryRow(ctx, query).Scan(&n); err != nil {
		return err
	}
	if n != want {
		return fmt.Errorf("after the drain there are %d instead of %d: %s", n, want, query)
	}
	return nil
}

const (
	journalled = `select coalesce(sum(published), 0) from outbox_journal`
	undeleted  = `select count(*) from outbox`
)

// insert fills a table in transactions of a thousand.
func (d *database) insert(ctx context.Context, n int, table, statement string) error {
	for from := 1; from <= n; from += 1000 {
		if _, err := d.conn.Exec(ctx, statement, from, min(n, from+999), keys, payload); err != nil {
			return err
		}
	}
	if _, err := d.conn.Exec(ctx, `vacuum analyze `+table); err != nil {
		return err
	}
	_, err := d.conn.Exec(ctx, `checkpoint`)
	return err
}

// topic is one run's own, with a consumer that reads along.
type topic struct {
	name string
	stop func()
}

// newTopic makes a topic. It returns when the consumer has shown that it reads
// all of it: before, a client may not have heard of a topic so young for
// seconds. see is called for each later record, by one goroutine; nil: nobody
// reads along.
func newTopic(ctx context.Context, e *env, see func(*kgo.Record)) (t *topic, err error) {
	name := fmt.Sprintf("outrider-bench-%d", time.Now().UnixNano())
	cl, err := kgo.NewClient(kgo.SeedBrokers(e.kafka), kgo.DisableClientMetrics(), kgo.MetadataMinAge(young),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.UnknownTopicRetries(-1))
	if err != nil {
		return nil, err
	}
	cctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	close(done) // nobody reads yet
	t = &topic{name: name, stop: func() {
		cancel()
		<-done
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		defer cancel()
		_, _ = kadm.NewClient(cl).DeleteTopics(ctx, name)
		cl.Close()
	}}
	defer func() {
		if err != nil {
			t.stop()
		}
	}()
	if _, err := kadm.NewClient(cl).CreateTopic(ctx, partitions, 1, nil, name); err != nil {
		return nil, err
	}
	if err := greet(ctx, cl, name); err != nil {
		return nil, err
	}
	if see == nil {
		cl.PurgeTopicsFromConsuming(name)
		return t, nil
	}
	done = make(chan struct{})
	go func() {
		defer close(done)
		for cctx.Err() == nil {
			cl.PollFetches(cctx).EachRecord(see)
		}
	}()
	return t, nil
}

// young is how soon a client asks again about a topic that it has not heard of.
const young = 50 * time.Millisecond

// greet sends a record to each partition, and reads them.
func greet(ctx context.Context, cl *kgo.Client, topic string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var all []*kgo.Record
	for i := range partitions {
		all = append(all, &kgo.Record{Topic: topic, Partition: int32(i)})
	}
	if err := cl.ProduceSync(ctx, all...).FirstErr(); err != nil {
		return err
	}
	cl.AddConsumeTopics(topic)
	for left := partitions; left > 0; {
		f := cl.PollFetches(ctx)
		if ctx.Err() != nil {
			return fmt.Errorf("the consumer does not read: %w", ctx.Err())
		}
		left -= f.NumRecords()
	}
	return nil
}

// header is a record's, by name.
func header(r *kgo.Record, name string) string {
	for _, h := range r.Headers {
		if h.Key == name {
			return string(h.Value)
		}
	}
	return ""
}
