package kafkasink

import (
	"context"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/sinktest"
)

// The library fails all records of a partition and calls back later. What is
// handed over in between must not get into the log: an earlier one of its key
// may be among the failed. Here the callbacks are held up, so that in between
// is long.
func TestFailureIsNoticedAtOnce(t *testing.T) {
	cluster, brokers := fake(t)
	topic, other := newTopic(t, brokers, 1, nil), newTopic(t, brokers, 1, nil)
	refused := cluster.Fault(kfake.Fault{
		Keys: []kmsg.Key{kmsg.Produce}, Err: kerr.InvalidRecord, Count: -1,
		When: func(r kmsg.Request) bool { return holdsPoison(r.(*kmsg.ProduceRequest)) },
	})
	s := closeLater(t, open(t, Config{Brokers: brokers}))
	wantDelivered(t, publish(s, message(topic, "first", "a"), message(other, "first", "x")))
	cl := s.client

	inReport, release := make(chan struct{}), make(chan struct{})
	slow := start(s, func(int) { close(inReport); <-release }, message(other, "slow", "x"))
	<-inReport // all callbacks wait now
	poisoned := message(topic, "poison", "a")
	poisoned.Payload = []byte("poison")
	answers := cl.answers.Load()
	first := start(s, nil, poisoned)
	<-first.accepted
	until(t, "the refusal", func() bool { return refused.Hits() > 0 && cl.answers.Load() > answers })
	if cl.failing.Load() == 0 {
		// The client's line is written a moment after its hook.
		until(t, "the client to notice", func() bool { return cl.failing.Load() > 0 })
	}
	second := start(s, nil, message(topic, "behind", "a"))
	until(t, "the next call to wait or to be accepted", func() bool {
		select {
		case <-second.accepted:
			return true
		default:
			return cl.settling.Load()
		}
	})
	close(release)
	<-slow.done
	<-first.done
	<-second.done
	want(t, "the refused one", first.results[0], sink.NotSent, sink.ClassHeld)
	want(t, "the one behind it", second.results[0], sink.NotSent, sink.ClassHeld)
	if cl.fenced.Load() {
		t.Error("the client was fenced; waiting for the callbacks would have done")
	}
	last := settle(t, s, poisoned, message(topic, "behind", "a"))
	want(t, "the refused one alone", last["poison"], sink.Reject, sink.ClassInvalid)
	if n := len(read(t, brokers, topic, 2)); n != 2 {
		t.Errorf("%d records are in the topic, want the first and the last", n)
	}
}

// A record that slips into a failing partition does not leave the client.
func TestFence(t *testing.T) {
	_, brokers := fake(t)
	topic := newTopic(t, brokers, 1, nil)
	s := closeLater(t, open(t, Config{Brokers: brokers}))
	wantDelivered(t, publish(s, message(topic, "1", "a")))
	cl := s.client
	cl.setFailing(place{topic, 0}, true)
	failed := make(chan error, 1)
	cl.kc.Produce(context.Background(), &kgo.Record{Topic: topic, Value: []byte("slipped in")},
		func(_ *kgo.Record, err error) { failed <- err })
	if !cl.fenced.Load() {
		t.Error("the client is not fenced")
	}
	until(t, "the client's replacement", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.client != cl
	})
	wantDelivered(t, publish(s, message(topic, "2", "a"))) // by a new client
	if err := <-failed; !isClosed(err) {
		t.Errorf("the record ended with %v", err)
	}
	if n := len(read(t, brokers, topic, 2)); n != 2 {
		t.Errorf("%d records are in the topic, want 2", n)
	}
}

