package route

import (
	"errors"
	"fmt"

	"github.com/outrider-dev/outrider"
)

// ErrNoRule is what Rules.To returns for an event that no rule matches.
var ErrNoRule = errors.New("no rule matches the event")

// Rule sends the events that Match picks to the place that To makes.
type Rule struct {
	Match Match
	To    Template
}

// ParseRule compiles a rule from its two texts.
func ParseRule(match, to string) (Rule, error) {
	m, err := ParseMatch(match)
	if err != nil {
		return Rule{}, fmt.Errorf("match %w", err)
	}
	t, err := ParseTemplate(to)
	if err != nil {
		return Rule{}, fmt.Errorf("to %w", err)
	}
	return Rule{m, t}, nil
}

// Rules are tried in order; the first that matches makes the name.
type Rules []Rule

// To makes the name of the place for an event. The error is ErrNoRule if none
// matches, else what Template.Expand found missing.
func (rs Rules) To(rec *outrider.Record) (string, error) {
	for i := range rs {
		if rs[i].Match.Match(rec) {
			return rs[i].To.Expand(rec)
		}
	}
	return "", ErrNoRule
}

// Constants are the names that do not depend on the event, each once: what a
// sink can look for at start-up.
func (rs Rules) Constants() []string {
	var names []string
	seen := map[string]bool{}
	for i := range rs {
		if name, ok := rs[i].To.Constant(); ok && !seen[name] {
			seen[name] = true
			names = append(names, name)
		}
	}
	return names
}
