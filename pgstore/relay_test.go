package pgstore_test

import (
	"context"
	"log/slog"
	"strconv"
	"testing"
	"time"

	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/relay"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// relaying runs a relay on a store until the test ends, or until stop, with
// times that no busy machine reaches where the test does not set them. It is
// ready when it holds all lanes that the others leave it.
func relaying(t testing.TB, s store.Store, sk sink.Sink, cfg relay.Config) (r *relay.Relay, stop func()) {
	t.Helper()
	cfg.Store, cfg.Logger, cfg.Gate = s, slog.New(slog.DiscardHandler), relay.NewGate()
	if cfg.Grace == 0 {
		cfg.LeaseTTL, cfg.Grace = time.Minute, time.Minute
	}
	if cfg.Destinations == nil {
		cfg.Destinations = []relay.Destination{{}}
	}
	cfg.Destinations[0].Name, cfg.Destinations[0].Sink, cfg.Destinations[0].FromEarliest = "main", sk, true
	r, err := relay.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the relay ended with %v", err)
		}
	}
	t.Cleanup(stop)
	return r, stop
}

// arrive waits until so many messages have arrived.
func arrive(t testing.TB, sk *memsink.Sink, n int, what string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := sk.Wait(ctx, n); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// ORD-01: fifty writers that hold their transactions, and one that stays open
// behind them all with a lower id than any of theirs. Nobody waits for it.
func TestFiftyWritersThatHold(t *testing.T) {
	s, _ := open(t, pgstore.Config{})
	h := newHistory(t, dsnOf(s))
	h.hold = 0.3
	ctx := context.Background()
	behind, err := h.pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer behind.Rollback(ctx) // after the commit it is a no-op
	if _, err := behind.Exec(ctx, `insert into outbox_events (aggregate_type, aggregate_id, event_type, payload, event_key)
		values ('a', 'behind', 'T', '1', null)`); err != nil {
		t.Fatal(err)
	}
	sk := memsink.New(memsink.Config{})
	relaying(t, s, sk, relay.Config{MaxRecords: 40}) // small pages, so that windows are paged
	wait, _ := h.run(t, 50, 8)
	wait()
	n := total(h.want)
	arrive(t, sk, n, "with a transaction that stays open")
	if err := behind.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	h.want["behind"] = 1
	arrive(t, sk, n+1, "of the transaction that stayed open")

	got := &arrived{last: map[string]int{}}
	for i, m := range sk.Messages() {
		v, err := strconv.Atoi(string(m.Payload))
		if err != nil {
			t.Fatal(err)
		}
		if m.Key == "behind" && i < n {
			t.Error("an event arrived that was not committed")
		}
		got.note(m.Key, v)
	}
	if lost := h.lost(got); lost != 0 || got.breaks != 0 || got.again != 0 {
		t.Errorf("%d lost, %d order breaks, %d repeated", lost, got.breaks, got.again)
	}
	t.Logf("%d events", n+1)
}
