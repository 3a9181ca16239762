// Package outrider writes events into a transactional outbox: in the same
// transaction as the data they speak of, so that both exist or neither does.
// A relay (package relay, or the outrider binary) carries them out afterwards.
//
// The package needs nothing but the standard library and links no driver.
package outrider

import (
	"fmt"
	"time"
)

// Event is one event as an application enqueues it.
type Event struct {
	// ID identifies the event everywhere: the "id" header, the operator's
	// look-ups, the key by which consumers drop duplicates. A UUID in its
	// text form; empty means that Add makes one (version 7, so that ids made
	// later sort later).
	//
	// An ID that is given twice is stored twice and delivered twice: the
	// outbox has no unique index on it, which would cost every insert and
	// could not reach over partitions. Consumers drop the second one.
	ID string

	// AggregateType and AggregateID name the thing that the event is about,
	// such as "order" and "42". Both are needed.
	AggregateType string
	AggregateID   string

	// Type is what happened, such as "OrderPlaced". Needed.
	Type string

	// Key is what is kept in order: events of one key are delivered in the
	// order of their transactions. Empty means the aggregate id.
	Key string

	// Unordered says that the event waits for no other and no other waits for
	// it. Key must be empty then.
	Unordered bool

	// Payload is carried byte for byte. nil is sent as an empty payload.
	Payload []byte

	// ContentType is the payload's media type; empty means
	// "application/json".
	ContentType string

	// Headers travel with the event as they are, besides those that a sink
	// makes itself (id, type, aggregate_type, ...). Names are case-sensitive.
	Headers map[string]string

	// Traceparent is the W3C trace context of the transaction, forwarded
	// unchanged as the "traceparent" header. Empty: none.
	Traceparent string

	// AvailableAt is when the event may be sent at the earliest; zero means
	// at once. It is compared with the database's clock. Until it is due, a
	// delayed event does not hold back the later ones of its key. From then
	// on it may until it has got through, and on SQLite it does.
	AvailableAt time.Time

	// Delay is the same counted from the insert, by the database's clock, in
	// steps of a microsecond. Only one of AvailableAt and Delay may be set.
	Delay time.Duration
}

// Record is an event as a store hands it to the relay and the relay to a sink.
// ID, Key and ContentType are filled in as they are in force (Key is empty
// only for unordered events); Traceparent is set from the header of that name,
// which is not in Headers any more; Delay is zero.
//
// A Record and all it points to is read-only once it has been handed out.
type Record struct {
	Event

	// Row is the store's own id of the event's row: a number on native
	// tables, anything on others. It is for people; ID is the identity.
	Row string

	// Lane is the lane of Key: see Lane.
	Lane int

	// Sequence grows along the first deliveries of a key, so a consumer that
	// remembers the highest one per key can drop a run that is repeated after
	// a crash. Zero where the store keeps none, and for an event outside the
	// order of its key: a delayed one, and one that was sent again after the
	// key had gone on without it.
	Sequence Sequence

	// CreatedAt is when the row was written, by the database's clock.
	CreatedAt time.Time

	// Attempts is how many deliveries of this event to this destination have
	// been counted as failed so far.
	Attempts int

	// Starts is how many processes died with this event alone in hand.
	Starts int

	// Waited is how long the event has been retried: from its first counted
	// failure to the claim, by the database's clock. 0 for a first attempt.
	Waited time.Duration
}

// SmallTexts is what a record's texts and headers may take up without counting
// in Size, in bytes: of records there is a bound of its own.
const SmallTexts = 1024

// Size is how many bytes the record takes up in a bound of memory: its payload,
// and by what its texts and headers exceed SmallTexts.
func (r *Record) Size() int {
	n := len(r.AggregateType) + len(r.AggregateID) + len(r.Type) + len(r.ContentType) + len(r.Traceparent)
	if r.Key != r.AggregateID {
		n += len(r.Key)
	}
	for k, v := range r.Headers {
		n += len(k) + len(v)
	}
	return len(r.Payload) + max(0, n-SmallTexts)
}

// Sequence places an event among the first deliveries of its key: the page it
// was read in, and its position there. A page that is read again after a crash
// keeps its number, over moves of its lane too, so what is repeated can be told
// from what is new, which a row id alone cannot do: a transaction that commits
// late carries a lower id. An event that is tried again after a failure has the
// number of its last page, so it is never below one that went out before it.
type Sequence struct {
	Page, Pos int64
}

// IsZero reports whether the store keeps no sequence.
func (s Sequence) IsZero() bool { return s == Sequence{} }

// String is 32 hexadecimal digits; texts compare as sequences do.
func (s Sequence) String() string { return fmt.Sprintf("%016x%016x", s.Page, s.Pos) }
