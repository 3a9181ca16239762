// Package demo shows the whole on one machine, without a server: a shop that
// places orders in SQLite, a relay in a process of its own, a broker, and a
// consumer that compares what it gets with what was committed. Relay and broker
// can be killed while it runs.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/outrider-dev/outrider/internal/config"
	"github.com/outrider-dev/outrider/internal/daemon"
	"github.com/outrider-dev/outrider/migrate"
)

// Config sets up a demonstration.
type Config struct {
	// Command makes a command that runs this program, killed at the end of
	// ctx. Needed.
	Command func(ctx context.Context, args ...string) *exec.Cmd

	// Out takes the board; Live says that it is a terminal that takes control
	// sequences.
	Out  io.Writer
	Live bool

	// Keys are the keys that are pressed. nil: none.
	Keys <-chan byte

	// Rate is orders per second. 0: 100.
	Rate int

	// For is how long the shop is open. 0: until q is pressed or ctx ends.
	For time.Duration

	// Script is what happens, and when.
	Script []Step

	// Drain is how long the rest may take to arrive, after the shop has
	// closed. 0: 60 s.
	Drain time.Duration
}

// demo is a running demonstration.
type demo struct {
	Config
	board    *board
	ledger   *ledger
	shop     *shop
	broker   *broker
	proxy    *proxy
	relay    *relay
	database string
	dir      string
	stops    int
	poison   chan struct{}
	phase    string
	began    time.Time
}

const (
	// slowWay is how long a slow way is, in each direction.
	slowWay = 150 * time.Millisecond
	// resolveAfter is for how long a blocked key is left for people to see.
	resolveAfter = 1500 * time.Millisecond
)

