package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/pprof"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/kafkasink"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/relay"
	"github.com/outrider-dev/outrider/route"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
)

// destination is the name of the one that all relays have.
const destination = "bench"

// What a process can be.
const (
	roleRelay        = "relay"
	roleBareKafka    = "bare kafka"
	roleBarePgoutput = "bare pgoutput"
	roleBareMemory   = "bare memory"
	roleBareSQLite   = "bare sqlite"
)

var roles = map[string]func(context.Context, childSpec, *meter) error{
	roleRelay:        runRelay,
	roleBareKafka:    runBareKafka,
	roleBarePgoutput: runBarePgoutput,
	roleBareMemory:   runBareMemory,
	roleBareSQLite:   runBareSQLite,
}

// childMain is what a child does instead of main.
func childMain(text string) int {
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})))
	signal.Ignore(os.Interrupt) // of the terminal: the parent ends the child
	var spec childSpec
	err := json.Unmarshal([]byte(text), &spec)
	if err == nil {
		err = runChild(spec, os.Stdin, os.Stdout)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: error: %v\n", spec.Role, err)
		return 1
	}
	return 0
}

func runChild(spec childSpec, in io.Reader, out io.Writer) error {
	role := roles[spec.Role]
	if role == nil {
		return fmt.Errorf("there is no role %q", spec.Role)
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	go func() {
		defer stop()
		_, _ = io.Copy(io.Discard, in) // it ends with the parent, however that ends
	}()
	m := &meter{spec: spec, out: json.NewEncoder(out)}
	err := errors.Join(m.flushing(ctx, func() error { return role(ctx, spec, m) }), m.failed())
	m.send(message{Peak: peakMemory()})
	return err
}

// meter tells the parent what is measured.
type meter struct {
	spec childSpec

	ready              atomic.Bool
	first, last        atomic.Int64
	delivered, settled atomic.Int64

	mu   sync.Mutex // guards the following
	out  *json.Encoder
	err  error
	acks []ack
}

func (m *meter) send(msg message) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.out.Encode(msg); m.err == nil {
		m.err = err
	}
}

func (m *meter) failed() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

// begin starts the clock; later calls change nothing.
func (m *meter) begin(at time.Time) {
	if m.first.Load() == 0 {
		m.first.CompareAndSwap(0, at.UnixNano())
	}
}

// count adds to what was delivered and settled, as of now.
func (m *meter) count(delivered, settled int) {
	at := time.Now().UnixNano()
	d, s := m.delivered.Add(int64(delivered)), m.settled.Add(int64(settled))
	m.last.Store(at)
	m.send(message{Progress: &progress{First: m.first.Load(), Last: at, Delivered: int(d), Settled: int(s)}})
}

// ack notes a delivery.
func (m *meter) ack(id string, at time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.acks = append(m.acks, ack{strings.Clone(id), at.UnixNano()})
}

// flushing runs f and sends what was acknowledged from time to time meanwhile.
func (m *meter) flushing(ctx context.Context, f func() error) error {
	ended := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		t := time.NewTicker(20 * time.Millisecond)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				m.flush()
			case <-ended:
				m.flush()
				return
			}
		}
	})
	err := f()
	close(ended)
	wg.Wait()
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return nil // it was told to stop
	}
	return err
}

func (m *meter) flush() {
	m.mu.Lock()
	acks := m.acks
	m.acks = nil
	m.mu.Unlock()
	if acks != nil {
		m.send(message{Acks: acks})
	}
}

// hooks are how a relay is measured.
func (m *meter) hooks() relay.Hooks {
	h := relay.Hooks{Claim: func(_ string, events int, took time.Duration) {
		if !m.ready.Swap(true) {
			m.send(message{Ready: true})
		}
		if events > 0 {
			m.begin(time.Now().Add(-took))
		}
	}}
	if m.spec.Events > 0 {
		h.Event = func(_ string, _ *outrider.Record, o relay.EventOutcome) {
			if o.Outcome == relay.Published {
				m.delivered.Add(1)
			}
		}
		h.Settle = func(_ string, events int, _ time.Duration) { m.count(0, events) }
	}
	return h
}

// watching is a sink that tells a meter what its inner sink delivered.
type watching struct {
	sink.Sink
	m *meter
}

// Publish implements sink.Sink.
func (s watching) Publish(ctx context.Context, b sink.Batch) {
	report, messages := b.Report, b.Messages
	b.Report = func(i int, r sink.Result) {
		if r.Status == sink.Delivered && (s.m.spec.Ignore == "" || messages[i].Key != s.m.spec.Ignore) {
			s.m.ack(messages[i].ID, time.Now())
		}
		report(i, r)
	}
	s.Sink.Publish(ctx, b)
}

func (s childSpec) openStore(ctx context.Context) (store.Store, error) {
	if s.File != "" {
		return sqlitestore.OpenStream(ctx, sqlitestore.Config{Path: s.File})
	}
	return pgstore.Open(ctx, pgstore.Config{DSN: s.DSN, Doorbell: s.Doorbell})
}

func (s childSpec) openSink() (sink.Sink, error) {
	if s.Kafka == "" {
		return memsink.New(memsink.Config{Discard: true}), nil
	}
	rule, err := route.ParseRule("", s.Topic)
	if err != nil {
		return nil, err
	}
	return kafkasink.New(kafkasink.Config{Brokers: []string{s.Kafka}, Topics: route.Rules{rule}})
}

// runRelay is a relay with the settings that it has by itself.
func runRelay(ctx context.Context, spec childSpec, m *meter) error {
	if spec.Profile != "" {
		f, err := os.Create(spec.Profile)
		if err == nil {
			err = pprof.StartCPUProfile(f)
		}
		if err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	st, err := spec.openStore(ctx)
	if err != nil {
		return err
	}
	defer st.Close() //nolint:errcheck // the process ends
	sk, err := spec.openSink()
	if err != nil {
		return err
	}
	defer sk.Close(context.WithoutCancel(ctx)) //nolint:errcheck // the same
	d := relay.Destination{Name: destination, Sink: sk, FromEarliest: true}
	if spec.Acks {
		d.Sink = watching{sk, m}
	}
	if spec.Apart {
		d.Match = func(r *outrider.Record) bool { return r.Key != spec.Ignore }
	}
	r, err := relay.New(relay.Config{Name: spec.Name, Store: st, Destinations: []relay.Destination{d}, Hooks: m.hooks()})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

// peakMemory is the most that this process has had in memory. What wait4 tells
// of a child includes the parent's, from before the exec. 0: unknown, where
// there is no /proc.
func peakMemory() uint64 {
	f, err := os.Open("/proc/self/status")
	if err != nil {
		return 0
	}
	defer f.Close() //nolint:errcheck // only read
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var kib uint64
		if _, err := fmt.Sscanf(lines.Text(), "VmHWM: %d kB", &kib); err == nil {
			return kib << 10
		}
	}
	return 0
}
