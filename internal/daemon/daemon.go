// Package daemon puts the relay process together. It is the only package that
// knows all drivers.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/config"
	"github.com/outrider-dev/outrider/relay"
	"github.com/outrider-dev/outrider/relayprom"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// Options set up a Daemon.
type Options struct {
	// Config is needed.
	Config *config.Config

	// Logger gets what people should know. Needed.
	Logger *slog.Logger

	// Stdout is where log destinations without a file write to. Needed if
	// there is one.
	Stdout io.Writer

	// Version is shown by /healthz and in metrics.
	Version string

	// Next is logged when the relays are at work: what to do then. Optional.
	Next string

	// Strict makes a destination that cannot be reached an error of New. By
	// default it is a warning: the relay waits for it.
	Strict bool
}

// Daemon is a relay process: a relay per source, and the HTTP endpoint.
type Daemon struct {
	log      *slog.Logger
	version  string
	next     string
	redact   func(string) string
	address  string
	budget   time.Duration
	relays   []*sourceRelay
	cleanups cleanups
	// announced: it was said that the relays are at work.
	announced atomic.Bool
}

type sourceRelay struct {
	name   string
	relay  *relay.Relay
	gauges *databaseGauges // nil: none
}

// checkTimeout bounds the look at each destination at the start.
const checkTimeout = 10 * time.Second

// closeTimeout bounds the clean-ups, over the relays' own budgets.
const closeTimeout = 10 * time.Second

