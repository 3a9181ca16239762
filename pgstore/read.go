package pgstore

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider"
)

// row is one event as it was read.
type row struct {
	id    int64
	later bool // available_at is to come
	size  int  // as of outrider.Record.Size
	large bool // the payload was left out
	rec   *outrider.Record
}

// batch is rows with their records side by side, so that a claim can take them
// over as they are: copying them cost a drain a tenth of its time.
type batch struct {
	rows  []row
	recs  []outrider.Record // recs[i] is that of rows[i]
	bytes int               // that all of them take up, as they were read
	more  bool              // there are rows that were not read, for their bytes
}

// add makes room for a row.
func (b *batch) add(hint int) *row {
	if len(b.recs) == cap(b.recs) {
		b.recs = append(make([]outrider.Record, 0, max(2*cap(b.recs), hint, 16)), b.recs...)
		for i := range b.rows {
			b.rows[i].rec = &b.recs[i]
		}
	}
	b.recs = b.recs[:len(b.recs)+1]
	b.rows = append(b.rows, row{rec: &b.recs[len(b.recs)-1]})
	return &b.rows[len(b.rows)-1]
}

// cut keeps the first n rows.
func (b *batch) cut(n int) {
	clear(b.rows[n:])
	clear(b.recs[n:])
	b.rows, b.recs = b.rows[:n], b.recs[:n]
}

// sort puts rows in the order of their ids.
func (b *batch) sort() {
	byID := func(x, y row) int { return cmpInt(x.id, y.id) }
	if slices.IsSortedFunc(b.rows, byID) {
		return
	}
	slices.SortFunc(b.rows, byID)
	recs := make([]outrider.Record, len(b.rows))
	for i := range b.rows {
		recs[i] = *b.rows[i].rec
		b.rows[i].rec = &recs[i]
	}
	b.recs = recs
}

// pgEpoch is where PostgreSQL counts time from, in Unix microseconds.
const pgEpoch = 946684800 * 1_000_000

// reader turns rows into records. Its maps hold the few distinct values of
// columns that repeat.
type reader struct {
	words map[string]string
	text  []byte // of the current row
}

func newReader() *reader { return &reader{words: make(map[string]string, 16)} }

func (r *reader) word(b []byte) string {
	if w, ok := r.words[string(b)]; ok {
		return w
	}
	w := string(b)
	if len(r.words) < 1000 {
		r.words[w] = w
	}
	return w
}

// scan reads the columns of the current row; extra is how many more follow and
// are left to the caller.
func (r *reader) scan(rows pgx.Rows, out *row) ([][]byte, error) {
	v := rows.RawValues()
	fields := rows.FieldDescriptions()
	if fields[0].Format != pgx.BinaryFormatCode {
		return nil, fmt.Errorf("pgstore: the server sends text where binary was asked for")
	}
	if v[0] == nil {
		return v[14:], nil // the event's row is gone
	}
	out.id = int64(binary.BigEndian.Uint64(v[0]))
	rec := out.rec
	rec.AggregateType = r.word(v[2])
	rec.Type = r.word(v[4])
	r.own(rec, out.id, v[1], v[3], v[5])
	rec.Unordered = rec.Key == ""
	rec.ContentType = r.word(v[6])
	r.headers(v[7], rec)
	rec.CreatedAt = pgTime(v[8])
	rec.Lane = int(binary.BigEndian.Uint16(v[9]))
	out.later = v[10][0] == 1
	if v[11] != nil {
		rec.AvailableAt = pgTime(v[11])
	}
	out.size = int(binary.BigEndian.Uint32(v[12]))
	out.large = v[13] == nil && out.size > 0
	out.size += max(0, len(v[2])+len(v[3])+len(v[4])+len(v[5])+len(v[6])+len(v[7])-outrider.SmallTexts)
	if v[13] != nil {
		rec.Payload = append(make([]byte, 0, len(v[13])), v[13]...)
	}
	return v[14:], nil
}

// own sets the texts that are a row's own. They are one piece of memory: with
// each by itself a drain spends a tenth of its time on them.
func (r *reader) own(rec *outrider.Record, row int64, id, aggregate, key []byte) {
	b := strconv.AppendInt(r.text[:0], row, 10)
	atID := len(b)
	b = appendUUID(b, id)
	atAggregate := len(b)
	b = append(b, aggregate...)
	atKey := len(b)
	same := bytes.Equal(key, aggregate)
	if !same {
		b = append(b, key...)
	}
	r.text = b
	text := string(b)
	rec.Row, rec.ID, rec.AggregateID, rec.Key = text[:atID], text[atID:atAggregate], text[atAggregate:atKey], text[atKey:]
	if same {
		rec.Key = rec.AggregateID
	}
}

// headers decodes a JSON object of texts. Anything else that a row written by
// hand may hold is passed on as its JSON text, so that it stops nothing.
func (r *reader) headers(b []byte, rec *outrider.Record) {
	if b == nil {
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

func pgTime(b []byte) time.Time {
	us := int64(binary.BigEndian.Uint64(b))
	switch us {
	case 1<<63 - 1, -1 << 63: // infinity, -infinity
		return time.Time{}
	}
	return time.UnixMicro(us + pgEpoch).UTC()
}

func appendUUID(to, id []byte) []byte {
	from := 0
	for _, end := range [...]int{4, 6, 8, 10, 16} {
		if from > 0 {
			to = append(to, '-')
		}
		to = hex.AppendEncode(to, id[from:end])
		from = end
	}
	return to
}

// rows reads a result, behind what b holds, until that exceeds limit bytes: what
// comes behind is not for the same claim, and rows whose texts are large are not
// to be in memory by the thousand. hint is how many may come.
func (r *reader) rows(res pgx.Rows, b *batch, limit, hint int) error {
	defer res.Close()
	for res.Next() {
		if b.more = b.bytes > limit; b.more {
			break
		}
		row := b.add(hint)
		if _, err := r.scan(res, row); err != nil {
			return err
		}
		b.bytes += row.size
	}
	res.Close() // reads over the rest
	return res.Err()
}

// takeBatch gives a batch to read into, and giveRows takes back its rows once
// they have been made a claim of. Growing new ones for each page took a tenth of
// a drain's time, and a sync.Pool forgets every other one.
func (s *Store) takeBatch() *batch {
	select {
	case rows := <-s.rows:
		return &batch{rows: rows}
	default:
		return &batch{}
	}
}

func (s *Store) giveRows(b *batch) {
	clear(b.rows)
	select {
	case s.rows <- b.rows[:0]:
	default:
	}
	b.rows = nil
}

// fetchLarge reads the payloads that were left out of rows, which are known by
// now to fit a claim.
func (s *Store) fetchLarge(ctx context.Context, rows []row) error {
	at := map[int64]int{}
	var ids []int64
	for i := range rows {
		if rows[i].large {
			ids = append(ids, rows[i].id)
			at[rows[i].id] = i
		}
	}
	if len(ids) == 0 {
		return nil
	}
	res, err := s.pool.Query(ctx, s.sql.large, ids)
	if err != nil {
		return fmt.Errorf("pgstore: read large payloads: %w", err)
	}
	var id int64
	var payload []byte
	_, err = pgx.ForEachRow(res, []any{&id, &payload}, func() error {
		r := &rows[at[id]]
		r.rec.Payload, r.large = payload, false
		payload = nil
		return nil
	})
	if err != nil {
		return fmt.Errorf("pgstore: read large payloads: %w", err)
	}
	for i := range rows {
		if rows[i].large {
			return fmt.Errorf("pgstore: read large payloads: row %d went away while it was read", rows[i].id)
		}
	}
	return nil
}
