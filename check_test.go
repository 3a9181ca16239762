package outrider

import (
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

func placed() Event {
	return Event{AggregateType: "order", AggregateID: "42", Type: "OrderPlaced", Payload: []byte(`{}`)}
}

func header(name, value string) func(*Event) {
	return func(e *Event) { e.Headers = map[string]string{name: value} }
}

func traceparent(s string) func(*Event) { return func(e *Event) { e.Traceparent = s } }

// Each field, at its limits and beyond. What is refused is refused before the
// database is touched, for the second of three events.
func TestCheck(t *testing.T) {
	many := func(n int) func(*Event) {
		return func(e *Event) {
			e.Headers = map[string]string{}
			for i := range n {
				e.Headers["h"+strings.Repeat("x", i)] = ""
			}
		}
	}
	for _, c := range []struct {
		name    string
		change  func(*Event)
		field   string // "" = accepted
		problem string
	}{
		{"plain", func(*Event) {}, "", ""},
		{"no aggregate type", func(e *Event) { e.AggregateType = "" }, "AggregateType", "is empty"},
		{"no aggregate id", func(e *Event) { e.AggregateID = "" }, "AggregateID", "is empty"},
		{"no type", func(e *Event) { e.Type = "" }, "Type", "is empty"},
		{"aggregate type at limit", func(e *Event) { e.AggregateType = strings.Repeat("x", 255) }, "", ""},
		{"aggregate type too long", func(e *Event) { e.AggregateType = strings.Repeat("x", 256) }, "AggregateType", "has 256 bytes, at most 255"},
		{"aggregate id at limit", func(e *Event) { e.AggregateID = strings.Repeat("ü", 256) }, "", ""},
		{"aggregate id too long", func(e *Event) { e.AggregateID = strings.Repeat("ü", 257) }, "AggregateID", "has 514 bytes, at most 512"},
		{"type too long", func(e *Event) { e.Type = strings.Repeat("x", 256) }, "Type", "has 256 bytes"},
		{"content type", func(e *Event) { e.ContentType = "application/vnd.x+json; v=2" }, "", ""},
		{"content type too long", func(e *Event) { e.ContentType = strings.Repeat("x", 256) }, "ContentType", "has 256 bytes"},
		{"content type injects", func(e *Event) { e.ContentType = "a/b\r\nX: y" }, "ContentType", "control characters"},
		{"key at limit", func(e *Event) { e.Key = strings.Repeat("x", 512) }, "", ""},
		{"key too long", func(e *Event) { e.Key = strings.Repeat("x", 513) }, "Key", "has 513 bytes"},
		{"unordered", func(e *Event) { e.Unordered = true }, "", ""},
		{"key and unordered", func(e *Event) { e.Unordered, e.Key = true, "k" }, "Key", "is set though Unordered is too"},
		{"NUL in aggregate type", func(e *Event) { e.AggregateType = "a\x00b" }, "AggregateType", "NUL"},
		{"NUL in aggregate id", func(e *Event) { e.AggregateID = "a\x00b" }, "AggregateID", "NUL"},
		{"NUL in type", func(e *Event) { e.Type = "a\x00b" }, "Type", "NUL"},
		{"NUL in key", func(e *Event) { e.Key = "\x00" }, "Key", "NUL"},
		{"NUL in content type", func(e *Event) { e.ContentType = "\x00" }, "ContentType", "NUL"},
		{"UTF-8 in aggregate type", func(e *Event) { e.AggregateType = "a\xff" }, "AggregateType", "UTF-8"},
		{"UTF-8 in aggregate id", func(e *Event) { e.AggregateID = "a\xc3" }, "AggregateID", "UTF-8"},
		{"UTF-8 in type", func(e *Event) { e.Type = "\xed\xa0\x80" }, "Type", "UTF-8"},
		{"UTF-8 in key", func(e *Event) { e.Key = "\xc0\x80" }, "Key", "UTF-8"},
		{"NUL in payload", func(e *Event) { e.Payload = []byte{0, 0xff} }, "", ""},
		{"nil payload", func(e *Event) { e.Payload = nil }, "", ""},
		{"payload at limit", func(e *Event) { e.Payload = make([]byte, 1<<20) }, "", ""},
		{"payload too large", func(e *Event) { e.Payload = make([]byte, 1<<20+1) }, "Payload", "has 1048577 bytes, at most 1048576"},
		{"header", header("x-tenant", "ü\r\n"), "", ""},
		{"header without name", header("", "x"), `Headers[""]`, "empty name"},
		{"header with control", header("x\ny", "x"), `Headers["x\ny"]`, "control characters"},
		{"header with NUL", header("x\x00", "x"), `Headers["x\x00"]`, "control characters"},
		{"header name UTF-8", header("x\xff", "x"), `Headers["x\xff"]`, "UTF-8"},
		{"header value NUL", header("x", "\x00"), `Headers["x"]`, "NUL"},
		{"header value UTF-8", header("x", "\xff"), `Headers["x"]`, "UTF-8"},
		{"reserved id", header("id", "x"), `Headers["id"]`, "reserved"},
		{"reserved type", header("Type", "x"), `Headers["Type"]`, "reserved"},
		{"reserved aggregate_type", header("aggregate_type", "x"), `Headers["aggregate_type"]`, "reserved"},
		{"reserved aggregate_id", header("aggregate_id", "x"), `Headers["aggregate_id"]`, "reserved"},
		{"reserved content_type", header("content_type", "x"), `Headers["content_type"]`, "reserved"},
		{"reserved traceparent", header("Traceparent", parent), `Headers["Traceparent"]`, "reserved"},
		{"reserved sequence", header("sequence", "x"), `Headers["sequence"]`, "reserved"},
		{"headers at limit", many(64), "", ""},
		{"too many headers", many(65), "Headers", "has 65 entries, at most 64"},
		{"header bytes at limit", header("x", strings.Repeat("v", 16<<10-1)), "", ""},
		{"too many header bytes", header("x", strings.Repeat("v", 16<<10)), "Headers", "has 16385 bytes"},
		{"traceparent", traceparent(parent), "", ""},
		{"traceparent of a later version", traceparent("cc" + parent[2:] + "-what.the_future"), "", ""},
		{"traceparent of version 00 with more", traceparent(parent + "-x"), "Traceparent", "W3C"},
		{"traceparent of version ff", traceparent("ff" + parent[2:]), "Traceparent", "W3C"},
		{"traceparent in capitals", traceparent(strings.ToUpper(parent)), "Traceparent", "W3C"},
		{"traceparent without trace", traceparent("00-00000000000000000000000000000000-b7ad6b7169203331-01"), "Traceparent", "W3C"},
		{"traceparent without parent", traceparent("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01"), "Traceparent", "W3C"},
		{"short traceparent", traceparent(parent[:54]), "Traceparent", "W3C"},
		{"traceparent with other dashes", traceparent(strings.ReplaceAll(parent, "-", "_")), "Traceparent", "W3C"},
		{"traceparent with a line break", traceparent("cc" + parent[2:] + "-\r\n"), "Traceparent", "W3C"},
		{"id", func(e *Event) { e.ID = "0190163D-8694-739b-aea5-966c26f8ad91" }, "", ""},
		{"bad id", func(e *Event) { e.ID = "42" }, "ID", `is not usable: "42" is not an id`},
		{"nil id", func(e *Event) { e.ID = "00000000-0000-0000-0000-000000000000" }, "ID", "nil UUID"},
		{"delay", func(e *Event) { e.Delay = time.Duration(1<<63 - 1) }, "", ""},
		{"negative delay", func(e *Event) { e.Delay = -1 }, "Delay", "is negative"},
		{"both", func(e *Event) { e.Delay, e.AvailableAt = 1, time.Unix(1, 0) }, "Delay", "is set though AvailableAt is too"},
		{"first instant", func(e *Event) { e.AvailableAt = time.Date(1, 1, 1, 0, 0, 0, 1, time.UTC) }, "", ""},
		{"last instant", func(e *Event) { e.AvailableAt = time.Date(9999, 12, 31, 23, 59, 59, 999_999_000, time.UTC) }, "", ""},
		{"rounded beyond the last", func(e *Event) { e.AvailableAt = time.Date(9999, 12, 31, 23, 59, 59, 999_999_001, time.UTC) }, "AvailableAt", "out of range"},
		{"before the first", func(e *Event) { e.AvailableAt = time.Date(0, 12, 31, 0, 0, 0, 0, time.UTC) }, "AvailableAt", "out of range"},
		{"far beyond", func(e *Event) { e.AvailableAt = time.Unix(1<<62, 0) }, "AvailableAt", "out of range"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := placed()
			c.change(&e)
			db := &recorder{}
			err := newOutbox(t, Config{Dialect: Postgres}).Add(t.Context(), db, placed(), e, placed())
			if c.field == "" {
				if err != nil || len(db.calls) != 1 {
					t.Errorf("got %v and %d statements", err, len(db.calls))
				}
				return
			}
			var bad *EventError
			if !errors.As(err, &bad) {
				t.Fatalf("got %v, want an EventError", err)
			}
			if bad.Index != 1 || bad.Field != c.field || !strings.Contains(bad.Problem, c.problem) {
				t.Errorf("got %+v, want field %s, problem %q", bad, c.field, c.problem)
			}
			if Hint(err) == "" || !strings.HasPrefix(err.Error(), "outrider: event 1: "+c.field+" ") {
				t.Errorf("%q with hint %q", err, Hint(err))
			}
			if len(db.calls) != 0 {
				t.Errorf("the database was touched: %v", db.calls)
			}
		})
	}
}