// New opens stores, sinks and the endpoint, and looks at all of them. What it
// has opened is closed again if it fails. Errors carry a hint.
func New(ctx context.Context, o Options) (_ *Daemon, err error) {
	d := &Daemon{log: o.Logger, version: o.Version, next: o.Next, redact: o.Config.Redact, budget: stopBudget(o.Config.Relay)}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close(ctx))
		}
	}()
	registry := newRegistry(o.Version)
	for _, s := range o.Config.Sources {
		if err := d.addSource(ctx, o, s, registry); err != nil {
			return nil, outrider.WithHint(fmt.Errorf("source %s: %w", s.Name, err), outrider.Hint(err))
		}
	}
	if o.Config.Listen != config.Off {
		if err := d.listen(ctx, o.Config.Listen, registry); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// addSource opens a source with its destinations and makes its relay.
func (d *Daemon) addSource(ctx context.Context, o Options, s config.Source, registry *prometheus.Registry) error {
	log := d.log.With("source", s.Name)
	st, err := OpenStore(ctx, s, log)
	if err != nil {
		return err
	}
	d.cleanups.add("source "+s.Name, func(context.Context) error { return st.Close() })
	rc := relayConfig(o.Config.Relay, st, log)
	for _, dest := range o.Config.Destinations {
		if dest.Source != s.Name {
			continue
		}
		k, err := d.openSink(ctx, o, dest, log)
		if err != nil {
			return outrider.WithHint(fmt.Errorf("destination %s: %w", dest.Name, err), outrider.Hint(err))
		}
		rc.Destinations = append(rc.Destinations, relayDestination(dest, k))
	}
	m := relayprom.New(relayprom.Config{Source: s.Name, EventTypes: o.Config.Metrics.EventTypes})
	rc.Hooks = m.Hooks()
	claimed := rc.Hooks.Claim
	rc.Hooks.Claim = func(destination string, events int, took time.Duration) {
		d.atWork() // before the first event is sent
		claimed(destination, events, took)
	}
	r, err := relay.New(rc)
	if err != nil {
		return err
	}
	m.Watch(r)
	if err := registry.Register(m); err != nil {
		return err
	}
	sr := &sourceRelay{name: s.Name, relay: r}
	d.relays = append(d.relays, sr)
	if o.Config.Listen == config.Off || o.Config.Metrics.DatabaseEvery <= 0 {
		return nil
	}
	sr.gauges, err = d.openGauges(ctx, o, s, log)
	if err != nil || sr.gauges == nil {
		return err
	}
	return registry.Register(sr.gauges)
}

// openGauges opens the source once more, so that figures have connections of
// their own. It is nil where the store has no figures.
func (d *Daemon) openGauges(ctx context.Context, o Options, s config.Source, log *slog.Logger) (*databaseGauges, error) {
	if s.Postgres != nil {
		pg := *s.Postgres
		pg.MaxConns = 2
		s.Postgres = &pg
	}
	st, err := OpenStore(ctx, s, log)
	if err != nil {
		return nil, err
	}
	i, ok := st.(store.Inspector)
	if !ok {
		return nil, st.Close()
	}
	d.cleanups.add("the figures of source "+s.Name, func(context.Context) error { return st.Close() })
	return newDatabaseGauges(s.Name, i, o.Config.Metrics.DatabaseEvery, log), nil
}

func (d *Daemon) openSink(ctx context.Context, o Options, dest config.Destination, log *slog.Logger) (sink.Sink, error) {
	k, err := newSink(dest, o.Stdout, log.With("destination", dest.Name))
	if err != nil {
		err = explain(err)
		if dest.Log != nil && outrider.Hint(err) == "" {
			err = outrider.WithHint(err, "look at the path: the folder has to exist and to be writable")
		}
		return nil, err
	}
	d.cleanups.add("destination "+dest.Name, k.Close)
	c, ok := k.(sink.Checker)
	if !ok {
		return k, nil
	}
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	err = explain(c.Check(ctx))
	switch {
	case err == nil:
	case isUnreachable(err) && !o.Strict:
		log.Warn("the destination cannot be reached; its events wait until it can",
			"destination", dest.Name, "error", d.redact(err.Error()), "hint", outrider.Hint(err))
	default:
		return nil, err
	}
	return k, nil
}

// Address is where the endpoint listens; "" if there is none.
func (d *Daemon) Address() string { return d.address }

// Run relays until ctx ends, then stops softly and closes everything. It ends
// early with an error if one of the relays does. Call it once.
func (d *Daemon) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	errs := make([]error, len(d.relays)+1)
	var running sync.WaitGroup
	for i, s := range d.relays {
		if s.gauges != nil {
			running.Go(func() { s.gauges.run(ctx) })
		}
		running.Go(func() {
			if err := s.relay.Run(ctx); err != nil {
				err = explain(err)
				errs[i] = outrider.WithHint(fmt.Errorf("source %s: %w", s.name, err), outrider.Hint(err))
				stop()
			}
		})
	}
	running.Go(func() { d.announce(ctx) })
	running.Wait()
	errs[len(d.relays)] = d.close(ctx)
	return errors.Join(errs...)
}

// announceEvery is how often it is looked whether the relays have joined.
const announceEvery = 10 * time.Millisecond

// announce looks until the relays are at work. Those that have nothing to read
// are seen by nothing else.
func (d *Daemon) announce(ctx context.Context) {
	look := time.NewTicker(announceEvery)
	defer look.Stop()
	for !d.atWork() {
		select {
		case <-look.C:
		case <-ctx.Done():
			return
		}
	}
}

// atWork says once that all relays are at work, when they are: joining may fail,
// as in a database that was restored.
func (d *Daemon) atWork() bool {
	if d.announced.Load() {
		return true
	}
	idle := func(s *sourceRelay) bool { return !s.relay.Health().Running }
	if slices.ContainsFunc(d.relays, idle) {
		return false
	}
	if d.announced.CompareAndSwap(false, true) {
		d.log.Info("relaying", "version", d.version, "address", d.address, "sources", len(d.relays), "next", d.next)
	}
	return true
}

// Cut ends the soft part of the stop at once.
func (d *Daemon) Cut() {
	for _, s := range d.relays {
		s.relay.Cut()
	}
}

// close undoes New under a context of its own, since the caller's may have
// ended.
func (d *Daemon) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	return d.cleanups.run(ctx)
}
