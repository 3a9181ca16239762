package route

import (
	"fmt"
	"strings"

	"github.com/outrider-dev/outrider"
)

// Match picks events. The zero value picks every event.
type Match struct {
	text  string
	terms []term
}

type term struct {
	field field
	not   bool
	any   []pattern
}

// pattern is a value cut at its wildcards: it holds if the value begins with
// the first part, ends with the last and has the others between them, in order.
type pattern []string

// ParseMatch compiles a Match. The error is a *SyntaxError.
func ParseMatch(s string) (Match, error) {
	p := parser{in: s}
	m := Match{text: strings.TrimSpace(s)}
	for p.space(); p.at < len(s); p.space() {
		t, err := p.term()
		if err != nil {
			return Match{}, err
		}
		m.terms = append(m.terms, t)
	}
	return m, nil
}

// Match says whether the event is picked.
func (m Match) Match(rec *outrider.Record) bool {
	for i := range m.terms {
		t := &m.terms[i]
		if t.holds(rec) == t.not {
			return false
		}
	}
	return true
}

// String is the text that the Match was made from.
func (m Match) String() string { return m.text }

// MarshalText implements encoding.TextMarshaler.
func (m Match) MarshalText() ([]byte, error) { return []byte(m.text), nil }

// UnmarshalText implements encoding.TextUnmarshaler with ParseMatch.
func (m *Match) UnmarshalText(b []byte) error {
	parsed, err := ParseMatch(string(b))
	if err == nil {
		*m = parsed
	}
	return err
}

func (t *term) holds(rec *outrider.Record) bool {
	v, ok := t.field.value(rec)
	if !ok {
		return false
	}
	for _, p := range t.any {
		if p.holds(v) {
			return true
		}
	}
	return false
}

func (p pattern) holds(v string) bool {
	if len(p) == 1 {
		return v == p[0]
	}
	first, last := p[0], p[len(p)-1]
	if len(v) < len(first)+len(last) || !strings.HasPrefix(v, first) || !strings.HasSuffix(v, last) {
		return false
	}
	v = v[len(first) : len(v)-len(last)]
	for _, part := range p[1 : len(p)-1] {
		i := strings.Index(v, part)
		if i < 0 {
			return false
		}
		v = v[i+len(part):]
	}
	return true
}

// parser reads a Match from left to right.
type parser struct {
	in string
	at int
}

func (p *parser) fail(at int, format string, args ...any) error {
	return &SyntaxError{Input: p.in, Column: at + 1, Reason: fmt.Sprintf(format, args...)}
}

func isSpace(c byte) bool { return c == ' ' || c == '\t' || c == '\n' || c == '\r' }

func (p *parser) space() {
	for p.at < len(p.in) && isSpace(p.in[p.at]) {
		p.at++
	}
}

// next takes c if it comes next.
func (p *parser) next(c byte) bool {
	if p.at < len(p.in) && p.in[p.at] == c {
		p.at++
		return true
	}
	return false
}

func (p *parser) term() (term, error) {
	t := term{not: p.next('!')}
	start := p.at
	for p.at < len(p.in) && p.in[p.at] != ':' && !isSpace(p.in[p.at]) {
		p.at++
	}
	name := p.in[start:p.at]
	if !p.next(':') {
		return t, p.fail(start, "a term is field:value, and %q has no colon", name)
	}
	var err error
	if t.field, err = parseField(p.in, name, start+1); err != nil {
		return t, err
	}
	for {
		v, err := p.value(name)
		if err != nil {
			return t, err
		}
		t.any = append(t.any, v)
		if !p.next(',') {
			return t, nil
		}
	}
}

// value reads one value, up to a comma, a space or the end.
func (p *parser) value(name string) (pattern, error) {
	start := p.at
	parts := pattern{""}
	last := func() *string { return &parts[len(parts)-1] }
	for p.at < len(p.in) && p.in[p.at] != ',' && !isSpace(p.in[p.at]) {
		switch p.in[p.at] {
		case '*':
			p.at++
			if n := len(parts); n == 1 || parts[n-1] != "" { // ** is *
				parts = append(parts, "")
			}
		case '"':
			s, err := p.quoted()
			if err != nil {
				return nil, err
			}
			*last() += s
		default:
			*last() += p.in[p.at : p.at+1]
			p.at++
		}
	}
	if p.at == start {
		return nil, p.fail(start, "a value is missing for %s; for the empty value write \"\"", name)
	}
	return parts, nil
}

// quoted reads "..." where \" and \\ stand for " and \.
func (p *parser) quoted() (string, error) {
	start := p.at
	p.at++
	var b strings.Builder
	for p.at < len(p.in) {
		c := p.in[p.at]
		p.at++
		switch {
		case c == '"':
			return b.String(), nil
		case c == '\\' && p.at < len(p.in) && (p.in[p.at] == '"' || p.in[p.at] == '\\'):
			b.WriteByte(p.in[p.at])
			p.at++
		case c == '\\':
			return "", p.fail(p.at-1, `in quotes only \" and \\ may follow a backslash`)
		default:
			b.WriteByte(c)
		}
	}
	return "", p.fail(start, "the quote is not closed")
}
