package cli

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/config"
	"github.com/outrider-dev/outrider/internal/daemon"
	"github.com/outrider-dev/outrider/migrate"
)

type migrateCmd struct {
	Up     migrateUpCmd     `cmd:"" help:"Make the tables, or bring them up to this version."`
	Status migrateStatusCmd `cmd:"" help:"Which migrations are applied, and whether somebody changed the tables."`
	Down   migrateDownCmd   `cmd:"" help:"Remove the tables. Refuses while they hold events."`
	Bell   migrateBellCmd   `cmd:"" name:"doorbell" help:"Make or remove the trigger that wakes sleeping relays (PostgreSQL, optional)."`
	SQL    migrateSQLCmd    `cmd:"" name:"sql" help:"Print the statements, and the INSERT that enqueues an event."`
}

// schema are the options that all of them share.
type schema struct {
	selection
	Dialect string `enum:"auto,postgres,sqlite" default:"auto" placeholder:"postgres|sqlite" help:"Kind of database, if neither --db nor --config tells."`
	Payload string `placeholder:"bytea|json" help:"Type of the payload column on PostgreSQL: bytea, the default, takes anything; json is readable in psql. Chosen once: tables that have the other type are an error."`
	Set     string `enum:"stream,rows" default:"stream" placeholder:"stream|rows" help:"Set of tables: stream is what the relay program serves; rows keep their state themselves, are for SQLite and are served by sqlitestore.OpenRows in a program of your own."`
	To      int    `placeholder:"VERSION" help:"Stop at this version. Default: the newest, or for down none."`

	absent int // exit code for a file that is not there; 0: as of any error
}

func (s *schema) options(a *app) (migrate.Options, error) {
	if s.To < 0 {
		return migrate.Options{}, usagef("--to is %d, want a version", s.To)
	}
	o := migrate.Options{To: s.To, Set: migrate.Set(s.Set)}
	switch s.Dialect {
	case "postgres":
		o.Dialect = outrider.Postgres
	case "sqlite":
		o.Dialect = outrider.SQLite
	default:
		if s.DB == "" && s.File == "" {
			return o, usagef("which database? give --db DSN, --config FILE or --dialect")
		}
		src, err := s.one(a)
		if err != nil {
			return o, err
		}
		o.Dialect = outrider.Postgres
		if src.SQLite != nil {
			o.Dialect = outrider.SQLite
		}
	}
	if o.Set == migrate.Rows && o.Dialect != outrider.SQLite {
		return o, usagef("--set rows is for SQLite; PostgreSQL has the stream alone")
	}
	switch {
	case s.Payload == "":
	case s.Payload != "bytea" && s.Payload != "json":
		return o, usagef("--payload is %q, want bytea or json", s.Payload)
	case o.Dialect != outrider.Postgres:
		return o, usagef("--payload %s is for PostgreSQL; SQLite keeps any payload as it is", s.Payload)
	case s.Payload == "json":
		o.Payload = outrider.PayloadJSON
	default:
		o.Payload = outrider.PayloadBytea
	}
	return o, nil
}

// flags give the same tables to another command.
func (s *schema) flags() string {
	if s.Set == string(migrate.Rows) {
		return s.selection.flags() + " --set rows"
	}
	return s.selection.flags()
}

// served is what comes next when tables are there and as they should be: relay
// is the command for those that the program serves.
func (s *schema) served(relay string) string {
	if s.Set == string(migrate.Rows) {
		return "sqlitestore.OpenRows, in a program of your own, serves these tables"
	}
	return relay
}

// existing is open for what makes no sense on a file that is not there: SQLite
// would make an empty one.
func (s *schema) existing(a *app, f func(src config.Source, o migrate.Options, db migrateDB) error) error {
	return s.open(a, func(src config.Source, o migrate.Options, db migrateDB) error {
		if src.SQLite != nil {
			if _, err := os.Stat(string(src.SQLite.Path)); err != nil {
				return &ended{outrider.WithHint(err, "outrider migrate up"+s.flags()+" makes it"), s.absent}
			}
		}
		return f(src, o, db)
	})
}

