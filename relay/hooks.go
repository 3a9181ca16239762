package relay

import (
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/sink"
)

// Hooks are told what a relay does. Any of them may be nil. They are called
// from many goroutines, must not block and must not keep what they are given.
//
// None is called after Run has returned, if every call of the sinks and the
// store had returned by then; Run's error tells of those that had not. (Of Wake
// WakeUp is told whenever it is called.)
type Hooks struct {
	// Event is called once for each event and turn: when it was published,
	// skipped by the destination's rules, failed for good, or put back to be
	// tried again.
	Event func(destination string, rec *outrider.Record, o EventOutcome)

	// Publish is called when a call of Publish has returned.
	Publish func(destination string, messages int, took time.Duration)

	// Claim is called when a claim has been read; events may be 0.
	Claim func(destination string, events int, took time.Duration)

	// Settle is called when a commit of outcomes and starts has been
	// answered, after all its repetitions.
	Settle func(destination string, events int, took time.Duration)

	// Circuit is called when a destination's breaker changes.
	Circuit func(destination string, s CircuitState)

	// Fenced is called when a claim or commit was refused because the lease
	// had gone to somebody else; what was in hand is dropped.
	Fenced func(destination string)

	// LeaseLost is called when a renewal finds a lease gone.
	LeaseLost func(destination string)

	// Broken is called when a sink did what it has promised not to: reported
	// twice, not at all, or with a class that does not exist, did not return,
	// or delivered behind a failure of the same key.
	Broken func(destination string)

	// WakeUp is called when something made the relay look for events:
	// "watch", "wake", "poll" or "due".
	WakeUp func(source string)

	// Swept is called after each sweep for events that were passed over, with
	// how many it found: 0, unless something is badly wrong.
	Swept func(found int)

	// StoreError is called for each error of the store that is waited out.
	StoreError func(destination, op string)
}

// Outcome names what an EventOutcome tells.
type Outcome string

// The outcomes.
const (
	Published Outcome = "published"
	Skipped   Outcome = "skipped" // not for this destination
	Retried   Outcome = "retried" // waits for its next attempt
	Failed    Outcome = "failed"
)

// EventOutcome is what became of an event.
type EventOutcome struct {
	Outcome Outcome
	Class   sink.Class // for Retried and Failed
	// Latency is from the row's creation to the destination's answer. It
	// compares the database's clock with this host's, so it is for display.
	Latency time.Duration
}

// CircuitState is where a destination's breaker stands.
type CircuitState uint8

// The states of a breaker.
const (
	CircuitClosed  CircuitState = iota // sending freely
	CircuitOpen                        // counts as down; single messages probe it
	CircuitRamping                     // it is back, or throttles: sending in growing portions
)

// String is the state as it is shown.
func (s CircuitState) String() string {
	switch s {
	case CircuitOpen:
		return "open"
	case CircuitRamping:
		return "ramping"
	default:
		return "closed"
	}
}
