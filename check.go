package outrider

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// EventError says which event Add refused and for which field; nothing was
// written then, of the other events neither. It comes with a hint: see Hint.
type EventError struct {
	Index   int    // in the events given to Add
	Field   string // such as "Key" or `Headers["x-tenant"]`
	Problem string // without the value, which may be confidential
}

// Error names the event, the field and what is wrong with it.
func (e *EventError) Error() string {
	return fmt.Sprintf("outrider: event %d: %s %s", e.Index, e.Field, e.Problem)
}

// reservedHeaders are made by sinks. HTTP doesn't tell names apart by case, so
// the check doesn't either.
var reservedHeaders = []string{
	"id", "type", "aggregate_type", "aggregate_id", "content_type", "traceparent", "sequence",
}

// refusal is what is wrong with one field.
type refusal struct{ field, problem, hint string }

// check refuses what can't be stored, or can be stored and not delivered. e
// stays as it is.
func (c *Config) check(e *Event) *refusal {
	for _, f := range []func(*Event) *refusal{c.checkNames, c.checkKey, c.checkPayload, c.checkHeaders, checkTimes} {
		if r := f(e); r != nil {
			return r
		}
	}
	return nil
}

func (c *Config) checkNames(e *Event) *refusal {
	if e.ID != "" {
		if _, err := ParseID(e.ID); err != nil {
			return &refusal{"ID", "is not usable: " + err.Error(), "leave it empty, or take NewID or any other UUID"}
		}
	}
	for _, f := range []struct {
		name, value, limit string
		max                int
		needed             bool
	}{
		{"AggregateType", e.AggregateType, "MaxType", c.MaxType, true},
		{"AggregateID", e.AggregateID, "MaxKey", c.MaxKey, true},
		{"Type", e.Type, "MaxType", c.MaxType, true},
		{"ContentType", e.ContentType, "MaxType", c.MaxType, false},
	} {
		if f.needed && f.value == "" {
			return &refusal{f.name, "is empty", "every event says what happened to what: set AggregateType, AggregateID and Type"}
		}
		if r := checkField(f.name, f.value, f.limit, f.max); r != nil {
			return r
		}
	}
	if hasControl(e.ContentType) {
		return &refusal{"ContentType", "has control characters", "it is sent as a header: give a media type"}
	}
	return nil
}

func (c *Config) checkKey(e *Event) *refusal {
	if e.Unordered && e.Key != "" {
		return &refusal{"Key", "is set though Unordered is too", "keep one: Key for events that wait for each other, Unordered for one that waits for none"}
	}
	return checkField("Key", e.Key, "MaxKey", c.MaxKey)
}

func (c *Config) checkPayload(e *Event) *refusal {
	if r := checkSize("Payload", len(e.Payload), "MaxPayload", c.MaxPayload); r != nil {
		r.hint = "store what is large elsewhere and send where it is, or raise Config.MaxPayload as far as the destinations allow"
		return r
	}
	// json.Valid leaves open what stands between quotes, the database doesn't.
	if c.Payload == PayloadJSON && e.Payload != nil && !(json.Valid(e.Payload) && utf8.Valid(e.Payload)) {
		return &refusal{"Payload", "is not valid JSON", "the payload column was made as json: send JSON, or migrate with payload bytea"}
	}
	return nil
}

func (c *Config) checkHeaders(e *Event) *refusal {
	if n := len(e.Headers); c.MaxHeaders >= 0 && n > c.MaxHeaders {
		return &refusal{"Headers", fmt.Sprintf("has %d entries, at most %d are allowed", n, c.MaxHeaders), "put data into the payload, or raise Config.MaxHeaders"}
	}
	total := 0
	for _, name := range slices.Sorted(maps.Keys(e.Headers)) { // the same error each time
		value := e.Headers[name]
		total += len(name) + len(value)
		if problem, hint := checkHeader(name, value); problem != "" {
			return &refusal{fmt.Sprintf("Headers[%.80q]", name), problem, hint}
		}
	}
	if r := checkSize("Headers", total, "MaxHeaderBytes", c.MaxHeaderBytes); r != nil {
		return r
	}
	if e.Traceparent != "" && !validTraceparent(e.Traceparent) {
		return &refusal{"Traceparent", "is not a W3C trace context", "it looks like 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01; leave it empty for none"}
	}
	return nil
}

func checkHeader(name, value string) (problem, hint string) {
	switch {
	case name == "":
		return "has an empty name", "name the header or leave it out"
	case !utf8.ValidString(name) || hasControl(name):
		return "has a name with control characters or invalid UTF-8", "header names are plain text"
	case slices.Contains(reservedHeaders, strings.ToLower(name)):
		if strings.EqualFold(name, "traceparent") {
			return "is reserved", "set Event.Traceparent"
		}
		return "is reserved", "sinks make the headers " + strings.Join(reservedHeaders, ", ") + " themselves; take another name"
	}
	if problem := checkText(value); problem != "" {
		return problem, textHint
	}
	return "", ""
}

// The years that every database and driver agrees on.
var (
	earliest = time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC)
	latest   = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)
)

func checkTimes(e *Event) *refusal {
	switch at := availableAt(e); {
	case e.Delay < 0:
		return &refusal{"Delay", "is negative", "0 means at once"}
	case e.Delay > 0 && !e.AvailableAt.IsZero():
		return &refusal{"Delay", "is set though AvailableAt is too", "keep one of them"}
	case !e.AvailableAt.IsZero() && (at.Before(earliest) || !at.Before(latest)):
		return &refusal{"AvailableAt", "is out of range", "it has to lie in the years 1 to 9999; leave it zero for at once"}
	}
	return nil
}

// availableAt is the instant in the steps of the databases, never earlier than
// what was asked for.
func availableAt(e *Event) time.Time {
	return e.AvailableAt.Add(time.Microsecond - 1).UTC().Truncate(time.Microsecond)
}

const textHint = "databases and destinations take valid UTF-8 without NUL; other bytes belong into the payload"

func checkField(name, value, limit string, most int) *refusal {
	if problem := checkText(value); problem != "" {
		return &refusal{name, problem, textHint}
	}
	return checkSize(name, len(value), limit, most)
}

func checkSize(name string, size int, limit string, most int) *refusal {
	if most < 0 || size <= most {
		return nil
	}
	return &refusal{name, fmt.Sprintf("has %d bytes, at most %d are allowed", size, most), "shorten it, or raise Config." + limit}
}

func checkText(s string) string {
	switch {
	case !utf8.ValidString(s):
		return "is not valid UTF-8"
	case strings.IndexByte(s, 0) >= 0:
		return "has a NUL character"
	default:
		return ""
	}
}

func hasControl(s string) bool { return strings.IndexFunc(s, unicode.IsControl) >= 0 }

// validTraceparent follows the W3C Trace Context recommendation: a later version
// may have more behind the four fields, version 00 may not, and ff is none.
func validTraceparent(s string) bool {
	if len(s) < 55 || s[2] != '-' || s[35] != '-' || s[52] != '-' {
		return false
	}
	version, trace, parent, flags := s[:2], s[3:35], s[36:52], s[53:55]
	if !lowerHex(version + trace + parent + flags) {
		return false
	}
	if strings.Trim(trace, "0") == "" || strings.Trim(parent, "0") == "" || version == "ff" {
		return false
	}
	if version == "00" {
		return len(s) == 55
	}
	return len(s) == 55 || s[55] == '-' && len(s) <= 512 && checkText(s) == "" && !hasControl(s)
}

func lowerHex(s string) bool {
	return strings.Trim(s, "0123456789abcdef") == ""
}