// A partition whose leader is silent holds up its own keys and no others; what
// is reported Unknown is not sent a second time while it may yet arrive.
func TestSilentLeader(t *testing.T) {
	cluster, brokers := fake(t)
	topic := newTopic(t, brokers, 2, nil)
	for p := range int32(2) {
		if err := cluster.MoveTopicPartition(topic, p, p); err != nil {
			t.Fatal(err)
		}
	}
	networks := [2]*sinktest.Network{sinktest.NewNetwork(), sinktest.NewNetwork()}
	s := closeLater(t, open(t, Config{Brokers: brokers, DeliveryTimeout: 500 * time.Millisecond,
		dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			if address == brokers[0] {
				return networks[0].Dial(ctx, network, address)
			}
			return networks[1].Dial(ctx, network, address)
		}}))
	var keys [2]string // one for each partition
	tp := partitioners["java"]().ForTopic(topic)
	for i := 0; keys[0] == "" || keys[1] == ""; i++ {
		k := fmt.Sprint("k", i)
		keys[tp.Partition(&kgo.Record{Key: []byte(k)}, 2)] = k
	}
	wantDelivered(t, publish(s, message(topic, "1", keys[0]), message(topic, "2", keys[1])))
	release := networks[0].Stall(t)
	rs := publish(s, message(topic, "3", keys[0]), message(topic, "4", keys[1]), message(topic, "5", keys[0]))
	want(t, "to the silent leader", rs[0], sink.Unknown, sink.ClassTimeout)
	want(t, "to the other", rs[1], sink.Delivered, sink.ClassNone)
	want(t, "behind the unknown", rs[2], sink.Unknown, sink.ClassTimeout) // it may have left too
	rs = publish(s, message(topic, "3", keys[0]), message(topic, "6", keys[1]))
	want(t, "again", rs[0], sink.NotSent, sink.ClassHeld)
	want(t, "to the other", rs[1], sink.Delivered, sink.ClassNone)
	release()
	until(t, "the silent leader", func() bool { return publish(s, message(topic, "3", keys[0]))[0].Status == sink.Delivered })
	// 1 to 6, and 3 a second time.
	if n := len(read(t, brokers, topic, 7)); n != 7 {
		t.Errorf("%d records are in the topic, want 7", n)
	}
}

// A producer that the cluster will not take any more is made anew.
func TestBrokenProducerIsReplaced(t *testing.T) {
	for _, c := range []struct {
		key    kmsg.Key
		err    *kerr.Error
		status sink.Status
		class  sink.Class
	}{
		{kmsg.InitProducerID, kerr.ClusterAuthorizationFailed, sink.NotSent, sink.ClassAuth},
		{kmsg.Produce, kerr.OutOfOrderSequenceNumber, sink.Delivered, sink.ClassNone},
		{kmsg.Produce, kerr.UnknownProducerID, sink.Delivered, sink.ClassNone},
		{kmsg.Produce, kerr.InvalidProducerEpoch, sink.Delivered, sink.ClassNone},
		{kmsg.Produce, kerr.ClusterAuthorizationFailed, sink.NotSent, sink.ClassAuth},
		{kmsg.Produce, kerr.TopicAuthorizationFailed, sink.Retry, sink.ClassAuth},
		{kmsg.Produce, kerr.NotLeaderForPartition, sink.Delivered, sink.ClassNone},
		{kmsg.Produce, kerr.NotEnoughReplicas, sink.Delivered, sink.ClassNone},
	} {
		cluster, brokers := fake(t)
		topic := newTopic(t, brokers, 1, nil)
		s := closeLater(t, open(t, Config{Brokers: brokers}))
		cluster.Fault(kfake.Fault{Keys: []kmsg.Key{c.key}, Err: c.err, Count: 1})
		what := fmt.Sprintf("%v to %v", c.err.Message, kmsg.NameForKey(int16(c.key)))
		want(t, what, publish(s, message(topic, "1", "a"))[0], c.status, c.class)
		want(t, what+", after it", publish(s, message(topic, "2", "a"))[0], sink.Delivered, sink.ClassNone)
	}
}

// A definite no means nothing once an answer was lost: the first attempt may
// have got through.
func TestNoAfterLostAnswerIsUnknown(t *testing.T) {
	v := judge(kerr.TopicAuthorizationFailed)
	want(t, "nothing lost", v.result(kerr.TopicAuthorizationFailed, false), sink.Retry, sink.ClassAuth)
	want(t, "an answer lost", v.result(kerr.TopicAuthorizationFailed, true), sink.Unknown, sink.ClassAuth)

	cluster, brokers := fake(t)
	topic := newTopic(t, brokers, 1, nil)
	network := sinktest.NewNetwork()
	s := closeLater(t, open(t, Config{Brokers: brokers, dial: network.Dial}))
	wantDelivered(t, publish(s, message(topic, "1", "a")))
	release := network.Stall(t)
	c := start(s, nil, message(topic, "2", "a"))
	until(t, "its arrival", func() bool { return cluster.PartitionInfo(topic, 0).HighWatermark == 2 })
	cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Err: kerr.TopicAuthorizationFailed, Count: 1})
	mend := network.Break(t)
	release()
	mend()
	<-c.done
	want(t, "refused on the second attempt", c.results[0], sink.Unknown, sink.ClassAuth)
}

