package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/outriderpgx"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/relay"
	"github.com/outrider-dev/outrider/sink"
)

// stopwatch measures from commit to acknowledgement, by event id.
type stopwatch struct {
	mu        sync.Mutex
	committed map[string]time.Time
	acked     map[string]time.Time
}

func newStopwatch() *stopwatch {
	return &stopwatch{committed: map[string]time.Time{}, acked: map[string]time.Time{}}
}

func (w *stopwatch) commit(id string, at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.committed[id] = at
}

func (w *stopwatch) ack(id string, at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.acked[id] = at
}

// wait gives the latencies of all that was committed, once all has arrived.
func (w *stopwatch) wait(ctx context.Context) ([]time.Duration, error) {
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		w.mu.Lock()
		missing := 0
		var out []time.Duration
		for id, t := range w.committed {
			at, ok := w.acked[id]
			if !ok {
				missing++
			}
			out = append(out, at.Sub(t))
		}
		w.mu.Unlock()
		switch {
		case missing == 0:
			return out, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case time.Now().After(deadline):
			return nil, fmt.Errorf("%d events did not arrive", missing)
		}
	}
}

// warm sends the first few, which find connections and leases that are still
// being made, and forgets them.
func (w *stopwatch) warm(ctx context.Context, one func(i int) error) error {
	if err := paced(ctx, 100, 50, one); err != nil {
		return err
	}
	if _, err := w.wait(ctx); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.committed)
	clear(w.acked)
	return nil
}

// watching is a sink that tells a stopwatch what its inner sink delivered.
type watching struct {
	sink.Sink
	w *stopwatch
}

func (s watching) Publish(ctx context.Context, b sink.Batch) {
	report := b.Report
	messages := b.Messages
	b.Report = func(i int, r sink.Result) {
		if r.Status == sink.Delivered {
			s.w.ack(messages[i].ID, time.Now())
		}
		report(i, r)
	}
	s.Sink.Publish(ctx, b)
}

// paced calls f n times at a rate.
func paced(ctx context.Context, rate, n int, f func(i int) error) error {
	t := time.NewTicker(time.Second / time.Duration(rate))
	defer t.Stop()
	for i := range n {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
		if err := f(i); err != nil {
			return err
		}
	}
	return nil
}

// running runs a relay until stop.
func running(ctx context.Context, dsn string, cfg pgstore.Config, d ...relay.Destination) (stop func() error, err error) {
	cfg.DSN = dsn
	st, err := pgstore.Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	r, err := relay.New(relay.Config{Store: st, Destinations: d})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	return func() error {
		cancel()
		return errors.Join(<-ended, st.Close())
	}, nil
}

// latencyAt measures at a rate, against a client that produces by itself right
// after its commit.
func latencyAt(rate, n int) func(context.Context, env) (sample, sample, error) {
	return func(ctx context.Context, e env) (a, b sample, err error) {
		topic, stop, err := newTopic(ctx, e)
		if err != nil {
			return a, b, err
		}
		defer stop()
		d, err := newDatabase(ctx, e)
		if err != nil {
			return a, b, err
		}
		defer d.drop()
		pool, err := pgxpool.New(ctx, d.dsn)
		if err != nil {
			return a, b, err
		}
		defer pool.Close()
		k, err := kafkaTo(e, topic)()
		if err != nil {
			return a, b, err
		}
		defer k.Close(context.WithoutCancel(ctx))
		w := newStopwatch()
		end, err := running(ctx, d.dsn, pgstore.Config{}, relay.Destination{Name: "bench", Sink: watching{k, w}, FromEarliest: true})
		if err != nil {
			return a, b, err
		}
		one := func(i int) error { return commitOne(ctx, pool, w, strconv.Itoa(i%keys)) }
		if err := w.warm(ctx, one); err != nil {
			return a, b, err
		}
		c := cpu()
		if err := paced(ctx, rate, n, one); err != nil {
			return a, b, err
		}
		if a.lat, err = w.wait(ctx); err != nil {
			return a, b, err
		}
		a.cpu = cpu() - c
		if err := end(); err != nil {
			return a, b, err
		}
		b, err = produceAfterCommit(ctx, e, d, topic, rate, n)
		return a, b, err
	}
}

// commitOne is a transaction of one event.
func commitOne(ctx context.Context, pool *pgxpool.Pool, w *stopwatch, key string) error {
	o, err := outrider.New(outrider.Config{Dialect: outrider.Postgres})
	if err != nil {
		return err
	}
	id := outrider.NewID()
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		return o.Add(ctx, outriderpgx.Tx(tx), outrider.Event{ID: id, AggregateType: "order", AggregateID: key,
			Type: "OrderPlaced", Payload: make([]byte, payload)})
	})
	w.commit(id, time.Now())
	return err
}

