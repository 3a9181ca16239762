package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	stream  = "SHOP"
	subject = "shop.order"
	// maxPayload is the most that the broker takes in a message.
	maxPayload = 64 << 10
	startLimit = 10 * time.Second
)

// broker is a NATS server with JetStream in this process.
type broker struct {
	dir  string
	mu   sync.Mutex
	srv  *server.Server
	port int
}

func (b *broker) start() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.srv != nil {
		return nil
	}
	port := b.port
	if port == 0 {
		port = server.RANDOM_PORT
	}
	s, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: port, JetStream: true, StoreDir: b.dir, MaxPayload: maxPayload,
		NoLog: true, NoSigs: true,
		// Clients that learnt the server's own address would go around the
		// proxy.
		Cluster: server.ClusterOpts{NoAdvertise: true},
	})
	if err != nil {
		return err
	}
	go s.Start()
	if !s.ReadyForConnections(startLimit) {
		s.Shutdown()
		return errors.New("the embedded broker did not start")
	}
	addr, ok := s.Addr().(*net.TCPAddr)
	if !ok {
		s.Shutdown()
		return fmt.Errorf("the embedded broker listens on %v", s.Addr())
	}
	b.srv, b.port = s, addr.Port
	return nil
}

func (b *broker) stop() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.srv != nil {
		b.srv.Shutdown()
		b.srv.WaitForShutdown()
		b.srv = nil
	}
}

func (b *broker) up() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.srv != nil
}

func (b *broker) address() string { return fmt.Sprintf("127.0.0.1:%d", b.port) }

// consumer reads the stream and tells the ledger.
type consumer struct {
	nc     *nats.Conn
	stream jetstream.Stream
	ledger *ledger
}

func newConsumer(ctx context.Context, address string, l *ledger) (*consumer, error) {
	nc, err := nats.Connect("nats://"+address, nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond),
		nats.ReconnectJitter(0, 0), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		return nil, err
	}
	var s jetstream.Stream
	js, err := jetstream.New(nc)
	if err == nil {
		s, err = js.CreateStream(ctx, jetstream.StreamConfig{
			Name: stream, Subjects: []string{subject}, AllowDirect: true,
			// The stream drops what it has seen within this window. It is as
			// short as can be, so that duplicates reach the consumer and are
			// counted.
			Duplicates: 100 * time.Millisecond,
		})
	}
	if err != nil {
		nc.Close()
		return nil, err
	}
	return &consumer{nc: nc, stream: s, ledger: l}, nil
}

// run asks for one message after another by its number: nothing is left out,
// twice or out of order on this side, whatever happens to the broker.
func (c *consumer) run(ctx context.Context) {
	defer c.nc.Close()
	idle := time.NewTicker(2 * time.Millisecond)
	defer idle.Stop()
	for next := uint64(1); ctx.Err() == nil; {
		msg, err := c.get(ctx, next)
		if err != nil {
			select {
			case <-ctx.Done():
			case <-idle.C:
			}
			continue
		}
		next = msg.Sequence + 1
		c.ledger.deliver(msg.Header.Get("id"), time.Now())
	}
}

func (c *consumer) get(ctx context.Context, seq uint64) (*jetstream.RawStreamMsg, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	return c.stream.GetMsg(ctx, seq, jetstream.WithGetMsgSubject(subject))
}

// proxy stands between relay and broker and can make the way slow.
type proxy struct {
	target string
	delay  atomic.Int64
	l      net.Listener
	wg     sync.WaitGroup
	mu     sync.Mutex
	conns  map[net.Conn]bool
	closed bool
}

func newProxy(ctx context.Context, target string) (*proxy, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{target: target, l: l, conns: map[net.Conn]bool{}}
	p.wg.Go(p.accept)
	return p, nil
}

func (p *proxy) address() string { return p.l.Addr().String() }

func (p *proxy) slow() bool { return p.delay.Load() > 0 }

func (p *proxy) accept() {
	for {
		in, err := p.l.Accept()
		if err != nil {
			return
		}
		out, err := net.DialTimeout("tcp", p.target, time.Second) //nolint:noctx // it ends within a second, and so does close
		if err != nil {
			_ = in.Close()
			continue
		}
		if !p.keep(in, out) {
			return
		}
		p.wg.Go(func() { p.carry(in, out) })
		p.wg.Go(func() { p.carry(out, in) })
	}
}

// keep notes connections, to be closed with the proxy.
func (p *proxy) keep(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		if p.closed {
			_ = c.Close()
		} else {
			p.conns[c] = true
		}
	}
	return !p.closed
}

func (p *proxy) close() {
	_ = p.l.Close()
	p.mu.Lock()
	p.closed = true
	for c := range p.conns {
		_ = c.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
}

// chunk is a piece on its way.
type chunk struct {
	data []byte
	due  time.Time
}

// carry hands on what comes, each piece after the delay: the way is long, not
// narrow.
func (p *proxy) carry(from, to net.Conn) {
	way := make(chan chunk, 1024)
	p.wg.Go(func() {
		defer to.Close() // both ends are given up
		for c := range way {
			if wait := time.Until(c.due); wait > 0 {
				<-time.After(wait)
			}
			if _, err := to.Write(c.data); err != nil {
				_ = from.Close()
			}
		}
	})
	defer close(way)
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			way <- chunk{append([]byte(nil), buf[:n]...), time.Now().Add(time.Duration(p.delay.Load()))}
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				_ = to.Close()
			}
			p.mu.Lock()
			delete(p.conns, from)
			p.mu.Unlock()
			return
		}
	}
}
