// Package memsink is a sink that keeps what it is given in memory: for tests,
// for demonstrations, and as the reference of what package sink asks for.
//
// Failures are scripted with Config.Decide, an outage with Break and Mend. By
// default it keeps order within and over calls; Config can take either
// promise away, so that the relay's ways of working without them can be seen.
package memsink

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/outrider-dev/outrider/sink"
)

// Config sets up a Sink. The zero value delivers everything, in order.
type Config struct {
	// Decide, if not nil, says what becomes of a message. It is called from
	// several goroutines, for one message of a key at a time, and may block
	// to play a slow destination; it should return when ctx, the call's, has
	// ended. Deliver is the answer that lets a message through.
	//
	// Without Decide, everything is decided inside Publish, with no
	// goroutine.
	Decide func(ctx context.Context, m sink.Message) sink.Result

	// KeepUnknown keeps messages that Decide answers Unknown, as when a
	// destination took a message and its answer was lost.
	KeepUnknown bool

	// Places are the places that exist; a message to any other is refused as
	// Retry with ClassNoTarget. Empty: every place exists.
	Places []string

	// MaxBytes is the largest payload taken; a larger one is rejected with
	// ClassOversize. 0: no limit.
	MaxBytes int

	// Deduplicate drops messages whose ID has been kept before and answers
	// Delivered, over the whole life of the sink.
	Deduplicate bool

	// NoOrderInFlight takes back the promise to keep order over calls.
	NoOrderInFlight bool

	// NoOrder takes back both promises about order.
	NoOrder bool

	// Discard keeps nothing but the count, for measurements.
	Discard bool
}

// Deliver is what Config.Decide returns to let a message through.
var Deliver = sink.Result{Status: sink.Delivered}

// Sink is a sink.Sink. Its methods may be called from any goroutine.
type Sink struct {
	cfg Config

	// mu guards lines, and is held over the report of a failure: what is
	// accepted before the report is behind it, what is accepted after is not.
	mu    sync.Mutex
	lines map[string]*line
	wg    sync.WaitGroup

	keep struct {
		sync.Mutex
		messages []sink.Message
		count    int
		seen     map[string]bool
		broken   error
		grown    chan struct{} // made by who waits, closed at the next arrival
	}
}

// New makes a Sink.
func New(cfg Config) *Sink {
	cfg.Places = slices.Clone(cfg.Places)
	cfg.NoOrderInFlight = cfg.NoOrderInFlight || cfg.NoOrder
	s := &Sink{cfg: cfg, lines: map[string]*line{}}
	s.keep.seen = map[string]bool{}
	return s
}

// Capabilities implements sink.Sink.
func (s *Sink) Capabilities() sink.Capabilities {
	return sink.Capabilities{
		Order:         !s.cfg.NoOrder,
		OrderInFlight: !s.cfg.NoOrderInFlight,
		Deduplicates:  s.cfg.Deduplicate,
	}
}

// Close implements sink.Sink. What was kept stays readable.
func (s *Sink) Close(ctx context.Context) error {
	done := make(chan struct{})
	go func() {
		s.wg.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("memsink: Decide has not returned: %w", ctx.Err())
	}
}

// Messages are copies of what arrived, in the order of arrival.
func (s *Sink) Messages() []sink.Message {
	s.keep.Lock()
	defer s.keep.Unlock()
	return slices.Clone(s.keep.messages)
}

// Len is the number of messages that arrived.
func (s *Sink) Len() int {
	s.keep.Lock()
	defer s.keep.Unlock()
	return s.keep.count
}

// Wait returns when n messages have arrived, or with the error of ctx.
func (s *Sink) Wait(ctx context.Context, n int) error {
	for {
		s.keep.Lock()
		if s.keep.grown == nil {
			s.keep.grown = make(chan struct{})
		}
		have, grown := s.keep.count, s.keep.grown
		s.keep.Unlock()
		if have >= n {
			return nil
		}
		select {
		case <-grown:
		case <-ctx.Done():
			return fmt.Errorf("memsink: %d of %d messages arrived: %w", have, n, ctx.Err())
		}
	}
}

// Reset forgets what arrived.
func (s *Sink) Reset() {
	s.keep.Lock()
	defer s.keep.Unlock()
	s.keep.messages, s.keep.count = nil, 0
	clear(s.keep.seen)
}

// Break makes the destination unreachable: from now on every message is
// answered NotSent with err, or with a stock error if err is nil.
func (s *Sink) Break(err error) {
	if err == nil {
		err = errors.New("destination is down")
	}
	s.keep.Lock()
	defer s.keep.Unlock()
	s.keep.broken = err
}

// Mend ends what Break began.
func (s *Sink) Mend() {
	s.keep.Lock()
	defer s.keep.Unlock()
	s.keep.broken = nil
}

// take decides about a message and keeps it if it arrives.
func (s *Sink) take(ctx context.Context, m *sink.Message) sink.Result {
	if r, ok := s.refuse(m); !ok {
		return r
	}
	r := Deliver
	if s.cfg.Decide != nil {
		r = s.cfg.Decide(ctx, *m)
	}
	if r.Status == sink.Delivered || r.Status == sink.Unknown && s.cfg.KeepUnknown {
		s.store(m)
	}
	return r
}

// clone copies a message and all it points to: what a batch holds belongs to
// the relay and must not be kept.
func clone(m *sink.Message) sink.Message {
	rec := *m.Record
	rec.Payload = slices.Clone(rec.Payload)
	rec.Headers = maps.Clone(rec.Headers)
	return sink.Message{Record: &rec, To: m.To, Redelivery: m.Redelivery}
}

// refuse finds the faults that need no Decide.
func (s *Sink) refuse(m *sink.Message) (sink.Result, bool) {
	s.keep.Lock()
	broken := s.keep.broken
	s.keep.Unlock()
	switch {
	case broken != nil:
		return sink.Result{Status: sink.NotSent, Class: sink.ClassUnreachable, Err: broken}, false
	case len(s.cfg.Places) > 0 && !slices.Contains(s.cfg.Places, m.To):
		return sink.Result{Status: sink.Retry, Class: sink.ClassNoTarget,
			Err: fmt.Errorf("there is no place %q", m.To)}, false
	case s.cfg.MaxBytes > 0 && len(m.Payload) > s.cfg.MaxBytes:
		return sink.Result{Status: sink.Reject, Class: sink.ClassOversize,
			Err: fmt.Errorf("payload of %d bytes is over the limit of %d", len(m.Payload), s.cfg.MaxBytes)}, false
	}
	return sink.Result{}, true
}

// store keeps a copy of what arrived.
func (s *Sink) store(m *sink.Message) {
	var c sink.Message
	if !s.cfg.Discard {
		c = clone(m)
	}
	s.keep.Lock()
	defer s.keep.Unlock()
	if s.cfg.Deduplicate {
		if s.keep.seen[m.ID] {
			return
		}
		s.keep.seen[m.ID] = true
	}
	if !s.cfg.Discard {
		s.keep.messages = append(s.keep.messages, c)
	}
	s.keep.count++
	if s.keep.grown != nil {
		close(s.keep.grown)
		s.keep.grown = nil
	}
}
