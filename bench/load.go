package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/outriderpgx"
)

// stopwatch measures from commit to delivery, by event id.
type stopwatch struct {
	mu        sync.Mutex
	committed map[string]time.Time
	keys      map[string]string
	delivered map[string]time.Time
}

func newStopwatch() *stopwatch {
	return &stopwatch{committed: map[string]time.Time{}, keys: map[string]string{}, delivered: map[string]time.Time{}}
}

func (w *stopwatch) commit(c commit) {
	if !c.counts {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.committed[c.id], w.keys[c.id] = c.at, c.key
}

// deliver notes the first delivery of an event.
func (w *stopwatch) deliver(id string, at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, again := w.delivered[id]; !again {
		w.delivered[id] = at
	}
}

// acks takes what a relay's process says.
func (w *stopwatch) acks(all []ack) {
	for _, a := range all {
		w.deliver(a.ID, time.Unix(0, a.At))
	}
}

// wait returns once all that was committed has been delivered.
func (w *stopwatch) wait(ctx context.Context) error {
	t := time.NewTicker(10 * time.Millisecond)
	defer t.Stop()
	for deadline := time.Now().Add(patience); ; {
		missing := 0
		w.mu.Lock()
		for id := range w.committed {
			if _, ok := w.delivered[id]; !ok {
				missing++
			}
		}
		w.mu.Unlock()
		if missing == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d events did not arrive", missing)
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// latencies are those of the events that match says to count.
func (w *stopwatch) latencies(match func(key string, committed time.Time) bool) []time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []time.Duration
	for id, t := range w.committed {
		if match(w.keys[id], t) {
			out = append(out, w.delivered[id].Sub(t))
		}
	}
	return out
}

// writes is what an application commits in one transaction.
type writes int

const (
	row         writes = iota // of its own
	event                     // nothing else, as where a load is to cost little
	rowAndEvent               // as applications do
)

// app is an application that writes, from up to 32 connections.
type app struct {
	writes writes
	pool   *pgxpool.Pool
	outbox *outrider.Outbox
}

const connections = 32

func newApp(ctx context.Context, d *database, w writes) (*app, error) {
	cfg, err := pgxpool.ParseConfig(d.dsn)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns, cfg.MinConns = connections, connections
	a := &app{writes: w}
	if a.outbox, err = outrider.New(outrider.Config{Dialect: outrider.Postgres}); err != nil {
		return nil, err
	}
	if _, err := d.conn.Exec(ctx, `create table orders (id bigint generated always as identity primary key, body bytea)`); err != nil {
		return nil, err
	}
	if a.pool, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
		return nil, err
	}
	return a, a.warm(ctx)
}

// warm has every connection there is, and both statements prepared on it, so
// that none of that is measured. What it writes is rolled back.
func (a *app) warm(ctx context.Context) error {
	var wg sync.WaitGroup
	errs := make([]error, connections)
	all := make(chan struct{})
	var have atomic.Int64
	for i := range errs {
		wg.Go(func() {
			errs[i] = pgx.BeginFunc(ctx, a.pool, func(tx pgx.Tx) error {
				if err := a.write(ctx, tx, outrider.NewID(), "warm"); err != nil {
					return err
				}
				if have.Add(1) == connections {
					close(all)
				}
				select { // so that each has a connection of its own
				case <-all:
				case <-ctx.Done():
				case <-time.After(patience):
				}
				return errWarm
			})
			if errors.Is(errs[i], errWarm) {
				errs[i] = nil
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

var errWarm = errors.New("rolled back on purpose")

// write is what one transaction does.
func (a *app) write(ctx context.Context, c outriderpgx.Conn, id, key string) error {
	if a.writes != event {
		if _, err := c.Exec(ctx, `insert into orders (body) values ($1)`, make([]byte, payload)); err != nil {
			return err
		}
	}
	if a.writes == row {
		return nil
	}
	return a.outbox.Add(ctx, outriderpgx.Tx(c), outrider.Event{ID: id, AggregateType: "order", AggregateID: key,
		Type: "OrderPlaced", Payload: make([]byte, payload)})
}

// commit is one transaction. One of a single statement needs no begin.
func (a *app) commit(ctx context.Context, id, key string) error {
	if a.writes == event {
		return a.write(ctx, a.pool, id, key)
	}
	return pgx.BeginFunc(ctx, a.pool, func(tx pgx.Tx) error { return a.write(ctx, tx, id, key) })
}

// load is what an application commits, at a rate.
type load struct {
	rate      int
	warm, run time.Duration // what is committed in the first does not count
	// done is called after each commit; it must not block.
	done func(c commit)
}

// commit is one that was made.
type commit struct {
	id, key string
	at      time.Time
	counts  bool // it does not, while things warm up
}

// commits does the load. It begins each transaction when it is due, whatever
// has become of those before it, as long as a connection is free. It gives the
// rate that was reached.
func (a *app) commits(ctx context.Context, l load) (float64, error) {
	interval := time.Second / time.Duration(l.rate)
	uncounted := int64(l.warm / interval)
	n := uncounted + int64(l.run/interval)
	var next atomic.Int64
	began := time.Now()
	err := together(connections, func(int) error {
		for {
			i := next.Add(1) - 1
			if i >= n {
				return nil
			}
			select {
			case <-time.After(time.Until(began.Add(time.Duration(i) * interval))):
			case <-ctx.Done():
				return ctx.Err()
			}
			id, key := outrider.NewID(), strconv.FormatInt(i%keys, 10)
			if err := a.commit(ctx, id, key); err != nil {
				return err
			}
			l.done(commit{id, key, time.Now(), i >= uncounted})
		}
	})
	reached := float64(n) / time.Since(began).Seconds()
	if reached < 0.9*float64(l.rate) {
		fmt.Fprintf(os.Stderr, "the writers reached %.0f of %d commits per second\n", reached, l.rate)
	}
	return reached, err
}

// together runs f n times at once, and gives the first error; the others end by
// themselves.
func together(n int, f func(i int) error) error {
	var wg sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
