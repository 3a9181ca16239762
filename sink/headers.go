package sink

// HeaderPrefix is put before the name of an event's own header that is one of
// the names below, so that both arrive and neither hides the other.
const HeaderPrefix = "header."

// reserved are the headers that sinks make themselves.
var reserved = map[string]bool{
	"id": true, "type": true, "aggregate_type": true, "aggregate_id": true,
	"content_type": true, "traceparent": true, "sequence": true, "key": true,
}

// Headers is how a message's headers are laid out where the destination has
// headers, the same over all sinks. f is called for each:
//
//	id              Event.ID
//	type            Event.Type
//	aggregate_type  Event.AggregateType
//	aggregate_id    Event.AggregateID
//	content_type    Event.ContentType
//	traceparent     Event.Traceparent, if there is one
//	sequence        Record.Sequence, if the store keeps one
//
// and then, in no order, the event's own under their own names; one whose name
// is among those above is given as "header." and that name. So is one named
// key: a sink to a destination that has no keys of its own adds the event's,
// if it has one, under that name.
func Headers(m *Message, f func(name, value string)) {
	f("id", m.ID)
	f("type", m.Type)
	f("aggregate_type", m.AggregateType)
	f("aggregate_id", m.AggregateID)
	f("content_type", m.ContentType)
	if m.Traceparent != "" {
		f("traceparent", m.Traceparent)
	}
	if !m.Sequence.IsZero() {
		f("sequence", m.Sequence.String())
	}
	for name, value := range m.Headers {
		if reserved[name] {
			name = HeaderPrefix + name
		}
		f(name, value)
	}
}
