//go:build linux

package chaos_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"math/rand/v2"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	_ "modernc.org/sqlite"

	"github.com/outrider-dev/outrider"
)

const natsSubject = "chaos"

// sqliteOptions are those of an application.
const sqliteOptions = "?_pragma=busy_timeout(60000)&_pragma=journal_mode(wal)&_pragma=synchronous(normal)&_txlock=immediate"

// TestCrashSQLite kills the one relay that carries from a SQLite file to NATS
// JetStream what four writers of another process commit. The long form is 20
// kills in 20,000 events. It needs no servers: NATS is in the test's process.
func TestCrashSQLite(t *testing.T) {
	if testing.Short() {
		t.Skip("kills processes for some seconds")
	}
	p := size(plan{kills: 4, events: 2000}, plan{kills: 20, events: 20_000})
	seed := crashSeed(t)
	path := filepath.Join(t.TempDir(), "outbox.db")
	db, err := sql.Open("sqlite", path+sqliteOptions)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	w := newWriters(t, db, outrider.SQLite, 4, 60, seed)
	url := runNATS(t)
	seen, read := followStream(t, url)
	sup := supervise(t, relaySpec{SQLite: path, NATS: url, Topic: natsSubject,
		TTL: 5 * time.Second, Grace: time.Second}, 1)

	c := &campaign{t: t, r: rand.New(rand.NewPCG(seed, 99)), writers: w, seen: seen, sup: sup, plan: p}
	c.run()
	noExceptions(t, db)
	c.judge(read())
}

// runNATS runs a server in this process.
func runNATS(t testing.TB) string {
	t.Helper()
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT,
		JetStream: true, StoreDir: t.TempDir(), NoLog: true, NoSigs: true})
	if err != nil {
		t.Fatal(err)
	}
	go s.Start()
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	if !s.ReadyForConnections(patience) {
		t.Fatal("the NATS server does not start")
	}
	return s.ClientURL()
}

// followStream makes a stream and reads it until the end of the test; read
// gives all that is in it.
func followStream(t testing.TB, url string) (l *tail, read func() []delivery) {
	t.Helper()
	l = newTail()
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	// The stream drops what it has seen shortly before. The window is as short
	// as can be, so that duplicates are counted.
	stream, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "CHAOS", Subjects: []string{natsSubject},
		Duplicates: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	consumer, err := stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	reading, err := consumer.Consume(func(m jetstream.Msg) {
		h := m.Headers()
		d := delivery{id: h.Get("id"), key: h.Get("key"), sequence: h.Get("sequence")}
		if err := json.Unmarshal(m.Data(), &d.payload); err != nil {
			t.Errorf("a message cannot be read: %v", err)
		}
		l.note(d)
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		reading.Stop()
		<-reading.Closed()
	})
	return l, func() []delivery {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		info, err := stream.Info(ctx)
		if err != nil {
			t.Fatal(err)
		}
		var got []delivery
		await(t, patience, "the end of the stream", func() bool {
			l.mu.Lock()
			defer l.mu.Unlock()
			got = l.got
			return uint64(len(got)) >= info.State.LastSeq
		})
		return got
	}
}
