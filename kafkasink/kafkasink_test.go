package kafkasink

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/route"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/sinktest"
)

func message(to, id, key string) sink.Message {
	return sink.Message{To: to, Record: &outrider.Record{Event: outrider.Event{
		ID: id, Key: key, Type: "OrderPlaced", AggregateType: "order", AggregateID: "42",
		ContentType: "application/json", Payload: []byte("{}"),
	}, CreatedAt: time.Now()}}
}

// call is a Publish in the background.
type backgroundCall struct {
	mu       sync.Mutex
	results  []sink.Result
	accepted chan struct{}
	done     chan struct{}
}

func start(s sink.Sink, onReport func(int), ms ...sink.Message) *backgroundCall {
	c := &backgroundCall{results: make([]sink.Result, len(ms)), accepted: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(c.done)
		s.Publish(context.Background(), sink.Batch{
			Messages: ms,
			Accepted: func() { close(c.accepted) },
			Report: func(i int, r sink.Result) {
				c.mu.Lock()
				c.results[i] = r
				c.mu.Unlock()
				if onReport != nil {
					onReport(i)
				}
			},
		})
	}()
	return c
}

func publish(s sink.Sink, ms ...sink.Message) []sink.Result {
	c := start(s, nil, ms...)
	<-c.done
	return c.results
}

// settle sends what is not settled until everything is, and gives the last
// result of each.
func settle(t *testing.T, s sink.Sink, ms ...sink.Message) map[string]sink.Result {
	t.Helper()
	last := map[string]sink.Result{}
	for limit := time.Now().Add(sinktest.Patience); len(ms) > 0; {
		if time.Now().After(limit) {
			t.Fatalf("%d messages are not settled: %v", len(ms), last[ms[0].ID])
		}
		var again []sink.Message
		for i, r := range publish(s, ms...) {
			last[ms[i].ID] = r
			if r.Status != sink.Delivered && r.Status != sink.Reject {
				again = append(again, ms[i])
			}
		}
		ms = again
	}
	return last
}

func want(t *testing.T, what string, r sink.Result, status sink.Status, class sink.Class) {
	t.Helper()
	if r.Status != status || r.Class != class {
		t.Errorf("%s: got %v %q (%v), want %v %q", what, r.Status, r.Class, r.Err, status, class)
	}
}

func wantDelivered(t *testing.T, rs []sink.Result) {
	t.Helper()
	for i, r := range rs {
		if r.Status != sink.Delivered {
			t.Fatalf("message %d: %v %q: %v", i, r.Status, r.Class, r.Err)
		}
	}
}

func closeLater(t *testing.T, s *Sink) *Sink {
	t.Helper()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), sinktest.Patience)
		defer cancel()
		if err := s.Close(ctx); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return s
}

// until waits for a condition.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for limit := time.Now().Add(sinktest.Patience); !ok(); {
		if time.Now().After(limit) {
			t.Fatalf("waited for %s for %v", what, sinktest.Patience)
		}
		<-time.After(time.Millisecond)
	}
}

func TestRecord(t *testing.T) {
	_, brokers := fake(t)
	topic := newTopic(t, brokers, 1, nil)
	s := closeLater(t, open(t, Config{Brokers: brokers}))
	m := message(topic, "1", "k")
	m.Payload, m.CreatedAt = nil, time.Date(2026, 1, 2, 3, 4, 5, 678901234, time.FixedZone("", 3600))
	free := message(topic, "2", "")
	rs := publish(s, m, free)
	for i, want := range []string{topic + "/0@0", topic + "/0@1"} {
		if rs[i].Receipt != want {
			t.Errorf("receipt %q, want %q", rs[i].Receipt, want)
		}
	}
	got := read(t, brokers, topic, 2)
	if got[0].Value == nil {
		t.Error("an empty payload became a null value, a tombstone")
	}
	if at := m.CreatedAt.Truncate(time.Millisecond); !got[0].Timestamp.Equal(at) {
		t.Errorf("timestamp %v, want %v", got[0].Timestamp, at)
	}
	if got[1].Key != nil {
		t.Errorf("an unordered event has the key %q, want none", got[1].Key)
	}
}

func TestCompression(t *testing.T) {
	_, brokers := fake(t)
	for codec := range codecs {
		topic := newTopic(t, brokers, 1, nil)
		s := closeLater(t, open(t, Config{Brokers: brokers, Compression: codec, Linger: time.Millisecond}))
		wantDelivered(t, publish(s, message(topic, "1", "k"), message(topic, "2", "k")))
		if n := len(read(t, brokers, topic, 2)); n != 2 {
			t.Errorf("%s: %d arrived", codec, n)
		}
	}
}