// open opens the database and hands on what to do with it.
func (s *schema) open(a *app, f func(src config.Source, o migrate.Options, db migrateDB) error) error {
	src, err := s.one(a)
	if err != nil {
		return err
	}
	o, err := s.options(a)
	if err != nil {
		return err
	}
	db, dialect, err := daemon.OpenDB(src)
	if err != nil {
		return err
	}
	defer db.Close() // what was asked for is done
	if s.Dialect != "auto" && o.Dialect != dialect {
		return usagef("--dialect %s, but the database is %s", s.Dialect, dialect)
	}
	return daemon.Explain(f(src, o, db))
}

type stepsView struct {
	Steps []stepView `json:"steps"`
}

type stepView struct {
	Version   int      `json:"version"`
	Name      string   `json:"name"`
	AppliedAt *instant `json:"applied_at,omitempty"`
}

func viewSteps(steps []migrate.Step) stepsView {
	v := stepsView{Steps: []stepView{}}
	for _, s := range steps {
		v.Steps = append(v.Steps, stepView{s.Version, s.Name, timeOrNil(s.AppliedAt)})
	}
	return v
}

func writeSteps(w io.Writer, verb string, steps []migrate.Step, none string) {
	for _, s := range steps {
		fmt.Fprintf(w, "%s %04d %s\n", verb, s.Version, s.Name)
	}
	if len(steps) == 0 {
		fmt.Fprintln(w, none)
	}
}

type migrateUpCmd struct {
	schema
}

func (c *migrateUpCmd) Run(a *app) error {
	return c.open(a, func(_ config.Source, o migrate.Options, db migrateDB) error {
		steps, err := migrate.Up(a.ctx, db, o)
		if errors.Is(err, migrate.ErrNoVersion) {
			return usageOf(err)
		}
		if err != nil {
			return err
		}
		next := "outrider dev" + c.flags() + " --to log:"
		if c.File != "" {
			next = "outrider run -c " + quote(c.File)
		}
		return a.print(viewSteps(steps), func(w io.Writer) {
			writeSteps(w, "applied", steps, "nothing to do: the tables are there")
		}, c.served(next))
	})
}

type migrateDownCmd struct {
	schema
	Force bool `help:"Remove them though they hold events."`
}

func (c *migrateDownCmd) Run(a *app) error {
	return c.existing(a, func(_ config.Source, o migrate.Options, db migrateDB) error {
		o.Force = c.Force
		steps, err := migrate.Down(a.ctx, db, o)
		if errors.Is(err, migrate.ErrNoVersion) {
			return usageOf(err)
		}
		if err != nil {
			return err
		}
		none := "nothing to do: there are no tables"
		if len(steps) == 0 {
			s, err := migrate.Status(a.ctx, db, o)
			if err != nil {
				return err
			}
			if s.Version > 0 {
				none = fmt.Sprintf("nothing to do: the tables are at version %d already", s.Version)
			}
		}
		return a.print(viewSteps(steps), func(w io.Writer) {
			writeSteps(w, "removed", steps, none)
		}, "outrider migrate status"+c.flags())
	})
}

type migrateStatusCmd struct {
	schema
}

func (*migrateStatusCmd) Help() string {
	return "Exits with 0 if a relay of this version can work with the tables, 3 if migrate up is to be run first, since they are missing or older, " +
		"and 4 if they are newer or were changed by something else. 1 is for errors, such as a database that is away."
}

// The exit codes of migrate status alone.
const (
	exitMigrate = 3
	exitDrift   = 4
)

type migrateStatusView struct {
	// State is ok, missing, older, newer or changed.
	State   string   `json:"state"`
	Problem string   `json:"problem,omitempty"`
	Version int      `json:"version"`
	Newest  int      `json:"newest"`
	Drift   []string `json:"drift,omitempty"`
	stepsView
}

func (c *migrateStatusCmd) Run(a *app) error {
	c.absent = exitMigrate
	return c.existing(a, func(_ config.Source, o migrate.Options, db migrateDB) error {
		s, err := migrate.Status(a.ctx, db, o)
		if err != nil {
			return err
		}
		view := migrateStatusView{Version: s.Version, Newest: s.Newest, Drift: s.Drift, stepsView: viewSteps(s.Steps)}
		wrong := migrate.Check(a.ctx, db, o)
		code, next := exitDrift, outrider.Hint(wrong)
		switch {
		case wrong == nil:
			view.State, code, next = "ok", exitOK, c.served("outrider status"+c.flags())
		case errors.Is(wrong, migrate.ErrMissing) && s.Version == 0:
			view.State, code, next = "missing", exitMigrate, "outrider migrate up"+c.flags()
		case errors.Is(wrong, migrate.ErrOlder):
			view.State, code, next = "older", exitMigrate, "outrider migrate up"+c.flags()
		case errors.Is(wrong, migrate.ErrNewer):
			view.State = "newer"
		case errors.Is(wrong, migrate.ErrDrift):
			view.State = "changed"
		default:
			return wrong
		}
		if wrong != nil {
			view.Problem = wrong.Error()
		}
		if err := a.print(view, func(w io.Writer) { writeMigrateStatus(w, s, wrong) }, next); err != nil || code == exitOK {
			return err
		}
		return &ended{code: code}
	})
}

