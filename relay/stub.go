package relay

import (
	"context"
	"sync/atomic"
	"time"
)

type worker struct {
	dest  *destination
	lanes atomic.Int64
}

func (w *worker) wake() {}
func (w *worker) poke() {}

type keeper struct{}

func (k *keeper) show() (bool, int, time.Duration) { return false, 0, 0 }
func (k *keeper) fresh() bool                      { return true }

type breaker struct{}

func newBreaker(b Breaker, d *destination) *breaker { return &breaker{} }
func (b *breaker) show(*DestinationHealth)          {}
func (r *Relay) run(ctx context.Context) error      { <-ctx.Done(); return nil }
