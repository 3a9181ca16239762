// Package natssink is the sink to NATS JetStream.
//
// # What is sent
//
// One message to the subject that the rules make, the payload byte for byte,
// with the headers of [sink.Headers] (id, type, aggregate_type, aggregate_id,
// content_type, traceparent, sequence, then the event's own), key unless the
// event is unordered, and Nats-Msg-Id, which is the event's id: within its
// window, two minutes by default, the stream drops a message that it has. One
// of the event's own headers that bears such a name, or begins with Nats-,
// which commands the server, travels as header.NAME.
//
// NATS cannot carry every header: a name must be printable without colon, a
// value must have no line break and no space at its ends. A message with
// another one is rejected, and not sent changed.
//
// Delivered means that a stream has acknowledged the message; that it is a
// copy dropped for its id counts as well. A subject without a stream gives no
// acknowledgement, and the message is rejected. How durable an acknowledged
// message is, is the stream's configuration: storage and replicas.
//
// # Order
//
// JetStream does not refuse what follows a message that was lost or refused.
// So the next message of a key leaves when the one before it has been
// acknowledged; those of other keys are on their way meanwhile, up to
// Config.MaxInFlight per call. There is no order over calls that overlap.
//
// When the connection breaks, what was on its way is reported Unknown and what
// had not left NotSent. The client library's buffer for the time without a
// connection is switched off: what lay in it would have to be reported before
// it is known to be sent.
//
// # Statuses
//
//	no stream takes the subject        Retry   no_target
//	no rule, or not a subject          Reject  no_target
//	larger than server or stream takes Reject  oversize
//	a header that NATS cannot carry    Reject  invalid
//	stream full or sealed, other noes  Retry or Reject, see verdict
//	not allowed to publish             Retry   auth
//	login refused                      NotSent auth
//	no connection                      NotSent unreachable
//	connection lost on the way         Unknown unreachable
//	no acknowledgement in time         Unknown timeout
//	behind a failure of its key        NotSent held
//
// The receipt of a delivered message is stream@sequence.
package natssink

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/nats-io/nats.go"

	"github.com/outrider-dev/outrider/sink"
)

// Sink is a sink.Sink to JetStream.
type Sink struct {
	cfg   Config
	nc    *nats.Conn
	inbox string // the prefix of replies, with its dot
	next  atomic.Uint64
	down  atomic.Pointer[error] // why there is no connection

	mu      sync.Mutex
	pending map[string]*sent // by reply subject
}

// sent is a message that awaits its acknowledgement.
type sent struct {
	c *call
	i int
}

// New makes a Sink. It tries to connect once and, if that fails, goes on
// trying beside; Check tells how it went.
func New(cfg Config) (*Sink, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	opts, err := cfg.options()
	if err != nil {
		return nil, err
	}
	s := &Sink{cfg: cfg, inbox: nats.NewInbox() + ".", pending: map[string]*sent{}}
	opts = append(opts,
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) { s.disconnected(err) }),
		nats.ConnectHandler(func(*nats.Conn) { s.down.Store(nil) }),
		nats.ReconnectHandler(func(*nats.Conn) { s.down.Store(nil) }),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) { s.down.Store(&err) }),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { s.asyncError(err) }),
	)
	if s.nc, err = nats.Connect(strings.Join(cfg.URLs, ","), opts...); err != nil {
		return nil, fmt.Errorf("natssink: %w", err)
	}
	if err := s.nc.LastError(); !s.nc.IsConnected() {
		if err == nil { // the next attempt has begun, and forgotten it
			err = nats.ErrNoServers
		}
		cfg.Logger.Warn("no server answers yet; the connection is tried again and again", "error", err)
	}
	if _, err := s.nc.Subscribe(s.inbox+"*", s.acknowledged); err != nil {
		s.nc.Close()
		return nil, fmt.Errorf("natssink: %w", err)
	}
	return s, nil
}

// Capabilities implements sink.Sink.
func (s *Sink) Capabilities() sink.Capabilities {
	return sink.Capabilities{Order: true, Deduplicates: true}
}

// Close implements sink.Sink.
func (s *Sink) Close(context.Context) error {
	s.nc.Close()
	return nil
}

// await registers a message and gives the subject for its acknowledgement.
func (s *Sink) await(c *call, i int) string {
	reply := s.inbox + strconv.FormatUint(s.next.Add(1), 36)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending[reply] = &sent{c, i}
	return reply
}

// settle takes a message out, unless somebody else has, and has it answered.
func (s *Sink) settle(reply string, r sink.Result) {
	s.mu.Lock()
	p := s.pending[reply]
	delete(s.pending, reply)
	s.mu.Unlock()
	if p != nil {
		p.c.events <- event{p.i, r}
	}
}

// take takes a message out; false if its answer is on the way already.
func (s *Sink) take(reply string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.pending[reply]
	delete(s.pending, reply)
	return ok
}

// disconnected answers all that was on its way.
func (s *Sink) disconnected(err error) {
	if err == nil {
		err = nats.ErrDisconnected
	}
	s.down.Store(&err)
	s.mu.Lock()
	lost := s.pending
	s.pending = map[string]*sent{}
	s.mu.Unlock()
	r := sink.Result{Status: sink.Unknown, Class: sink.ClassUnreachable,
		Err: fmt.Errorf("connection lost before the acknowledgement: %w", err)}
	for _, p := range lost {
		p.c.events <- event{p.i, r}
	}
}

// asyncError hears of publishes that are not allowed: the server does not say
// which it was, only the subject.
func (s *Sink) asyncError(err error) {
	if !errors.Is(err, nats.ErrPermissionViolation) {
		return
	}
	_, subject, ok := strings.Cut(err.Error(), "Publish to \"")
	if !ok {
		return
	}
	subject = strings.TrimSuffix(subject, "\"")
	s.mu.Lock()
	var refused []*sent
	for reply, p := range s.pending {
		if p.c.subjects[p.i] == subject {
			refused = append(refused, p)
			delete(s.pending, reply)
		}
	}
	s.mu.Unlock()
	for _, p := range refused {
		p.c.events <- event{p.i, permissionResult(err)}
	}
}
