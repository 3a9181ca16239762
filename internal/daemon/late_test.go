package daemon

import (
	"context"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/kafkasink"
	"github.com/outrider-dev/outrider/natssink"
	"github.com/outrider-dev/outrider/sink"
)

// LIF-03: a call that comes when its client has been closed is answered, and
// with nothing that says delivered or refused.
func TestLateCallMeetsClosedClient(t *testing.T) {
	for name, open := range map[string]func(*testing.T) (sink.Sink, error){
		"Kafka": func(t *testing.T) (sink.Sink, error) {
			return kafkasink.New(kafkasink.Config{Brokers: []string{testdb.Kafka(t)}, DeliveryTimeout: 2 * time.Second})
		},
		"NATS": func(t *testing.T) (sink.Sink, error) {
			return natssink.New(natssink.Config{URLs: []string{testdb.NATS(t)}, AckTimeout: 2 * time.Second})
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := open(t)
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			got := make([]*sink.Result, 2)
			s.Publish(ctx, sink.Batch{
				Messages: []sink.Message{
					{To: "late", Record: &outrider.Record{Event: outrider.Event{ID: "1", Key: "a", Payload: []byte("x")}}},
					{To: "late", Record: &outrider.Record{Event: outrider.Event{ID: "2", Key: "b", Payload: []byte("y")}}},
				},
				Report: func(i int, r sink.Result) { got[i] = &r },
			})
			for i, r := range got {
				if r == nil || r.Status != sink.NotSent && r.Status != sink.Unknown || r.Err == nil {
					t.Errorf("message %d: %+v", i, r)
				}
			}
		})
	}
}
