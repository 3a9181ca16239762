package main

import (
	"context"
	"fmt"
	"net/url"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
)

// database is a database of a scenario's own, filled with events.
type database struct {
	dsn  string
	conn *pgx.Conn
	drop func()
}

const (
	keys       = 1000
	partitions = 8
	payload    = 300
)

func newDatabase(ctx context.Context, e env) (*database, error) {
	admin, err := pgx.Connect(ctx, e.postgres)
	if err != nil {
		return nil, err
	}
	name := fmt.Sprintf("outrider_bench_%d", time.Now().UnixNano())
	if _, err := admin.Exec(ctx, "create database "+name); err != nil {
		return nil, err
	}
	u, err := url.Parse(e.postgres)
	if err != nil {
		return nil, err
	}
	u.Path = "/" + name
	d := &database{dsn: u.String()}
	d.drop = func() {
		ctx := context.WithoutCancel(ctx)
		if d.conn != nil {
			_ = d.conn.Close(ctx)
		}
		_, _ = admin.Exec(ctx, "drop database if exists "+name+" with (force)")
		_ = admin.Close(ctx)
	}
	cfg, err := pgx.ParseConfig(d.dsn)
	if err != nil {
		return nil, err
	}
	db := stdlib.OpenDB(*cfg)
	defer db.Close()
	if _, err := migrate.Up(ctx, db, migrate.Options{Dialect: outrider.Postgres}); err != nil {
		return nil, err
	}
	if d.conn, err = pgx.Connect(ctx, d.dsn); err != nil {
		return nil, err
	}
	return d, nil
}

// fill inserts n events in transactions of a thousand, and flushes them, so
// that no side of a pair pays for the other's writes.
func (d *database) fill(ctx context.Context, n int) error {
	for n > 0 {
		k := min(n, 1000)
		_, err := d.conn.Exec(ctx, `
			insert into outbox_events (aggregate_type, aggregate_id, event_type, payload, event_key)
			select 'order', ((random() * 1e9)::int % $2)::text, 'OrderPlaced', decode(repeat('ab', $3), 'hex'), null
			from generate_series(1, $1::int)`, k, keys, payload)
		if err != nil {
			return err
		}
		n -= k
	}
	if _, err := d.conn.Exec(ctx, `vacuum analyze outbox_events`); err != nil {
		return err
	}
	_, err := d.conn.Exec(ctx, `checkpoint`)
	return err
}

// plain makes a table such as everybody writes by hand, and fills it.
func (d *database) plain(ctx context.Context, n int) error {
	_, err := d.conn.Exec(ctx, `
		create table outbox (id bigint generated always as identity primary key, event_id uuid not null default gen_random_uuid(),
			aggregate_id text not null, event_type text not null, payload bytea not null, created_at timestamptz not null default now())`)
	if err != nil {
		return err
	}
	if _, err := d.conn.Exec(ctx, `
		insert into outbox (aggregate_id, event_type, payload)
		select ((random() * 1e9)::int % $2)::text, 'OrderPlaced', decode(repeat('ab', $3), 'hex')
		from generate_series(1, $1::int)`, n, keys, payload); err != nil {
		return err
	}
	if _, err := d.conn.Exec(ctx, `vacuum analyze outbox`); err != nil {
		return err
	}
	_, err = d.conn.Exec(ctx, `checkpoint`)
	return err
}

// newTopic makes a topic, and a consumer that reads it along until stopped.
func newTopic(ctx context.Context, e env) (name string, stop func(), err error) {
	cl, err := kgo.NewClient(kgo.SeedBrokers(e.kafka))
	if err != nil {
		return "", nil, err
	}
	name = fmt.Sprintf("outrider-bench-%d", time.Now().UnixNano())
	if _, err := kadm.NewClient(cl).CreateTopic(ctx, partitions, 1, nil, name); err != nil {
		cl.Close()
		return "", nil, err
	}
	consumer, err := kgo.NewClient(kgo.SeedBrokers(e.kafka), kgo.ConsumeTopics(name))
	if err != nil {
		cl.Close()
		return "", nil, err
	}
	cctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for cctx.Err() == nil {
			consumer.PollFetches(cctx)
		}
	}()
	return name, func() {
		cancel()
		<-done
		consumer.Close()
		_, _ = kadm.NewClient(cl).DeleteTopics(context.WithoutCancel(ctx), name)
		cl.Close()
	}, nil
}

// cpu is what this process has used so far.
func cpu() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// timed measures one side.
func timed(events int, f func() error) (sample, error) {
	c, t := cpu(), time.Now()
	if err := f(); err != nil {
		return sample{}, err
	}
	d := time.Since(t)
	return sample{rate: float64(events) / d.Seconds(), cpu: cpu() - c}, nil
}
