// Package route says which events go where: the one grammar of a relay's
// destination filters and of the rules by which a sink chooses topic, subject,
// exchange or URL.
//
// A [Match] picks events:
//
//	type:Order* aggregate_type:order header.tenant:acme,beta !type:OrderDebug
//
// Terms are separated by spaces and all must hold. A term is a field, a colon
// and one value or several with commas between them, of which one must hold; a
// ! in front turns the term around. In a value * stands for any run of bytes.
// A value with spaces, commas, quotes or a literal * is put in double quotes,
// where \" and \\ stand for " and \. The empty Match picks every event.
//
// The fields are type, aggregate_type (or aggregate), aggregate_id, key,
// content_type and header.NAME. The key is the one in force: the aggregate id
// where the event names none, and empty (key:"") for an unordered event. A
// header term holds only if the event has that header, so header.tenant:* asks
// for its presence and !header.tenant:* for its absence.
//
// A [Template] makes the name of a place:
//
//	{aggregate_type}-events
//	tenants.{header.tenant}.{type|kebab}
//
// Fields are the same; filters follow after |, from left to right: lower,
// kebab (OrderPlaced becomes order-placed), snake (order_placed) and dot
// (order.placed). {{ and }} stand for braces. A field that is empty or missing
// in an event is an error: a name with a hole in it is a place nobody meant.
//
// [Rules] are pairs of both; the first whose Match holds makes the name.
//
// Everything is compiled once and safe for use by many goroutines. Matching
// and constant templates allocate nothing; other templates allocate the name
// they make.
package route

import (
	"fmt"
	"strings"

	"github.com/outrider-dev/outrider"
)

// SyntaxError is what is wrong with a Match or a Template.
type SyntaxError struct {
	Input  string // the whole text
	Column int    // where in it, in bytes from 1
	Reason string
	// Nearest is the valid name closest to a wrong one, or "".
	Nearest string
}

// Error gives column, reason and suggestion on one line.
func (e *SyntaxError) Error() string {
	s := fmt.Sprintf("%q, column %d: %s", e.Input, e.Column, e.Reason)
	if e.Nearest != "" {
		s += fmt.Sprintf("; did you mean %q?", e.Nearest)
	}
	return s
}

// field is a part of an event that a term or a template can name.
type field struct {
	get    func(*outrider.Record) string
	header string // the name, if get is nil
}

var fields = map[string]func(*outrider.Record) string{
	"type":           func(r *outrider.Record) string { return r.Type },
	"aggregate":      func(r *outrider.Record) string { return r.AggregateType },
	"aggregate_type": func(r *outrider.Record) string { return r.AggregateType },
	"aggregate_id":   func(r *outrider.Record) string { return r.AggregateID },
	"key":            func(r *outrider.Record) string { return r.Key },
	"content_type":   func(r *outrider.Record) string { return r.ContentType },
}

// fieldNames are all names in the order in which errors list them.
var fieldNames = []string{"type", "aggregate_type", "aggregate_id", "key", "content_type", "header.NAME"}

// value is the field's value in an event, and whether the event has the field.
func (f *field) value(r *outrider.Record) (string, bool) {
	if f.get != nil {
		return f.get(r), true
	}
	v, ok := r.Headers[f.header]
	return v, ok
}

// parseField finds a field by its name; column is where the name stands.
func parseField(input, name string, column int) (field, error) {
	if header, ok := strings.CutPrefix(name, "header."); ok {
		if header == "" {
			return field{}, &SyntaxError{input, column + len(name), "a header's name is missing after \"header.\"", ""}
		}
		return field{header: header}, nil
	}
	if get, ok := fields[name]; ok {
		return field{get: get}, nil
	}
	near := nearest(name, append([]string{"aggregate"}, fieldNames...))
	if near == "" {
		return field{}, &SyntaxError{input, column,
			fmt.Sprintf("unknown field %q, there are %s", name, strings.Join(fieldNames, ", ")), ""}
	}
	return field{}, &SyntaxError{input, column, fmt.Sprintf("unknown field %q", name), near}
}

// nearest is the name that is closest to a mistyped one, or "" if none is
// close enough to have been meant.
func nearest(s string, names []string) string {
	best, at := "", max(2, len(s)/3)+1
	for _, n := range names {
		if d := distance(strings.ToLower(s), n); d < at {
			best, at = n, d
		}
	}
	return best
}

// distance is the number of bytes to insert, remove or replace.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
