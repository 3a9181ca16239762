// Package faults breaks connections on purpose, for tests: between a client and
// a real server, at a moment of the test's choosing.
package faults

import (
	"errors"
	"net"
	"sync"
	"testing"
)

// Proxy stands between a client and a TCP server.
type Proxy struct {
	target   string
	listener net.Listener

	mu    sync.Mutex
	conns map[net.Conn]struct{}
	lose  func(request []byte) bool
	down  bool
	// refused is how many connections were turned away.
	refused int
	wg      sync.WaitGroup
}

// NewProxy listens on a free loopback port and forwards to target (host:port)
// until the test ends.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{target: target, listener: l, conns: map[net.Conn]struct{}{}}
	p.wg.Go(p.accept)
	t.Cleanup(func() {
		_ = l.Close()
		p.Cut()
		p.wg.Wait()
	})
	return p
}

// Addr is where the proxy listens.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// LoseAnswer lets the next request that match accepts reach the server, swallows
// the answer, and breaks that connection: the client cannot know what became
// of it.
func (p *Proxy) LoseAnswer(match func(request []byte) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lose = match
}

// Refused is how many connections were turned away while the server was down.
func (p *Proxy) Refused() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.refused
}

// Cut breaks every connection; new ones are served.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close()
	}
}

// SetDown makes the server unreachable, or reachable again.
func (p *Proxy) SetDown(down bool) {
	p.mu.Lock()
	p.down = down
	p.mu.Unlock()
	if down {
		p.Cut()
	}
}

func (p *Proxy) accept() {
	for {
		c, err := p.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			p.wg.Go(func() { p.serve(c) })
		}
	}
}

func (p *Proxy) serve(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", p.target)
	if err != nil || !p.enter(client, server) {
		if server != nil {
			_ = server.Close()
		}
		return
	}
	defer p.leave(client, server)
	swallow := make(chan struct{})
	var once sync.Once
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 64<<10)
		for {
			n, err := server.Read(buf)
			if err != nil {
				_ = client.Close()
				return
			}
			select {
			case <-swallow: // answered, and nobody hears it
				_ = client.Close()
				_ = server.Close()
				return
			default:
			}
			if _, err := client.Write(buf[:n]); err != nil {
				return
			}
		}
	}()
	buf := make([]byte, 64<<10)
	for {
		n, err := client.Read(buf)
		if err != nil {
			break
		}
		if p.loses(buf[:n]) {
			once.Do(func() { close(swallow) })
		}
		if _, err := server.Write(buf[:n]); err != nil {
			break
		}
	}
	_ = server.Close()
	<-done
}

func (p *Proxy) loses(request []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lose == nil || !p.lose(request) {
		return false
	}
	p.lose = nil
	return true
}

func (p *Proxy) enter(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.down {
		p.refused++
		return false
	}
	for _, c := range conns {
		p.conns[c] = struct{}{}
	}
	return true
}

func (p *Proxy) leave(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
		delete(p.conns, c)
	}
}
