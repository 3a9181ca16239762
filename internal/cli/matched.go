package cli

import (
	"strings"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/config"
	"github.com/outrider-dev/outrider/store"
)

// notMatched is the reason of what is PUBLISHED without having been sent, as
// its destination's match does not pick it. No store keeps that: a relay passes
// over such events as over those that arrived. So the match of the
// configuration is asked again, which may have been changed meanwhile.
const notMatched = "not matched"

// matches are a source's destinations, each with its match. Empty without a file.
type matches map[string]config.Destination

// matches are known once the source has been opened.
func (s *selection) matches(a *app) matches {
	out := matches{}
	if s.File == "" || a.config == nil {
		return out
	}
	for _, d := range a.config.Destinations {
		if s.Source == "" || s.Source == d.Source {
			out[d.Name] = d
		}
	}
	return out
}

// mark gives entries the reason notMatched. rec is their event; nil: they are
// of a list, and hold less of it.
func (m matches) mark(entries []store.Entry, rec *outrider.Record) []store.Entry {
	for i := range entries {
		e := &entries[i]
		d, ok := m[e.Destination]
		if !ok || e.State != store.Published || e.Reason != "" {
			continue
		}
		r := rec
		if r == nil {
			if needsMore(d) {
				continue
			}
			r = &outrider.Record{Event: outrider.Event{
				ID: e.EventID, Type: e.Type, AggregateType: e.AggregateType, AggregateID: e.AggregateID,
				Key: e.Key, Unordered: e.Unordered,
			}}
		}
		if !d.Match.Match(r) {
			e.Reason = notMatched
		}
	}
	return entries
}

// needsMore says whether a match looks at what a list's entries do not hold. It
// is too careful with one that has such words in a value.
func needsMore(d config.Destination) bool {
	text := d.Match.String()
	return strings.Contains(text, "header.") || strings.Contains(text, "content_type")
}
