package memsink_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/sinktest"
)

// gate is a destination that can fall silent.
type gate struct {
	mu   sync.Mutex
	open chan struct{}
	left chan struct{} // gets one for every message that is held up
}

func (g *gate) wait(*testing.T) { <-g.left }

func (g *gate) stall(*testing.T) func() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = make(chan struct{})
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		close(g.open)
		g.open = nil
	}
}

// decide pays no heed to its context, so that a cut call has to do without it.
func (g *gate) decide(_ context.Context, m sink.Message) sink.Result {
	g.mu.Lock()
	open := g.open
	g.mu.Unlock()
	if open != nil {
		select {
		case g.left <- struct{}{}:
		default:
		}
		<-open
	}
	if m.Type == "Poison" {
		return sink.Result{Status: sink.Reject, Class: sink.ClassRefused, Err: errors.New("poison")}
	}
	return memsink.Deliver
}

func TestSuite(t *testing.T) {
	for _, decide := range []bool{false, true} {
		for _, cfg := range []memsink.Config{
			{}, {NoOrderInFlight: true}, {NoOrder: true}, {Deduplicate: true},
		} {
			name := fmt.Sprintf("decide=%v,no-in-flight=%v,no-order=%v,dedup=%v",
				decide, cfg.NoOrderInFlight, cfg.NoOrder, cfg.Deduplicate)
			t.Run(name, func(t *testing.T) {
				sinktest.Run(t, sinktest.Harness{New: func(*testing.T) sinktest.Env { return env(cfg, decide) }})
			})
		}
	}
}

func env(cfg memsink.Config, decide bool) sinktest.Env {
	g := &gate{left: make(chan struct{}, 1)}
	cfg.Places, cfg.MaxBytes = []string{"here", "there"}, 1<<20
	e := sinktest.Env{
		Place: "here", OtherPlace: "there", Missing: "nowhere", MaxBytes: 1<<20 + 1, Fits: 1 << 20,
	}
	if decide {
		cfg.Decide = g.decide
		e.Stall, e.Left = g.stall, g.wait
		e.Poison = func(m *sink.Message) { m.Type = "Poison" }
	}
	s := memsink.New(cfg)
	e.Open = func(*testing.T) sink.Sink { return s }
	e.Break = func(*testing.T) func() { s.Break(nil); return s.Mend }
	e.Read = func(t *testing.T, place string, n int) []sinktest.Arrived {
		ctx, cancel := context.WithTimeout(context.Background(), sinktest.Patience)
		defer cancel()
		if err := s.Wait(ctx, n); err != nil {
			t.Fatal(err)
		}
		var as []sinktest.Arrived
		for _, m := range s.Messages() {
			if m.To == place {
				as = append(as, sinktest.Arrived{Place: place, ID: m.ID, Key: m.Key, HasKey: m.Key != "",
					Headers: sinktest.Headers(m), Payload: m.Payload})
			}
		}
		return as
	}
	return e
}
