//go:build linux

package chaos_test

import (
	"context"
	"errors"
	"os"
	"sync"
	"syscall"

	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// point is a moment in the life of a batch.
type point string

const (
	pointStarted  point = "started"  // its start is committed, nothing is sent
	pointHanded   point = "handed"   // it is on its way to the broker
	pointAcked    point = "acked"    // the broker has confirmed its first message
	pointReported point = "reported" // all of it is answered
	pointSettling point = "settling" // its outcomes are about to be committed
	pointSettled  point = "settled"  // they are committed
	pointRandom   point = "random"   // any
)

// points that a relay is made to die at.
var points = []point{pointStarted, pointHanded, pointAcked, pointReported, pointSettling, pointSettled, pointRandom}

// probe stands between the relay and its store and sink. It counts what is in
// hand, and kills or stops its own process at a point.
type probe struct {
	gauges *gauges

	mu     sync.Mutex
	claims map[*store.Claim]bool // started and not wholly settled
	point  point
	signal syscall.Signal
	left   int
}

func newProbe(g *gauges) *probe { return &probe{gauges: g, claims: map[*store.Claim]bool{}} }

// arm has the signal sent when the point is reached for the nth time.
func (p *probe) arm(sig syscall.Signal, at point, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.point, p.signal, p.left = at, sig, n
}

// at is called at each point. Nothing behind it happens in a process that it
// kills: the mutex is kept.
func (p *probe) at(here point) {
	p.mu.Lock()
	if p.point != here {
		p.mu.Unlock()
		return
	}
	if p.left--; p.left > 0 {
		p.mu.Unlock()
		return
	}
	p.point = ""
	if err := syscall.Kill(os.Getpid(), p.signal); err != nil {
		panic(err)
	}
	if p.signal == syscall.SIGKILL {
		select {}
	}
	p.mu.Unlock()
}

// starting counts claims whose start is about to be committed, once each.
func (p *probe) starting(claims []*store.Claim) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range claims {
		if !p.claims[c] {
			p.claims[c] = true
			p.gauges.hand(len(c.Records))
		}
	}
}

// settled counts what is in hand no more.
func (p *probe) settled(settlements []store.Settlement) {
	n := 0
	for _, s := range settlements {
		for _, o := range s.Outcomes {
			if o.State != store.Unchanged && o.State != store.InHand {
				n--
			}
		}
	}
	p.gauges.hand(n)
}

// nativeStore is what both native streams are.
type nativeStore interface {
	store.Store
	store.Watcher
	store.Maintainer
}

type probedStore struct {
	nativeStore
	probe *probe
}

func (s probedStore) Join(ctx context.Context, p store.JoinParams) (store.Session, error) {
	ses, err := s.nativeStore.Join(ctx, p)
	if err != nil {
		return nil, err
	}
	s.probe.gauges.Joined.Store(1)
	return probedSession{ses.(nativeSession), s.probe}, nil
}

type nativeSession interface {
	store.Session
	store.Merger
}

type probedSession struct {
	nativeSession
	probe *probe
}

func (s probedSession) Commit(ctx context.Context, c store.CommitParams) error {
	p := s.probe
	if len(c.Settle) > 0 {
		p.at(pointSettling)
	}
	p.starting(c.Start)
	err := s.nativeSession.Commit(ctx, c)
	switch {
	case errors.Is(err, store.ErrFenced):
		p.gauges.Fenced.Add(1)
		p.gauges.Stale.Add(int64(len(c.Settle)))
	case err == nil:
		p.settled(c.Settle)
		if len(c.Settle) > 0 {
			p.at(pointSettled)
		}
		if len(c.Start) > 0 {
			p.at(pointStarted)
		}
	}
	return err
}

func (s probedSession) Claim(ctx context.Context, c store.ClaimParams) (*store.Claim, error) {
	claim, err := s.nativeSession.Claim(ctx, c)
	if errors.Is(err, store.ErrFenced) {
		s.probe.gauges.Fenced.Add(1)
	}
	return claim, err
}

func (s probedSession) Renew(ctx context.Context, leases []store.Lease) (store.Renewal, error) {
	r, err := s.nativeSession.Renew(ctx, leases)
	s.probe.gauges.Fenced.Add(int64(len(r.Lost)))
	return r, err
}

type probedSink struct {
	sink.Sink
	probe *probe
}

func (s probedSink) Publish(ctx context.Context, b sink.Batch) {
	p := s.probe
	var first sync.Once
	report, accepted := b.Report, b.Accepted
	b.Report = func(i int, r sink.Result) {
		switch r.Status {
		case sink.Delivered:
			p.gauges.Delivered.Add(1)
			first.Do(func() { p.at(pointAcked) })
		case sink.Unknown:
			p.gauges.Unknown.Add(1)
		}
		report(i, r)
	}
	if accepted != nil {
		b.Accepted = func() {
			p.at(pointHanded)
			accepted()
		}
	}
	s.Sink.Publish(ctx, b)
	p.at(pointReported)
}
