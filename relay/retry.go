package relay

import (
	"math"
	"math/rand/v2"
	"time"
)

// delay is how long a message waits after its nth failure behind the immediate
// ones, n from 1: Base doubled up to Cap, and jitter on top. It doubles step by
// step and stops at Cap, so that no count, however large, can overflow.
func (r Retry) delay(n int) time.Duration {
	return jitter(r.backoff(n))
}

func (r Retry) backoff(n int) time.Duration { return doubled(r.Base, r.Cap, n-1) }

// doubled is base * 2^n, at most limit, but at least base.
func doubled(base, limit time.Duration, n int) time.Duration {
	d := base
	for ; n > 0 && d > 0 && d < limit; n-- {
		if d > limit/2 {
			return limit
		}
		d *= 2
	}
	return d
}

// jitter adds a tenth to a half, so that what failed together does not come
// back together. It only adds: a floor stays a floor.
func jitter(d time.Duration) time.Duration {
	extra := time.Duration(float64(d) * (0.1 + 0.4*rand.Float64()))
	if extra < 0 || d > math.MaxInt64-extra {
		return math.MaxInt64
	}
	return d + extra
}

// after is the delay of a failure with a destination's wish in it, which is a
// floor under the jitter.
func (r Retry) after(n int, wish time.Duration) time.Duration {
	return jitter(max(r.backoff(n), wish))
}
