package relay

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// charge gives events that nobody has in hand so many failed attempts.
func (w *world) charge(attempts map[string]int) {
	w.t.Helper()
	must := func(err error) {
		if err != nil {
			w.t.Helper()
			w.t.Fatal(err)
		}
	}
	ctx := context.Background()
	s, err := w.store.Join(ctx, store.JoinParams{Relay: "before", TTL: time.Hour, Grace: time.Second,
		Destinations: []store.Destination{{Name: "out", FromEarliest: true}}})
	must(err)
	l, err := s.Acquire(ctx, store.AcquireParams{Destination: "out", Lanes: outrider.Lanes})
	must(err)
	c, err := s.Claim(ctx, store.ClaimParams{Lease: l[0], Kind: store.Fresh, MaxRecords: 1000, MaxBytes: 1 << 20})
	must(err)
	if len(c.Records) != len(attempts) {
		w.t.Fatalf("%d events were claimed, not %d", len(c.Records), len(attempts))
	}
	out := make([]store.Outcome, len(c.Records))
	for i, r := range c.Records {
		out[i] = store.Outcome{State: store.Waiting, Attempts: attempts[r.ID], Class: "refused"}
	}
	must(s.Commit(ctx, store.CommitParams{Lease: c.Lease, Start: []*store.Claim{c}}))
	must(s.Commit(ctx, store.CommitParams{Lease: c.Lease, Settle: []store.Settlement{{Claim: c, Outcomes: out}}}))
	must(s.Leave(ctx))
}

// delays are how long after their last failure events are tried again, by id.
func (w *world) delays() map[string]time.Duration {
	out := map[string]time.Duration{}
	for id, e := range w.entries() {
		if e.State == store.Waiting {
			out[id] = time.Since(e.LastFailure) + e.DueIn
		}
	}
	return out
}

// RTY-01: an event that the store says has failed very often is due after the
// cap, and not at once, and is not tried before.
func TestRTY01_StoredAttemptsKeepTheDelayInBounds(t *testing.T) {
	counts := []int{30, 63, 64, 100, 1000, 1<<31 - 1}
	for _, c := range []struct {
		retry Retry
		want  time.Duration
	}{
		{Retry{Base: time.Second, Cap: time.Hour}, time.Hour},
		{Retry{Base: time.Minute, Cap: time.Hour}, time.Hour},
		{Retry{Base: 0, Cap: time.Hour}, time.Hour},
		{Retry{Base: 0, Cap: 0}, 5 * time.Minute},
		{Retry{Base: time.Hour, Cap: time.Second}, time.Hour}, // cap below base
		{Retry{Base: time.Hour, Cap: 1<<63 - 1}, 1<<63 - 1},
	} {
		t.Run(fmt.Sprintf("base %v cap %v", c.retry.Base, c.retry.Cap), func(t *testing.T) {
			var tries *attempts
			inWorld(t, memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
				if tries.note(m.Key) > 100 {
					return memsink.Deliver // or a hot loop would never end
				}
				return answer(sink.Retry, sink.ClassRefused)
			}}, func(w *world) {
				tries = newAttempts()
				keys := many(len(counts), len(counts))
				ids, had := w.add(keys...), map[string]int{}
				for i, id := range ids {
					had[id] = counts[i]
				}
				w.charge(had)
				r := w.start(func(cfg *Config) {
					cfg.Destinations[0].Retry = c.retry
					cfg.Destinations[0].Retry.MaxAttempts = -1
				})
				time.Sleep(2 * time.Second)
				all, delays := w.entries(), w.delays()
				for i, id := range ids {
					if e := all[id]; e.State != store.Waiting || e.Attempts != counts[i]+1 {
						t.Errorf("after %d attempts and one more it is %v with %d", counts[i], e.State, e.Attempts)
					}
					if d := delays[id]; d < c.want || float64(d) > 1.5*float64(c.want) {
						t.Errorf("after %d attempts it waits %v, want %v and up to half", counts[i], d, c.want)
					}
				}
				most := min(c.want, time.Hour)
				time.Sleep(most - 3*time.Second)
				for i, k := range keys {
					if n := len(tries.of(k)); n != 1 {
						t.Errorf("with %d attempts it was tried %d times in %v", counts[i], n, most)
					}
				}
				if c.want <= most {
					time.Sleep(most/2 + 5*time.Second)
					for i, k := range keys {
						if n := len(tries.of(k)); n != 2 {
							t.Errorf("with %d attempts it was tried %d times in one and a half of %v", counts[i], n, most)
						}
					}
				}
				r.end()
			})
		})
	}
}

// RTY-05: what failed in one instant is not due in one instant, and nothing of
// it before the delay or the destination's wish is over.
func TestRTY05_WhatFailedTogetherReturnsApart(t *testing.T) {
	const n, parts = 1000, 8 // of what is added: a tenth to a half
	for name, c := range map[string]struct {
		class       sink.Class
		wish, floor time.Duration
	}{
		"refused":              {sink.ClassRefused, 0, 20 * time.Second},
		"refused with a wish":  {sink.ClassRefused, time.Minute, time.Minute},
		"throttled for longer": {sink.ClassThrottled, time.Minute, time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			var tries *attempts
			inWorld(t, memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
				if tries.note(m.Key) > 1 {
					return memsink.Deliver
				}
				r := answer(sink.Retry, c.class)
				r.RetryAfter = c.wish
				return r
			}}, func(w *world) {
				tries = newAttempts()
				r := w.start(func(cfg *Config) {
					cfg.Destinations[0].Retry = Retry{Immediate: -1, Base: 20 * time.Second, Cap: 20 * time.Second}
				})
				time.Sleep(time.Second)
				keys := many(n, n)
				ids := w.add(keys...)
				time.Sleep(time.Second)
				spread(w.t, "due", c.floor, parts, n, w.delays())
				w.wait(n, 2*c.floor)
				again := map[string]time.Duration{}
				for _, k := range keys {
					at := tries.of(k)
					again[k] = at[1] - at[0]
					if at[0] != tries.of(keys[0])[0] {
						w.t.Fatal("they have not failed in one instant: this test is of those that do")
					}
				}
				spread(w.t, "tried", c.floor, parts, n, again)
				w.mustBe(store.Published, ids...)
				r.end()
			})
		})
	}
}

// spread checks that n delays are between floor and a half more, and that none
// of so many parts of the time from a tenth to a half has more than twice its
// share of them: by chance that is some ten standard deviations off.
func spread(t *testing.T, what string, floor time.Duration, parts, n int, delays map[string]time.Duration) {
	t.Helper()
	if len(delays) != n {
		t.Fatalf("%d of %d are to be %s again", len(delays), n, what)
	}
	count := map[int]int{}
	for k, d := range delays {
		if d < floor || d > floor+floor/2+time.Second {
			t.Fatalf("%s is %s again after %v, want %v and up to half", k, what, d, floor)
		}
		count[int(float64(d-floor-floor/10)/float64(floor)*float64(parts)/0.4)]++
	}
	for i, c := range count {
		if c > 2*n/parts {
			t.Errorf("%d of %d are %s again in part %d of %d", c, n, what, i+1, parts)
		}
	}
}