// A limit of -1 is none.
func TestCheckWithoutLimits(t *testing.T) {
	o := newOutbox(t, Config{Dialect: Postgres, MaxPayload: -1, MaxType: -1, MaxHeaders: -1, MaxHeaderBytes: -1})
	e := placed()
	e.Payload = make([]byte, 3<<20)
	e.Type, e.AggregateType, e.ContentType = strings.Repeat("x", 9999), strings.Repeat("x", 9999), strings.Repeat("x", 9999)
	e.Headers = map[string]string{}
	for i := range 500 {
		e.Headers[strings.Repeat("x", i+1)] = strings.Repeat("y", 500)
	}
	if err := o.Add(t.Context(), &recorder{}, e); err != nil {
		t.Error(err)
	}
}

func TestCheckJSON(t *testing.T) {
	o := newOutbox(t, Config{Dialect: Postgres, Payload: PayloadJSON})
	for payload, ok := range map[string]bool{
		`{"b": 1.50, "a": [1e400, "\u0000\ud800", null]}`: true,
		` 1 `:              true,
		``:                 false,
		`{`:                false,
		`{} {}`:            false,
		"\"\xff\"":         false,
		"\ufeff{}":         false,
		"{\"a\":\"\x00\"}": false,
		"'a'":              false,
	} {
		e := placed()
		e.Payload = []byte(payload)
		var bad *EventError
		err := o.Add(t.Context(), &recorder{}, e)
		if ok != (err == nil) || !ok && (!errors.As(err, &bad) || bad.Field != "Payload") {
			t.Errorf("%q: %v", payload, err)
		}
	}
	e := placed()
	e.Payload = nil
	if err := o.Add(t.Context(), &recorder{}, e); err != nil {
		t.Errorf("no payload: %v", err)
	}
}

