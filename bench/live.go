package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
)

const warmUp = 2 * time.Second

// scene is a database with an application, and with relays if there are any.
type scene struct {
	e      *env
	d      *database
	t      *topic // nil: to memory
	app    *app
	relays []*process
	watch  *stopwatch
}

// setting is how a scene is set.
type setting struct {
	kafka    bool
	see      func(*kgo.Record) // what the consumer does; nil: there is none
	writes   writes            // what the application writes
	doorbell bool
	relays   []childSpec // without addresses
}

func newScene(ctx context.Context, e *env, s setting) (sc *scene, err error) {
	sc = &scene{e: e, watch: newStopwatch()}
	defer func() {
		if err != nil {
			sc.close()
		}
	}()
	if sc.d, err = e.empty(ctx); err != nil {
		return sc, err
	}
	if s.doorbell {
		if err := doorbell(ctx, sc.d); err != nil {
			return sc, err
		}
	}
	if sc.app, err = newApp(ctx, sc.d, s.writes); err != nil {
		return sc, err
	}
	if s.kafka {
		if sc.t, err = newTopic(ctx, e, s.see); err != nil {
			return sc, err
		}
	}
	for _, r := range s.relays {
		r.DSN = sc.d.dsn
		r.Doorbell = s.doorbell
		if sc.t != nil {
			r.Kafka, r.Topic = e.kafka, sc.t.name
		}
		p, err := start(r, sc.watch.acks)
		if err != nil {
			return sc, err
		}
		sc.relays = append(sc.relays, p)
	}
	for _, p := range sc.relays {
		if err := p.await(ctx); err != nil {
			return sc, err
		}
	}
	return sc, nil
}

func doorbell(ctx context.Context, d *database) error {
	db, err := sql.Open("pgx", d.dsn)
	if err != nil {
		return err
	}
	return errors.Join(migrate.Doorbell(ctx, db, true), db.Close())
}

// stop stops the relays, and adds what they have used.
func (sc *scene) stop(into sample) error {
	for _, p := range sc.relays {
		used, err := p.stop()
		if err != nil {
			return err
		}
		for q, v := range used {
			into[q] += v
		}
	}
	return nil
}

func (sc *scene) close() {
	for _, p := range sc.relays {
		_, _ = p.stop() // for who leaves by an error
	}
	if sc.app != nil && sc.app.pool != nil {
		sc.app.pool.Close()
	}
	if sc.t != nil {
		sc.t.stop()
	}
	if sc.d != nil {
		sc.d.drop()
	}
}

func every(string, time.Time) bool { return true }

// measured is a relay that reports its deliveries.
func (e *env) measured() []childSpec {
	r := e.relaySpecs(1)
	r[0].Acks = true
	return r
}

// relayLatency is from the commit to the broker's acknowledgement in a relay,
// which is a process of its own.
func relayLatency(rate int) func(context.Context, *env) (sample, error) {
	return func(ctx context.Context, e *env) (sample, error) {
		sc, err := newScene(ctx, e, setting{kafka: true, writes: event, relays: e.measured()})
		if err != nil {
			return nil, err
		}
		defer sc.close()
		return sc.latency(ctx, rate, e.span(20*time.Second))
	}
}

// latency commits at a rate and measures what the relay makes of it.
func (sc *scene) latency(ctx context.Context, rate int, run time.Duration) (sample, error) {
	s := sample{}
	var err error
	s[offered], err = sc.app.commits(ctx, load{rate: rate, warm: sc.e.span(warmUp), run: run, done: sc.watch.commit})
	if err != nil {
		return nil, err
	}
	if err := sc.watch.wait(ctx); err != nil {
		return nil, err
	}
	s.latencies(sc.watch.latencies(every))
	return s, sc.stop(s)
}

// directLatency is the same of an application that produces by itself, right
// after its commit: as fast as can be, and lost if it dies in between.
func directLatency(rate int) func(context.Context, *env) (sample, error) {
	return func(ctx context.Context, e *env) (sample, error) {
		sc, err := newScene(ctx, e, setting{kafka: true, writes: row})
		if err != nil {
			return nil, err
		}
		defer sc.close()
		cl, err := kafkaClient(e.kafka, sc.t.name)
		if err != nil {
			return nil, err
		}
		defer cl.Close()
		s := sample{}
		s[offered], err = sc.app.commits(ctx, load{rate: rate, warm: e.span(warmUp), run: e.span(20 * time.Second),
			done: func(c commit) {
				sc.watch.commit(c)
				cl.Produce(ctx, plainRecord(c.id, c.key, "OrderPlaced", make([]byte, payload)), func(_ *kgo.Record, err error) {
					if err == nil {
						sc.watch.deliver(c.id, time.Now())
					}
				})
			}})
		if err != nil {
			return nil, err
		}
		if err := sc.watch.wait(ctx); err != nil {
			return nil, err
		}
		s.latencies(sc.watch.latencies(every))
		return s, nil
	}
}

// heldLatency has something open for a minute, in which others commit.
func heldLatency(h hold) func(context.Context, *env) (sample, error) {
	return func(ctx context.Context, e *env) (sample, error) {
		sc, err := newScene(ctx, e, setting{writes: event, relays: e.measured()})
		if err != nil {
			return nil, err
		}
		defer sc.close()
		release, err := h(ctx, sc.d)
		if err != nil {
			return nil, err
		}
		defer release()
		return sc.latency(ctx, 200, e.span(aMinute))
	}
}

