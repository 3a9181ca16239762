package memsink

import (
	"context"
	"errors"

	"github.com/outrider-dev/outrider/sink"
)

var (
	errHeld    = errors.New("held behind an earlier message of its key")
	errStale   = errors.New("held, since an earlier message has failed and the call was made without knowing")
	errStopped = errors.New("the call was ended before this message was sent")
	errCut     = errors.New("the call was ended while this message was on its way")
)

// call is one Publish. Its fields are guarded by Sink.mu.
type call struct {
	ctx  context.Context
	b    sink.Batch
	left int
	done chan struct{}
}

// item is one message of a call; c is nil once it has been reported.
type item struct {
	c     *call
	i     int
	begun bool // it is in Decide's hands
}

// line is what waits to be sent one after another: the messages of a key, over
// all calls where order in flight is kept. The first is in hand.
type line struct {
	key   string
	items []item
}

// report answers an item. Sink.mu is held.
func (it *item) report(r sink.Result) {
	c := it.c
	if c == nil {
		return
	}
	it.c = nil
	c.b.Report(it.i, r)
	c.left--
	if c.left == 0 {
		close(c.done)
	}
}

// Publish implements sink.Sink.
func (s *Sink) Publish(ctx context.Context, b sink.Batch) {
	if s.cfg.Decide == nil {
		s.publishAtOnce(ctx, b)
		return
	}
	c := &call{ctx: ctx, b: b, left: len(b.Messages), done: make(chan struct{})}
	if len(b.Messages) == 0 {
		s.accept(b)
		return
	}
	s.mu.Lock()
	var mine []*line
	if s.stale(b) {
		refuse(b)
		c.left = 0
		close(c.done)
	} else {
		mine = s.queue(c)
	}
	s.mu.Unlock()
	s.accept(b)
	select {
	case <-c.done:
	case <-ctx.Done():
		s.abandon(c, mine)
		<-c.done
	}
}

// publishAtOnce is Publish where nothing can block: a message is decided when
// its turn comes, and all failures are reported before the call is accepted.
func (s *Sink) publishAtOnce(ctx context.Context, b sink.Batch) {
	var stopped map[string]bool
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.accept(b)
	if s.stale(b) {
		refuse(b)
		return
	}
	for i := range b.Messages {
		m := &b.Messages[i]
		ordered := m.Key != "" && !s.cfg.NoOrder
		var r sink.Result
		switch {
		case ordered && stopped[m.Key]:
			r = sink.Result{Status: sink.NotSent, Class: sink.ClassHeld, Err: errHeld}
		case ctx.Err() != nil:
			r = sink.Result{Status: sink.NotSent, Class: sink.ClassStopped, Err: errStopped}
		default:
			r = s.take(ctx, m)
		}
		if r.Status != sink.Delivered && ordered {
			if stopped == nil {
				stopped = map[string]bool{}
			}
			stopped[m.Key] = true
		}
		b.Report(i, r)
	}
}

// stale asks whether a failure was reported that the batch was made without
// knowing of. Sink.mu is held, as it is when failures are reported.
func (s *Sink) stale(b sink.Batch) bool {
	return !s.cfg.NoOrderInFlight && b.Stale != nil && b.Stale()
}

// refuse answers a stale batch.
func refuse(b sink.Batch) {
	for i := range b.Messages {
		b.Report(i, sink.Result{Status: sink.NotSent, Class: sink.ClassHeld, Err: errStale})
	}
}

func (s *Sink) accept(b sink.Batch) {
	if b.Accepted != nil && !s.cfg.NoOrderInFlight {
		b.Accepted()
	}
}

// queue puts a call's messages behind those of their keys, starts the lines
// that were idle and returns the lines the call is in. Sink.mu is held.
func (s *Sink) queue(c *call) []*line {
	lines := s.lines
	if s.cfg.NoOrderInFlight {
		lines = map[string]*line{}
	}
	mine := map[*line]bool{}
	for i := range c.b.Messages {
		key := c.b.Messages[i].Key
		var l *line
		if key != "" && !s.cfg.NoOrder {
			l = lines[key]
		}
		if l == nil {
			l = &line{key: key}
			if key != "" && !s.cfg.NoOrder {
				lines[key] = l
			}
		}
		mine[l] = true
		l.items = append(l.items, item{c: c, i: i})
		if len(l.items) == 1 {
			s.wg.Go(func() { s.drive(l) })
		}
	}
	all := make([]*line, 0, len(mine))
	for l := range mine {
		all = append(all, l)
	}
	return all
}

// drive sends what is in a line, one after another, until it is empty.
func (s *Sink) drive(l *line) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(l.items) > 0 {
		switch head := &l.items[0]; {
		case head.c == nil:
		case head.c.ctx.Err() != nil:
			head.report(sink.Result{Status: sink.NotSent, Class: sink.ClassStopped, Err: errStopped})
			l.stop(1)
		default:
			head.begun = true
			m := clone(&head.c.b.Messages[head.i]) // Decide may outlast the call
			ctx := head.c.ctx
			s.mu.Unlock()
			r := s.take(ctx, &m)
			s.mu.Lock()
			// A head that was abandoned meanwhile has been reported, and
			// what came later does not stand behind its failure.
			if l.items[0].c != nil {
				l.items[0].report(r)
				if r.Status != sink.Delivered {
					l.stop(1)
				}
			}
		}
		l.items = l.items[1:]
	}
	if s.lines[l.key] == l {
		delete(s.lines, l.key)
	}
}

// stop answers NotSent for the items from the nth on and takes them out.
func (l *line) stop(n int) {
	for k := n; k < len(l.items); k++ {
		l.items[k].report(sink.Result{Status: sink.NotSent, Class: sink.ClassHeld, Err: errHeld})
	}
	l.items = l.items[:n]
}

// abandon ends a call whose context has ended. A message in hand may still
// arrive, so that its line goes on only when Decide has returned.
func (s *Sink) abandon(c *call, mine []*line) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range mine {
		for k := range l.items {
			if l.items[k].c != c {
				continue
			}
			if l.items[k].begun {
				l.items[k].report(sink.Result{Status: sink.Unknown, Class: sink.ClassStopped, Err: errCut})
			} else {
				l.items[k].report(sink.Result{Status: sink.NotSent, Class: sink.ClassStopped, Err: errStopped})
			}
			l.stop(k + 1)
			if k > 0 {
				l.items = l.items[:k]
			}
			break
		}
	}
}
