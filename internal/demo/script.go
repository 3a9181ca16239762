package demo

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Step is something done to the running system.
type Step struct {
	At     time.Duration
	Action Action
}

// Action is what can be done.
type Action string

// The actions.
const (
	Kill        Action = "kill"         // kill -9 the relay
	StopBroker  Action = "stop-broker"  // take the broker down
	StartBroker Action = "start-broker" // and bring it back
	Poison      Action = "poison"       // commit an event that the broker refuses
	Slow        Action = "slow"         // make the way to the broker slow
	Fast        Action = "fast"         // and fast again
)

var actions = []Action{Kill, StopBroker, StartBroker, Poison, Slow, Fast}

// ParseScript reads steps like "2s kill, 4s stop-broker, 6s start-broker".
func ParseScript(s string) ([]Step, error) {
	var steps []Step
	for part := range strings.SplitSeq(s, ",") {
		if strings.TrimSpace(part) == "" {
			continue
		}
		words := strings.Fields(part)
		if len(words) != 2 {
			return nil, fmt.Errorf("%q is no step, want a time and an action, such as 2s kill", strings.TrimSpace(part))
		}
		at, err := time.ParseDuration(words[0])
		if err != nil || at < 0 {
			return nil, fmt.Errorf("%q is no time, want a duration such as 2s", words[0])
		}
		a := Action(words[1])
		if !slices.Contains(actions, a) {
			return nil, fmt.Errorf("%q is no action, there are %s", words[1], actionNames())
		}
		steps = append(steps, Step{at, a})
	}
	slices.SortStableFunc(steps, func(a, b Step) int { return int(a.At - b.At) })
	return steps, nil
}

// ErrScript says that a script does not fit the time that the shop is open.
var ErrScript = errors.New("the script is longer than the shop is open")

// checkScript refuses steps that would never be done. open is how long the shop
// is open, 0: until somebody closes it.
func checkScript(open time.Duration, steps []Step) error {
	for _, s := range steps {
		if open > 0 && s.At >= open {
			return fmt.Errorf("%w: %v %s comes when it has closed, after %v", ErrScript, s.At, s.Action, open)
		}
	}
	return nil
}

func actionNames() string {
	var names []string
	for _, a := range actions {
		names = append(names, string(a))
	}
	return strings.Join(names, ", ")
}
