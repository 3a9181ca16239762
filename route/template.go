package route

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/outrider-dev/outrider"
)

// Template makes the name of a place from an event. The zero value makes the
// empty name.
type Template struct {
	text     string
	constant string // the whole name, if parts is empty
	parts    []part
}

// part is a literal, or a field with its filters.
type part struct {
	literal string
	name    string
	field   field
	filters []func(string) string
}

// A filter that splits words makes them lower-case.
var filters = map[string]func(string) string{
	"lower": strings.ToLower,
	"kebab": func(s string) string { return joinWords(s, '-') },
	"snake": func(s string) string { return joinWords(s, '_') },
	"dot":   func(s string) string { return joinWords(s, '.') },
}

var filterNames = []string{"lower", "kebab", "snake", "dot"}

// ParseTemplate compiles a Template. The error is a *SyntaxError. The empty
// text is refused: it names no place.
func ParseTemplate(s string) (Template, error) {
	if s == "" {
		return Template{}, &SyntaxError{s, 1, "the name of a place is missing", ""}
	}
	t := Template{text: s}
	var lit strings.Builder
	for i := 0; i < len(s); i++ {
		c := s[i]
		switch {
		case (c == '{' || c == '}') && i+1 < len(s) && s[i+1] == c:
			lit.WriteByte(c)
			i++
		case c == '}':
			return Template{}, &SyntaxError{s, i + 1, "} without {; a literal one is }}", ""}
		case c == '{':
			end := strings.IndexByte(s[i:], '}')
			if end < 0 {
				return Template{}, &SyntaxError{s, i + 1, "{ is not closed; a literal one is {{", ""}
			}
			p, err := parsePart(s, i+1, i+end)
			if err != nil {
				return Template{}, err
			}
			p.literal = lit.String() // what stands before the field
			lit.Reset()
			t.parts = append(t.parts, p)
			i += end
		default:
			lit.WriteByte(c)
		}
	}
	t.constant = lit.String() // or what stands after the last field
	return t, nil
}

// parsePart reads field|filter|filter in s[from:to].
func parsePart(s string, from, to int) (part, error) {
	names := strings.Split(s[from:to], "|")
	p := part{name: names[0]}
	if p.name == "" {
		return p, &SyntaxError{s, from + 1, "a field's name is missing in the braces", ""}
	}
	var err error
	if p.field, err = parseField(s, p.name, from+1); err != nil {
		return p, err
	}
	at := from + len(names[0]) + 1
	for _, n := range names[1:] {
		f, ok := filters[n]
		if !ok {
			near := nearest(n, filterNames)
			reason := fmt.Sprintf("unknown filter %q", n)
			if near == "" {
				reason += ", there are " + strings.Join(filterNames, ", ")
			}
			return p, &SyntaxError{s, at + 1, reason, near}
		}
		p.filters = append(p.filters, f)
		at += len(n) + 1
	}
	return p, nil
}

// Constant is the name, and true, if it is the same for every event.
func (t Template) Constant() (string, bool) { return t.constant, len(t.parts) == 0 }

// Expand makes the name for an event. It fails if a field is empty or missing.
func (t Template) Expand(rec *outrider.Record) (string, error) {
	if len(t.parts) == 0 {
		return t.constant, nil
	}
	var b strings.Builder
	for i := range t.parts {
		p := &t.parts[i]
		b.WriteString(p.literal)
		v, ok := p.field.value(rec)
		if !ok {
			return "", fmt.Errorf("the event has no %s, which %q needs", p.name, t.text)
		}
		for _, f := range p.filters {
			v = f(v)
		}
		if v == "" {
			return "", fmt.Errorf("%s is empty in the event, and %q needs it", p.name, t.text)
		}
		b.WriteString(v)
	}
	b.WriteString(t.constant)
	return b.String(), nil
}

// String is the text that the Template was made from.
func (t Template) String() string { return t.text }

// MarshalText implements encoding.TextMarshaler.
func (t Template) MarshalText() ([]byte, error) { return []byte(t.text), nil }

// UnmarshalText implements encoding.TextUnmarshaler with ParseTemplate.
func (t *Template) UnmarshalText(b []byte) error {
	parsed, err := ParseTemplate(string(b))
	if err == nil {
		*t = parsed
	}
	return err
}

// joinWords puts sep between the words of s, in lower case. Words end where
// anything but a letter or digit stands, before an upper-case letter that
// follows a lower-case one or a digit (orderPlaced), and before the last of
// several upper-case ones (HTTPServer).
func joinWords(s string, sep byte) string {
	var b strings.Builder
	b.Grow(len(s) + 4)
	var before rune // in the word; 0 at its start
	for i, r := range s {
		if !unicode.IsLetter(r) && !unicode.IsDigit(r) {
			before = 0
			continue
		}
		starts := before == 0
		if unicode.IsUpper(r) && before != 0 {
			next, _ := utf8.DecodeRuneInString(s[i+utf8.RuneLen(r):])
			starts = !unicode.IsUpper(before) || unicode.IsLower(next)
		}
		if starts && b.Len() > 0 {
			b.WriteByte(sep)
		}
		b.WriteRune(unicode.ToLower(r))
		before = r
	}
	return b.String()
}
