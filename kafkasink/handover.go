package kafkasink

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrider-dev/outrider/sink"
)

// handOver gives a call's messages to the client, in order. The caller has the
// turn.
func (s *Sink) handOver(c *call) {
	cl := s.current(c.ctx)
	c.client = cl
	c.writes, c.answers, c.lost = cl.writes.Load(), cl.answers.Load(), cl.lost.Load()
	places := s.destinations(c)
	c.layOut()
	var solo *client
	for i := range c.slots {
		sl := &c.slots[i]
		switch alone, ok := s.mayGo(cl, sl, places); {
		case !ok:
		case alone:
			solo = s.sendAlone(c, sl, solo)
		default:
			sl.state.Store(held)
			c.inClient.Add(1)
			cl.kc.Produce(context.Background(), &sl.rec, c.promise)
			if !cl.warm[sl.rec.Topic] {
				s.warmUp(c, cl, sl)
			}
		}
	}
	if solo != nil {
		solo.stop()
	}
}

// warmUp waits until the library has loaded the partitions of a topic whose
// first record it has got. What is handed over before that, it would buffer
// later and beside, and settleFailing could not wait for it.
func (s *Sink) warmUp(c *call, cl *client, sl *slot) {
	timer := time.NewTimer(s.cfg.DeliveryTimeout)
	defer timer.Stop()
	tick := time.NewTicker(500 * time.Microsecond)
	defer tick.Stop()
	for sl.partition.Load() < 0 && sl.state.Load() == held {
		select {
		case <-tick.C:
		case <-c.ctx.Done():
			return
		case <-timer.C:
			cl.fence() // not even metadata have come
			return
		}
	}
	cl.warm[sl.rec.Topic] = sl.partition.Load() >= 0
}

// mayGo says whether a message may be handed to the client now, and whether it
// has to go alone. If not, it has been answered.
func (s *Sink) mayGo(cl *client, sl *slot, places map[string]*topicInfo) (alone, ok bool) {
	if sl.call.ctx.Err() != nil {
		s.refuse(sl, sink.Result{Status: sink.NotSent, Class: sink.ClassStopped, Err: errStopped})
		return false, false
	}
	if cl.failing.Load() > 0 {
		s.settleFailing(cl)
	}
	if cl.fenced.Load() {
		r := sink.Result{Status: sink.NotSent, Class: sink.ClassHeld, Err: errFenced}
		if cl.downError() != nil {
			r = cl.closedResult(false)
		}
		s.refuse(sl, r)
		return false, false
	}
	if s.marked.Load() {
		var isHeld bool
		if isHeld, alone = s.checkMarks(sl); isHeld {
			return false, false
		}
	}
	topic := sl.rec.Topic
	ti := places[topic]
	if ti == nil || ti.refuse != nil {
		s.refuse(sl, s.whyRefused(sl, ti))
		return false, false
	}
	switch size, has := sl.size(), cl.batchLimit(topic); {
	case size > ti.limit:
		s.refuse(sl, sink.Result{Status: sink.Reject, Class: sink.ClassOversize,
			Err: fmt.Errorf("%d bytes with key, headers and batch are over the limit of %d for topic %q", size, ti.limit, topic)})
		return false, false
	case size > has: // the limit was raised after this client had asked for it
		cl.renew.Store(true)
		s.refuse(sl, sink.Result{Status: sink.NotSent, Class: sink.ClassHeld, Err: errFenced})
		return false, false
	case has > ti.limit:
		cl.renew.Store(true)
	}
	return alone, true
}

// current is the client for the next call: a new one if the old one asks for
// it, once the calls that are with it have ended.
func (s *Sink) current(ctx context.Context) *client {
	s.mu.Lock()
	cl := s.client
	var calls []*call
	if cl.renew.Load() {
		for a := range s.active {
			if a.client == cl {
				calls = append(calls, a)
			}
		}
	}
	s.mu.Unlock()
	if !cl.renew.Load() && !cl.fenced.Load() {
		return cl
	}
	for _, a := range calls {
		select {
		case <-a.done:
		case <-ctx.Done():
			return cl
		}
	}
	s.replace(cl)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.client
}

// destinations finds the topic of every message, looks up those that are not
// known, and gives what is known of each.
func (s *Sink) destinations(c *call) map[string]*topicInfo {
	places := map[string]*topicInfo{}
	var missing, stale []string
	last := ""
	for i := range c.b.Messages {
		m, rec := &c.b.Messages[i], &c.slots[i].rec
		if rec.Topic = m.To; rec.Topic == "" {
			rec.Topic, _ = s.cfg.Topics.To(m.Record)
		}
		if rec.Topic == last {
			continue
		}
		last = rec.Topic
		if _, ok := places[last]; ok || checkName(last) != nil {
			continue
		}
		ti, old := s.topics.get(last)
		places[last] = ti
		if ti == nil {
			missing = append(missing, last)
		}
		if old {
			stale = append(stale, last)
		}
	}
	for _, name := range stale {
		s.wg.Go(func() { s.refresh(c.client, name) })
	}
	if len(missing) > 0 {
		s.lookup(c, missing, places)
	}
	return places
}

