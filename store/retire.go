package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outrider-dev/outrider"
)

// Retirer is a Store that can forget a destination.
type Retirer interface {
	// Retire removes all that is kept of a destination: where it stands, what
	// has failed or waits, and its journal. The events stay. A relay that joins
	// for it afterwards makes it known anew; one that had joined before, and
	// holds nothing of it, has errors from Acquire. What the last owner still
	// has in hand is fenced off.
	//
	// Refused with ErrServed while somebody has a lease that has not expired,
	// and with ErrUnknownDestination. dry only looks.
	Retire(ctx context.Context, destination string, dry bool) (RetireReport, error)
}

// RetireReport says what is given up with a destination.
type RetireReport struct {
	Pending Count `json:"pending"` // not delivered yet: pending, in hand, waiting or scheduled
	Failed  Count `json:"failed"`
}

// Retiring sums up what would be given up.
func (d DestinationStatus) Retiring() RetireReport {
	r := RetireReport{Failed: d.Failed}
	for _, c := range []Count{d.Pending, d.Publishing, d.Waiting, d.Scheduled} {
		r.Pending.N += c.N
		r.Pending.Estimate = r.Pending.Estimate || c.Estimate
	}
	return r
}

// Errors of Retirer, and of Acquire for a destination that was retired.
var (
	ErrServed             = errors.New("a relay serves the destination")
	ErrUnknownDestination = errors.New("there is no such destination")
)

// Served is ErrServed with what to do about it, for drivers. left is how long
// the relay's lease lives.
func Served(relay string, left time.Duration) error {
	return outrider.WithHint(fmt.Errorf("%w: %s", ErrServed, relay),
		fmt.Sprintf("take the destination out of the relay's configuration and restart it, or stop the relay; if it is dead, its lease expires in %v",
			max(time.Second, left.Round(time.Second))))
}

// Retired is ErrUnknownDestination as Acquire gives it, for drivers.
func Retired(destination string) error {
	return outrider.WithHint(fmt.Errorf("%w: %q was retired after this relay had joined", ErrUnknownDestination, destination),
		"take it out of the relay's configuration; if it is wanted after all, restart the relay, and it begins anew")
}
