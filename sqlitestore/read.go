package sqlitestore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/outrider-dev/outrider"
)

// row is one event as it was read.
type row struct {
	id    int64
	later bool // available_at is to come
	size  int  // as of outrider.Record.Size
	large bool // the payload was left out
	skip  bool // it was read without being wanted: its key is held back
	rec   outrider.Record
}

// columns are what a record is made of; see scan. A payload beyond ?1 bytes is
// left out and fetched by itself, so that a page's memory has a bound that does
// not depend on what was written: its length takes its place, which
// octet_length knows without loading it. Every column costs: one for length and
// payload both, since this is what a drain spends its time on.
const columns = `e.id, e.event_id, e.aggregate_type, e.aggregate_id, e.event_type, e.event_key,
	e.content_type, e.headers, e.created_at, e.available_at,
	case when octet_length(e.payload) <= ?1 then cast(e.payload as blob) else octet_length(e.payload) end`

// scanner holds what the columns of a row are scanned into.
type scanner struct {
	now       int64
	dest      []any
	payload   any // its bytes, its length, or nothing
	key       sql.NullString
	headers   []byte
	available sql.NullInt64
	created   int64
}

// scan reads a row; extra are further columns.
func (s *scanner) scan(rows *sql.Rows, out *row, extra ...any) error {
	rec := &out.rec
	s.headers, s.payload = nil, nil
	s.dest = append(s.dest[:0], &out.id, &rec.ID, &rec.AggregateType, &rec.AggregateID, &rec.Type, &s.key,
		&rec.ContentType, &s.headers, &s.created, &s.available, &s.payload)
	s.dest = append(s.dest, extra...)
	if err := rows.Scan(s.dest...); err != nil {
		return err
	}
	s.fill(out)
	return nil
}

func (s *scanner) fill(out *row) {
	rec := &out.rec
	rec.Row = strconv.FormatInt(out.id, 10)
	rec.Key = s.key.String
	if !s.key.Valid {
		rec.Key = rec.AggregateID
	}
	rec.Unordered = rec.Key == ""
	rec.Lane = laneOf(out.id, rec.Key)
	decodeHeaders(s.headers, rec)
	rec.CreatedAt = time.UnixMicro(s.created).UTC()
	if s.available.Valid {
		rec.AvailableAt = time.UnixMicro(s.available.Int64).UTC()
		out.later = s.available.Int64 > s.now
	}
	switch v := s.payload.(type) {
	case []byte:
		rec.Payload = v
		out.size = rec.Size()
	case int64:
		out.size, out.large = int(v)+rec.Size(), true
	default:
		out.size = rec.Size()
	}
}

// laneOf is the lane of an event; unordered ones are spread by id.
func laneOf(id int64, key string) int {
	if key == "" {
		return int(uint64(id) % outrider.Lanes)
	}
	return outrider.Lane(key)
}

// decodeHeaders decodes a JSON object of texts. Anything else that a row
// written by hand may hold is passed on as its JSON text, so that it stops
// nothing.
func decodeHeaders(b []byte, rec *outrider.Record) {
	if len(b) == 0 {
		return
	}
	var texts map[string]string
	if json.Unmarshal(b, &texts) != nil {
		var raw map[string]json.RawMessage
		if json.Unmarshal(b, &raw) != nil {
			texts = map[string]string{"headers": string(b)}
		} else {
			texts = make(map[string]string, len(raw))
			for k, v := range raw {
				var s string
				if json.Unmarshal(v, &s) != nil {
					s = string(v)
				}
				texts[k] = s
			}
		}
	}
	if tp, ok := texts["traceparent"]; ok {
		rec.Traceparent = tp
		delete(texts, "traceparent")
	}
	if len(texts) > 0 {
		rec.Headers = texts
	}
}

// fetchLarge reads the payload that was left out of a row. false: the row is
// gone.
func (db *database) fetchLarge(ctx context.Context, table string, r *row) (bool, error) {
	if !r.large {
		return true, nil
	}
	var payload []byte
	err := db.row(ctx, []any{&payload}, `select payload from `+table+` where id = ?`, r.id)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("sqlitestore: payload of row %d: %w", r.id, explain(err))
	}
	r.rec.Payload, r.large = payload, false
	return true, nil
}