// What is accepted can be stored: valid text without NUL, within the limits; and
// nothing makes the check panic.
func FuzzCheck(f *testing.F) {
	f.Add("", "order", "42", "OrderPlaced", "", false, "", "x", "y", parent, int64(0), int64(0), []byte("{}"))
	f.Add("x", "a\x00", "\xff", "", "k", true, "a\nb", "ID", "\x00", "00-", int64(-1), int64(1<<62), []byte("{"))
	f.Add("", "order", "42", "OrderPlaced", "k", true, "", "x", "y", "", int64(0), int64(0), []byte("{}"))
	f.Add("", "order", "42", "OrderPlaced", "", false, "", "x", "\x00", "", int64(0), int64(0), []byte("{}"))
	f.Add("", "order", "42", "OrderPlaced\xff", "", false, "", "x", "y", "", int64(0), int64(0), []byte("{}"))
	f.Fuzz(func(t *testing.T, id, aggType, aggID, typ, key string, unordered bool, contentType, name, value, trace string, delay, at int64, payload []byte) {
		e := Event{
			ID: id, AggregateType: aggType, AggregateID: aggID, Type: typ, Key: key, Unordered: unordered, ContentType: contentType,
			Headers: map[string]string{name: value}, Traceparent: trace, Delay: time.Duration(delay), Payload: payload,
		}
		if at != 0 {
			e.AvailableAt = time.Unix(at, 0)
		}
		for _, kind := range []PayloadKind{PayloadBytea, PayloadJSON} {
			c := Config{Dialect: Postgres, Payload: kind}.withDefaults()
			if r := c.check(&e); r != nil {
				if r.field == "" || r.problem == "" || r.hint == "" || !utf8.ValidString(r.field) {
					t.Errorf("refused with %+v", r)
				}
				continue
			}
			for _, s := range []string{aggType, aggID, typ, key, contentType, name, value, trace} {
				if !utf8.ValidString(s) || strings.ContainsRune(s, 0) || len(s) > 16<<10 {
					t.Errorf("accepted %q", s)
				}
			}
			if aggType == "" || aggID == "" || typ == "" || name == "" || unordered && key != "" || len(payload) > 1<<20 {
				t.Errorf("accepted %+v", e)
			}
			r := newRow(&e)
			if _, err := ParseID(r.id); err != nil || !utf8.ValidString(r.headers) {
				t.Errorf("made %+v", r)
			}
		}
	})
}

func FuzzTableName(f *testing.F) {
	f.Add(`a."b""c"`)
	f.Add(`"`)
	f.Fuzz(func(t *testing.T, name string) {
		quoted, err := quoteTable(Postgres, name)
		if err != nil {
			return
		}
		// Outside of quotes nothing is left but one dot at most.
		outside := strings.Builder{}
		in := false
		for i := 0; i < len(quoted); i++ {
			if quoted[i] == '"' {
				in = !in
			} else if !in {
				outside.WriteByte(quoted[i])
			}
		}
		if in || outside.String() != "" && outside.String() != "." {
			t.Errorf("%q became %s", name, quoted)
		}
	})
}
