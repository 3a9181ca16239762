package pgstore_test

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"strings"
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
	cfg.Store, cfg.Gate = s, relay.NewGate()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
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

// What a sink says is settled, whatever bytes it is made of: PostgreSQL takes
// neither NULs nor what is not UTF-8, and a settlement that is refused would be
// tried for ever, with all of its lease behind it.
func TestWhateverASinkSaysIsSettled(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	bytes := "a\x00b\xFFc\xC3"
	class := sink.Class(bytes + strings.Repeat("long", 100_000))
	sk := memsink.New(memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
		r := sink.Result{Class: class, Err: errors.New(bytes), Receipt: bytes}
		switch m.Key {
		case "reject":
			r.Status = sink.Reject
		case "retry":
			r.Status = sink.Retry
		default:
			r.Status = sink.Delivered
		}
		return r
	}})
	for _, k := range []string{"reject", "retry", "good"} {
		insert(t, db, k, k)
	}
	_, stop := relaying(t, s, sk, relay.Config{Destinations: []relay.Destination{{Retry: relay.Retry{Immediate: -1, Base: time.Hour, Cap: time.Hour}}}})
	arrive(t, sk, 1, "beside what the sink refused")
	stop() // settles
	want := map[string]store.State{"reject": store.Failed, "retry": store.Waiting, "good": store.Published}
	page, err := s.List(t.Context(), store.ListParams{Limit: 10})
	if err != nil || len(page.Entries) != len(want) {
		t.Fatalf("%d events are there, %v", len(page.Entries), err)
	}
	for _, e := range page.Entries {
		if e.State != want[e.Key] {
			t.Errorf("%s is %v: %q %q", e.Key, e.State, e.Class, e.Message)
		}
		if e.State != store.Published && (e.Class != string(sink.ClassOther) || !strings.HasSuffix(e.Message, "a\uFFFDb\uFFFDc\uFFFD")) {
			t.Errorf("%s is of class %q, and its evidence %q", e.Key, e.Class, e.Message)
		}
	}
	var receipts string
	if err := db.QueryRow(`select receipts->>0 from outbox_journal where receipts::text <> '[]'`).Scan(&receipts); err != nil || receipts != "a\uFFFDb\uFFFDc\uFFFD" {
		t.Errorf("the receipt in the journal is %q, %v", receipts, err)
	}
}
