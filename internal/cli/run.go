package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/config"
	"github.com/outrider-dev/outrider/internal/daemon"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/store"
)

type runCmd struct {
	File string `name:"config" short:"c" env:"OUTRIDER_CONFIG" required:"" placeholder:"FILE" help:"The configuration file; docs/CONFIG.md tells its keys."`

	// For whoever starts it as a child, so that it does not stay behind.
	UntilEOF bool `name:"until-eof" hidden:"" help:"Stop at the end of standard input."`
}

func (c *runCmd) Help() string {
	return "SIGTERM or Ctrl-C stops softly: nothing new is taken, what was begun may end within relay.soft_timeout. " +
		"A second signal cuts at once. Events are lost by neither."
}

func (c *runCmd) Run(a *app) error {
	cfg, err := config.Load(c.File)
	if err != nil {
		return err
	}
	a.redact = cfg.Redact
	if c.UntilEOF {
		ctx, stop := context.WithCancel(a.ctx)
		defer stop()
		a.ctx = ctx
		go func() {
			_, _ = io.Copy(io.Discard, a.in) // the end is all that counts
			stop()
		}()
	}
	return a.relay(cfg, false, "outrider status -c "+quote(c.File))
}

// oneSignal is within which time several signals are one: timeout(1) and others
// send theirs to the process and to its group.
const oneSignal = 250 * time.Millisecond

// relay runs a daemon until a signal or the end of the context.
func (a *app) relay(cfg *config.Config, strict bool, next string) error {
	log := a.logger(cfg.Log)
	ctx, stop := context.WithCancel(a.ctx)
	defer stop()
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	cut := make(chan struct{})
	over := make(chan struct{})
	defer close(over)
	go func() {
		var first time.Time
		for {
			select {
			case s := <-signals:
				switch {
				case first.IsZero():
					first = time.Now()
					log.Info("stopping; a second signal cuts off what is under way", "signal", s.String())
					stop()
				case time.Since(first) >= oneSignal:
					log.Warn("cutting off", "signal", s.String())
					close(cut)
					return
				}
			case <-over:
				return
			}
		}
	}()
	d, err := daemon.New(ctx, daemon.Options{Config: cfg, Logger: log, Stdout: a.out, Version: version(), Next: next, Strict: strict})
	if err != nil {
		if ctx.Err() != nil && a.ctx.Err() == nil {
			return errors.New("stopped by a signal while starting")
		}
		return err
	}
	go func() {
		select {
		case <-cut:
			d.Cut()
		case <-over:
		}
	}()
	return d.Run(ctx)
}

type devCmd struct {
	DB string `name:"db" env:"OUTRIDER_DB" required:"" placeholder:"DSN" help:"The database: postgres://user@host:5432/name or sqlite:path/to/file.db."`
	To string `name:"to" required:"" placeholder:"URL" help:"Where events go: kafka://host:9092/topic, nats://host:4222/subject, log: (standard output) or log:FILE. Topic and subject may have fields of the event, as in {aggregate_type}-events; they have to exist there, a subject in some stream."`
}

func (c *devCmd) Help() string {
	return "Makes the tables if the database has none, then sends every event in it, oldest first, and each new one as it is committed, until Ctrl-C. " +
		"Where it stopped it goes on the next time, under the destination name dev. " +
		"If the database or the destination cannot be reached at the start it ends with an error, where run would wait for the destination. " +
		"Its messages go to standard error; with --to log: the events go to standard output, a line of JSON each.\n\n" +
		"For instance: outrider dev --db sqlite:shop.db --to log:"
}

func (c *devCmd) Run(a *app) error {
	cfg, err := config.Adhoc(c.DB, c.To)
	if err != nil {
		return usageOf(err)
	}
	a.redact = cfg.Redact
	if err := c.prepare(a, cfg.Sources[0]); err != nil {
		return err
	}
	a.say("%s -> %s", config.RedactDSN(c.DB), daemon.Place(cfg.Destinations[0]))
	s := selection{DB: c.DB}
	if err := c.tellFailed(a, cfg, &s); err != nil {
		return err
	}
	return a.relay(cfg, true, "outrider status"+s.flags())
}

// prepare makes the tables in a database that has none.
func (c *devCmd) prepare(a *app, src config.Source) error {
	db, dialect, err := daemon.OpenDB(src)
	if err != nil {
		return err
	}
	defer db.Close() // the migration has told
	o := migrate.Options{Dialect: dialect}
	err = migrate.Check(a.ctx, db, o)
	if !errors.Is(err, migrate.ErrMissing) {
		return daemon.Explain(err)
	}
	a.say("%s has no outbox yet: making its tables (outrider migrate sql --dialect %s shows them)",
		config.RedactDSN(c.DB), dialect)
	_, err = migrate.Up(a.ctx, db, o)
	return daemon.Explain(err)
}

// tellFailed says that there are events which dev will not send: those that
// failed before, perhaps on their way to another --to.
func (c *devCmd) tellFailed(a *app, cfg *config.Config, s *selection) error {
	return withSource(a, cfg.Sources[0], "be looked into", func(i store.Inspector) error {
		ctx, cancel := context.WithTimeout(a.ctx, openTimeout)
		defer cancel()
		st, err := i.Status(ctx)
		if err != nil {
			return err
		}
		for _, d := range st.Destinations {
			if d.Name == cfg.Destinations[0].Name && d.Failed.N > 0 {
				a.say("earlier runs left FAILED events: %s. They are not sent again by themselves, wherever --to leads now, and hold back their keys; see: outrider list --state failed%s", count(d.Failed), s.flags())
			}
		}
		return nil
	})
}

// usageOf marks an error as one of the call, keeping its hint.
func usageOf(err error) error {
	return outrider.WithHint(&usageError{err}, outrider.Hint(err))
}
