package memsink_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/sink"
)

func message(id, key string) sink.Message {
	return sink.Message{To: "orders", Record: &outrider.Record{Event: outrider.Event{
		ID: id, AggregateType: "order", AggregateID: key, Type: "OrderPlaced", Key: key,
		Payload: []byte(`{"n":1}`), ContentType: "application/json",
	}}}
}

func publish(s sink.Sink, ms ...sink.Message) []sink.Result {
	rs := make([]sink.Result, len(ms))
	s.Publish(context.Background(), sink.Batch{
		Messages: ms,
		Report:   func(i int, r sink.Result) { rs[i] = r },
	})
	return rs
}

func TestMessageIsCopied(t *testing.T) {
	s := memsink.New(memsink.Config{})
	m := message("1", "42")
	publish(s, m)
	m.Payload[0] = 'X'
	if got := string(s.Messages()[0].Payload); got != `{"n":1}` {
		t.Fatalf("kept payload changed with the batch: %s", got)
	}
}

func TestKeepUnknown(t *testing.T) {
	for _, keep := range []bool{false, true} {
		s := memsink.New(memsink.Config{
			KeepUnknown: keep,
			Decide:      func(context.Context, sink.Message) sink.Result { return sink.Result{} },
		})
		rs := publish(s, message("1", "42"))
		if rs[0].Status != sink.Unknown || s.Len() == 1 != keep {
			t.Errorf("KeepUnknown %v: answered %v, kept %d", keep, rs[0].Status, s.Len())
		}
	}
}

// A call that is cut while Decide has a message in hand does not wait for it;
// the next of the key does, and does not stand behind its failure.
func TestCutWhileInHand(t *testing.T) {
	begun, release := make(chan struct{}), make(chan struct{})
	s := memsink.New(memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
		if m.ID == "1" {
			close(begun)
			<-release
			return sink.Result{Status: sink.Retry, Class: sink.ClassOther}
		}
		return memsink.Deliver
	}})
	ctx, cancel := context.WithCancel(context.Background())
	rs := make([]sink.Result, 2)
	go func() { <-begun; cancel() }()
	s.Publish(ctx, sink.Batch{
		Messages: []sink.Message{message("1", "42"), message("2", "42")},
		Report:   func(i int, r sink.Result) { rs[i] = r },
	})
	if rs[0].Status != sink.Unknown || rs[1].Status != sink.NotSent {
		t.Errorf("cut: got %v and %v, want unknown and not-sent", rs[0].Status, rs[1].Status)
	}
	accepted, done := make(chan struct{}), make(chan sink.Result, 1)
	go s.Publish(context.Background(), sink.Batch{
		Messages: []sink.Message{message("3", "42")},
		Report:   func(_ int, r sink.Result) { done <- r },
		Accepted: func() { close(accepted) },
	})
	<-accepted
	if s.Len() != 0 {
		t.Error("the next of the key overtook one that is in hand")
	}
	close(release)
	if r := <-done; r.Status != sink.Delivered {
		t.Errorf("the next of the key: got %v, want delivered", r.Status)
	}
}

func TestDiscardCounts(t *testing.T) {
	s := memsink.New(memsink.Config{Discard: true})
	publish(s, message("1", "42"), message("2", "42"))
	if s.Len() != 2 || len(s.Messages()) != 0 {
		t.Fatalf("counted %d, kept %d", s.Len(), len(s.Messages()))
	}
}

func ExampleSink() {
	s := memsink.New(memsink.Config{
		Decide: func(_ context.Context, m sink.Message) sink.Result {
			if m.ID == "2" {
				return sink.Result{Status: sink.Retry, Class: sink.ClassThrottled}
			}
			return memsink.Deliver
		},
	})
	for i, r := range publish(s, message("1", "42"), message("2", "42"), message("3", "42"), message("4", "43")) {
		fmt.Printf("%d %v/%s\n", i+1, r.Status, r.Class)
	}
	fmt.Println(s.Len(), "arrived")
	// Output:
	// 1 delivered/
	// 2 retry/throttled
	// 3 not-sent/held
	// 4 delivered/
	// 2 arrived
}
