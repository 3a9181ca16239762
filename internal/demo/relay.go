package demo

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// command makes a command that runs this program, killed at the end of ctx.
type command func(ctx context.Context, args ...string) *exec.Cmd

// relay is the relay as a process of its own, the same program with run -c. It
// is started again whenever it ends.
type relay struct {
	command command
	file    string // its configuration
	log     *os.File
	events  func(format string, args ...any)

	mu      sync.Mutex
	cmd     *exec.Cmd
	stdin   io.Closer
	stopped bool
	kills   int
	done    chan struct{}
}

// restartAfter is how long a supervisor takes to start it again.
const restartAfter = 300 * time.Millisecond

// relayFile is the configuration of the relay. Leases are short, so that the
// demonstration is.
const relayFile = `listen: "off"
relay: {lease_ttl: 2s, grace: 500ms}
sources:
  - name: shop
    sqlite: {path: %q}
destinations:
  - name: broker
    nats: {urls: [%q], ack_timeout: 2s}
    to: %q
    from: earliest
    breaker: {base: 100ms, cap: 500ms}
`

func newRelay(dir, database, address string, command command, events func(string, ...any)) (*relay, error) {
	file := filepath.Join(dir, "outrider.yaml")
	text := fmt.Sprintf(relayFile, database, "nats://"+address, subject)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(dir, "relay.log"))
	if err != nil {
		return nil, err
	}
	return &relay{command: command, file: file, log: log, events: events, done: make(chan struct{})}, nil
}

// start starts the process, which ends with its standard input: so it does not
// outlive the demonstration, however that ends.
func (r *relay) start() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	cmd := r.command(context.Background(), "run", "-c", r.file, "--until-eof")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	cmd.Stderr = r.log
	if err := cmd.Start(); err != nil {
		return err
	}
	r.cmd, r.stdin = cmd, stdin
	go r.watch(cmd)
	return nil
}

// watch starts the process again when it has ended.
func (r *relay) watch(cmd *exec.Cmd) {
	err := cmd.Wait()
	r.mu.Lock()
	stopped := r.stopped
	r.cmd = nil
	r.mu.Unlock()
	if stopped {
		close(r.done)
		return
	}
	r.events("%s; it is started again%s", ending(err), r.lastWords())
	<-time.After(restartAfter)
	if err := r.start(); err != nil {
		r.events("the relay cannot be started: %v", err)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped && r.cmd != nil { // asked to stop in between
		_ = r.cmd.Process.Signal(syscall.SIGTERM)
	}
}

// ending says how the process ended. One that was told to by a signal to all of
// a terminal's processes has done its work; what is left needs another.
func ending(err error) string {
	if err == nil {
		return "the relay was asked to stop by somebody else, and has"
	}
	return fmt.Sprintf("the relay has ended (%v)", err)
}

// lastWords are what the relay said of why it ended, if it did.
func (r *relay) lastWords() string {
	data, err := os.ReadFile(r.log.Name())
	if err != nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	for _, l := range slices.Backward(lines[max(0, len(lines)-3):]) {
		if strings.HasPrefix(l, "error: ") {
			return ": " + l
		}
	}
	return ""
}

// kill is kill -9.
func (r *relay) kill() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cmd != nil {
		r.kills++
		r.events("kill -9 of the relay, pid %d", r.cmd.Process.Pid)
		_ = r.cmd.Process.Kill() // it may have ended already
	}
}

// pid is 0 while there is none.
func (r *relay) pid() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cmd == nil {
		return 0
	}
	return r.cmd.Process.Pid
}

func (r *relay) killed() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.kills
}

// stop ends it softly, and hard if that takes long.
func (r *relay) stop() {
	r.mu.Lock()
	r.stopped = true
	cmd := r.cmd
	r.mu.Unlock()
	if cmd != nil {
		_ = cmd.Process.Signal(syscall.SIGTERM)
	}
	select {
	case <-r.done:
	case <-time.After(stopLimit):
		r.mu.Lock()
		if r.cmd != nil {
			_ = r.cmd.Process.Kill()
		}
		r.mu.Unlock()
	}
	_ = r.log.Close()
}

// stopLimit bounds the end of the relay.
const stopLimit = 10 * time.Second