// bothClusters runs a test on a fake and on a real cluster.
func bothClusters(t *testing.T, test func(t *testing.T, brokers []string)) {
	t.Helper()
	t.Run("fake", func(t *testing.T) {
		_, brokers := fake(t)
		test(t, brokers)
	})
	t.Run("real", func(t *testing.T) { test(t, []string{testdb.Kafka(t)}) })
}

// The largest record that fits is delivered, as the broker sees it too, and one
// byte more is not sent.
func TestOversizeByTheByte(t *testing.T) {
	bothClusters(t, func(t *testing.T, brokers []string) {
		for limit, configs := range map[int]map[string]string{
			20000:   {"max.message.bytes": "20000"},
			1 << 20: {"max.message.bytes": "3000000", "segment.bytes": "1048576"},
		} {
			topic := newTopic(t, brokers, 1, configs)
			s := closeLater(t, open(t, Config{Brokers: brokers}))
			sized := func(key string, n int) sink.Message {
				m := message(topic, "1", key)
				m.Payload = make([]byte, n)
				return m
			}
			fits := limit - 400
			for measure(sized("k", fits+1)) <= limit {
				fits++
			}
			rs := publish(s, sized("k", fits), sized("l", fits+1))
			want(t, fmt.Sprint(limit, " at the limit"), rs[0], sink.Delivered, sink.ClassNone)
			want(t, fmt.Sprint(limit, " over the limit"), rs[1], sink.Reject, sink.ClassOversize)
		}
	})
}

func measure(m sink.Message) int {
	c := &call{b: sink.Batch{Messages: []sink.Message{m}}, buffers: &buffers{bytes: []byte{}}}
	c.take(c, 1)
	c.layOut()
	return c.slots[0].size()
}

// A limit that is lowered while batches of the old size are on their way makes
// nothing fail but what is too large by itself.
func TestLimitIsLowered(t *testing.T) {
	_, brokers := fake(t)
	topic := newTopic(t, brokers, 1, nil)
	s := closeLater(t, open(t, Config{Brokers: brokers}))
	wantDelivered(t, publish(s, message(topic, "first", "k")))
	setLimit(t, brokers, topic, 5000)
	var ms []sink.Message
	for i := range 60 {
		m := message(topic, fmt.Sprint(i), fmt.Sprint("k", i%10))
		m.Payload = make([]byte, 1000)
		if i == 30 {
			m.Payload = make([]byte, 6000)
		}
		ms = append(ms, m)
	}
	last := settle(t, s, ms...)
	for i := range ms {
		if i == 30 {
			want(t, "too large now", last["30"], sink.Reject, sink.ClassOversize)
		} else if r := last[ms[i].ID]; r.Status != sink.Delivered {
			t.Errorf("message %d: %v %q %v", i, r.Status, r.Class, r.Err)
		}
	}
	if n := len(read(t, brokers, topic, 60)); n != 60 {
		t.Errorf("%d records, want 60", n)
	}
}

func setLimit(t *testing.T, brokers []string, topic string, n int) {
	t.Helper()
	cl := plainClient(t, brokers)
	defer cl.Close()
	rs, err := kadm.NewClient(cl).AlterTopicConfigs(t.Context(),
		[]kadm.AlterConfig{{Op: kadm.SetConfig, Name: "max.message.bytes", Value: kadm.StringPtr(fmt.Sprint(n))}}, topic)
	if err != nil || rs[0].Err != nil {
		t.Fatal(err, rs)
	}
}

// A limit that was raised is in force after TopicRefresh.
func TestLimitIsRaised(t *testing.T) {
	_, brokers := fake(t)
	topic := newTopic(t, brokers, 1, map[string]string{"max.message.bytes": "5000"})
	s := closeLater(t, open(t, Config{Brokers: brokers, TopicRefresh: time.Millisecond}))
	m := message(topic, "1", "k")
	m.Payload = make([]byte, 6000)
	want(t, "over the limit", publish(s, m)[0], sink.Reject, sink.ClassOversize)
	setLimit(t, brokers, topic, 10000)
	until(t, "the new limit", func() bool { return publish(s, m)[0].Status == sink.Delivered })
}

