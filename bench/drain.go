package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrider-dev/outrider/kafkasink"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/relay"
	"github.com/outrider-dev/outrider/route"
	"github.com/outrider-dev/outrider/sink"
)

// counting is a sink that counts what is delivered and says when all is. Its
// inner sink is nil for one that keeps nothing.
type counting struct {
	inner sink.Sink
	left  *atomic.Int64
	done  chan struct{}
}

func (c counting) Capabilities() sink.Capabilities {
	if c.inner != nil {
		return c.inner.Capabilities()
	}
	return sink.Capabilities{Order: true, OrderInFlight: true}
}

func (c counting) Close(ctx context.Context) error {
	if c.inner != nil {
		return c.inner.Close(ctx)
	}
	return nil
}

func (c counting) Publish(ctx context.Context, b sink.Batch) {
	report := b.Report
	b.Report = func(i int, r sink.Result) {
		report(i, r)
		if r.Status == sink.Delivered && c.left.Add(-1) == 0 {
			close(c.done)
		}
	}
	if c.inner != nil {
		c.inner.Publish(ctx, b)
		return
	}
	if b.Accepted != nil {
		b.Accepted()
	}
	for i := range b.Messages {
		b.Report(i, sink.Result{Status: sink.Delivered})
	}
}

// relays drains n events with a number of relays to what makes a sink, until the
// last one is delivered.
func relays(ctx context.Context, dsn string, n, count int, makeSink func() (sink.Sink, error)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var left atomic.Int64
	left.Store(int64(n))
	done := make(chan struct{})
	ended := make(chan error, count)
	for range count {
		st, err := pgstore.Open(ctx, pgstore.Config{DSN: dsn})
		if err != nil {
			return err
		}
		defer st.Close()
		var inner sink.Sink
		if makeSink != nil {
			if inner, err = makeSink(); err != nil {
				return err
			}
			defer inner.Close(context.WithoutCancel(ctx))
		}
		r, err := relay.New(relay.Config{Store: st, Destinations: []relay.Destination{{
			Name: "bench", Sink: counting{inner, &left, done}, FromEarliest: true}}})
		if err != nil {
			return err
		}
		go func() { ended <- r.Run(ctx) }()
	}
	select {
	case <-done:
	case err := <-ended:
		return errors.Join(errors.New("a relay ended early"), err)
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(10 * time.Minute):
		return fmt.Errorf("%d of %d events are left after 10 minutes", left.Load(), n)
	}
	cancel()
	for range count {
		if err := <-ended; err != nil {
			return err
		}
	}
	return nil
}

// outrider fills a database and drains it.
func outriderDrain(ctx context.Context, e env, n, count int, makeSink func() (sink.Sink, error), before func(*database) (func(), error)) (sample, error) {
	d, err := newDatabase(ctx, e)
	if err != nil {
		return sample{}, err
	}
	defer d.drop()
	if err := d.fill(ctx, n); err != nil {
		return sample{}, err
	}
	if before != nil {
		after, err := before(d)
		if err != nil {
			return sample{}, err
		}
		defer after()
	}
	peak := watchMemory()
	s, err := timed(n, func() error { return relays(ctx, d.dsn, n, count, makeSink) })
	s.note = fmt.Sprintf("peak %d MiB", peak()>>20)
	return s, err
}

// watchMemory samples the heap in use and gives its peak.
func watchMemory() func() uint64 {
	runtime.GC()
	stop, out := make(chan struct{}), make(chan uint64)
	go func() {
		var peak uint64
		var m runtime.MemStats
		t := time.NewTicker(50 * time.Millisecond)
		defer t.Stop()
		for {
			select {
			case <-stop:
				out <- peak
				return
			case <-t.C:
				runtime.ReadMemStats(&m)
				peak = max(peak, m.HeapInuse)
			}
		}
	}()
	return func() uint64 { close(stop); return <-out }
}

