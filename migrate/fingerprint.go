package migrate

import (
	"fmt"
	"slices"
	"strings"

	"github.com/outrider-dev/outrider"
)

// A fingerprint is a text with one line for each thing that a set of tables is
// made of. A line has three fields with tabs between: what it is, how it is
// made, and expressions as the server prints them. Servers of another major
// version may print the same expression otherwise, so the last field is compared
// only between equal servers; the line "server" says which one it was.

// difference is between how the migrations left the tables and how they are.
type difference struct {
	what     string // such as "column outbox_events.payload"
	was, now string // how it is made; empty: it is not there
	harmless bool
}

func (d difference) String() string {
	switch {
	case d.now == "":
		return d.what + " is missing; it was made as: " + d.was
	case d.was == "":
		return d.what + " was added: " + d.now
	default:
		return d.what + " was changed from: " + d.was + "; to: " + d.now
	}
}

// line is one line of a fingerprint.
type line struct{ def, expr string }

func (l line) String() string {
	if l.expr == "" {
		return l.def
	}
	return strings.TrimSpace(fmt.Sprintf("%s %.200s", l.def, l.expr))
}

func parseFingerprint(text string) (server string, lines map[string]line) {
	lines = make(map[string]line)
	for l := range strings.Lines(text) {
		f := strings.SplitN(strings.TrimRight(l, "\n"), "\t", 3)
		for len(f) < 3 {
			f = append(f, "")
		}
		if f[0] == "server" {
			server = f[1]
			continue
		}
		l := line{f[1], strings.Join(strings.Fields(f[2]), " ")}
		if f[0] == ringName && l.expr == ringMade {
			continue // the doorbell comes and goes as its owner likes
		}
		lines[f[0]] = l
	}
	return server, lines
}

func differences(was, now string) []difference {
	oldServer, old := parseFingerprint(was)
	newServer, cur := parseFingerprint(now)
	var out []difference
	for what, o := range old {
		c, ok := cur[what]
		if !ok {
			out = append(out, difference{what: what, was: o.String(), harmless: isView(what)})
		} else if c.def != o.def || oldServer == newServer && c.expr != o.expr {
			out = append(out, difference{what: what, was: o.String(), now: c.String(), harmless: isView(what)})
		}
	}
	for what, c := range cur {
		if _, ok := old[what]; !ok {
			out = append(out, difference{what: what, now: c.String(), harmless: harmless(what, c)})
		}
	}
	slices.SortFunc(out, func(a, b difference) int { return strings.Compare(a.what, b.what) })
	return out
}

// isView: views are for people. No relay should stay down for one.
func isView(what string) bool { return strings.HasPrefix(what, "view ") }

// harmless says whether an addition leaves every INSERT and every query of ours
// as they were.
func harmless(what string, l line) bool {
	switch kind, _, _ := strings.Cut(what, " "); kind {
	case "trigger", "view":
		return true
	case "index":
		return l.def == "plain"
	case "column":
		return !strings.Contains(l.def, "not null") || l.expr != ""
	default:
		return false
	}
}

// checkPayload compares the payload column's type with what was asked for.
func (m *migrator) checkPayload(s *state) error {
	if m.Payload == 0 || s.version() == 0 {
		return nil
	}
	_, lines := parseFingerprint(s.applied[len(s.applied)-1].fingerprint)
	is, ok := lines["column "+m.events+".payload"]
	if !ok || is.def == m.Payload.String() {
		return nil
	}
	return outrider.WithHint(fmt.Errorf("%w: %s.payload is of type %s, and %s was asked for", ErrDrift, m.events, is.def, m.Payload),
		"the type is chosen when the table is made; configure payload "+is.def)
}