func writeMigrateStatus(w io.Writer, s migrate.State, wrong error) {
	switch {
	case s.Version == 0:
		fmt.Fprintln(w, "there is no outbox in this database")
	case s.Version == s.Newest:
		fmt.Fprintf(w, "version %d, the newest\n", s.Version)
	default:
		fmt.Fprintf(w, "version %d; this program knows %d\n", s.Version, s.Newest)
	}
	for _, x := range s.Steps {
		when := "not applied"
		if !x.AppliedAt.IsZero() {
			when = "applied " + stamp(x.AppliedAt)
		}
		fmt.Fprintf(w, "%04d %s: %s\n", x.Version, x.Name, when)
	}
	for _, d := range s.Drift {
		fmt.Fprintf(w, "changed since: %s\n", d)
	}
	switch {
	case wrong == nil && len(s.Drift) > 0:
		fmt.Fprintln(w, "none of that does harm")
	case errors.Is(wrong, migrate.ErrNewer), errors.Is(wrong, migrate.ErrDrift):
		fmt.Fprintf(w, "no relay of this version starts: %v\n", wrong)
	}
}

type migrateSQLCmd struct {
	schema
}

func (c *migrateSQLCmd) Help() string {
	return "For people who apply statements with a tool of their own: run them in one transaction. No connection is made."
}

func (c *migrateSQLCmd) Run(a *app) error {
	o, err := c.options(a)
	if err != nil {
		return err
	}
	ddl, err := migrate.SQL(o)
	if err != nil {
		return err
	}
	insert, err := migrate.PlainInsert(o)
	if err != nil {
		return err
	}
	view := struct {
		SQL    string `json:"sql"`
		Insert string `json:"insert"`
	}{ddl, insert}
	next := "outrider migrate status --db DSN"
	if o.Set == migrate.Rows {
		next += " --set rows"
	}
	// What comes next is a comment: the output goes into psql as it is.
	if a.json {
		return a.print(view, nil, next)
	}
	_, err = fmt.Fprintf(a.out, "%s-- next: %s\n", ddl, next)
	return err
}

type migrateBellCmd struct {
	schema
	State string `arg:"" optional:"" help:"on makes it, off removes it. Left out: tells whether it is there."`
}

func (c *migrateBellCmd) Run(a *app) error {
	if c.State != "" && c.State != "on" && c.State != "off" {
		return usagef("the doorbell is to be %q, want on or off", c.State)
	}
	return c.existing(a, func(src config.Source, _ migrate.Options, db migrateDB) error {
		if src.Postgres == nil {
			return usagef("the doorbell is for PostgreSQL; SQLite has no notifications")
		}
		if c.State == "" {
			return c.tell(a, db)
		}
		if err := migrate.Doorbell(a.ctx, db, c.State == "on"); err != nil {
			return err
		}
		next := "relays use it with `doorbell: true` in their source's settings"
		if c.State == "off" {
			next = "relays poll; take `doorbell: true` out of their source's settings"
		}
		return a.print(map[string]string{"doorbell": c.State}, func(w io.Writer) { fmt.Fprintf(w, "the doorbell is %s\n", c.State) }, next)
	})
}

// tell says how it is.
func (c *migrateBellCmd) tell(a *app, db migrateDB) error {
	on, err := migrate.HasDoorbell(a.ctx, db)
	if err != nil {
		return err
	}
	is, next := "off", "outrider migrate doorbell on"+c.flags()
	if on {
		is, next = "on", "outrider migrate doorbell off"+c.flags()
	}
	return a.print(map[string]string{"doorbell": is}, func(w io.Writer) { fmt.Fprintf(w, "the doorbell is %s\n", is) }, next)
}
