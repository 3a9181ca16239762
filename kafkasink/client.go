package kafkasink

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// client is one producer with what has to be known about it. It is replaced
// when it is stuck, broken or has to start over; see Sink.replace.
type client struct {
	kc     *kgo.Client
	logger *slog.Logger

	// limits are the largest batch per topic. The library asks once and keeps
	// to it, so the answer stays the same over the client's life.
	limit  func(topic string) int
	limits sync.Map // topic: int

	// Produce requests of which bytes were written, answers that were read,
	// and requests that were written and whose answer was lost.
	writes, answers, lost atomic.Int64

	// down is the error of the last connection, nil once anything was read.
	// refused is why the cluster takes no producer of ours; it stays.
	down, refused atomic.Pointer[error]

	// renew asks for a new client before the next call is handed over.
	renew atomic.Bool

	// fenced: no byte leaves any more. onFence is told, once.
	fenced  atomic.Bool
	onFence func(*client)

	// warm are topics whose partitions the library has loaded. Until then it
	// buffers their records at a time of its own. Only read and written by
	// the call that hands over.
	warm map[string]bool

	// failing are partitions whose buffered records have been or are about
	// to be failed by the library while the callbacks are still to come.
	failing   atomic.Int32 // len(failingIn)
	settling  atomic.Bool  // a hand-over waits for those callbacks
	failingMu sync.Mutex
	failingIn map[place]bool
}

// place is a partition.
type place struct {
	topic     string
	partition int32
}

var errFenced = errors.New("this client has been replaced")

func newClient(cfg Config, tc *tls.Config, limit func(topic string) int, onFence func(*client)) (*client, error) {
	c := &client{
		logger: cfg.Logger, limit: limit, onFence: onFence,
		warm: map[string]bool{}, failingIn: map[place]bool{},
	}
	opts := append(cfg.options(),
		kgo.WithHooks(c),
		kgo.WithLogger(c),
		kgo.ProducerBatchMaxBytesFn(func(topic string) int32 { return int32(c.batchLimit(topic)) }),
		kgo.Dialer(func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := cfg.dial(ctx, network, address)
			if err != nil {
				return nil, err
			}
			if tc != nil {
				if conn, err = encrypt(ctx, conn, tc, address); err != nil {
					return nil, err
				}
			}
			return &fencedConn{Conn: conn, c: c}, nil
		}),
	)
	var err error
	c.kc, err = kgo.NewClient(opts...)
	return c, err
}

// batchLimit is the largest batch of a topic as this client has it.
func (c *client) batchLimit(topic string) int {
	if n, ok := c.limits.Load(topic); ok {
		return n.(int) //nolint:errcheck // only ints are stored
	}
	n, _ := c.limits.LoadOrStore(topic, c.limit(topic))
	return n.(int) //nolint:errcheck // only ints are stored
}

// encrypt makes a TLS connection of a plain one.
func encrypt(ctx context.Context, conn net.Conn, tc *tls.Config, address string) (net.Conn, error) {
	if tc.ServerName == "" && !tc.InsecureSkipVerify {
		tc = tc.Clone()
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			_ = conn.Close()
			return nil, err
		}
		tc.ServerName = host
	}
	enc := tls.Client(conn, tc)
	if err := enc.HandshakeContext(ctx); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return enc, nil
}

// fencedConn is a connection that stops writing when its client is fenced.
type fencedConn struct {
	net.Conn
	c *client
}

func (f *fencedConn) Write(b []byte) (int, error) {
	if f.c.fenced.Load() {
		return 0, errFenced
	}
	return f.Conn.Write(b)
}

// stop ends the client. What is with it is failed by the library with
// kgo.ErrClientClosed.
func (c *client) stop() {
	c.fenced.Store(true)
	c.kc.Close()
}

// downError is why the cluster cannot be reached, nil if it can.
func (c *client) downError() error {
	for _, p := range []*atomic.Pointer[error]{&c.refused, &c.down} {
		if err := p.Load(); err != nil {
			return *err
		}
	}
	return nil
}

const produceKey = 0 // of the request, in the protocol

// OnBrokerConnect implements kgo.HookBrokerConnect.
func (c *client) OnBrokerConnect(_ kgo.BrokerMetadata, _ time.Duration, _ net.Conn, err error) {
	if err != nil {
		c.down.Store(&err)
	}
}

// OnBrokerWrite implements kgo.HookBrokerWrite.
func (c *client) OnBrokerWrite(_ kgo.BrokerMetadata, key int16, n int, _, _ time.Duration, _ error) {
	if key == produceKey && n > 0 {
		c.writes.Add(1)
	}
}

