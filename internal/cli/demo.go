package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/term"

	"github.com/outrider-dev/outrider/internal/demo"
)

type demoCmd struct {
	For    time.Duration `placeholder:"DURATION" help:"Close the shop after this time. Default: when q is pressed; without a terminal, when it is interrupted."`
	Script string        `placeholder:"STEPS" help:"What happens, and when: \"2s kill, 4s stop-broker, 6s start-broker, 7s poison, 8s slow, 9s fast\"."`
	Assert bool          `help:"Fail if anything was lost, out of order, or sent though it was rolled back, or if the first event took more than 30 s with nothing killed or stopped."`
	Rate   int           `default:"100" help:"Orders per second, 1 to 1000."`
}

func (*demoCmd) Help() string {
	return "A shop places orders in a SQLite file, each in one transaction with its event. A relay, a process of its own, " +
		"carries the events to a broker inside this program, and a consumer compares what arrives with what was committed. " +
		"Kill the relay, stop the broker, send a poison message, and watch what is lost: nothing."
}

type demoView struct {
	demo.Report
	First float64 `json:"first_delivery_seconds"` // from the start; 0: none
	P50   float64 `json:"latency_p50_seconds"`
	P95   float64 `json:"latency_p95_seconds"`
	P99   float64 `json:"latency_p99_seconds"`
	OK    bool    `json:"ok"`
}

func (c *demoCmd) Run(a *app) error {
	script, err := demo.ParseScript(c.Script)
	if err != nil {
		return &usageError{fmt.Errorf("--script: %w", err)}
	}
	if c.Rate < 1 || c.Rate > 1000 {
		return usagef("--rate is %d, want 1 to 1000", c.Rate)
	}
	if c.For < 0 {
		return usagef("--for is %v, want a duration", c.For)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(a.ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	keys, live, restore := a.terminal()
	defer restore()
	out := a.out
	if a.json {
		out = a.err // the report alone goes to standard output
	}
	report, err := demo.Run(ctx, demo.Config{
		Command: func(ctx context.Context, args ...string) *exec.Cmd { return exec.CommandContext(ctx, self, args...) },
		Out:     out, Live: live, Keys: keys, Rate: c.Rate, For: c.For, Script: script,
	})
	restore()
	if errors.Is(err, demo.ErrScript) {
		return &usageError{err}
	}
	if err != nil {
		return err
	}
	verdict := report.Verdict()
	view := demoView{report, seconds(report.First), seconds(report.P50), seconds(report.P95), seconds(report.P99), verdict == nil}
	if err := a.print(view, func(w io.Writer) { writeDemo(w, view) }, ""); err != nil {
		return err
	}
	if c.Assert {
		return verdict
	}
	return nil
}

func writeDemo(w io.Writer, v demoView) {
	table(w,
		[]string{"committed", fmt.Sprint(v.Committed), "lost", fmt.Sprint(v.Lost + v.Waiting)},
		[]string{"delivered", fmt.Sprint(v.Delivered), "order breaks", fmt.Sprint(v.Breaks)},
		[]string{"given up", fmt.Sprint(v.Skipped), "duplicates", fmt.Sprint(v.Duplicates)},
		[]string{"rolled back", fmt.Sprint(v.RolledBack), "of them sent", fmt.Sprint(v.Ghosts)},
	)
	if v.First > 0 {
		fmt.Fprintf(w, "the first event was delivered %.1f s after the start\n", v.First)
	}
	fmt.Fprintf(w, "the relay was killed %s, the broker stopped %s\n", times(v.Kills), times(v.Outages))
	fmt.Fprint(w, `
The same on your own database:
  outrider migrate up --db postgres://user@localhost:5432/app
  outrider dev --db postgres://user@localhost:5432/app --to log:
  outrider status --db postgres://user@localhost:5432/app
`)
}

func times(n int) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}

// terminal makes keys readable one by one, where both ends are a terminal.
// restore may be called twice.
func (a *app) terminal() (keys <-chan byte, live bool, restore func()) {
	none := func() {}
	in, ok := a.in.(*os.File)
	out, ok2 := a.out.(*os.File)
	if a.json || !ok || !ok2 || !term.IsTerminal(int(in.Fd())) || !term.IsTerminal(int(out.Fd())) {
		return nil, false, none
	}
	before, err := term.MakeRaw(int(in.Fd()))
	if err != nil {
		return nil, false, none
	}
	pressed := make(chan byte)
	done := make(chan struct{})
	// It reads until the process ends: a read from a terminal cannot be cut.
	go func() {
		var b [1]byte
		for {
			if n, err := in.Read(b[:]); err != nil || n == 0 {
				return
			}
			select {
			case pressed <- b[0]:
			case <-done:
				return
			}
		}
	}()
	restored := false
	return pressed, true, func() {
		if !restored {
			restored = true
			close(done)
			_ = term.Restore(int(in.Fd()), before)
		}
	}
}
