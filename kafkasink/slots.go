package kafkasink

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kbin"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrider-dev/outrider/sink"
)

// The states of a slot.
const (
	idle     int32 = iota // not with the client
	held                  // with the client
	answered              // reported, and not with the client any more
	cutOff                // reported, and still with the client
)

// slot is one message of a call. It serves the record as its context, which is
// the way from a record back to the message and never ends.
type slot struct {
	rec       kgo.Record
	call      *call
	i         int
	state     atomic.Int32
	partition atomic.Int32 // -1 until it is known
	alone     *client      // the client of its own that it was sent with
}

// Deadline implements context.Context.
func (*slot) Deadline() (time.Time, bool) { return time.Time{}, false }

// Done implements context.Context.
func (*slot) Done() <-chan struct{} { return nil }

// Err implements context.Context.
func (*slot) Err() error { return nil }

// Value implements context.Context.
func (*slot) Value(any) any { return nil }

func (sl *slot) message() *sink.Message { return &sl.call.b.Messages[sl.i] }

// buffers are the memory of a call, used again once the client is through with
// all of it. Payloads are copied too: the client may hold them longer than the
// relay lends them.
type buffers struct {
	slots   []slot
	headers []kgo.RecordHeader
	bytes   []byte
}

var pool = sync.Pool{New: func() any { return &buffers{bytes: []byte{}} }}

// poolBytes is the largest buffer that is kept for the next call.
const poolBytes = 8 << 20

func (b *buffers) release() {
	if cap(b.bytes) > poolBytes {
		return
	}
	clear(b.slots)
	clear(b.headers)
	pool.Put(b)
}

// take makes n slots for a call.
func (b *buffers) take(c *call, n int) {
	if cap(b.slots) < n {
		b.slots = make([]slot, n)
	}
	b.slots = b.slots[:n]
	for i := range b.slots {
		sl := &b.slots[i]
		sl.call, sl.i = c, i
		sl.partition.Store(-1)
	}
}

// layOut makes the records of a call's messages. Their topics are set.
func (c *call) layOut() {
	bytes, headers := 0, 0
	for i := range c.b.Messages {
		m := &c.b.Messages[i]
		bytes += len(m.Key) + len(m.Payload)
		sink.Headers(m, func(_, value string) {
			headers++
			bytes += len(value)
		})
	}
	if cap(c.bytes) < bytes {
		c.buffers.bytes = make([]byte, 0, bytes)
	}
	if cap(c.headers) < headers {
		c.buffers.headers = make([]kgo.RecordHeader, 0, headers)
	}
	a, hs := c.bytes[:0], c.headers[:0]
	for i := range c.slots {
		sl := &c.slots[i]
		m := sl.message()
		if m.Key != "" {
			sl.rec.Key, a = keep(a, m.Key)
		}
		from := len(a)
		a = append(a, m.Payload...)
		sl.rec.Value = a[from:len(a):len(a)] // not nil, which would be a tombstone
		first := len(hs)
		sink.Headers(m, func(name, value string) {
			var v []byte
			v, a = keep(a, value)
			hs = append(hs, kgo.RecordHeader{Key: name, Value: v})
		})
		sl.rec.Headers = hs[first:len(hs):len(hs)]
		sl.rec.Timestamp = m.CreatedAt
		sl.rec.Context = sl //nolint:fatcontext // a slot is its record's context, each once
	}
	c.buffers.bytes, c.buffers.headers = a, hs
}

// keep appends s and gives the part of the array that holds it.
func keep(a []byte, s string) (part, all []byte) {
	from := len(a)
	a = append(a, s...)
	return a[from:len(a):len(a)], a
}

// batchOverhead is the size of a batch besides its records, as the client
// library counts it: four bytes more than the broker does.
const batchOverhead = 65

// size is that of a batch with this record alone, not compressed.
func (sl *slot) size() int {
	r := &sl.rec
	n := 1 + 1 + 1 // attributes, and the differences of time and offset
	n += kbin.VarintLen(int32(len(r.Key))) + len(r.Key)
	n += kbin.VarintLen(int32(len(r.Value))) + len(r.Value)
	n += kbin.VarintLen(int32(len(r.Headers)))
	for i := range r.Headers {
		h := &r.Headers[i]
		n += kbin.VarintLen(int32(len(h.Key))) + len(h.Key)
		n += kbin.VarintLen(int32(len(h.Value))) + len(h.Value)
	}
	return batchOverhead + kbin.VarintLen(int32(n)) + n
}
