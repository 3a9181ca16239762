package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"sync"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/kafkasink"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/relay"
)

const (
	relays     = 2
	partitions = 8
	// patience is for how long nothing may arrive.
	patience = time.Minute
)

// depart books the flights, relays their events meanwhile, and checks what
// arrives.
func depart(ctx context.Context, o options, flights []flight, out io.Writer) error {
	db, err := sql.Open("pgx", o.db)
	if err != nil {
		return err
	}
	defer db.Close()
	db.SetMaxOpenConns(o.writers + 2)
	db.SetMaxIdleConns(o.writers + 2)
	if _, err := migrate.Up(ctx, db, migrate.Options{Dialect: outrider.Postgres}); err != nil {
		return err
	}
	desk, err := newOffice(ctx, db, flights)
	if err != nil {
		return err
	}
	topic := "departures-" + outrider.NewID()
	consumer, err := newConsumer(ctx, o.kafka, topic)
	if err != nil {
		return err
	}
	defer consumer.Close()

	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var running sync.WaitGroup
	for i := range relays {
		running.Go(func() {
			if err := relayTo(ctx, o, topic, "relay-"+strconv.Itoa(i+1)); err != nil {
				stop(err)
			}
		})
	}
	c := newCheck(flights, desk.before)
	running.Go(func() { follow(ctx, consumer, c) })

	fmt.Fprintf(out, "%d departures from %d airports; %d writers, %d relays, topic %s\n",
		len(flights), len(desk.before), o.writers, relays, topic)
	began := time.Now()
	err = desk.bookAll(ctx, flights, o.writers)
	booked := time.Since(began)
	if err == nil {
		err = await(ctx, c)
	}
	took := time.Since(began)
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	stop(nil)
	running.Wait()
	return errors.Join(err, c.report(out, len(flights), booked, took))
}

// relayTo is one relay, which in other set-ups is a process of its own.
func relayTo(ctx context.Context, o options, topic, name string) error {
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	st, err := pgstore.Open(ctx, pgstore.Config{DSN: o.db, Logger: log})
	if err != nil {
		return unlessStopped(ctx, err)
	}
	defer st.Close() //nolint:errcheck // nothing is left to be written
	sk, err := kafkasink.New(kafkasink.Config{Brokers: []string{o.kafka}})
	if err != nil {
		return err
	}
	defer sk.Close(context.WithoutCancel(ctx)) //nolint:errcheck // the same
	r, err := relay.New(relay.Config{
		Name: name, Store: st, Logger: log,
		Destinations: []relay.Destination{{
			Name: "kafka", Sink: sk, FromEarliest: true,
			To: func(*outrider.Record) (string, error) { return topic, nil },
		}},
	})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

func unlessStopped(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil //nolint:nilerr // what its name says
	}
	return err
}

// newConsumer makes the topic and a client that reads it.
func newConsumer(ctx context.Context, broker, topic string) (*kgo.Client, error) {
	cl, err := kgo.NewClient(kgo.SeedBrokers(broker), kgo.ConsumeTopics(topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if err != nil {
		return nil, err
	}
	if _, err := kadm.NewClient(cl).CreateTopic(ctx, partitions, 1, nil, topic); err != nil {
		cl.Close()
		return nil, fmt.Errorf("make the topic: %w", err)
	}
	return cl, nil
}

// follow has every message checked as it arrives.
func follow(ctx context.Context, cl *kgo.Client, c *check) {
	for ctx.Err() == nil {
		cl.PollFetches(ctx).EachRecord(func(r *kgo.Record) {
			id := ""
			for _, h := range r.Headers {
				if h.Key == "id" {
					id = string(h.Value)
				}
			}
			c.arrived(id, string(r.Key), r.Value, time.Since(r.Timestamp))
		})
	}
}

// await waits until all has arrived.
func await(ctx context.Context, c *check) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		n, quiet := c.missing()
		switch {
		case n == 0:
			return nil
		case quiet > patience:
			return fmt.Errorf("nothing has arrived for %v", patience)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// report prints the figures, and returns what is wrong.
func (c *check) report(out io.Writer, flights int, booked, took time.Duration) error {
	missing, _ := c.missing()
	c.mu.Lock()
	defer c.mu.Unlock()
	fmt.Fprintf(out, "booked in %.1f s, %.0f a second\n", booked.Seconds(), float64(flights)/booked.Seconds())
	fmt.Fprintf(out, "all arrived %.2f s after the last booking; from insert to arrival p50 %v, p95 %v\n",
		(took - booked).Seconds(), c.wait(0.5).Round(time.Millisecond), c.wait(0.95).Round(time.Millisecond))
	fmt.Fprintf(out, "%d arrived, %d missing, %d twice, %d problems\n", len(c.seen), missing, c.again, len(c.problems))
	var errs []error
	if missing > 0 {
		errs = append(errs, fmt.Errorf("%d departures have not arrived", missing))
	}
	for _, p := range c.problems {
		errs = append(errs, errors.New(p))
	}
	return errors.Join(errs...)
}
