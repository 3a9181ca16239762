//go:build linux

package chaos_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/kafkasink"
	"github.com/outrider-dev/outrider/natssink"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/relay"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/sqlitestore"
)

// envRelay holds the relaySpec of a process that is to be a relay.
const envRelay = "OUTRIDER_CHAOS_RELAY"

// destination is the name of the one that all tests have.
const destination = "broker"

// relaySpec is all that a relay process is told.
type relaySpec struct {
	Name   string
	Gauges string // file

	Postgres string // DSN
	SQLite   string // file, instead

	Kafka string // host:port
	NATS  string // URL, instead
	Topic string // or subject

	TTL, Grace time.Duration

	Poisoned, Exit bool // a message ends the process: poisonedSink
	SlowDisk       bool // see slowDisk
}

// What a relay may have in hand, small so that there are many batches.
const (
	maxRecords         = 100
	maxRecordsInFlight = 500
)

func (s relaySpec) openStore(ctx context.Context, log *slog.Logger) (nativeStore, error) {
	if s.SQLite != "" {
		return sqlitestore.OpenStream(ctx, sqlitestore.Config{Path: s.SQLite, Logger: log})
	}
	return pgstore.Open(ctx, pgstore.Config{DSN: s.Postgres, Logger: log})
}

func (s relaySpec) openSink() (sink.Sink, error) {
	if s.NATS != "" {
		return natssink.New(natssink.Config{URLs: []string{s.NATS}})
	}
	return kafkasink.New(kafkasink.Config{Brokers: []string{s.Kafka}})
}

// runRelay is a relay process. It ends softly with its standard input, so it
// does not outlive the test, and hard as it is told to.
func runRelay(spec relaySpec) error {
	signal.Ignore(os.Interrupt) // of the terminal: the test ends the process
	log := slog.New(slog.NewTextHandler(os.Stderr, nil)).With("relay", spec.Name)
	g, err := mapGauges(spec.Gauges)
	if err != nil {
		return err
	}
	p := newProbe(g)
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	go func() {
		defer stop()
		if err := p.obey(os.Stdin); err != nil {
			log.Error("orders", "error", err)
		}
	}()

	st, err := spec.openStore(ctx, log)
	if err != nil {
		return err
	}
	defer st.Close() // the process ends
	sk, err := spec.openSink()
	if err != nil {
		return err
	}
	defer sk.Close(context.WithoutCancel(ctx)) // the same
	if spec.Poisoned {
		sk = poisonedSink{sk, spec.Exit}
	}
	r, err := relay.New(relay.Config{
		Name: spec.Name, Store: probedStore{st, p}, Logger: log,
		LeaseTTL: spec.TTL, Grace: spec.Grace,
		MaxRecords: maxRecords, MaxRecordsInFlight: maxRecordsInFlight,
		Destinations: []relay.Destination{{
			Name: destination, Sink: probedSink{sk, p}, FromEarliest: true,
			To:      func(*outrider.Record) (string, error) { return spec.Topic, nil },
			Retry:   relay.Retry{Base: 100 * time.Millisecond, Cap: time.Second},
			Breaker: relay.Breaker{Base: 100 * time.Millisecond, Cap: time.Second},
		}},
	})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

// obey reads orders, a line each: the number of a signal, the point at which it
// is to be sent, and at which time there.
func (p *probe) obey(in io.Reader) error {
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var sig, n int
		var at point
		if _, err := fmt.Sscan(lines.Text(), &sig, &at, &n); err != nil {
			return err
		}
		p.arm(syscall.Signal(sig), at, n)
	}
	return lines.Err()
}
