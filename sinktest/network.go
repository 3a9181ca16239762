package sinktest

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"
)

// Network makes connections that can fall silent and break, between a client
// in the test and any server, fake or real. Give its Dial to the client.
type Network struct {
	mu     sync.Mutex
	conns  map[*conn]struct{}
	broken bool
	silent chan struct{} // closed at the end of the silence, nil if there is none
	left   chan struct{} // closed at the first write in the silence
}

// NewNetwork makes a Network that works.
func NewNetwork() *Network { return &Network{conns: map[*conn]struct{}{}} }

var errBroken = errors.New("network is broken by the test")

// Dial connects, unless the network is broken.
func (n *Network) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	n.mu.Lock()
	broken := n.broken
	n.mu.Unlock()
	if broken {
		return nil, &net.OpError{Op: "dial", Net: network, Err: errBroken}
	}
	c, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	w := &conn{Conn: c, n: n, closed: make(chan struct{})}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.conns[w] = struct{}{}
	return w, nil
}

// Break cuts all connections and makes no new ones until mend is called. It is
// Env.Break.
func (n *Network) Break(*testing.T) (mend func()) {
	n.mu.Lock()
	n.broken = true
	conns := n.conns
	n.conns = map[*conn]struct{}{}
	n.mu.Unlock()
	for c := range conns {
		_ = c.Close()
	}
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.broken = false
	}
}

// Stall keeps back what servers send until release is called. It is Env.Stall.
func (n *Network) Stall(*testing.T) (release func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	silent := make(chan struct{})
	n.silent, n.left = silent, make(chan struct{})
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.silent = nil
		close(silent)
	}
}

// Left waits until a client has written something in the silence. It is
// Env.Left.
func (n *Network) Left(t *testing.T) {
	t.Helper()
	n.mu.Lock()
	left := n.left
	n.mu.Unlock()
	select {
	case <-left:
	case <-time.After(Patience):
		t.Fatal("nothing has left")
	}
}

func (n *Network) silence() chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.silent
}

type conn struct {
	net.Conn
	n      *Network
	once   sync.Once
	closed chan struct{}
}

// Read gives nothing while there is silence, not even what had come before.
func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err != nil {
		return n, err
	}
	if silent := c.n.silence(); silent != nil {
		select {
		case <-silent:
		case <-c.closed:
			return 0, net.ErrClosed
		}
	}
	return n, nil
}

func (c *conn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	if c.n.silent != nil && n > 0 {
		select {
		case <-c.n.left:
		default:
			close(c.n.left)
		}
	}
	return n, err
}

func (c *conn) Close() error {
	c.once.Do(func() {
		close(c.closed)
		c.n.mu.Lock()
		delete(c.n.conns, c)
		c.n.mu.Unlock()
	})
	return c.Conn.Close()
}
