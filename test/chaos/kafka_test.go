//go:build linux

package chaos_test

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrider-dev/outrider"
)

// tail follows what arrives while the test is under way.
type tail struct {
	mu       sync.Mutex
	got      []delivery
	distinct map[string]bool
	last     time.Time // of the last first delivery
	stall    time.Duration
}

func newTail() *tail {
	return &tail{distinct: map[string]bool{}, last: time.Now()}
}

// note takes down an arrival. A stall is the time between two first deliveries
// while something was committed and had not arrived.
func (l *tail) note(d delivery) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.got = append(l.got, d)
	if l.distinct[d.id] {
		return
	}
	l.distinct[d.id] = true
	now := time.Now()
	l.stall = max(l.stall, now.Sub(l.last))
	l.last = now
}

// rest says that nothing is owed: what comes now is not late.
func (l *tail) rest() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last = time.Now()
}

// arrived is how many different events have arrived.
func (l *tail) arrived() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.distinct)
}

func (l *tail) longest() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stall
}

// makeTopic makes one with eight partitions.
func makeTopic(t testing.TB, broker string) string {
	t.Helper()
	cl := newClient(t, broker)
	defer cl.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	topic := "outrider-chaos-" + outrider.NewID()
	if _, err := kadm.NewClient(cl).CreateTopic(ctx, 8, 1, nil, topic); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cl := newClient(t, broker)
		defer cl.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_, _ = kadm.NewClient(cl).DeleteTopics(ctx, topic) // the broker may be gone already
	})
	return topic
}

func newClient(t testing.TB, broker string, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	cl, err := kgo.NewClient(append(opts, kgo.SeedBrokers(broker), kgo.DisableClientMetrics())...)
	if err != nil {
		t.Fatal(err)
	}
	return cl
}

// followTopic reads a topic until the end of the test.
func followTopic(t testing.TB, broker, topic string) *tail {
	t.Helper()
	l := newTail()
	cl := newClient(t, broker, kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchMaxWait(100*time.Millisecond))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			cl.PollFetches(ctx).EachRecord(func(r *kgo.Record) {
				d, err := fromKafka(r)
				if err != nil {
					t.Error(err)
				}
				l.note(d)
			})
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		cl.Close()
	})
	return l
}

func fromKafka(r *kgo.Record) (delivery, error) {
	d := delivery{key: string(r.Key), partition: r.Partition}
	for _, h := range r.Headers {
		switch h.Key {
		case "id":
			d.id = string(h.Value)
		case "sequence":
			d.sequence = string(h.Value)
		}
	}
	if err := json.Unmarshal(r.Value, &d.payload); err != nil {
		return d, fmt.Errorf("%s/%d@%d: %w", r.Topic, r.Partition, r.Offset, err)
	}
	return d, nil
}

// readTopic reads a topic from its start to its end, by a client of its own.
func readTopic(t testing.TB, broker, topic string) []delivery {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cl := newClient(t, broker, kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	defer cl.Close()
	ends, err := kadm.NewClient(cl).ListEndOffsets(ctx, topic)
	if err != nil {
		t.Fatal(err)
	}
	if err := ends.Error(); err != nil {
		t.Fatal(err)
	}
	want := 0
	ends.Each(func(o kadm.ListedOffset) { want += int(o.Offset) })
	var got []delivery
	for len(got) < want && ctx.Err() == nil {
		cl.PollFetches(ctx).EachRecord(func(r *kgo.Record) {
			d, err := fromKafka(r)
			if err != nil {
				t.Error(err)
			}
			got = append(got, d)
		})
	}
	if len(got) < want {
		t.Fatalf("%d of %d records of %s could be read", len(got), want, topic)
	}
	return got
}
