package kafkasink

import (
	"context"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/sink"
)

// BenchmarkPublish sends to the real broker, overlapping calls of 5,000
// messages of 300 bytes over 1,000 keys, and counts this process's own time.
func BenchmarkPublish(b *testing.B) {
	for _, codec := range []string{"none", "lz4"} {
		b.Run(codec, func(b *testing.B) {
			brokers := []string{testdb.Kafka(b)}
			topic := newTopic(b, brokers, 8, nil)
			s, err := New(Config{Brokers: brokers, Compression: codec})
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close(context.Background())
			const batch = 5000
			ms := make([]sink.Message, batch)
			payload := make([]byte, 300)
			for i := range payload {
				payload[i] = byte('a' + i*i%26)
			}
			for i := range ms {
				ms[i] = sink.Message{To: topic, Record: &outrider.Record{Event: outrider.Event{
					ID: fmt.Sprintf("0190c5f0-7e6a-7000-8000-%012x", i), Key: fmt.Sprint("key-", i%1000),
					Type: "OrderPlaced", AggregateType: "order", AggregateID: fmt.Sprint("key-", i%1000),
					ContentType: "application/json", Payload: payload,
				}, CreatedAt: time.Now()}}
			}
			b.ReportAllocs()
			b.ResetTimer()
			before := cpu()
			began := time.Now()
			var wg sync.WaitGroup
			var inFlight = make(chan struct{}, 3)
			for sent := 0; sent < b.N; sent += batch {
				inFlight <- struct{}{}
				accepted := make(chan struct{})
				part := ms[:min(batch, b.N-sent)]
				wg.Go(func() {
					s.Publish(context.Background(), sink.Batch{Messages: part, Accepted: func() { close(accepted) },
						Report: func(i int, r sink.Result) {
							if r.Status != sink.Delivered {
								b.Errorf("message %d: %v %v", i, r.Status, r.Err)
							}
						}})
					<-inFlight
				})
				<-accepted
			}
			wg.Wait()
			b.ReportMetric(float64(cpu()-before)/float64(b.N), "cpu-ns/op")
			b.ReportMetric(float64(b.N)/time.Since(began).Seconds(), "msgs/s")
		})
	}
}

func cpu() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
