// Package sink is the seam between the relay and a destination. A driver
// implements Sink and passes sinktest; the relay knows nothing else of it.
package sink

import (
	"context"
	"time"

	"github.com/outrider-dev/outrider"
)

// Sink carries messages to one destination.
//
// The relay owns retries, order over calls, breaker and bookkeeping. A sink
// never retries beyond what its client does inside one delivery's time-out,
// never sleeps to pace itself, and never drops: it says what happened.
type Sink interface {
	// Publish sends a batch and returns when every message has been reported,
	// exactly once each. It may be called again, from another goroutine,
	// while a call is under way.
	//
	// ctx ends a call early: what is not known to be delivered by then is
	// reported Unknown if it may have left, NotSent if it cannot have. Publish
	// returns soon after in any case.
	Publish(ctx context.Context, b Batch)

	// Capabilities says what the driver promises; constant over its life.
	Capabilities() Capabilities

	// Close gives up connections. Called once, after the last Publish has
	// returned.
	Close(ctx context.Context) error
}

// Checker is a Sink that can tell at start-up whether its destination is there
// and may be written to. The error carries a hint (outrider.Hint).
type Checker interface {
	Check(ctx context.Context) error
}

// Capabilities are a driver's promises. sinktest tests each both ways.
type Capabilities struct {
	// Order: inside one call, messages of one key are delivered in the
	// batch's order, and once one of them is not Delivered, the rest of its
	// key is reported NotSent and not sent. A sink without it is given at
	// most one message of a key per call.
	Order bool

	// OrderInFlight: the same holds over calls that overlap, in the order in
	// which they were accepted (Batch.Accepted). A key that stopped stays
	// stopped for the calls that were accepted behind the failing one before
	// its failure was reported, those that are just being accepted included.
	// Calls that come in later are asked whether they know of the failure
	// (Batch.Stale). Needs Order.
	OrderInFlight bool

	// Deduplicates: the destination drops a message whose ID it has seen
	// shortly before, within a window of its own.
	Deduplicates bool
}

// Batch is what Publish sends.
type Batch struct {
	// Messages, in the order to be kept. The slice and what it holds belong
	// to the relay and must not be written to, nor be kept after Publish
	// returned.
	Messages []Message

	// Report tells what became of Messages[i]. Called exactly once for each
	// i, from any goroutine, as soon as it is known; it does not block.
	Report func(i int, r Result)

	// Accepted, if not nil, is called once by a sink with OrderInFlight, as
	// soon as all messages are in the client's hands in order: from then on
	// the relay may begin the next call. A sink without it never calls it.
	Accepted func()

	// Stale, if not nil, is asked by a sink with OrderInFlight before it takes
	// anything of the batch into the client's hands, in one step with regard
	// to its reports of failures (under the same lock). True means that a
	// failure has been reported which the relay did not know of when it made
	// the batch, so that a message in it might overtake the one that failed:
	// the sink reports every message NotSent with ClassHeld and sends none.
	// It does not block.
	Stale func() bool
}

// Message is one event on its way out.
type Message struct {
	*outrider.Record

	// To is the place inside the destination, made by its rules: topic,
	// subject, exchange or URL.
	To string

	// Redelivery: the event may have been delivered before, as after a crash.
	Redelivery bool
}

// Status is what became of a message.
type Status uint8

const (
	// Unknown: it may have been delivered. The zero value, so that what was
	// forgotten is never taken for delivered or for safe to repeat.
	Unknown Status = iota
	// Delivered: the destination confirmed it and keeps it.
	Delivered
	// Retry: it was refused for a reason that may pass; it is this message's
	// own attempt that failed.
	Retry
	// Reject: it was refused for a reason that lies in the message or in what
	// names its place and will not pass by itself. A place that is well named
	// and not there may be made yet: that is Retry with ClassNoTarget.
	Reject
	// NotSent: it cannot have been delivered, and not through its own fault:
	// destination unreachable, or held back behind an earlier one of its key.
	NotSent
)

// String gives the status as it is shown and logged.
func (s Status) String() string {
	switch s {
	case Delivered:
		return "delivered"
	case Retry:
		return "retry"
	case Reject:
		return "reject"
	case NotSent:
		return "not-sent"
	default:
		return "unknown"
	}
}

// Class sorts failures: a small fixed set, used in metrics, listings and rules.
type Class string

// The classes of failure.
const (
	ClassNone        Class = ""
	ClassUnreachable Class = "unreachable" // no connection, broker down: opens the breaker
	ClassTimeout     Class = "timeout"     // no answer in time
	ClassThrottled   Class = "throttled"   // asked to slow down; costs no attempt
	ClassAuth        Class = "auth"        // not authenticated or not allowed
	ClassNoTarget    Class = "no_target"   // topic, stream, exchange or route does not exist
	ClassOversize    Class = "oversize"    // larger than the destination takes
	ClassInvalid     Class = "invalid"     // the destination cannot take this message as it is
	ClassRefused     Class = "refused"     // any other definite no
	ClassHeld        Class = "held"        // behind an earlier message of its key
	ClassWorkerDied  Class = "worker_died" // processes died with it alone in hand
	ClassExpired     Class = "expired"     // its maximum age was reached
	ClassStopped     Class = "stopped"     // the relay was stopping
	ClassOther       Class = "other"
)

// Result is what a sink says of one message.
type Result struct {
	Status Status

	// Class is why, for all but Delivered.
	Class Class

	// RetryAfter is the destination's own wish: not before this long from
	// now. 0: none.
	RetryAfter time.Duration

	// Receipt says where a delivered message went ("orders/3@17", a stream
	// sequence, an HTTP status). Kept per batch and shown by trace; may be "".
	Receipt string

	// Err is the evidence, for all but Delivered. Its text is stored and
	// shown to operators: no secrets.
	Err error
}
