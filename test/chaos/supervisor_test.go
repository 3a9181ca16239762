//go:build linux

package chaos_test

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"
)

// supervisor runs relays as processes, and starts each again as soon as it has
// ended.
type supervisor struct {
	t    testing.TB
	spec relaySpec
	dir  string

	mu       sync.Mutex
	stopping bool
	slots    []*process
	kills    int
	poisoned int // ended by a message
	alone    int // ended with one event in hand
	unjoined int // ended before they had joined, as while the database was away
	starts   int
	// What the processes that have ended may have left to be sent again.
	bound, most int64
	fenced      int64
	watched     sync.WaitGroup
}

// process is one life of a relay.
type process struct {
	slot   int
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	gauges *gauges
	log    string
	ended  chan struct{}
	killed bool // by kill -9; to be read once it has ended
}

// supervise starts n relays, and stops them at the end of the test.
func supervise(t testing.TB, spec relaySpec, n int) *supervisor {
	t.Helper()
	s := &supervisor{t: t, spec: spec, dir: t.TempDir(), slots: make([]*process, n)}
	t.Cleanup(s.stop)
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range n {
		s.start(i)
	}
	return s
}

// start is called with mu held.
func (s *supervisor) start(slot int) {
	s.starts++
	name := "relay-" + strconv.Itoa(slot) + "-" + strconv.Itoa(s.starts)
	p := &process{slot: slot, ended: make(chan struct{}), log: filepath.Join(s.dir, name+".log")}
	spec := s.spec
	spec.Name, spec.Gauges = name, filepath.Join(s.dir, name+".gauges")
	err := func() (err error) {
		if p.gauges, err = mapGauges(spec.Gauges); err != nil {
			return err
		}
		text, err := json.Marshal(spec)
		if err != nil {
			return err
		}
		log, err := os.Create(p.log)
		if err != nil {
			return err
		}
		defer log.Close()
		args := []string{os.Args[0]}
		if spec.SlowDisk {
			args = append(slowDisk(filepath.Join(s.dir, name+".trace")), args...)
		}
		p.cmd = exec.Command(args[0], args[1:]...)
		p.cmd.Env = append(os.Environ(), envRelay+"="+string(text))
		p.cmd.Stdout, p.cmd.Stderr = log, log
		if p.stdin, err = p.cmd.StdinPipe(); err != nil {
			return err
		}
		return p.cmd.Start()
	}()
	if err != nil {
		s.t.Errorf("start a relay: %v", err)
		return
	}
	s.slots[slot] = p
	s.watched.Go(func() { s.watch(p) })
}

// watch waits for the end of a process, takes note of what it had in hand, and
// starts the next one.
func (s *supervisor) watch(p *process) {
	err := p.cmd.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	defer close(p.ended)
	s.bound += p.gauges.InHand.Load() + p.gauges.Unknown.Load()
	s.most = max(s.most, p.gauges.Most.Load())
	s.fenced += p.gauges.Fenced.Load()
	if p.gauges.InHand.Load() == 1 {
		s.alone++
	}
	status, _ := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	switch {
	case status.Signaled() && status.Signal() == syscall.SIGKILL:
		s.kills++
		p.killed = true
	case status.Exited() && status.ExitStatus() == poisonExit:
		s.poisoned++
	case s.stopping && err == nil:
		return
	case p.gauges.Joined.Load() == 0:
		s.unjoined++
	default:
		s.t.Errorf("a relay ended by itself: %v\n%s", err, p.tail())
	}
	if !s.stopping {
		s.start(p.slot)
	}
}

// tail is the end of the process's log.
func (p *process) tail() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-4000):])
}

// deaths is how many processes were killed, by whom ever.
func (s *supervisor) deaths() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.kills + s.poisoned
}

// get is the running process of a slot.
func (s *supervisor) get(slot int) *process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.slots[slot]
}

// arm has the process send itself a signal.
func (p *process) arm(sig syscall.Signal, at point, n int) {
	_, _ = fmt.Fprintln(p.stdin, int(sig), at, n) // fails if it has ended, which is waited for
}

func (p *process) kill() { _ = p.cmd.Process.Kill() } // fails if it has ended

func (p *process) hasEnded() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// stopped reports whether the process is halted by SIGSTOP.
func (p *process) stopped() bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		return false
	}
	_, rest, _ := cutLast(string(stat), ") ")
	return len(rest) > 0 && rest[0] == 'T'
}

// stop ends all relays softly. It may be called again.
func (s *supervisor) stop() {
	s.mu.Lock()
	s.stopping = true
	for _, p := range s.slots {
		if p != nil {
			_ = p.stdin.Close()
			_ = p.cmd.Process.Signal(syscall.SIGCONT)
		}
	}
	s.mu.Unlock()
	done := make(chan struct{})
	go func() { s.watched.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(patience):
		s.mu.Lock()
		for _, p := range s.slots {
			if p != nil && !p.hasEnded() {
				s.t.Errorf("a relay did not stop\n%s", p.tail())
				p.kill()
			}
		}
		s.mu.Unlock()
		<-done
	}
}

// logs shows what the relays had to say.
func (s *supervisor) logs() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.slots {
		if p != nil {
			s.t.Logf("%s\n%s", filepath.Base(p.log), p.tail())
		}
	}
}
