//go:build linux

package chaos_test

import (
	"encoding/json"
	"fmt"
	"os"
	"testing"
	"time"
)

// TestMain makes a relay or a writer of the test's binary when it is started as
// one.
func TestMain(m *testing.M) {
	played := play(envRelay, runRelay) || play(envWriter, runWriter)
	if played {
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// play runs a part of which the environment has the particulars.
func play[S any](env string, run func(S) error) bool {
	text := os.Getenv(env)
	if text == "" {
		return false
	}
	var spec S
	if err := json.Unmarshal([]byte(text), &spec); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	if err := run(spec); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return true
}

// plan is the size of a test.
type plan struct {
	kills, events int
}

// size is the long form if OUTRIDER_CRASH=long.
func size(short, long plan) plan {
	if os.Getenv("OUTRIDER_CRASH") == "long" {
		return long
	}
	return short
}

// await polls until cond holds.
func await(t testing.TB, limit time.Duration, what string, cond func() bool) {
	t.Helper()
	if !awaited(limit, cond) {
		t.Fatalf("after %v still waiting for: %s", limit, what)
	}
}

func awaited(limit time.Duration, cond func() bool) bool {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(limit); !cond(); <-tick.C {
		if time.Now().After(deadline) {
			return false
		}
	}
	return true
}

// patience bounds a wait for what takes seconds on a loaded machine.
const patience = 2 * time.Minute