// lookup asks the cluster for topics. If it cannot be asked, they are refused
// as what kept it from answering says.
func (s *Sink) lookup(c *call, names []string, places map[string]*topicInfo) {
	found, err := s.topics.lookup(c.ctx, c.client.kc, names...)
	if err == nil {
		s.topics.put(found)
		for name, ti := range found {
			places[name] = ti
		}
		return
	}
	r := sink.Result{Status: sink.NotSent, Class: sink.ClassStopped, Err: errStopped}
	if c.ctx.Err() == nil {
		if down := c.client.downError(); down != nil {
			err = down
		}
		v := judge(err)
		if v.class != sink.ClassAuth {
			v = verdict{class: sink.ClassUnreachable, hint: hintUnreachable}
		}
		v.status = sink.NotSent // nothing has been sent, whatever the reason
		r = v.result(fmt.Errorf("looking up the topic: %w", err), false)
	}
	for _, name := range names {
		places[name] = &topicInfo{refuse: &r}
	}
}

// whyRefused is the answer to a message whose topic cannot be written to, or
// that has none. ti is what is known of the topic, nil if it is no topic's name.
func (s *Sink) whyRefused(sl *slot, ti *topicInfo) sink.Result {
	if ti != nil {
		return *ti.refuse
	}
	m := sl.message()
	err := checkName(sl.rec.Topic)
	if m.To == "" {
		if _, ruleErr := s.cfg.Topics.To(m.Record); ruleErr != nil {
			err = ruleErr
		}
	}
	return sink.Result{Status: sink.Reject, Class: sink.ClassNoTarget, Err: err}
}

// refresh looks a topic up beside the sending.
func (s *Sink) refresh(cl *client, name string) {
	defer s.topics.refreshed(name)
	if found, err := s.topics.lookup(s.ctx, cl.kc, name); err == nil {
		s.topics.put(found)
	}
}

// checkMarks says whether a message is held up behind another of its key, and
// has been answered so, or has to be sent alone.
func (s *Sink) checkMarks(sl *slot) (isHeld, alone bool) {
	m := sl.message()
	s.mu.Lock()
	defer s.mu.Unlock()
	if m.Key != "" {
		err := errHeld
		at, stopped := s.stops[m.Key]
		stopped = stopped && at.holdsUp(sl)
		if !stopped && s.late[m.Key] > 0 {
			stopped, err = true, errLate
			s.stop(m.Key, sl, false)
		}
		if stopped {
			sl.state.Store(answered)
			sl.call.report(sl.i, sink.Result{Status: sink.NotSent, Class: sink.ClassHeld, Err: err})
			return true, false
		}
	}
	_, alone = s.alone[m.ID]
	return false, alone
}

// settleFailing waits until every record that is with the client in a failing
// partition has had its callback: all of them have been failed, and the
// callbacks are on their way.
func (s *Sink) settleFailing(cl *client) {
	cl.settling.Store(true)
	defer cl.settling.Store(false)
	limit := time.Now().Add(s.cfg.DeliveryTimeout)
	for _, p := range cl.failingPlaces() {
		for s.holds(cl, p) {
			if time.Now().After(limit) {
				cl.fence()
				return
			}
			cl.barrier()
		}
		cl.setFailing(p, false)
	}
}

// holds says whether a message of a call is with the client in a partition.
func (s *Sink) holds(cl *client, p place) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.active {
		if c.client != cl {
			continue
		}
		for i := range c.slots {
			sl := &c.slots[i]
			if sl.state.Load() == held && sl.partition.Load() == p.partition && sl.rec.Topic == p.topic {
				return true
			}
		}
	}
	return false
}

// sendAlone sends a message in a batch of its own, by a client of its own, and
// waits for the answer.
func (s *Sink) sendAlone(c *call, sl *slot, solo *client) *client {
	// What was handed over before may be of the same key.
	for c.inClient.Load() > 0 && c.ctx.Err() == nil {
		select {
		case <-time.After(time.Millisecond):
		case <-c.ctx.Done():
		}
	}
	if isHeld, _ := s.checkMarks(sl); isHeld {
		return solo
	}
	if solo == nil {
		var err error
		if solo, err = s.newClient(); err != nil {
			s.refuse(sl, sink.Result{Status: sink.NotSent, Class: sink.ClassOther, Err: err})
			return nil
		}
	}
	done := make(chan struct{})
	sl.alone = solo
	sl.state.Store(held)
	c.inClient.Add(1)
	solo.kc.Produce(context.Background(), &sl.rec, func(rec *kgo.Record, err error) {
		c.answer(rec, err)
		close(done)
	})
	timer := time.NewTimer(s.cfg.DeliveryTimeout)
	defer timer.Stop()
	select {
	case <-done:
		s.notAlone(sl.message().ID)
		for _, p := range solo.failingPlaces() {
			solo.setFailing(p, false) // it held nothing else
		}
		return solo
	case <-c.ctx.Done():
	case <-timer.C:
	}
	solo.stop()
	<-done
	return nil
}

func (s *Sink) notAlone(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.alone, id)
	s.mark()
}

func isClosed(err error) bool { return errors.Is(err, kgo.ErrClientClosed) }

// joined is two errors in one line.
type joined struct{ what, why error }

func (j joined) Error() string   { return j.what.Error() + ": " + j.why.Error() }
func (j joined) Unwrap() []error { return []error{j.what, j.why} }
