package outrider

import (
	"bytes"
	"encoding/json"
	"maps"
	"strconv"
	"strings"
	"time"
)

// maxParams is how many parameters a statement may have: PostgreSQL's protocol
// counts them in 16 bits, SQLite's default is 32,766.
func maxParams(d Dialect) int {
	if d == SQLite {
		return 32766
	}
	return 65535
}

// maxStatement is how many bytes of payloads and texts one statement carries; a
// larger event goes alone. It bounds what client and server hold in memory at
// once, several times over in some protocol modes.
const maxStatement = 8 << 20

// columns of the INSERT. Those after the fifth are named only where an event of
// the statement needs them, so that the simple case stays small.
type columns uint8

const (
	colKey columns = 1 << iota
	colContentType
	colHeaders
	colAvailableAt

	fixedColumns = 5
)

var optional = []struct {
	col  columns
	name string
}{
	{colKey, "event_key"}, {colContentType, "content_type"}, {colHeaders, "headers"}, {colAvailableAt, "available_at"},
}

func (c columns) count() int {
	n := fixedColumns
	for _, o := range optional {
		if c&o.col != 0 {
			n++
		}
	}
	return n
}

const defaultContentType = "application/json"

// row is an event on its way into a statement.
type row struct {
	*Event
	id      string
	headers string // a JSON object; empty: none
	needs   columns
	size    int
}

// newRow prepares an event that was checked.
func newRow(e *Event) row {
	r := row{Event: e, headers: headersJSON(e)}
	if e.ID == "" {
		r.id = NewID()
	} else {
		r.id, _ = ParseID(e.ID)
	}
	if e.Key != "" || e.Unordered {
		r.needs |= colKey
	}
	if e.ContentType != "" && e.ContentType != defaultContentType {
		r.needs |= colContentType
	}
	if r.headers != "" {
		r.needs |= colHeaders
	}
	if e.Delay > 0 || !e.AvailableAt.IsZero() {
		r.needs |= colAvailableAt
	}
	r.size = len(e.Payload) + len(r.id) + len(e.AggregateType) + len(e.AggregateID) + len(e.Type) + len(e.Key) + len(e.ContentType) + len(r.headers)
	return r
}

func headersJSON(e *Event) string {
	h := e.Headers
	if e.Traceparent != "" {
		h = maps.Clone(h)
		if h == nil {
			h = make(map[string]string, 1)
		}
		h["traceparent"] = e.Traceparent
	}
	if len(h) == 0 {
		return ""
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // it is read by people too
	_ = enc.Encode(h)        // texts always encode
	return strings.TrimSuffix(b.String(), "\n")
}

// cut takes as many rows as fit into one statement off the front.
func (o *Outbox) cut(rows []row) (head, tail []row, cols columns) {
	size := 0
	for i, r := range rows {
		cols2, size2 := cols|r.needs, size+r.size
		if i > 0 && ((i+1)*cols2.count() > o.maxParams || size2 > o.maxBytes) {
			return rows[:i], rows[i:], cols
		}
		cols, size = cols2, size2
	}
	return rows, nil, cols
}

// statement is being built: its text and its arguments.
type statement struct {
	strings.Builder
	dialect Dialect
	args    []any
}

// param adds an argument. PostgreSQL is told its type: an untyped text would go
// into a column of another type unnoticed, such as JSON into bytea with its
// backslashes taken for escapes, and a driver may declare every string as text.
func (s *statement) param(arg any, cast string) {
	s.args = append(s.args, arg)
	if s.dialect == SQLite {
		s.WriteByte('?')
		return
	}
	s.WriteByte('$')
	s.WriteString(strconv.Itoa(len(s.args)))
	s.WriteString(cast)
}

// insert is the only INSERT there is.
func (o *Outbox) insert(rows []row, cols columns) (string, []any) {
	s := &statement{dialect: o.config.Dialect, args: make([]any, 0, len(rows)*cols.count())}
	s.Grow(160 + len(rows)*cols.count()*10)
	s.WriteString("INSERT INTO " + o.table + " (event_id, aggregate_type, aggregate_id, event_type, payload")
	for _, c := range optional {
		if cols&c.col != 0 {
			s.WriteString(", " + c.name)
		}
	}
	s.WriteString(") VALUES ")
	for i := range rows {
		if i > 0 {
			s.WriteString(", ")
		}
		s.WriteByte('(')
		o.writeRow(s, &rows[i], cols)
		s.WriteByte(')')
	}
	return s.String(), s.args
}

func (o *Outbox) writeRow(s *statement, r *row, cols columns) {
	s.param(r.id, "::uuid")
	s.WriteString(", ")
	s.param(r.AggregateType, "")
	s.WriteString(", ")
	s.param(r.AggregateID, "")
	s.WriteString(", ")
	s.param(r.Type, "")
	s.WriteString(", ")
	s.param(o.payload(r), "::"+o.config.Payload.String())
	if cols&colKey != 0 {
		s.WriteString(", ")
		var key any // NULL: the aggregate id
		if r.needs&colKey != 0 {
			key = r.Key // empty: unordered
		}
		s.param(key, "")
	}
	if cols&colContentType != 0 {
		s.WriteString(", ")
		contentType := r.ContentType
		if contentType == "" {
			contentType = defaultContentType
		}
		s.param(contentType, "")
	}
	if cols&colHeaders != 0 {
		s.WriteString(", ")
		var headers any
		if r.headers != "" {
			headers = r.headers
		}
		s.param(headers, "::json")
	}
	if cols&colAvailableAt != 0 {
		s.WriteString(", ")
		writeAvailableAt(s, r)
	}
}

// payload is NULL for nil, so that a destination which tells nothing from empty
// can. JSON goes as a string: a driver in simple protocol would write bytes as
// bytea's hexadecimal digits.
func (o *Outbox) payload(r *row) any {
	switch {
	case r.Payload == nil:
		return nil
	case o.config.Payload == PayloadJSON:
		return string(r.Payload)
	default:
		return r.Payload
	}
}

// sqliteNow is in microseconds since 1970; the migrations' defaults use the same.
const sqliteNow = "cast(round((julianday('now') - 2440587.5) * 86400000.0) as integer) * 1000"

// writeAvailableAt leaves a delay to the database's clock: hosts need not agree
// on the time.
func writeAvailableAt(s *statement, r *row) {
	switch {
	case r.Delay > 0 && s.dialect == SQLite:
		s.WriteString(sqliteNow + " + ")
		s.param(int64((r.Delay-1)/time.Microsecond)+1, "")
	case r.Delay > 0:
		s.WriteString("clock_timestamp() + ")
		s.param(int64((r.Delay-1)/time.Microsecond)+1, "::bigint")
		s.WriteString(" * interval '1 microsecond'")
	case r.AvailableAt.IsZero():
		s.param(nil, "::timestamptz")
	case s.dialect == SQLite:
		s.param(availableAt(r.Event).UnixMicro(), "")
	default:
		s.param(availableAt(r.Event), "::timestamptz")
	}
}