func kafkaTo(e env, topic string) func() (sink.Sink, error) {
	return func() (sink.Sink, error) {
		rule, err := route.ParseRule("", topic)
		if err != nil {
			return nil, err
		}
		return kafkasink.New(kafkasink.Config{Brokers: []string{e.kafka}, Topics: route.Rules{rule}})
	}
}

func drainKafka(ctx context.Context, e env) (a, b sample, err error) {
	topic, stop, err := newTopic(ctx, e)
	if err != nil {
		return a, b, err
	}
	defer stop()
	if a, err = outriderDrain(ctx, e, e.events, 1, kafkaTo(e, topic), nil); err != nil {
		return a, b, err
	}
	d, err := newDatabase(ctx, e)
	if err != nil {
		return a, b, err
	}
	defer d.drop()
	if err := d.plain(ctx, e.events); err != nil {
		return a, b, err
	}
	cl, err := kgo.NewClient(kgo.SeedBrokers(e.kafka), kgo.DefaultProduceTopic(topic), kgo.ProducerLinger(0),
		kgo.ProducerBatchCompression(kgo.NoCompression()))
	if err != nil {
		return a, b, err
	}
	defer cl.Close()
	b, err = timed(e.events, func() error { return bareLoop(ctx, d.conn, e.events, cl) })
	return a, b, err
}

// bareLoop is what everybody writes: lock a thousand, produce, delete, commit.
func bareLoop(ctx context.Context, conn *pgx.Conn, n int, cl *kgo.Client) error {
	for n > 0 {
		tx, err := conn.Begin(ctx)
		if err != nil {
			return err
		}
		rows, err := tx.Query(ctx, `select id, event_id::text, aggregate_id, event_type, payload from outbox order by id limit 1000 for update skip locked`)
		if err != nil {
			return err
		}
		var ids []int64
		var records []*kgo.Record
		for rows.Next() {
			var id int64
			var event, key, typ string
			var value []byte
			if err := rows.Scan(&id, &event, &key, &typ, &value); err != nil {
				return err
			}
			ids = append(ids, id)
			records = append(records, &kgo.Record{Key: []byte(key), Value: value, Headers: []kgo.RecordHeader{
				{Key: "id", Value: []byte(event)}, {Key: "type", Value: []byte(typ)}}})
		}
		if err := rows.Err(); err != nil {
			return err
		}
		if err := cl.ProduceSync(ctx, records...).FirstErr(); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `delete from outbox where id = any($1)`, ids); err != nil {
			return err
		}
		if err := tx.Commit(ctx); err != nil {
			return err
		}
		n -= len(ids)
	}
	return nil
}

func drainKafkaTwo(ctx context.Context, e env) (a, b sample, err error) {
	for i, side := range []*sample{&a, &b} {
		topic, stop, err := newTopic(ctx, e)
		if err != nil {
			return a, b, err
		}
		*side, err = outriderDrain(ctx, e, e.events, 2-i, kafkaTo(e, topic), nil)
		stop()
		if err != nil {
			return a, b, err
		}
	}
	return a, b, nil
}

func drainMemory(ctx context.Context, e env) (a, b sample, err error) {
	if a, err = outriderDrain(ctx, e, e.events, 1, nil, nil); err != nil {
		return a, b, err
	}
	d, err := newDatabase(ctx, e)
	if err != nil {
		return a, b, err
	}
	defer d.drop()
	if err := d.fill(ctx, e.events); err != nil {
		return a, b, err
	}
	b, err = timed(e.events, func() error { return barePipelined(ctx, d.dsn, e.events) })
	return a, b, err
}

