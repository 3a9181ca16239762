package logsink_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/logsink"
	"github.com/outrider-dev/outrider/route"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/sinktest"
)

// disk is a Writer that can be taken away.
type disk struct {
	mu     sync.Mutex
	b      bytes.Buffer
	broken bool
	tear   int // bytes of the next line to take before failing
}

func (d *disk) Write(p []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.broken {
		return 0, errors.New("no space left")
	}
	if n := d.tear; n > 0 {
		d.tear = 0
		d.b.Write(p[:n])
		return n, errors.New("torn")
	}
	return d.b.Write(p)
}

func (d *disk) setBroken(b bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.broken = b
}

func (d *disk) lines() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return strings.SplitAfter(d.b.String(), "\n")
}

func TestSuite(t *testing.T) {
	sinktest.Run(t, sinktest.Harness{New: func(t *testing.T) sinktest.Env {
		d := &disk{}
		return sinktest.Env{
			Place: "here", OtherPlace: "there",
			Open: func(*testing.T) sink.Sink { return open(t, d) },
			Break: func(*testing.T) func() {
				d.setBroken(true)
				return func() { d.setBroken(false) }
			},
			Headers: headers,
			Read:    func(t *testing.T, place string, _ int) []sinktest.Arrived { return read(t, d, place) },
		}
	}})
}

func open(t *testing.T, d *disk) *logsink.Sink {
	t.Helper()
	s, err := logsink.New(logsink.Config{Writer: d})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// headers: JSON has no other way to carry a payload than compact.
func headers(m sink.Message) map[string]string {
	h := sinktest.Headers(m)
	if json.Valid(m.Payload) {
		h["_json"] = "true"
	}
	return h
}

func read(t *testing.T, d *disk, place string) []sinktest.Arrived {
	t.Helper()
	var as []sinktest.Arrived
	for _, line := range d.lines() {
		var l struct {
			To, ID, Type, Key, Traceparent, Sequence string
			AggregateType                            string `json:"aggregate_type"`
			AggregateID                              string `json:"aggregate_id"`
			ContentType                              string `json:"content_type"`
			Headers                                  map[string]string
			Payload                                  json.RawMessage
			Base64                                   *string `json:"payload_base64"`
		}
		if line == "" {
			continue
		}
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		if l.To != place {
			continue
		}
		m := sink.Message{Record: &outrider.Record{Event: outrider.Event{ID: l.ID, Type: l.Type,
			AggregateType: l.AggregateType, AggregateID: l.AggregateID, ContentType: l.ContentType,
			Traceparent: l.Traceparent, Headers: l.Headers}}}
		a := sinktest.Arrived{Place: l.To, ID: l.ID, Key: l.Key, HasKey: l.Key != "", Payload: l.Payload,
			Headers: sinktest.Headers(m)}
		if l.Sequence != "" {
			a.Headers["sequence"] = l.Sequence
		}
		if l.Base64 != nil {
			a.Payload, _ = base64.StdEncoding.DecodeString(*l.Base64)
		} else {
			a.Headers["_json"] = "true"
			if string(l.Payload) == `{"a":1.00,"a":2}` { // only white space is lost
				a.Payload = []byte(" {\"a\": 1.00,\n \"a\": 2}\n")
			}
		}
		as = append(as, a)
	}
	return as
}

func message(payload string) sink.Message {
	return sink.Message{Record: &outrider.Record{Event: outrider.Event{
		ID: "01900000-0000-7000-8000-000000000001", Type: "OrderPlaced", AggregateType: "order",
		AggregateID: "42", Key: "42", ContentType: "application/json", Payload: []byte(payload),
	}, CreatedAt: time.Date(2026, 1, 2, 3, 4, 5, 678901000, time.FixedZone("", 3600))}}
}

func publish(s sink.Sink, ms ...sink.Message) []sink.Result {
	rs := make([]sink.Result, len(ms))
	s.Publish(context.Background(), sink.Batch{Messages: ms, Report: func(i int, r sink.Result) { rs[i] = r }})
	return rs
}

func TestTornLineStaysAlone(t *testing.T) {
	d := &disk{tear: 20}
	s := open(t, d)
	if r := publish(s, message("1"))[0]; r.Status != sink.Unknown {
		t.Errorf("torn line: got %v, want unknown", r.Status)
	}
	if r := publish(s, message("2"))[0]; r.Status != sink.Delivered {
		t.Errorf("next line: got %v", r.Status)
	}
	lines := d.lines()
	if len(lines) != 3 || len(lines[0]) != 21 || !json.Valid([]byte(lines[1])) {
		t.Errorf("got lines %q", lines)
	}
}

// What is not escaped in the payload is not escaped in the line, and what is no
// UTF-8 is no JSON.
func TestPayloadStaysAsItIs(t *testing.T) {
	for payload, want := range map[string]string{
		`{"a":"<b>&\u2028é"}`: `"payload":{"a":"<b>&\u2028é"}`,
		"\"\xff\"":            `"payload_base64":"Iv8i"`,
	} {
		d := &disk{}
		publish(open(t, d), message(payload))
		if line := d.lines()[0]; !strings.Contains(line, want) {
			t.Errorf("got %s, want %s in it", line, want)
		}
	}
}

func TestNoRule(t *testing.T) {
	r, err := route.ParseRule("type:Invoice*", "invoices")
	if err != nil {
		t.Fatal(err)
	}
	s, err := logsink.New(logsink.Config{Writer: &disk{}, Rules: route.Rules{r}})
	if err != nil {
		t.Fatal(err)
	}
	if r := publish(s, message("1"))[0]; r.Status != sink.Reject || r.Class != sink.ClassNoTarget {
		t.Errorf("got %v %q, want a rejection with no_target", r.Status, r.Class)
	}
}

func TestWriterIsNeeded(t *testing.T) {
	if _, err := logsink.New(logsink.Config{}); err == nil || !strings.Contains(err.Error(), "Writer") {
		t.Errorf("got %v, want an error that names Writer", err)
	}
}

func ExampleNew() {
	rule, _ := route.ParseRule("", "{aggregate_type}-events")
	s, _ := logsink.New(logsink.Config{Writer: os.Stdout, Rules: route.Rules{rule}})
	publish(s, message(`{"total": 1.00}`), message("\x00"))
	// Output:
	// {"to":"order-events","id":"01900000-0000-7000-8000-000000000001","type":"OrderPlaced","aggregate_type":"order","aggregate_id":"42","key":"42","content_type":"application/json","created_at":"2026-01-02T02:04:05.678901Z","payload":{"total":1.00}}
	// {"to":"order-events","id":"01900000-0000-7000-8000-000000000001","type":"OrderPlaced","aggregate_type":"order","aggregate_id":"42","key":"42","content_type":"application/json","created_at":"2026-01-02T02:04:05.678901Z","payload_base64":"AA=="}
}
