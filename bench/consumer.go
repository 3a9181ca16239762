package main

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// audit is a consumer that knows what has to arrive: the events numbered 1 to
// n, each key's in the order of their numbers.
type audit struct {
	mu       sync.Mutex
	seen     []bool           // by number
	last     map[string]int64 // by key, among first deliveries
	distinct int
	err      error
}

func newAudit(n int) *audit { return &audit{seen: make([]bool, n+1), last: map[string]int64{}} }

func (a *audit) see(r *kgo.Record) { a.note(string(r.Key), header(r, "id")) }

func (a *audit) note(key, id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n, err := strconv.ParseInt(id[max(0, len(id)-12):], 16, 64)
	switch {
	case err != nil || n < 1 || n >= int64(len(a.seen)):
		a.fail("an event with the id %q arrived, which was not written", id)
	case a.seen[n]: // consumers drop it
	default:
		if n < a.last[key] {
			a.fail("order: event %d of key %s arrived behind %d", n, key, a.last[key])
		}
		a.seen[n] = true
		a.last[key] = max(a.last[key], n)
		a.distinct++
	}
}

func (a *audit) fail(format string, args ...any) {
	if a.err == nil {
		a.err = fmt.Errorf(format, args...)
	}
}

// complete waits until all has arrived, and says what is wrong with it.
func (a *audit) complete(ctx context.Context) error {
	t := time.NewTicker(10 * time.Millisecond)
	defer t.Stop()
	for deadline := time.Now().Add(patience); ; {
		a.mu.Lock()
		missing, err := len(a.seen)-1-a.distinct, a.err
		a.mu.Unlock()
		switch {
		case err != nil || missing == 0:
			return err
		case time.Now().After(deadline):
			return fmt.Errorf("%d events did not arrive", missing)
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
