// Command skewed is a relay of TestClocks. The test builds it with a package
// time whose wall clock is off, as that of a host with a wrong clock is; its
// monotonic clock is right.
//
// It carries from PostgreSQL to the test: a line of JSON for each message over
// TCP, and a line back. It ends softly with its standard input.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"sync"
	"time"

	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/relay"
	"github.com/outrider-dev/outrider/sink"
)

// Spec is what the environment's OUTRIDER_SKEWED_RELAY holds.
type Spec struct {
	Name, Postgres, Address string
	TTL, Grace, RetryBase   time.Duration
	MaxRecordsInFlight      int
}

// Line is a message on its way to the test.
type Line struct {
	Relay             string
	Now               time.Time // by the clock that is off
	ID, Key, Sequence string
	Payload           json.RawMessage
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	signal.Ignore(os.Interrupt) // of the terminal: the test ends the process
	var spec Spec
	if err := json.Unmarshal([]byte(os.Getenv("OUTRIDER_SKEWED_RELAY")), &spec); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); stop() }()
	log := slog.New(slog.NewTextHandler(os.Stderr, nil)).With("relay", spec.Name)
	st, err := pgstore.Open(ctx, pgstore.Config{DSN: spec.Postgres, Logger: log})
	if err != nil {
		return err
	}
	defer st.Close() //nolint:errcheck // the process ends
	r, err := relay.New(relay.Config{
		Name: spec.Name, Store: st, Logger: log, LeaseTTL: spec.TTL, Grace: spec.Grace,
		MaxRecords: 20, MaxRecordsInFlight: spec.MaxRecordsInFlight,
		Destinations: []relay.Destination{{
			Name: "broker", Sink: &wire{spec: spec}, FromEarliest: true,
			Retry: relay.Retry{Immediate: -1, Base: spec.RetryBase, Cap: spec.RetryBase},
		}},
	})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

// wire is a sink to the test.
type wire struct {
	spec Spec

	mu   sync.Mutex
	conn net.Conn
	in   *bufio.Scanner
}

func (w *wire) Capabilities() sink.Capabilities { return sink.Capabilities{Order: true} }

func (w *wire) Close(context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hangUp()
	return nil
}

// Publish sends one message after the other.
func (w *wire) Publish(ctx context.Context, b sink.Batch) {
	w.mu.Lock()
	defer w.mu.Unlock()
	held := map[string]bool{}
	for i := range b.Messages {
		key := b.Messages[i].Key
		r := sink.Result{Status: sink.NotSent, Class: sink.ClassHeld}
		if key == "" || !held[key] {
			r = w.send(ctx, &b.Messages[i])
		}
		held[key] = r.Status != sink.Delivered
		b.Report(i, r)
	}
}

func (w *wire) send(ctx context.Context, m *sink.Message) sink.Result {
	if err := w.connect(ctx); err != nil {
		return sink.Result{Status: sink.NotSent, Class: sink.ClassUnreachable, Err: err}
	}
	conn := w.conn
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	err := json.NewEncoder(conn).Encode(Line{Relay: w.spec.Name, Now: time.Now(), ID: m.ID, Key: m.Key,
		Sequence: sequence(m), Payload: m.Payload})
	if err == nil && !w.in.Scan() {
		if err = w.in.Err(); err == nil {
			err = io.ErrUnexpectedEOF
		}
	}
	switch {
	case err != nil:
		w.hangUp()
		return sink.Result{Status: sink.Unknown, Class: sink.ClassUnreachable, Err: err}
	case w.in.Text() == "yes":
		return sink.Result{Status: sink.Delivered}
	default:
		return sink.Result{Status: sink.Retry, Class: sink.ClassRefused, Err: fmt.Errorf("the answer is %s", w.in.Text())}
	}
}

func sequence(m *sink.Message) string {
	if m.Sequence.IsZero() {
		return ""
	}
	return m.Sequence.String()
}

func (w *wire) connect(ctx context.Context) error {
	if w.conn != nil {
		return nil
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", w.spec.Address)
	if err != nil {
		return err
	}
	w.conn, w.in = conn, bufio.NewScanner(conn)
	return nil
}

func (w *wire) hangUp() {
	if w.conn != nil {
		_ = w.conn.Close()
		w.conn = nil
	}
}
