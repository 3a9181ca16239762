package cli

import (
	"encoding/json"
	"time"
	"unicode/utf8"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// The shapes of what is printed as JSON. Ids are strings, so that no reader
// rounds them; durations are seconds; times are RFC 3339.

type statusView struct {
	Sources []sourceView `json:"sources"`
}

type sourceView struct {
	Source       string            `json:"source"`
	Destinations []destinationView `json:"destinations"`
	Relays       []relayView       `json:"relays"`
	Warnings     []string          `json:"warnings,omitempty"`
}

type destinationView struct {
	Name          string      `json:"name"`
	OldestPending float64     `json:"oldest_pending_seconds"`
	OldestBlocked float64     `json:"oldest_blocked_seconds"`
	OldestFailed  float64     `json:"oldest_failed_seconds"`
	Pending       store.Count `json:"pending"`
	Publishing    store.Count `json:"publishing"`
	Waiting       store.Count `json:"waiting"`
	Scheduled     store.Count `json:"scheduled"`
	Failed        store.Count `json:"failed"`
	BlockedKeys   store.Count `json:"blocked_keys"`
	Leases        []leaseView `json:"leases"`
}

type leaseView struct {
	ID      string  `json:"id"`
	Lanes   int     `json:"lanes"`
	Owner   string  `json:"owner,omitempty"`
	Epoch   string  `json:"epoch"`
	Expires float64 `json:"expires_seconds"` // negative: since then
	// Held: its owner lives. Gone: its owner's process or connection has ended.
	Held bool `json:"held"`
	Gone bool `json:"gone,omitempty"`
}

type relayView struct {
	Name string  `json:"name"`
	Seen float64 `json:"seen_seconds"`
	Gone bool    `json:"gone,omitempty"`
}

type entryView struct {
	Destination   string   `json:"destination"`
	Row           string   `json:"row"`
	EventID       string   `json:"event_id"`
	Type          string   `json:"type"`
	AggregateType string   `json:"aggregate_type"`
	AggregateID   string   `json:"aggregate_id"`
	Key           string   `json:"key"`
	Unordered     bool     `json:"unordered,omitempty"`
	State         string   `json:"state"`
	Reason        string   `json:"reason,omitempty"`
	Attempts      int      `json:"attempts"`
	Class         string   `json:"class,omitempty"`
	Message       string   `json:"message,omitempty"`
	CreatedAt     instant  `json:"created_at"`
	LastFailure   *instant `json:"last_failure,omitempty"`
	DueIn         float64  `json:"due_in_seconds,omitempty"`
}

type listView struct {
	Entries []entryView `json:"entries"`
	// After is what --after takes for the next page; absent at the end.
	After string `json:"after,omitempty"`
	// Note says why there are no entries, where that needs saying.
	Note string `json:"note,omitempty"`
}

type eventView struct {
	Row           string            `json:"row"`
	ID            string            `json:"id"`
	Type          string            `json:"type"`
	AggregateType string            `json:"aggregate_type"`
	AggregateID   string            `json:"aggregate_id"`
	Key           string            `json:"key"`
	Unordered     bool              `json:"unordered,omitempty"`
	ContentType   string            `json:"content_type"`
	Headers       map[string]string `json:"headers,omitempty"`
	Traceparent   string            `json:"traceparent,omitempty"`
	Lane          int               `json:"lane"`
	CreatedAt     instant           `json:"created_at"`
	AvailableAt   *instant          `json:"available_at,omitempty"`
	// Payload is the payload if it is valid UTF-8, PayloadBase64 if not.
	Payload       *string     `json:"payload,omitempty"`
	PayloadBase64 []byte      `json:"payload_base64,omitempty"`
	Destinations  []entryView `json:"destinations"`
}

type showView struct {
	Events []eventView `json:"events"`
}

func seconds(d time.Duration) float64 { return d.Round(time.Microsecond).Seconds() }

func viewStatus(source string, s store.Status) sourceView {
	v := sourceView{Source: source, Destinations: []destinationView{}, Relays: []relayView{}, Warnings: s.Warnings}
	for _, d := range s.Destinations {
		dv := destinationView{
			Name: d.Name, OldestPending: seconds(d.OldestPending), OldestBlocked: seconds(d.OldestBlocked),
			OldestFailed: seconds(d.OldestFailed), Pending: d.Pending, Publishing: d.Publishing,
			Waiting: d.Waiting, Scheduled: d.Scheduled, Failed: d.Failed, BlockedKeys: d.BlockedKeys,
			Leases: []leaseView{},
		}
		for _, l := range d.Leases {
			dv.Leases = append(dv.Leases, leaseView{number(l.ID), l.Count, l.Owner, number(l.Epoch), seconds(l.Expires), l.Held(), l.Gone})
		}
		v.Destinations = append(v.Destinations, dv)
	}
	for _, r := range s.Relays {
		v.Relays = append(v.Relays, relayView{r.Name, seconds(r.Seen), r.Gone})
	}
	return v
}

func viewEntry(e store.Entry) entryView {
	return entryView{
		Destination: e.Destination, Row: e.Row, EventID: e.EventID, Type: e.Type,
		AggregateType: e.AggregateType, AggregateID: e.AggregateID, Key: e.Key, Unordered: e.Unordered,
		State: e.State.String(), Reason: e.Reason, Attempts: e.Attempts, Class: e.Class, Message: e.Message,
		CreatedAt: instant{e.CreatedAt.UTC()}, LastFailure: timeOrNil(e.LastFailure), DueIn: seconds(e.DueIn),
	}
}

func viewEvent(d store.Detail) eventView {
	r := d.Record
	v := eventView{
		Row: r.Row, ID: r.ID, Type: r.Type, AggregateType: r.AggregateType, AggregateID: r.AggregateID,
		Key: r.Key, Unordered: r.Unordered, ContentType: r.ContentType, Headers: r.Headers,
		Traceparent: r.Traceparent, Lane: r.Lane, CreatedAt: instant{r.CreatedAt.UTC()},
		AvailableAt: timeOrNil(r.AvailableAt), Destinations: []entryView{},
	}
	v.Payload, v.PayloadBase64 = viewPayload(r)
	for _, e := range d.Entries {
		v.Destinations = append(v.Destinations, viewEntry(e))
	}
	return v
}

func viewPayload(r outrider.Record) (*string, []byte) {
	if utf8.Valid(r.Payload) {
		s := string(r.Payload)
		return &s, nil
	}
	return nil, r.Payload
}

// instant is printed whatever its year: package time refuses those beyond 9999,
// which a row written by hand may have.
type instant struct{ time.Time }

func (t instant) MarshalJSON() ([]byte, error) { return json.Marshal(t.Format(time.RFC3339Nano)) }

func timeOrNil(t time.Time) *instant {
	if t.IsZero() {
		return nil
	}
	return &instant{t.UTC()}
}