// Records that were refused together go alone, each with a client that the
// ones before it have not spoilt.
func TestSeveralAreRefused(t *testing.T) {
	cluster, brokers := fake(t)
	topic := newTopic(t, brokers, 1, nil)
	cluster.Fault(kfake.Fault{
		Keys: []kmsg.Key{kmsg.Produce}, Err: kerr.InvalidRecord, Count: -1,
		When: func(r kmsg.Request) bool { return holdsPoison(r.(*kmsg.ProduceRequest)) },
	})
	s := closeLater(t, open(t, Config{Brokers: brokers, DeliveryTimeout: time.Hour}))
	var ms []sink.Message
	for i := range 40 {
		m := message(topic, fmt.Sprint(i), fmt.Sprint("k", i))
		if i == 10 || i == 11 || i == 30 {
			m.Payload = []byte("poison")
		}
		ms = append(ms, m)
	}
	for id, r := range settle(t, s, ms...) {
		if bad := id == "10" || id == "11" || id == "30"; bad != (r.Status == sink.Reject) {
			t.Errorf("message %s: %v %q", id, r.Status, r.Class)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.alone)+len(s.stops)+len(s.late) > 0 {
		t.Errorf("left over: alone %v, stops %v, late %v", s.alone, s.stops, s.late)
	}
}

// While nothing gets through, the client is replaced and what was never
// written is NotSent.
func TestStuckClientIsReplaced(t *testing.T) {
	_, brokers := fake(t)
	topic := newTopic(t, brokers, 1, nil)
	network := sinktest.NewNetwork()
	s := closeLater(t, open(t, Config{Brokers: brokers, DeliveryTimeout: 200 * time.Millisecond, dial: network.Dial}))
	wantDelivered(t, publish(s, message(topic, "1", "a")))
	first := s.client
	mend := network.Break(t)
	publish(s, message(topic, "2", "a")) // may have been written into the dead connection
	if s.client == first {
		t.Error("the client was not replaced")
	}
	rs := publish(s, message(topic, "3", "b"), message(topic, "4", "b"))
	want(t, "without a connection", rs[0], sink.NotSent, sink.ClassUnreachable)
	if rs[1].Status != sink.NotSent {
		t.Errorf("behind it: got %v (%v), want not-sent", rs[1].Status, rs[1].Err)
	}
	mend()
	settle(t, s, message(topic, "5", "b"))
	for _, r := range read(t, brokers, topic, 2) {
		for _, h := range r.Headers {
			if id := string(h.Value); h.Key == "id" && (id == "3" || id == "4") {
				t.Errorf("%s was NotSent and is in the topic", id)
			}
		}
	}
}

// A client that asks to be replaced is kept until the calls with it are
// through.
func TestRenewalWaitsForCallsUnderWay(t *testing.T) {
	_, brokers := fake(t)
	topic := newTopic(t, brokers, 1, nil)
	network := sinktest.NewNetwork()
	s := closeLater(t, open(t, Config{Brokers: brokers, dial: network.Dial}))
	wantDelivered(t, publish(s, message(topic, "1", "a")))
	old := s.client
	release := network.Stall(t)
	first := start(s, nil, message(topic, "2", "a"))
	<-first.accepted
	old.renew.Store(true)
	second := start(s, nil, message(topic, "3", "a"))
	until(t, "the second call's turn", func() bool {
		select {
		case <-first.done: // too early: it was cut off
			return true
		default:
			return len(s.turn) == 1
		}
	})
	release()
	<-first.done
	<-second.done
	want(t, "under way", first.results[0], sink.Delivered, sink.ClassNone)
	want(t, "after it", second.results[0], sink.Delivered, sink.ClassNone)
	if s.client == old {
		t.Error("the client was not replaced")
	}
}

func TestNoBroker(t *testing.T) {
	s := closeLater(t, open(t, Config{Brokers: []string{"127.0.0.1:1"}, DeliveryTimeout: 300 * time.Millisecond}))
	r := publish(s, message("t", "1", "a"))[0]
	want(t, "no broker", r, sink.NotSent, sink.ClassUnreachable)
	if outrider.Hint(r.Err) != hintUnreachable {
		t.Errorf("hint %q", outrider.Hint(r.Err))
	}
}

// A producer that the cluster refuses while the library is learning a topic's
// partitions keeps no message: it is answered long before its time is over.
func TestRefusedProducerKeepsNothing(t *testing.T) {
	for range 30 {
		cluster, brokers := fake(t)
		topic := newTopic(t, brokers, 1, nil)
		s := closeLater(t, open(t, Config{Brokers: brokers, DeliveryTimeout: time.Minute}))
		cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.InitProducerID}, Err: kerr.ClusterAuthorizationFailed, Count: 1})
		want(t, "refused", publish(s, message(topic, "1", "a"))[0], sink.NotSent, sink.ClassAuth)
		if t.Failed() {
			return
		}
	}
}
