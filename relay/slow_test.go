package relay

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// sluggish keeps order in flight. It takes 3 s for all messages of its first two
// calls, whose keys begin with "slow", and none for others.
type sluggish struct{ calls atomic.Int64 }

func (*sluggish) Capabilities() sink.Capabilities {
	return sink.Capabilities{Order: true, OrderInFlight: true}
}
func (*sluggish) Close(context.Context) error { return nil }
func (s *sluggish) Publish(_ context.Context, b sink.Batch) {
	n := s.calls.Add(1)
	b.Accepted()
	for i, m := range b.Messages {
		if m.Key == "fast" {
			b.Report(i, sink.Result{Status: sink.Delivered})
		}
	}
	if n <= 2 {
		time.Sleep(3*time.Second + time.Duration(n)*time.Millisecond)
	}
	for i, m := range b.Messages {
		if m.Key != "fast" {
			b.Report(i, sink.Result{Status: sink.Delivered})
		}
	}
}

// What is delivered behind a message that was set aside because it was slow goes
// back with its key, but the sink has broken no promise: it was asked for both
// before that.
func TestDeliveredBehindSlowIsNoBrokenPromise(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		broken := 0
		w.start(func(c *Config) {
			c.Destinations[0].Sink = &sluggish{}
			c.Hooks.Broken = func(string) { broken++ }
		})
		time.Sleep(time.Second)
		ids := w.add("slow", "fast")
		time.Sleep(500 * time.Millisecond)
		keys := []string{"slow"} // and so many that the second call is not set aside
		for i := range 40 {
			keys = append(keys, fmt.Sprintf("slow-%d", i))
		}
		ids = append(ids, w.add(keys...)...)
		time.Sleep(time.Minute)
		w.mustBe(store.Published, ids...)
		if broken != 0 {
			t.Errorf("%d promises counted as broken", broken)
		}
	})
}
