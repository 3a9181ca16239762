//go:build linux

package chaos_test

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

const (
	poisonType = "Poison"
	poisonKey  = "poisoned"
	poisonExit = 7 // the code of a process that a message has ended

	// maxDeaths is how often one event may end a process: with all that is in
	// hand, with ever smaller parts of it, and three times alone.
	maxDeaths = 8

	beside = 60 // innocents in its transaction, each of a key of its own
)

// poisonedSink ends its process at a message of one type, as a handler does
// that crashes. What is ahead of it in the batch has been sent by then.
type poisonedSink struct {
	sink.Sink
	exit bool
}

func (s poisonedSink) Publish(ctx context.Context, b sink.Batch) {
	for i := range b.Messages {
		if b.Messages[i].Type == poisonType {
			s.Sink.Publish(ctx, sink.Batch{Messages: b.Messages[:i], Report: b.Report, Stale: b.Stale})
			if s.exit {
				os.Exit(poisonExit)
			}
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	s.Sink.Publish(ctx, b)
}

// TestPoison has one event end each process that sends it, by kill -9 or by
// exit, while others start them again and the traffic goes on. The event is
// FAILED after three deaths alone in hand; nothing else fails, is lost or comes
// out of order, and its key goes on once it is skipped.
func TestPoison(t *testing.T) {
	if testing.Short() {
		t.Skip("kills processes for some seconds")
	}
	for _, exit := range []bool{false, true} {
		name := map[bool]string{false: "kill", true: "exit"}[exit]
		t.Run("Postgres/"+name, func(t *testing.T) { poisonPostgres(t, exit) })
		t.Run("SQLite/"+name, func(t *testing.T) { poisonSQLite(t, exit) })
	}
}

func poisonPostgres(t *testing.T, exit bool) {
	t.Helper()
	broker, dsn := testdb.Kafka(t), testdb.Postgres(t)
	db, err := sql.Open("pgx", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	w := newWriters(t, db, outrider.Postgres, 8, 20, 1)
	topic := makeTopic(t, broker)
	seen := followTopic(t, broker, topic)
	sup := supervise(t, relaySpec{Postgres: dsn, Kafka: broker, Topic: topic, Poisoned: true, Exit: exit,
		TTL: 5 * time.Second, Grace: time.Second}, 2)
	poison(t, &campaign{t: t, writers: w, seen: seen, sup: sup, began: time.Now()},
		func() []delivery { return readTopic(t, broker, topic) })
}

func poisonSQLite(t *testing.T, exit bool) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "outbox.db")
	db, err := sql.Open("sqlite", path+sqliteOptions)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	w := newWriters(t, db, outrider.SQLite, 4, 20, 1)
	url := runNATS(t)
	seen, read := followStream(t, url)
	sup := supervise(t, relaySpec{SQLite: path, NATS: url, Topic: natsSubject, Poisoned: true, Exit: exit,
		TTL: 5 * time.Second, Grace: time.Second}, 1)
	poison(t, &campaign{t: t, writers: w, seen: seen, sup: sup, began: time.Now()}, read)
}

func poison(t *testing.T, c *campaign, read func() []delivery) { //nolint:thelper // the body of a test: its own lines tell more
	const events = 1500
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	w, sup := c.writers, c.sup
	st, err := sup.spec.openStore(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close() // the test ends
	look := func() store.Entry {
		t.Helper()
		details, err := st.(store.Inspector).Show(ctx, poisonID)
		if err != nil || len(details) != 1 || len(details[0].Entries) != 1 {
			t.Fatalf("%v, %+v", err, details)
		}
		return details[0].Entries[0]
	}

	w.allow(events / 3)
	await(t, patience, "the first events", c.quiet)
	w.allow(events * 2 / 3)
	addPoison(ctx, t, w)
	await(t, patience, "the first death", func() bool { return sup.deaths() > 0 })
	w.allow(events) // there is traffic at the later deaths, too
	await(t, patience, "the event to be given up", func() bool { return look().State == store.Failed })
	e := look()
	c.logf("after %d deaths the event is %v, %s: %s", sup.deaths(), e.State, e.Class, e.Message)
	if e.Class != string(sink.ClassWorkerDied) || e.Attempts != 0 {
		t.Errorf("it ended as %+v", e)
	}
	await(t, patience, "the events of other keys", func() bool {
		n, all := w.written()
		return all && c.seen.arrived() >= n+beside
	})
	onlyPoisonFailed(ctx, t, st)
	if n, err := st.(store.Operator).Skip(ctx, store.Target{ID: poisonID}); n != 1 || err != nil {
		t.Fatalf("%d were skipped, %v", n, err)
	}
	w.close()
	want := w.truth(t)
	delete(want, poisonID) // it never arrives
	await(t, patience, "all but the poison", func() bool { return c.seen.arrived() >= len(want) })
	sup.stop()

	f := audit(want, w.rolled, read())
	c.logf("%d committed, %d delivered, %d duplicates, at most %d by what was in hand; %d relay processes, %d deaths, %d with one event in hand",
		len(want), f.delivered, f.duplicates, sup.bound, sup.starts, sup.deaths(), sup.alone)
	if len(f.faults) > 0 {
		t.Errorf("%v", f)
	}
	if int64(f.duplicates) > sup.bound {
		t.Errorf("%d duplicates, more than the %d that had been in hand", f.duplicates, sup.bound)
	}
	if n := sup.deaths(); n < 3 || n > maxDeaths {
		t.Errorf("%d deaths, want 3 to %d", n, maxDeaths)
	}
	if sup.alone < 3 {
		t.Errorf("%d deaths with one event in hand, want 3 at least", sup.alone)
	}
	if want := sup.deaths() + len(sup.slots); sup.starts != want || sup.unjoined > 0 {
		t.Errorf("%d starts, %d of which did not join, want %d", sup.starts, sup.unjoined, want)
	}
}

// poisonID and followerID are the only events of poisonKey.
var poisonID, followerID = "00000000-0000-7000-8000-0000000000aa", "00000000-0000-7000-8000-0000000000bb"

// addPoison commits both, amid others that are innocent.
func addPoison(ctx context.Context, t testing.TB, w *writers) {
	t.Helper()
	event := func(id, key, typ string, n int) outrider.Event {
		return outrider.Event{ID: id, AggregateType: "aggregate", AggregateID: key, Type: typ,
			Payload: fmt.Appendf(nil, `{"key":%q,"n":%d}`, key, n)}
	}
	var events []outrider.Event
	for i := range beside {
		events = append(events, event("", fmt.Sprint("beside-", i), "Counted", 1))
	}
	events = slices.Insert(events, beside/2, event(poisonID, poisonKey, poisonType, 0), event(followerID, poisonKey, "Counted", 1))
	tx, err := w.db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback() // after a commit it is a no-op
	if err := w.outbox.Add(ctx, tx, events...); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
}

// onlyPoisonFailed checks that nothing but the poison failed or waits, and that
// its follower is held back.
func onlyPoisonFailed(ctx context.Context, t testing.TB, st nativeStore) {
	t.Helper()
	status, err := st.(store.Inspector).Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range status.Destinations {
		if d.Failed.N != 1 || d.BlockedKeys.N != 1 || d.Waiting.N != 0 {
			t.Errorf("want one failed event and one blocked key: %+v", d)
		}
	}
	details, err := st.(store.Inspector).Show(ctx, followerID)
	if err != nil || len(details) != 1 {
		t.Fatalf("%v, %+v", err, details)
	}
	if e := details[0].Entries[0]; e.State != store.Pending {
		t.Errorf("its follower is %v (%s), want it to wait", e.State, e.Reason)
	}
}
