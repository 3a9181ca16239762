package kafkasink

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/sinktest"
)

const (
	topicBytes = 1 << 20 // of the topics that tests make
	overhead   = 4 << 10 // more than the suite's headers, once, and a batch
)

// fake starts a cluster in the process.
func fake(t *testing.T) (*kfake.Cluster, []string) {
	t.Helper()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(3))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cluster.Close)
	return cluster, cluster.ListenAddrs()
}

// plainClient is one beside the sink, for making topics and reading them.
func plainClient(t testing.TB, brokers []string, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	cl, err := kgo.NewClient(append(opts, kgo.SeedBrokers(brokers...), kgo.DisableClientMetrics(),
		kgo.MetadataMinAge(100*time.Millisecond))...)
	if err != nil {
		t.Fatal(err)
	}
	return cl
}

// newTopic makes a topic of the test's own.
func newTopic(t testing.TB, brokers []string, partitions int32, configs map[string]string) string {
	t.Helper()
	name := topicName()
	makeTopic(t, brokers, name, partitions, configs)
	return name
}

func topicName() string { return fmt.Sprintf("outrider-test-%016x", rand.Uint64()) }

func makeTopic(t testing.TB, brokers []string, name string, partitions int32, configs map[string]string) {
	t.Helper()
	cl := plainClient(t, brokers)
	defer cl.Close()
	set := map[string]*string{"max.message.bytes": kadm.StringPtr(fmt.Sprint(topicBytes))}
	for k, v := range configs {
		set[k] = &v
	}
	ctx, cancel := context.WithTimeout(context.Background(), sinktest.Patience)
	defer cancel()
	adm := kadm.NewClient(cl)
	if _, err := adm.CreateTopic(ctx, partitions, 1, set, name); err != nil {
		t.Fatal(err)
	}
	// A broker with much to do may say for a while that it does not know it.
	until(t, "the new topic", func() bool {
		ends, err := adm.ListEndOffsets(ctx, name)
		return err == nil && ends.Error() == nil && len(ends[name]) == int(partitions)
	})
	t.Cleanup(func() {
		cl := plainClient(t, brokers)
		defer cl.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, _ = kadm.NewClient(cl).DeleteTopics(ctx, name)
	})
}

// read gives what a topic holds once it is n records.
func read(t *testing.T, brokers []string, topic string, n int) []*kgo.Record {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), sinktest.Patience)
	defer cancel()
	cl := plainClient(t, brokers, kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	defer cl.Close()
	var rs []*kgo.Record
	for {
		ends, err := kadm.NewClient(cl).ListEndOffsets(ctx, topic)
		if err != nil {
			t.Fatal(err)
		}
		end := 0
		ends.Each(func(o kadm.ListedOffset) { end += int(o.Offset) })
		if end >= n && len(rs) >= end {
			return rs
		}
		if end > len(rs) {
			fs := cl.PollFetches(ctx)
			if err := ctx.Err(); err != nil {
				t.Fatalf("%d of %d records are in %s: %v", len(rs), n, topic, err)
			}
			rs = append(rs, fs.Records()...)
		} else if ctx.Err() != nil {
			t.Fatalf("%d of %d records are in %s", len(rs), n, topic)
		}
	}
}

func arrived(rs []*kgo.Record) []sinktest.Arrived {
	as := make([]sinktest.Arrived, 0, len(rs))
	for _, r := range rs {
		a := sinktest.Arrived{Place: r.Topic, Key: string(r.Key), HasKey: r.Key != nil,
			Payload: r.Value, Headers: map[string]string{}}
		for _, h := range r.Headers {
			a.Headers[h.Key] = string(h.Value)
		}
		a.ID = a.Headers["id"]
		as = append(as, a)
	}
	return as
}

func open(t *testing.T, cfg Config) *Sink {
	t.Helper()
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// env is the suite's view of a cluster.
func env(t *testing.T, brokers []string) sinktest.Env {
	t.Helper()
	network := sinktest.NewNetwork()
	missing := topicName()
	return sinktest.Env{
		Open: func(t *testing.T) sink.Sink {
			return open(t, Config{Brokers: brokers, DeliveryTimeout: 3 * time.Second, dial: network.Dial})
		},
		Place:      newTopic(t, brokers, 6, nil),
		OtherPlace: newTopic(t, brokers, 3, nil),
		Missing:    missing,
		Make:       func(t *testing.T) { makeTopic(t, brokers, missing, 6, nil) },
		MaxBytes:   topicBytes, Fits: topicBytes - overhead,
		Stall: network.Stall, Left: network.Left, Break: network.Break,
		Read: func(t *testing.T, place string, n int) []sinktest.Arrived {
			return arrived(read(t, brokers, place, n))
		},
	}
}

func TestSuiteFake(t *testing.T) {
	sinktest.Run(t, sinktest.Harness{New: func(t *testing.T) sinktest.Env {
		cluster, brokers := fake(t)
		e := env(t, brokers)
		e.Poison = func(m *sink.Message) { m.Payload = []byte("poison") }
		cluster.Fault(kfake.Fault{
			Keys: []kmsg.Key{kmsg.Produce}, Err: kerr.InvalidRecord, Count: -1,
			When: func(r kmsg.Request) bool { return holdsPoison(r.(*kmsg.ProduceRequest)) },
		})
		return e
	}})
}

func holdsPoison(r *kmsg.ProduceRequest) bool {
	for _, t := range r.Topics {
		for _, p := range t.Partitions {
			if bytes.Contains(p.Records, []byte("poison")) {
				return true
			}
		}
	}
	return false
}

func TestSuiteReal(t *testing.T) {
	brokers := []string{testdb.Kafka(t)}
	sinktest.Run(t, sinktest.Harness{New: func(t *testing.T) sinktest.Env {
		e := env(t, brokers)
		// Over message.timestamp.after.max.ms, an hour by default.
		e.Poison = func(m *sink.Message) { m.CreatedAt = m.CreatedAt.Add(1000 * time.Hour) }
		return e
	}})
}