func produceAfterCommit(ctx context.Context, e env, d *database, topic string, rate, n int) (sample, error) {
	cl, err := kgo.NewClient(kgo.SeedBrokers(e.kafka), kgo.DefaultProduceTopic(topic), kgo.ProducerLinger(0))
	if err != nil {
		return sample{}, err
	}
	defer cl.Close()
	pool, err := pgxpool.New(ctx, d.dsn)
	if err != nil {
		return sample{}, err
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, `create table orders (id bigint generated always as identity primary key, body bytea)`); err != nil {
		return sample{}, err
	}
	w := newStopwatch()
	one := func(i int) error {
		if _, err := pool.Exec(ctx, `insert into orders (body) values ($1)`, make([]byte, payload)); err != nil {
			return err
		}
		id := strconv.Itoa(i)
		w.commit(id, time.Now())
		cl.Produce(ctx, &kgo.Record{Key: []byte(strconv.Itoa(i % keys)), Value: make([]byte, payload)}, func(_ *kgo.Record, err error) {
			if err == nil {
				w.ack(id, time.Now())
			}
		})
		return nil
	}
	if err := w.warm(ctx, one); err != nil {
		return sample{}, err
	}
	if err := paced(ctx, rate, n, one); err != nil {
		return sample{}, err
	}
	lat, err := w.wait(ctx)
	return sample{lat: lat}, err
}

// burst measures the others of a key that gets very much at once.
func burst(ctx context.Context, e env) (a, b sample, err error) {
	for i, side := range []*sample{&a, &b} {
		if side.lat, err = burstSide(ctx, e, i == 1); err != nil {
			return a, b, err
		}
	}
	return a, b, nil
}

func burstSide(ctx context.Context, e env, apart bool) ([]time.Duration, error) {
	topic, stop, err := newTopic(ctx, e)
	if err != nil {
		return nil, err
	}
	defer stop()
	d, err := newDatabase(ctx, e)
	if err != nil {
		return nil, err
	}
	defer d.drop()
	pool, err := pgxpool.New(ctx, d.dsn)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	k, err := kafkaTo(e, topic)()
	if err != nil {
		return nil, err
	}
	defer k.Close(context.WithoutCancel(ctx))
	w := newStopwatch()
	dest := relay.Destination{Name: "bench", Sink: watching{k, w}, FromEarliest: true}
	if apart { // the burst goes nowhere
		dest.Match = func(r *outrider.Record) bool { return r.Key != "burst" }
	}
	end, err := running(ctx, d.dsn, pgstore.Config{}, dest)
	if err != nil {
		return nil, err
	}
	err = paced(ctx, 100, 800, func(i int) error {
		if i == 200 {
			go func() {
				_, _ = pool.Exec(ctx, `insert into outbox_events (aggregate_type, aggregate_id, event_type, payload, event_key)
					select 'order', 'burst', 'OrderPlaced', decode(repeat('ab', $1), 'hex'), null from generate_series(1, 100000)`, payload)
			}()
		}
		return commitOne(ctx, pool, w, strconv.Itoa(i%keys))
	})
	if err != nil {
		return nil, err
	}
	lat, err := w.wait(ctx)
	return lat, errors.Join(err, end())
}

// writers measures what the outbox costs those who write: commits per second of
// 16 of them, with a relay running.
func writers(bell bool) func(context.Context, env) (sample, sample, error) {
	return func(ctx context.Context, e env) (a, b sample, err error) {
		for i, side := range []*sample{&a, &b} {
			with := i == 0
			if *side, err = writersSide(ctx, e, with || bell, with && bell); err != nil {
				return a, b, err
			}
		}
		return a, b, nil
	}
}

func writersSide(ctx context.Context, e env, events, bell bool) (sample, error) {
	const n, parallel = 20_000, 16
	d, err := newDatabase(ctx, e)
	if err != nil {
		return sample{}, err
	}
	defer d.drop()
	cfg, err := pgxpool.ParseConfig(d.dsn)
	if err != nil {
		return sample{}, err
	}
	cfg.MaxConns = parallel
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return sample{}, err
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, `create table orders (id bigint generated always as identity primary key, body bytea)`); err != nil {
		return sample{}, err
	}
	if events {
		if bell {
			db, err := sql.Open("pgx", d.dsn)
			if err != nil {
				return sample{}, err
			}
			if err := errors.Join(migrate.Doorbell(ctx, db, true), db.Close()); err != nil {
				return sample{}, err
			}
		}
		var left atomic.Int64
		left.Store(1 << 60)
		end, err := running(ctx, d.dsn, pgstore.Config{Doorbell: bell},
			relay.Destination{Name: "bench", Sink: counting{nil, &left, make(chan struct{})}, FromEarliest: true})
		if err != nil {
			return sample{}, err
		}
		defer end() //nolint:errcheck // the measure is taken
	}
	o, err := outrider.New(outrider.Config{Dialect: outrider.Postgres})
	if err != nil {
		return sample{}, err
	}
	return timed(n, func() error {
		var wg sync.WaitGroup
		errs := make(chan error, parallel)
		for w := range parallel {
			wg.Go(func() {
				for i := range n / parallel {
					err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
						if _, err := tx.Exec(ctx, `insert into orders (body) values ($1)`, make([]byte, payload)); err != nil {
							return err
						}
						if !events {
							return nil
						}
						return o.Add(ctx, outriderpgx.Tx(tx), outrider.Event{AggregateType: "order",
							AggregateID: strconv.Itoa((w*1000 + i) % keys), Type: "OrderPlaced", Payload: make([]byte, payload)})
					})
					if err != nil {
						errs <- err
						return
					}
				}
			})
		}
		wg.Wait()
		close(errs)
		return <-errs
	})
}
