package kafkasink

import (
	"context"
	"crypto/tls"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/outrider-dev/outrider/sink"
)

// Sink is a sink.Sink to one Kafka cluster.
type Sink struct {
	cfg    Config
	tls    *tls.Config
	topics *topics

	// turn is held by the call that hands its messages over: calls are
	// accepted one after another.
	turn chan struct{}

	// ctx ends at Close, for what runs beside the calls.
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu     sync.Mutex // guards the following
	client *client
	begun  uint64              // calls so far
	active map[*call]struct{}  // calls under way
	stops  map[string]stop     // key: what its failure holds up
	late   map[string]int      // key: messages reported Unknown and still with the client
	alone  map[string]struct{} // ids of messages that were refused together

	// marked: one of stops, late and alone holds something. Read without mu.
	marked atomic.Bool
}

// stop is the failure of a key.
type stop struct {
	seq     uint64 // the call of the message that failed
	i       int    // and its place in the call
	last    uint64 // the last call that it holds up
	unknown bool   // the message may have been delivered
}

// holdsUp says whether a message is behind the failure and accepted before its
// report.
func (at stop) holdsUp(sl *slot) bool {
	seq := sl.call.seq
	return seq <= at.last && (seq > at.seq || seq == at.seq && sl.i > at.i)
}

// New makes a Sink. It does not connect; Check does.
func New(cfg Config) (*Sink, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	tc, err := cfg.TLS.tlsConfig()
	if err != nil {
		return nil, err
	}
	s := &Sink{
		cfg: cfg, tls: tc,
		topics: &topics{cfg: cfg, known: map[string]*topicInfo{}, busy: map[string]bool{}},
		turn:   make(chan struct{}, 1),
		active: map[*call]struct{}{},
		stops:  map[string]stop{},
		late:   map[string]int{},
		alone:  map[string]struct{}{},
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	if s.client, err = s.newClient(); err != nil {
		return nil, fmt.Errorf("kafkasink: %w", err)
	}
	return s, nil
}

func (s *Sink) newClient() (*client, error) {
	return newClient(s.cfg, s.tls, s.topics.limit, func(c *client) {
		s.wg.Go(func() { s.replace(c) })
	})
}

// Capabilities implements sink.Sink.
func (s *Sink) Capabilities() sink.Capabilities {
	return sink.Capabilities{Order: true, OrderInFlight: true}
}

// Close implements sink.Sink. Messages whose calls were cut and which are
// still with the client are given up.
func (s *Sink) Close(ctx context.Context) error {
	s.cancel()
	s.mu.Lock()
	c := s.client
	s.mu.Unlock()
	done := make(chan struct{})
	go func() {
		c.stop()
		s.wg.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// replace puts a new client in the place of one that is stuck or broken. The
// library then fails what is with the old one, and no more of it leaves.
//
// It is as safe as the death of a process and the take-over by another: both
// send in order from the first message that is not settled, so that what still
// arrives from the old one repeats a run and breaks no order.
func (s *Sink) replace(old *client) {
	s.mu.Lock()
	if s.client != old || s.ctx.Err() != nil {
		s.mu.Unlock()
		return
	}
	fresh, err := s.newClient()
	if err != nil { // the same options were good before
		s.mu.Unlock()
		s.cfg.Logger.Error("kafka client: cannot be made anew", "err", err)
		return
	}
	s.client = fresh
	s.mu.Unlock()
	old.fenced.Store(true)
	s.wg.Go(old.stop)
}
