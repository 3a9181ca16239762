package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"
)

// What is measured runs in a process of its own, so that its processor time and
// memory are its own, and so that it can be killed. The process is this program
// once more; what it is to do is in envChild.
const envChild = "OUTRIDER_BENCH_CHILD"

// childSpec is all that a process is told.
type childSpec struct {
	Role string // see roles
	Name string // of a relay

	DSN   string
	File  string // SQLite instead
	Kafka string // empty: memory
	Topic string

	Events   int    // to be drained; 0: it goes on until it is stopped
	Acks     bool   // report when each event was delivered
	Ignore   string // but for those of this key
	Apart    bool   // the key ignored goes nowhere
	Doorbell bool
	Profile  string
}

// ack says when an event was delivered, in nanoseconds since 1970: processes of
// one machine share its clock.
type ack struct {
	ID string
	At int64
}

// progress is how far a drain has come. The clock begins with the first read
// and ends with the last commit, so connecting, joining and leaving are not in
// it, on either side of a pair.
type progress struct {
	First, Last        int64
	Delivered, Settled int
}

// message is a line that a process writes.
type message struct {
	Ready    bool      `json:",omitempty"`
	Progress *progress `json:",omitempty"`
	Acks     []ack     `json:",omitempty"`
	Peak     uint64    `json:",omitempty"` // bytes, at the end
}

// process is a running child.
type process struct {
	cmd   *exec.Cmd
	stdin io.Closer
	acks  func([]ack) // nil: nobody asks
	ready chan struct{}
	ended chan struct{}

	mu       sync.Mutex // guards the following
	progress progress
	peak     uint64
	err      error // to be read once it has ended
}

// start starts a child. It ends with its standard input, so it does not outlive
// this process.
func start(spec childSpec, acks func([]ack)) (*process, error) {
	text, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{cmd: exec.Command(self), acks: acks, //nolint:noctx // it is stopped in order, see stop
		ready: make(chan struct{}), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), envChild+"="+string(text))
	p.cmd.Stderr = os.Stderr
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	p.stdin = stdin
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go p.follow(out)
	return p, nil
}

// follow takes what the child says until its end.
func (p *process) follow(out io.Reader) {
	defer close(p.ended)
	for d := json.NewDecoder(out); ; {
		var m message
		if d.Decode(&m) != nil { // its end; what it means is known to Wait
			break
		}
		p.take(m)
	}
	err := p.cmd.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = err
}

func (p *process) take(m message) {
	if m.Ready {
		close(p.ready)
	}
	if m.Acks != nil && p.acks != nil {
		p.acks(m.Acks)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.peak = max(p.peak, m.Peak)
	if m.Progress != nil {
		p.progress = *m.Progress
	}
}

// patience bounds what takes seconds.
const patience = 2 * time.Minute

// await waits until the child does its work.
func (p *process) await(ctx context.Context) error {
	select {
	case <-p.ready:
		return nil
	case <-p.ended:
		return p.endedEarly()
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(patience):
		return fmt.Errorf("a relay does nothing for %v", patience)
	}
}

func (p *process) endedEarly() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return errors.Join(errors.New("a process ended early"), p.err)
}

// stop ends the child in order and gives what it has used. It may be called
// again.
func (p *process) stop() (sample, error) {
	_ = p.stdin.Close() // fails if it has ended
	select {
	case <-p.ended:
	case <-time.After(patience):
		p.kill()
		return nil, fmt.Errorf("a process did not stop within %v", patience)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return nil, p.err
	}
	s := sample{cpuSeconds: (p.cmd.ProcessState.UserTime() + p.cmd.ProcessState.SystemTime()).Seconds()}
	if p.peak > 0 {
		s[peakMiB] = float64(p.peak) / (1 << 20)
	}
	return s, nil
}

// kill ends the child with SIGKILL.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // fails if it has ended
	<-p.ended
}

func (p *process) at() progress {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.progress
}

// drain runs children until they have settled n events, and measures them.
func drain(ctx context.Context, n int, specs ...childSpec) (sample, error) {
	var all []*process
	defer func() {
		for _, p := range all {
			_, _ = p.stop() // on the way out of an error
		}
	}()
	for _, spec := range specs {
		spec.Events = n
		p, err := start(spec, nil)
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	sum, err := settled(ctx, n, all)
	if err != nil {
		return nil, err
	}
	out := sample{perSecond: float64(n) / time.Duration(sum.Last-sum.First).Seconds()}
	for _, p := range all {
		used, err := p.stop()
		if err != nil {
			return nil, err
		}
		out[cpuSeconds] += used[cpuSeconds]
		if v, ok := used[peakMiB]; ok {
			out[peakMiB] += v
		}
	}
	return out, nil
}

// settled waits until n events are.
func settled(ctx context.Context, n int, all []*process) (sum progress, err error) {
	limit := time.NewTimer(10 * time.Minute)
	defer limit.Stop()
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	for {
		sum = progress{}
		over := 0
		for _, p := range all {
			ended := false
			select {
			case <-p.ended:
				ended = true
				over++
			default:
			}
			if at := p.at(); at.First > 0 {
				if sum.First == 0 || at.First < sum.First {
					sum.First = at.First
				}
				sum.Last = max(sum.Last, at.Last)
				sum.Delivered += at.Delivered
				sum.Settled += at.Settled
			} else if ended {
				return sum, p.endedEarly()
			}
		}
		if sum.Delivered >= n && sum.Settled >= n {
			return sum, nil
		}
		if over == len(all) {
			return sum, fmt.Errorf("%d of %d events were settled: %w", sum.Settled, n, all[0].endedEarly())
		}
		select {
		case <-look.C:
		case <-limit.C:
			return sum, fmt.Errorf("%d of %d events are settled after 10 minutes", sum.Settled, n)
		case <-ctx.Done():
			return sum, ctx.Err()
		}
	}
}