// Where topic configurations may not be read, Kafka's default limit stands in.
func TestConfigurationMayNotBeRead(t *testing.T) {
	cluster, brokers := fake(t)
	topic := newTopic(t, brokers, 1, nil)
	cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.DescribeConfigs}, Err: kerr.TopicAuthorizationFailed, Count: -1})
	s := closeLater(t, open(t, Config{Brokers: brokers}))
	m := message(topic, "1", "k")
	m.Payload = make([]byte, unreadLimit)
	rs := publish(s, m, message(topic, "2", "other"))
	want(t, "over the assumed limit", rs[0], sink.Reject, sink.ClassOversize)
	want(t, "a small one", rs[1], sink.Delivered, sink.ClassNone)
}

// A missing topic is answered at once, is not made, does not hold up another,
// and is found once somebody has made it.
func TestMissingTopic(t *testing.T) {
	cluster, brokers := fake(t)
	topic := newTopic(t, brokers, 1, nil)
	s := closeLater(t, open(t, Config{Brokers: brokers, DeliveryTimeout: time.Hour}))
	rs := publish(s, message("later", "1", "a"), message(topic, "2", "b"), message("later", "3", "a"))
	want(t, "to a missing topic", rs[0], sink.Retry, sink.ClassNoTarget)
	want(t, "to another topic", rs[1], sink.Delivered, sink.ClassNone)
	want(t, "behind the refused", rs[2], sink.NotSent, sink.ClassHeld)
	if outrider.Hint(rs[0].Err) == "" || !strings.Contains(rs[0].Err.Error(), "later") {
		t.Errorf("error without the topic or a hint: %v", rs[0].Err)
	}
	if err := cluster.CreateTopic("later", 1, nil); err != nil { // fails if it is there
		t.Fatal(err)
	}
	until(t, "the new topic", func() bool { return publish(s, message("later", "4", "a"))[0].Status == sink.Delivered })
}

// A topic that is deleted under way is answered at once too, and one that is
// made again under the same name is another topic.
func TestTopicIsDeletedAndMadeAgain(t *testing.T) {
	cluster, brokers := fake(t)
	topic, other := newTopic(t, brokers, 1, nil), newTopic(t, brokers, 1, nil)
	s := closeLater(t, open(t, Config{Brokers: brokers}))
	wantDelivered(t, publish(s, message(topic, "1", "a"), message(other, "2", "b")))
	if err := cluster.DeleteTopic(topic); err != nil {
		t.Fatal(err)
	}
	until(t, "the end of the topic", func() bool {
		rs := publish(s, message(topic, "3", "a"), message(other, "4", "b"))
		if rs[0].Status == sink.Delivered || rs[0].Status == sink.Reject {
			t.Fatalf("to the deleted topic: %v %q %v", rs[0].Status, rs[0].Class, rs[0].Err)
		}
		return rs[0].Status == sink.Retry && rs[0].Class == sink.ClassNoTarget && rs[1].Status == sink.Delivered
	})
	if err := cluster.CreateTopic(topic, 1, nil); err != nil {
		t.Fatal(err)
	}
	until(t, "the new topic", func() bool { return publish(s, message(topic, "5", "a"))[0].Status == sink.Delivered })
}

func TestTopicNames(t *testing.T) {
	_, brokers := fake(t)
	s := closeLater(t, open(t, Config{Brokers: brokers}))
	for _, name := range []string{"", ".", "..", "a b", "ä", "a/b", strings.Repeat("x", 250)} {
		want(t, name, publish(s, message(name, "1", "k"))[0], sink.Reject, sink.ClassNoTarget)
	}
}

func TestTopicsByRules(t *testing.T) {
	_, brokers := fake(t)
	topic := newTopic(t, brokers, 1, nil)
	s := closeLater(t, open(t, Config{Brokers: brokers, Topics: rules(t, "type:Order*", topic)}))
	refund := message("", "2", "k2")
	refund.Type = "Refund"
	rs := publish(s, message("", "1", "k"), refund)
	want(t, "with a rule", rs[0], sink.Delivered, sink.ClassNone)
	want(t, "without a rule", rs[1], sink.Reject, sink.ClassNoTarget)
	if !errors.Is(rs[1].Err, route.ErrNoRule) {
		t.Errorf("got %v, want ErrNoRule", rs[1].Err)
	}
}

func rules(t *testing.T, pairs ...string) (rs route.Rules) {
	t.Helper()
	for i := 0; i < len(pairs); i += 2 {
		r, err := route.ParseRule(pairs[i], pairs[i+1])
		if err != nil {
			t.Fatal(err)
		}
		rs = append(rs, r)
	}
	return rs
}
