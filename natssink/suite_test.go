package natssink

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/sinktest"
)

// embedded starts a server in the process.
func embedded(t *testing.T, change ...func(*server.Options)) string {
	t.Helper()
	opts := &server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(),
		NoLog: true, NoSigs: true}
	for _, f := range change {
		f(opts)
	}
	srv, err := server.NewServer(opts)
	if err != nil {
		t.Fatal(err)
	}
	srv.Start()
	t.Cleanup(func() { srv.Shutdown(); srv.WaitForShutdown() })
	if !srv.ReadyForConnections(sinktest.Patience) {
		t.Fatal("the server is not ready")
	}
	return srv.ClientURL()
}

func jetStream(t *testing.T, url string, opts ...nats.Option) jetstream.JetStream {
	t.Helper()
	nc, err := nats.Connect(url, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// newStream makes a stream of the test's own. Its subjects begin with its name.
func newStream(t *testing.T, js jetstream.JetStream, change ...func(*jetstream.StreamConfig)) string {
	t.Helper()
	cfg := jetstream.StreamConfig{Name: streamName()}
	cfg.Subjects = []string{cfg.Name + ".>"}
	for _, f := range change {
		f(&cfg)
	}
	ctx, cancel := context.WithTimeout(context.Background(), sinktest.Patience)
	defer cancel()
	if _, err := js.CreateStream(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = js.DeleteStream(ctx, cfg.Name)
	})
	return cfg.Name
}

func streamName() string { return fmt.Sprintf("outrider-test-%016x", rand.Uint64()) }

// read gives what a subject holds once it is n messages.
func read(t *testing.T, js jetstream.JetStream, subject string, n int) []sinktest.Arrived {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), sinktest.Patience)
	defer cancel()
	name, _, _ := strings.Cut(subject, ".")
	stream, err := js.Stream(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	var have uint64
	for have = 0; ; {
		info, err := stream.Info(ctx, jetstream.WithSubjectFilter(subject))
		if err != nil {
			t.Fatalf("%d of %d messages are in %s: %v", have, n, subject, err)
		}
		if have = info.State.Subjects[subject]; have >= uint64(n) {
			break
		}
	}
	if have == 0 {
		return nil
	}
	consumer, err := stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{FilterSubjects: []string{subject}})
	if err != nil {
		t.Fatal(err)
	}
	it, err := consumer.Messages()
	if err != nil {
		t.Fatal(err)
	}
	defer it.Stop()
	var as []sinktest.Arrived
	for uint64(len(as)) < have {
		m, err := it.Next()
		if err != nil {
			t.Fatal(err)
		}
		as = append(as, arrived(t, m))
	}
	return as
}

func arrived(t *testing.T, m jetstream.Msg) sinktest.Arrived {
	t.Helper()
	a := sinktest.Arrived{Place: m.Subject(), Payload: m.Data(), Headers: map[string]string{}}
	for name, vs := range m.Headers() {
		a.Headers[name] = vs[0]
	}
	a.ID = a.Headers["id"]
	if id := a.Headers[nats.MsgIdHdr]; id != a.ID {
		t.Errorf("Nats-Msg-Id is %q, want the event's id %q", id, a.ID)
	}
	a.Key, a.HasKey = a.Headers["key"]
	delete(a.Headers, nats.MsgIdHdr)
	delete(a.Headers, "key")
	return a
}

func open(t *testing.T, cfg Config) *Sink {
	t.Helper()
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func suite(t *testing.T, url string) {
	t.Helper()
	js := jetStream(t, url)
	sinktest.Run(t, sinktest.Harness{New: func(t *testing.T) sinktest.Env {
		network := sinktest.NewNetwork()
		name, missing := newStream(t, js), streamName()
		small := newStream(t, js, func(c *jetstream.StreamConfig) { c.MaxMsgSize = 1000 })
		return sinktest.Env{
			Open: func(t *testing.T) sink.Sink {
				return open(t, Config{URLs: []string{url}, AckTimeout: 3 * time.Second, dial: network.Dial})
			},
			Place: name + ".here", OtherPlace: name + ".there", Missing: missing + ".here",
			Make: func(t *testing.T) {
				newStream(t, js, func(c *jetstream.StreamConfig) { c.Name, c.Subjects = missing, []string{missing + ".>"} })
			},
			MaxBytes: 1 << 20, Fits: 1<<20 - 4<<10,
			Poison: func(m *sink.Message) { m.To, m.Payload = small+".here", make([]byte, 2000) },
			Stall:  network.Stall, Left: network.Left, Break: network.Break,
			Read: func(t *testing.T, place string, n int) []sinktest.Arrived { return read(t, js, place, n) },
		}
	}})
}

func TestSuiteEmbedded(t *testing.T) { suite(t, embedded(t)) }

func TestSuiteReal(t *testing.T) { suite(t, testdb.NATS(t)) }