// burst measures the others of a key that gets very much at once. Apart, the
// burst is for a destination of its own that is paused, and so costs this one
// no more than the look that passes over it.
func burst(apart bool) func(context.Context, *env) (sample, error) {
	return func(ctx context.Context, e *env) (sample, error) {
		relays := e.measured()
		relays[0].Ignore, relays[0].Apart = "burst", apart
		sc, err := newScene(ctx, e, setting{kafka: true, writes: event, relays: relays})
		if err != nil {
			return nil, err
		}
		defer sc.close()
		burst := make(chan error, 1)
		began := time.Now().Add(e.span(warmUp))
		go func() {
			select {
			case <-time.After(time.Until(began)):
			case <-ctx.Done():
			}
			_, err := sc.d.conn.Exec(ctx, `
				insert into outbox_events (aggregate_type, aggregate_id, event_type, payload, event_key)
				select 'order', 'burst', 'OrderPlaced', decode(repeat('ab', $2), 'hex'), null from generate_series(1, $1::int)`,
				e.n(100_000), payload)
			burst <- err
		}()
		s, err := sc.latency(ctx, 100, e.span(15*time.Second))
		return s, errors.Join(err, <-burst)
	}
}

// writers measures what the outbox costs those who write: commits per second of
// 16 of them.
func writers(events, bell bool) func(context.Context, *env) (sample, error) {
	return func(ctx context.Context, e *env) (sample, error) {
		const parallel = 16
		n := e.n(20_000) / parallel
		set := setting{writes: row, doorbell: bell}
		if events {
			set.writes = rowAndEvent
			set.relays = e.relaySpecs(1)
		}
		sc, err := newScene(ctx, e, set)
		if err != nil {
			return nil, err
		}
		defer sc.close()
		began := time.Now()
		err = together(parallel, func(w int) error {
			for i := range n {
				if err := sc.app.commit(ctx, "", strconv.Itoa((w*n+i)%keys)); err != nil {
					return err
				}
			}
			return nil
		})
		s := sample{perSecond: float64(n*parallel) / time.Since(began).Seconds()}
		return s, errors.Join(err, sc.stop(s))
	}
}

// stall has two relays share the load; one is killed in the middle of it. What
// counts is what a consumer sees: the longest that an event takes from its
// commit, of the lanes of the one that was killed, and of the others.
func stall(kill bool) func(context.Context, *env) (sample, error) {
	return func(ctx context.Context, e *env) (sample, error) {
		var sc *scene
		watch := newStopwatch()
		sc, err := newScene(ctx, e, setting{kafka: true, writes: event, relays: e.relaySpecs(2),
			see: func(r *kgo.Record) { watch.deliver(header(r, "id"), time.Now()) }})
		if err != nil {
			return nil, err
		}
		defer sc.close()
		sc.watch = watch
		if err := sc.shared(ctx); err != nil {
			return nil, err
		}
		run := e.span(8 * time.Second)
		lanes := make(chan any, 1)
		if kill {
			go func() {
				select {
				case <-time.After(e.span(warmUp) + run*3/8):
				case <-ctx.Done():
				}
				lanes <- sc.killOne(ctx)
			}()
		} else {
			lanes <- laneSet(0)
		}
		s := sample{}
		s[offered], err = sc.app.commits(ctx, load{rate: 500, warm: e.span(warmUp), run: run, done: sc.watch.commit})
		got := <-lanes
		if fault, ok := got.(error); ok {
			err = errors.Join(err, fault)
		}
		if err != nil {
			return nil, err
		}
		victim, _ := got.(laneSet)
		if err := sc.watch.wait(ctx); err != nil {
			return nil, err
		}
		longest := func(its bool) float64 {
			return percentile(sc.watch.latencies(func(key string, _ time.Time) bool { return victim.has(key) == its }), 100).Seconds()
		}
		s[waitOthers] = longest(false)
		if kill {
			s[waitKilled] = longest(true)
			sc.relays = sc.relays[1:]
		}
		return s, sc.stop(s)
	}
}

// laneSet is a set of lanes as outbox_leases has it.
type laneSet int64

func (l laneSet) has(key string) bool { return l>>outrider.Lane(key)&1 == 1 }

// shared waits until both relays have half of the lanes each, twice in a row.
func (sc *scene) shared(ctx context.Context) error {
	t := time.NewTicker(100 * time.Millisecond)
	defer t.Stop()
	calm := 0
	for deadline := time.Now().Add(patience); calm < 2; {
		var least, all int
		err := sc.d.conn.QueryRow(ctx, `
			select coalesce(min(n), 0), coalesce(sum(n), 0) from (
				select sum(length(replace(lanes::bit(64)::text, '0', ''))) as n from outbox_leases
				where owner is not null group by owner) o`).Scan(&least, &all)
		switch {
		case err != nil:
			return err
		case least == outrider.Lanes/2 && all == outrider.Lanes:
			calm++
			continue
		case time.Now().After(deadline):
			return fmt.Errorf("after %v the relays do not share the lanes: the smaller has %d of %d", patience, least, all)
		}
		calm = 0
		select {
		case <-t.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// killOne kills the first relay, and gives the lanes that it had, or an error.
func (sc *scene) killOne(ctx context.Context) any {
	var lanes laneSet
	err := sc.d.conn.QueryRow(ctx, `select bit_or(lanes) from outbox_leases where owner = 'bench-0'`).Scan(&lanes)
	if err != nil {
		return err
	}
	sc.relays[0].kill()
	return lanes
}
