package relay

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// source is a store of nothing but work: each claim is full until n events have
// been handed out. It costs as little as possible, so that what is measured is
// the engine.
type source struct {
	records []outrider.Record
	left    atomic.Int64
	settled atomic.Int64
	n       int64
	done    chan struct{}
	read    time.Duration // how long a Claim takes
	commit  time.Duration // how long a Commit takes
	took    bool
}

func newSource(n int) *source {
	s := &source{n: int64(n), done: make(chan struct{})}
	s.left.Store(int64(n))
	for i := range 5000 {
		s.records = append(s.records, outrider.Record{
			Event: outrider.Event{ID: strconv.Itoa(i), Key: fmt.Sprintf("key-%d", i%1000), Payload: make([]byte, 300)},
			Row:   strconv.Itoa(i)})
	}
	return s
}

func (s *source) Capabilities() store.Capabilities { return store.Capabilities{FanOut: true} }
func (s *source) Close() error                     { return nil }
func (s *source) Join(context.Context, store.JoinParams) (store.Session, error) {
	return s, nil
}
func (s *source) Acquire(_ context.Context, p store.AcquireParams) ([]store.Lease, error) {
	if s.took {
		return nil, nil
	}
	s.took = true
	return []store.Lease{{ID: 1, Destination: p.Destination, Lanes: store.AllLanes, Epoch: 1}}, nil
}
func (s *source) Renew(context.Context, []store.Lease) (store.Renewal, error) {
	return store.Renewal{Relays: 1, Serving: map[string]int{"out": 1}}, nil
}
func (s *source) Release(context.Context, store.Lease, store.LaneSet) (store.Lease, error) {
	return store.Lease{}, nil
}
func (s *source) Leave(context.Context) error { return nil }
func (s *source) Forget(*store.Claim)         {}

func (s *source) Claim(_ context.Context, p store.ClaimParams) (*store.Claim, error) {
	c := &store.Claim{Lease: p.Lease, Kind: p.Kind}
	if p.Kind == store.Due {
		return c, nil
	}
	if s.read > 0 {
		time.Sleep(s.read)
	}
	n := min(int64(p.MaxRecords), s.left.Load(), int64(len(s.records)))
	c.Records = s.records[:n]
	c.More = s.left.Add(-n) > 0
	return c, nil
}

func (s *source) Commit(_ context.Context, p store.CommitParams) error {
	if s.commit > 0 {
		time.Sleep(s.commit)
	}
	for _, st := range p.Settle {
		if s.settled.Add(int64(len(st.Outcomes))) == s.n {
			close(s.done)
		}
	}
	return nil
}

// drain is a sink that takes everything at once.
type drain struct {
	receipts bool
	inFlight bool
	took     time.Duration // how long a call takes
}

func (d drain) Capabilities() sink.Capabilities {
	return sink.Capabilities{Order: true, OrderInFlight: d.inFlight}
}
func (d drain) Close(context.Context) error { return nil }
func (d drain) Publish(_ context.Context, b sink.Batch) {
	if b.Accepted != nil && d.inFlight {
		b.Accepted()
	}
	if d.took > 0 {
		time.Sleep(d.took)
	}
	r := sink.Result{Status: sink.Delivered}
	if d.receipts {
		r.Receipt = "orders/3@17"
	}
	for i := range b.Messages {
		b.Report(i, r)
	}
}

// BenchmarkEngine moves b.N events from a store to a sink that cost next to
// nothing. cpu-ns/msg is the processor time of the whole process.
func BenchmarkEngine(b *testing.B) {
	for _, c := range []struct {
		name  string
		sink  drain
		hooks bool
	}{
		{"in-flight", drain{inFlight: true}, false},
		{"in-flight+receipts+hooks", drain{inFlight: true, receipts: true}, true},
		{"one-call-at-a-time", drain{}, false},
	} {
		b.Run(c.name, func(b *testing.B) {
			src := newSource(b.N)
			cfg := Config{Store: src, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
				Destinations: []Destination{{Name: "out", Sink: c.sink,
					To: func(r *outrider.Record) (string, error) { return "orders", nil }}}}
			if c.hooks {
				var n atomic.Int64
				cfg.Hooks.Event = func(string, *outrider.Record, EventOutcome) { n.Add(1) }
			}
			r, err := New(cfg)
			if err != nil {
				b.Fatal(err)
			}
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			cpu := processTime()
			b.ResetTimer()
			ctx, cancel := context.WithCancel(context.Background())
			ended := make(chan error)
			go func() { ended <- r.Run(ctx) }()
			<-src.done
			b.StopTimer()
			cpu = processTime() - cpu
			runtime.ReadMemStats(&after)
			cancel()
			if err := <-ended; err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msgs/s")
			b.ReportMetric(float64(cpu.Nanoseconds())/float64(b.N), "cpu-ns/msg")
			b.ReportMetric(float64(after.Mallocs-before.Mallocs)/float64(b.N), "allocs/msg")
		})
	}
}

func processTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