// OnBrokerE2E implements kgo.HookBrokerE2E.
func (c *client) OnBrokerE2E(_ kgo.BrokerMetadata, key int16, e kgo.BrokerE2E) {
	err := e.Err()
	switch {
	case err == nil:
		if c.down.Load() != nil {
			c.down.Store(nil)
		}
		if key == produceKey {
			c.answers.Add(1)
		}
	case key == produceKey && e.BytesWritten > 0:
		c.lost.Add(1)
	}
}

// OnProduceRecordPartitioned implements kgo.HookProduceRecordPartitioned. The
// library calls it under the partition's lock, right after the record was
// buffered and before it can be sent. A record that got into a partition
// behind the library's back, that is while earlier records of it have been
// failed and their callbacks are to come, must not leave: an earlier one of
// its key may be among them.
func (c *client) OnProduceRecordPartitioned(r *kgo.Record, _ int32) {
	if s, ok := r.Context.(*slot); ok {
		s.partition.Store(r.Partition)
	}
	if c.failing.Load() > 0 && c.isFailing(place{r.Topic, r.Partition}) {
		c.fence()
	}
}

// fence keeps all bytes back from now on. It does not block.
func (c *client) fence() {
	if c.fenced.CompareAndSwap(false, true) {
		c.onFence(c)
	}
}

func (c *client) isFailing(p place) bool {
	c.failingMu.Lock()
	defer c.failingMu.Unlock()
	return c.failingIn[p]
}

func (c *client) setFailing(p place, is bool) {
	c.failingMu.Lock()
	defer c.failingMu.Unlock()
	if is {
		c.failingIn[p] = true
	} else {
		delete(c.failingIn, p)
	}
	c.failing.Store(int32(len(c.failingIn)))
}

func (c *client) failingPlaces() []place {
	c.failingMu.Lock()
	defer c.failingMu.Unlock()
	ps := make([]place, 0, len(c.failingIn))
	for p := range c.failingIn {
		ps = append(ps, p)
	}
	return ps
}

// barrier returns when the callbacks that are due have run. Callbacks run one
// after another, so that of a record that fails at once, for want of a topic,
// is the last of them.
func (c *client) barrier() {
	done := make(chan struct{})
	c.kc.TryProduce(context.Background(), &kgo.Record{}, func(*kgo.Record, error) { close(done) })
	<-done
	runtime.Gosched()
}

// Level implements kgo.Logger.
func (c *client) Level() kgo.LogLevel { return kgo.LogLevelInfo }

// Lines of the library's log that stand for hooks which it does not have.
const (
	// These two are written under the partition's lock just before everything
	// that is buffered in the partition is failed;
	// TestFailureIsNoticedAtOnce fails if they change.
	logBatchFailed = "batch in a produce request failed"
	logLoadFailed  = "produce partition load error, bumping error count on first stored batch"

	// This is written before everything that is buffered anywhere is failed.
	// What is in a topic of which the library is just now learning the
	// partitions it misses, and would keep without ever sending it;
	// TestRefusedProducerKeepsNothing fails if the line changes.
	logRefused = "fatal InitProducerID error, failing all buffered records"
)

// Log implements kgo.Logger.
func (c *client) Log(level kgo.LogLevel, msg string, keyvals ...any) {
	if msg == logBatchFailed || msg == logLoadFailed {
		c.noteFailing(msg, keyvals)
	}
	if msg == logRefused {
		c.noteRefused(keyvals)
	}
	switch level {
	case kgo.LogLevelError:
		c.logger.Error("kafka client: "+msg, keyvals...)
	case kgo.LogLevelWarn:
		c.logger.Warn("kafka client: "+msg, keyvals...)
	}
}

func (c *client) noteFailing(msg string, keyvals []any) {
	var p place
	fails := msg == logBatchFailed
	for i := 0; i+1 < len(keyvals); i += 2 {
		switch keyvals[i] {
		case "topic":
			p.topic, _ = keyvals[i+1].(string)
		case "partition":
			p.partition, _ = keyvals[i+1].(int32)
		case "will_fail":
			fails, _ = keyvals[i+1].(bool)
		}
	}
	if fails {
		c.setFailing(p, true)
	}
}

// noteRefused has the client replaced, which ends what is left in it.
func (c *client) noteRefused(keyvals []any) {
	err := errors.New(logRefused)
	for i := 0; i+1 < len(keyvals); i += 2 {
		if e, ok := keyvals[i+1].(error); ok && keyvals[i] == "err" {
			err = e
		}
	}
	c.refused.Store(&err)
	c.fence()
}