// barePipelined is a loop of the same statements without anything around them:
// a page is read while the one before is noted.
func barePipelined(ctx context.Context, dsn string, n int) error {
	read, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer read.Close(ctx)
	write, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer write.Close(ctx)
	if _, err := write.Exec(ctx, `insert into outbox_leases (destination, lanes, base) values ('bare', -1, pg_current_snapshot())`); err != nil {
		return err
	}
	var snap string
	if err := read.QueryRow(ctx, `select pg_current_snapshot()::text`).Scan(&snap); err != nil {
		return err
	}
	noted := make(chan error, 1)
	noted <- nil
	at := int64(0)
	for n > 0 {
		rows, err := read.Query(ctx, barePage, int64(-1), 4096, at, int64(1)<<62, snap, 5000)
		if err != nil {
			return err
		}
		k := 0
		for rows.Next() {
			var e bareEvent
			if err := rows.Scan(&at, &e.id, &e.aggregateType, &e.aggregateID, &e.typ, &e.key, &e.contentType, &e.headers,
				&e.created, &e.lane, &e.later, &e.available, &e.size, &e.payload); err != nil {
				return err
			}
			k++
		}
		if err := rows.Err(); err != nil {
			return err
		}
		n -= k
		if err := <-noted; err != nil {
			return err
		}
		go func(at int64) {
			_, err := write.Exec(ctx, `
				with l as (update outbox_leases set writes = writes + 1, at = $1 where destination = 'bare' returning lease)
				insert into outbox_journal (destination, lease, epoch, relay, kind, from_id, to_id, records, published)
				select 'bare', lease, 1, 'bare', 'FRESH', $1, $1, 5000, 5000 from l`, at)
			noted <- err
		}(at)
	}
	return <-noted
}

// bareEvent is what a page's row is read into.
type bareEvent struct {
	id                                                [16]byte
	aggregateType, aggregateID, typ, key, contentType string
	headers, payload                                  []byte
	created                                           time.Time
	available                                         *time.Time
	lane                                              int16
	later                                             bool
	size                                              int32
}

// barePage is the statement that pgstore reads a page of a backlog with.
const barePage = `select e.id, e.event_id, e.aggregate_type, e.aggregate_id, e.event_type,
	coalesce(e.event_key, e.aggregate_id) as key, e.content_type, e.headers,
	e.created_at, e.lane, coalesce(e.available_at > clock_timestamp(), false) as later, e.available_at,
	coalesce(octet_length(e.payload), 0) as size,
	case when octet_length(e.payload) <= $2 then e.payload end as payload
	from outbox_events e
	where e.id > $3 and e.id <= $4 and (($1::bigint >> e.lane::int) & 1) = 1
	  and pg_visible_in_snapshot(e.tx_id, $5::pg_snapshot)
	order by e.id limit $6`

func drainOldSnapshot(ctx context.Context, e env) (a, b sample, err error) {
	hold := func(d *database) (func(), error) {
		tx, err := d.conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
		if err != nil {
			return nil, err
		}
		if _, err := tx.Exec(ctx, `select pg_current_xact_id()`); err != nil {
			return nil, err
		}
		return func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }, nil
	}
	if a, err = outriderDrain(ctx, e, e.events, 1, nil, hold); err != nil {
		return a, b, err
	}
	b, err = outriderDrain(ctx, e, e.events, 1, nil, nil)
	return a, b, err
}

// drainOpenWriter has a transaction that has written an event, and stays open.
func drainOpenWriter(ctx context.Context, e env) (a, b sample, err error) {
	hold := func(d *database) (func(), error) {
		tx, err := d.conn.Begin(ctx)
		if err != nil {
			return nil, err
		}
		if _, err := tx.Exec(ctx, `insert into outbox_events (aggregate_type, aggregate_id, event_type, payload, event_key)
			values ('order', 'open', 'OrderPlaced', '{}', null)`); err != nil {
			return nil, err
		}
		return func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }, nil
	}
	if a, err = outriderDrain(ctx, e, e.events, 1, nil, hold); err != nil {
		return a, b, err
	}
	b, err = outriderDrain(ctx, e, e.events, 1, nil, nil)
	return a, b, err
}

func drainBacklog(ctx context.Context, e env) (a, b sample, err error) {
	if a, err = outriderDrain(ctx, e, 10*e.events, 1, nil, nil); err != nil {
		return a, b, err
	}
	b, err = outriderDrain(ctx, e, e.events, 1, nil, nil)
	return a, b, err
}
