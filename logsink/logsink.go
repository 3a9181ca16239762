// Package logsink is a sink that writes events as lines of JSON to an
// io.Writer: a log file, standard output, a pipe to another program.
//
// A line is one object, with a line feed at its end and none inside:
//
//	{"to":"orders","id":"0190...","type":"OrderPlaced","aggregate_type":"order",
//	 "aggregate_id":"42","key":"42","content_type":"application/json",
//	 "created_at":"2026-01-02T03:04:05.678901Z","headers":{"tenant":"acme"},
//	 "payload":{"total":1.00}}
//
//	to              the place, as the rules made it; absent if empty
//	id, type, aggregate_type, aggregate_id, content_type
//	key             absent for an unordered event
//	sequence        absent where the store keeps none
//	traceparent     absent if the event has none
//	created_at      RFC 3339 with microseconds, UTC
//	headers         the event's own; absent if there are none
//	redelivery      true if the event may have been written before, else absent
//	payload         the payload, if it is a JSON text in valid UTF-8; only
//	                white space between its tokens is taken out, so that
//	                numbers and the order of names stay as they were
//	payload_base64  the payload, if it is anything else, also if it is empty
//
// A line is written with one Write and not split. Delivered means that Write
// returned without an error: whether the bytes are on a disk is the Writer's
// affair. A Write that fails after a part of the line makes the message
// Unknown; the next line then begins after a line feed of its own, so that
// the torn line stays alone.
package logsink

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"unicode/utf8"

	"github.com/outrider-dev/outrider/route"
	"github.com/outrider-dev/outrider/sink"
)

// Config sets up a Sink.
type Config struct {
	// Writer takes the lines. Needed. It is not closed.
	Writer io.Writer

	// Rules fill in "to" for messages that come without a place. Empty: none.
	Rules route.Rules
}

// Sink is a sink.Sink. It keeps order within and over calls.
type Sink struct {
	cfg Config

	mu   sync.Mutex
	buf  bytes.Buffer
	torn bool // the last line is not complete
}

// New makes a Sink.
func New(cfg Config) (*Sink, error) {
	if cfg.Writer == nil {
		return nil, errors.New("logsink: Writer is missing")
	}
	return &Sink{cfg: cfg}, nil
}

// Capabilities implements sink.Sink.
func (s *Sink) Capabilities() sink.Capabilities {
	return sink.Capabilities{Order: true, OrderInFlight: true}
}

// Close implements sink.Sink. There is nothing to give up.
func (s *Sink) Close(context.Context) error { return nil }

// Publish implements sink.Sink. Calls take turns; one is accepted when it is
// through, so that all its failures have been reported by then.
func (s *Sink) Publish(ctx context.Context, b sink.Batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var stopped map[string]bool
	stale := b.Stale != nil && b.Stale()
	for i := range b.Messages {
		m := &b.Messages[i]
		var r sink.Result
		switch {
		case stale:
			r = sink.Result{Status: sink.NotSent, Class: sink.ClassHeld,
				Err: errors.New("held, since an earlier message has failed and the call was made without knowing")}
		case m.Key != "" && stopped[m.Key]:
			r = sink.Result{Status: sink.NotSent, Class: sink.ClassHeld,
				Err: errors.New("held behind an earlier message of its key")}
		case ctx.Err() != nil:
			r = sink.Result{Status: sink.NotSent, Class: sink.ClassStopped, Err: context.Cause(ctx)}
		default:
			r = s.write(m)
		}
		if r.Status != sink.Delivered && m.Key != "" {
			if stopped == nil {
				stopped = map[string]bool{}
			}
			stopped[m.Key] = true
		}
		b.Report(i, r)
	}
	if b.Accepted != nil {
		b.Accepted()
	}
}

// line is the shape of a line.
type line struct {
	To            string            `json:"to,omitempty"`
	ID            string            `json:"id"`
	Type          string            `json:"type"`
	AggregateType string            `json:"aggregate_type"`
	AggregateID   string            `json:"aggregate_id"`
	Key           string            `json:"key,omitempty"`
	ContentType   string            `json:"content_type"`
	Sequence      string            `json:"sequence,omitempty"`
	Traceparent   string            `json:"traceparent,omitempty"`
	CreatedAt     string            `json:"created_at"`
	Headers       map[string]string `json:"headers,omitempty"`
	Redelivery    bool              `json:"redelivery,omitempty"`
	Payload       json.RawMessage   `json:"payload,omitempty"`
	PayloadBase64 *[]byte           `json:"payload_base64,omitempty"`
}

// write writes one message's line.
func (s *Sink) write(m *sink.Message) sink.Result {
	to := m.To
	if to == "" && len(s.cfg.Rules) > 0 {
		var err error
		if to, err = s.cfg.Rules.To(m.Record); err != nil {
			return sink.Result{Status: sink.Reject, Class: sink.ClassNoTarget, Err: err}
		}
	}
	l := line{
		To: to, ID: m.ID, Type: m.Type, AggregateType: m.AggregateType, AggregateID: m.AggregateID,
		Key: m.Key, ContentType: m.ContentType, Traceparent: m.Traceparent,
		CreatedAt: m.CreatedAt.UTC().Format("2006-01-02T15:04:05.000000Z07:00"),
		Headers:   m.Headers, Redelivery: m.Redelivery,
	}
	if !m.Sequence.IsZero() {
		l.Sequence = m.Sequence.String()
	}
	if utf8.Valid(m.Payload) && json.Valid(m.Payload) {
		l.Payload = m.Payload
	} else {
		p := m.Payload
		if p == nil {
			p = []byte{}
		}
		l.PayloadBase64 = &p
	}
	s.buf.Reset()
	if s.torn {
		s.buf.WriteByte('\n')
	}
	enc := json.NewEncoder(&s.buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(&l); err != nil {
		return sink.Result{Status: sink.Reject, Class: sink.ClassInvalid, Err: err}
	}
	return s.flush()
}

// flush hands the line in the buffer to the Writer.
func (s *Sink) flush() sink.Result {
	n, err := s.cfg.Writer.Write(s.buf.Bytes())
	if err == nil && n < s.buf.Len() {
		err = io.ErrShortWrite
	}
	switch {
	case err == nil:
		s.torn = false
		return sink.Result{Status: sink.Delivered}
	case n == 0:
		return sink.Result{Status: sink.NotSent, Class: sink.ClassUnreachable, Err: fmt.Errorf("write: %w", err)}
	default:
		s.torn = true
		return sink.Result{Status: sink.Unknown, Class: sink.ClassOther,
			Err: fmt.Errorf("write ended after %d of %d bytes: %w", n, s.buf.Len(), err)}
	}
}