// Run runs the demonstration and reports how it ended. The error says that it
// could not be run, not that something was lost.
func Run(ctx context.Context, c Config) (Report, error) {
	if c.Rate == 0 {
		c.Rate = 100
	}
	if c.Drain == 0 {
		c.Drain = time.Minute
	}
	if err := checkScript(c.For, c.Script); err != nil {
		return Report{}, err
	}
	dir, err := os.MkdirTemp("", "outrider-demo-")
	if err != nil {
		return Report{}, err
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a folder for temporary files
	d := &demo{
		Config: c, dir: dir, database: filepath.Join(dir, "shop.db"), ledger: newLedger(),
		board: &board{out: c.Out, live: c.Live, begun: time.Now()}, poison: make(chan struct{}, 16),
		began: time.Now(),
	}
	return d.run(ctx)
}

func (d *demo) run(ctx context.Context) (Report, error) {
	// What carries events goes on when the shop has closed.
	carry, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	d.broker = &broker{dir: filepath.Join(d.dir, "broker")}
	if err := d.broker.start(); err != nil {
		return Report{}, fmt.Errorf("broker: %w", err)
	}
	defer d.broker.stop()
	consumer, err := newConsumer(ctx, d.broker.address(), d.ledger)
	if err != nil {
		return Report{}, fmt.Errorf("consumer: %w", err)
	}
	consumed := make(chan struct{})
	go func() { consumer.run(carry); close(consumed) }()
	defer func() { stop(); <-consumed }()
	if d.proxy, err = newProxy(ctx, d.broker.address()); err != nil {
		return Report{}, err
	}
	defer d.proxy.close()
	closeShop, err := d.openShop(ctx)
	if err != nil {
		return Report{}, err
	}
	defer closeShop()
	if d.relay, err = newRelay(d.dir, d.database, d.proxy.address(), d.Command, d.board.say); err != nil {
		return Report{}, err
	}
	if err := d.relay.start(); err != nil { //nolint:contextcheck // the relay is stopped by its input, not killed
		return Report{}, fmt.Errorf("relay: %w", err)
	}
	defer d.relay.stop()
	d.board.open()
	defer d.board.close()
	d.sayHowItEnds()
	if err := d.open(ctx); err != nil {
		return d.report(), err
	}
	d.drain(ctx)
	return d.report(), nil
}

// openShop makes the database with the outbox and the shop's own tables.
func (d *demo) openShop(ctx context.Context) (func(), error) {
	cfg, err := config.Adhoc("sqlite:"+d.database, "") //nolint:contextcheck // a port is looked up in a file, if at all
	if err != nil {
		return nil, err
	}
	db, dialect, err := daemon.OpenDB(cfg.Sources[0])
	if err != nil {
		return nil, err
	}
	// SQLite has one writer anyway.
	db.SetMaxOpenConns(1)
	closeShop := func() { _ = db.Close() }
	if _, err := migrate.Up(ctx, db, migrate.Options{Dialect: dialect}); err != nil {
		closeShop()
		return nil, fmt.Errorf("shop: %w", err)
	}
	if d.shop, err = newShop(ctx, db, d.ledger); err != nil {
		closeShop()
		return nil, fmt.Errorf("shop: %w", err)
	}
	return closeShop, nil
}

// sayHowItEnds: without a terminal there is no q.
func (d *demo) sayHowItEnds() {
	if d.Keys == nil && d.For == 0 {
		d.board.say("there is no terminal to take keys: SIGINT or SIGTERM closes the shop, as --for would after a time")
	}
}

// open runs the shop until its time is over, and what happens meanwhile.
func (d *demo) open(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	failed := make(chan error, 1)
	sold := make(chan struct{})
	go func() { failed <- d.sell(ctx); close(sold) }()
	defer func() { stop(); <-sold }()
	resolved := make(chan struct{})
	go func() { d.resolve(ctx); close(resolved) }()
	defer func() { stop(); <-resolved }()

	d.phase = "open"
	var over <-chan time.Time
	if d.For > 0 {
		over = time.After(d.For)
	}
	redraw := time.NewTicker(d.every())
	defer redraw.Stop()
	script := d.Script
	for {
		var step <-chan time.Time
		if len(script) > 0 {
			step = time.After(time.Until(d.board.begun.Add(script[0].At)))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-over:
			return nil
		case err := <-failed:
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("shop: %w", err)
		case <-step:
			d.do(script[0].Action)
			script = script[1:]
		case k := <-d.Keys:
			if d.key(k) {
				return nil
			}
		case <-redraw.C:
			d.show()
		}
	}
}

// every is how often the board is shown.
func (d *demo) every() time.Duration {
	if d.Live {
		return 100 * time.Millisecond
	}
	return time.Second
}

// sell places orders at the rate.
func (d *demo) sell(ctx context.Context) error {
	tick := time.NewTicker(time.Second / time.Duration(d.Rate))
	defer tick.Stop()
	for {
		poison := false
		select {
		case <-ctx.Done():
			return nil
		case <-d.poison:
			poison = true
		case <-tick.C:
		}
		// An order that was begun is finished: the ledger has it.
		if err := d.shop.place(context.WithoutCancel(ctx), poison); err != nil {
			return err
		}
	}
}

// key does what a key stands for, and reports whether that is to quit.
func (d *demo) key(k byte) bool {
	const ctrlC, ctrlD = 3, 4
	switch k {
	case 'q', ctrlC, ctrlD:
		return true
	case 'k':
		d.do(Kill)
	case 'b':
		if d.broker.up() {
			d.do(StopBroker)
		} else {
			d.do(StartBroker)
		}
	case 'p':
		d.do(Poison)
	case 's':
		if d.proxy.slow() {
			d.do(Fast)
		} else {
			d.do(Slow)
		}
	}
	return false
}

func (d *demo) do(a Action) {
	switch a {
	case Kill:
		d.relay.kill()
	case StopBroker:
		if d.broker.up() {
			d.stops++
			d.board.say("the broker is stopped; events wait, and it costs them no attempts")
			d.broker.stop()
		}
	case StartBroker:
		if !d.broker.up() {
			if err := d.broker.start(); err != nil {
				d.board.say("the broker cannot be started: %v", err)
				return
			}
			d.board.say("the broker is back")
		}
	case Poison:
		select {
		case d.poison <- struct{}{}:
			d.board.say("an order is committed that the broker will refuse: it is larger than %d KiB", maxPayload>>10)
		default: // plenty of it already
		}
	case Slow:
		d.proxy.delay.Store(int64(slowWay))
		d.board.say("the way to the broker takes %v now, and back as well", slowWay)
	case Fast:
		d.proxy.delay.Store(0)
		d.board.say("the way to the broker is short again")
	}
}

func (d *demo) report() Report {
	r := d.ledger.report()
	r.Outages = d.stops
	if first := d.ledger.firstDelivery(); !first.IsZero() {
		r.First = max(1, first.Sub(d.began))
	}
	if d.relay != nil {
		r.Kills = d.relay.killed()
	}
	return r
}

func (d *demo) show() {
	d.board.show(situation{
		Report: d.report(), relay: d.relay.pid(), broker: d.broker.up(), slow: d.proxy.slow(),
		rate: d.Rate, phase: d.phase,
	})
}

// drain lets what is committed arrive: whatever was broken is mended first.
func (d *demo) drain(ctx context.Context) {
	d.phase = "closed; the rest is on its way"
	d.do(StartBroker)
	if d.proxy.slow() {
		d.do(Fast)
	}
	d.board.say("the shop is closed; %d events are on their way", d.report().Waiting)
	// A person who pressed Ctrl-C still sees the end of it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.Drain)
	defer cancel()
	resolved := make(chan struct{})
	go func() { d.resolve(ctx); close(resolved) }()
	defer func() { cancel(); <-resolved }()
	look := time.NewTicker(20 * time.Millisecond)
	defer look.Stop()
	redraw := time.NewTicker(d.every())
	defer redraw.Stop()
	for d.report().Waiting > 0 {
		select {
		case <-ctx.Done():
			d.board.say("%d events did not come within %v", d.report().Waiting, d.Drain)
			return
		case k := <-d.Keys:
			if d.key(k) {
				return
			}
		case <-look.C:
		case <-redraw.C:
			d.show()
		}
	}
	d.show()
}

// errLost says that a promise was broken.
var errLost = errors.New("a promise was broken")

// firstWithin is far more than the first event takes on any machine. What it
// takes on one is in docs/BENCH.md.
const firstWithin = 30 * time.Second

// Verdict is nil if nothing was lost, out of order or sent though rolled back,
// and the first event came in time, where nothing was killed or stopped.
func (r Report) Verdict() error {
	if r.Lost+r.Waiting+r.Breaks+r.Ghosts > 0 {
		return fmt.Errorf("%w: %d lost, %d not delivered in time, %d out of order, %d sent though rolled back",
			errLost, r.Lost, r.Waiting, r.Breaks, r.Ghosts)
	}
	if r.First > firstWithin && r.Kills+r.Outages == 0 {
		return fmt.Errorf("the first event was delivered %.1f s after the start, more than %.0f s", r.First.Seconds(), firstWithin.Seconds())
	}
	return nil
}
