package natssink

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/sink"
)

// call is one Publish. All but events belongs to its goroutine.
type call struct {
	s        *Sink
	ctx      context.Context
	b        sink.Batch
	subjects []string // read by others, and not changed once anything is sent
	events   chan event

	behind   map[string][]int // key: its messages that have not left, in order
	ready    []int            // messages that may leave
	flight   []flight         // messages on their way, oldest first, and some that are not any more
	inFlight int
	left     int
	nobody   map[string]sink.Result // subject: what was found out about it
}

// event is the answer to a message on its way.
type event struct {
	i int
	r sink.Result
}

// flight is a message on its way.
type flight struct {
	reply    string
	i        int
	deadline time.Time
}

// Publish implements sink.Sink.
func (s *Sink) Publish(ctx context.Context, b sink.Batch) {
	c := &call{
		s: s, ctx: ctx, b: b, left: len(b.Messages),
		subjects: make([]string, len(b.Messages)),
		events:   make(chan event, s.cfg.MaxInFlight), // one per message on its way: none blocks
		behind:   map[string][]int{},
		nobody:   map[string]sink.Result{},
	}
	c.queue()
	timer := time.NewTimer(s.cfg.AckTimeout)
	defer timer.Stop()
	for c.left > 0 {
		for len(c.ready) > 0 && c.inFlight < s.cfg.MaxInFlight && ctx.Err() == nil {
			i := c.ready[0]
			c.ready = c.ready[1:]
			c.send(i)
		}
		if ctx.Err() != nil {
			c.cut()
			return
		}
		if c.left == 0 {
			return
		}
		select {
		case e := <-c.events:
			c.answered(e)
		case <-ctx.Done():
		case <-timer.C:
			timer.Reset(c.expire())
		}
	}
}

// queue finds out what may leave at once: of each key the first.
func (c *call) queue() {
	for i := range c.b.Messages {
		key := c.b.Messages[i].Key
		if key == "" {
			c.ready = append(c.ready, i)
			continue
		}
		q, ok := c.behind[key]
		if !ok {
			c.ready = append(c.ready, i)
			c.behind[key] = nil
			continue
		}
		c.behind[key] = append(q, i)
	}
	for i := range c.b.Messages {
		m := &c.b.Messages[i]
		if c.subjects[i] = m.To; m.To == "" {
			c.subjects[i], _ = c.s.cfg.Subjects.To(m.Record)
		}
	}
}

// send lets a message leave, or answers it.
func (c *call) send(i int) {
	m := &c.b.Messages[i]
	msg := &nats.Msg{Subject: c.subjects[i], Data: m.Payload}
	if r, ok := c.prepare(m, msg); !ok {
		c.done(i, r)
		return
	}
	msg.Reply = c.s.await(c, i)
	c.inFlight++
	if err := c.s.nc.PublishMsg(msg); err != nil {
		if c.s.take(msg.Reply) {
			c.inFlight--
			c.done(i, c.s.notSent(err))
		}
		return
	}
	c.flight = append(c.flight, flight{msg.Reply, i, time.Now().Add(c.s.cfg.AckTimeout)})
}

// prepare fills in the headers and finds what NATS cannot carry.
func (c *call) prepare(m *sink.Message, msg *nats.Msg) (sink.Result, bool) {
	err := checkSubject(msg.Subject)
	if m.To == "" && msg.Subject == "" {
		_, err = c.s.cfg.Subjects.To(m.Record)
	}
	if err != nil {
		return sink.Result{Status: sink.Reject, Class: sink.ClassNoTarget, Err: outrider.WithHint(err, hintStream)}, false
	}
	msg.Header = make(nats.Header, 8+len(m.Headers))
	add := func(name, value string) {
		if strings.ContainsAny(value, "\r\n") || value != strings.Trim(value, " \t\n\r") {
			err = fmt.Errorf("header %q has a line break, or a space at an end", name)
		}
		if len(name) > 5 && strings.EqualFold(name[:5], "Nats-") {
			name = sink.HeaderPrefix + name
		}
		msg.Header[name] = []string{value}
	}
	sink.Headers(m, add)
	if m.Key != "" {
		add("key", m.Key)
	}
	if err != nil {
		return sink.Result{Status: sink.Reject, Class: sink.ClassInvalid, Err: err}, false
	}
	msg.Header[nats.MsgIdHdr] = []string{m.ID}
	return sink.Result{}, true
}

// answered takes the answer to a message on its way.
func (c *call) answered(e event) {
	c.inFlight--
	if errors.Is(e.r.Err, errNobody) {
		subject := c.subjects[e.i]
		r, ok := c.nobody[subject]
		if !ok {
			r = c.s.whyNobody(c.ctx, subject)
			c.nobody[subject] = r
		}
		e.r = r
	}
	c.done(e.i, e.r)
}

// done reports a message and lets the next one of its key go, or none.
func (c *call) done(i int, r sink.Result) {
	c.left--
	c.b.Report(i, r)
	key := c.b.Messages[i].Key
	if key == "" {
		return
	}
	q := c.behind[key]
	if r.Status == sink.Delivered {
		if len(q) > 0 {
			c.ready = append(c.ready, q[0])
			c.behind[key] = q[1:]
		}
		return
	}
	delete(c.behind, key)
	for _, i := range q {
		c.left--
		c.b.Report(i, sink.Result{Status: sink.NotSent, Class: sink.ClassHeld, Err: errHeld})
	}
}

// expire answers what has waited too long, and says when to look again.
func (c *call) expire() time.Duration {
	now := time.Now()
	for len(c.flight) > 0 {
		f := c.flight[0]
		if f.deadline.After(now) {
			return f.deadline.Sub(now)
		}
		c.flight = c.flight[1:]
		if c.s.take(f.reply) {
			c.inFlight--
			c.done(f.i, sink.Result{Status: sink.Unknown, Class: sink.ClassTimeout, Err: errTimeout})
		}
	}
	return c.s.cfg.AckTimeout
}

// cut ends the call: what is on its way is unknown, the rest was not sent.
func (c *call) cut() {
	for _, f := range c.flight {
		if c.s.take(f.reply) {
			c.inFlight--
			c.done(f.i, sink.Result{Status: sink.Unknown, Class: sink.ClassStopped, Err: errCut})
		}
	}
	for c.inFlight > 0 { // answers that are in the channel or about to be
		e := <-c.events
		c.inFlight--
		if errors.Is(e.r.Err, errNobody) {
			e.r = sink.Result{Status: sink.NotSent, Class: sink.ClassStopped, Err: errNobody}
		}
		c.done(e.i, e.r)
	}
	for _, i := range c.ready {
		c.done(i, sink.Result{Status: sink.NotSent, Class: sink.ClassStopped, Err: errStopped})
	}
}

// checkSubject applies the rules of NATS for a subject to publish to.
func checkSubject(subject string) error {
	bad := subject == "" || strings.HasPrefix(subject, ".") || strings.HasSuffix(subject, ".") ||
		strings.Contains(subject, "..") || strings.ContainsAny(subject, " \t\r\n\x00*>")
	// $ begins the server's own subjects, and commands to it.
	if bad || strings.HasPrefix(subject, "$") || strings.HasPrefix(subject, "_INBOX.") {
		return fmt.Errorf("%q is no subject to publish events to", subject)
	}
	return nil
}
