// Package migrate makes and checks the outbox's tables.
//
// It speaks through database/sql and imports no driver. All statements are sent
// without parameters, so they work in any protocol mode of a driver, and locks
// last no longer than a transaction, so they work behind a transaction pooler.
package migrate

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outrider-dev/outrider"
)

// What Check, Up and Down find, for errors.Is. The errors themselves say more and carry a
// hint (outrider.Hint).
var (
	// ErrMissing: the tables have not been made.
	ErrMissing = errors.New("the outbox has not been migrated")
	// ErrOlder: migrations are still to be applied.
	ErrOlder = errors.New("the outbox's schema is older than this program")
	// ErrNewer: migrations were applied that this program doesn't know.
	ErrNewer = errors.New("the outbox's schema is newer than this program")
	// ErrDrift: the tables are not as the migrations left them.
	ErrDrift = errors.New("the outbox's schema was changed by something else")
	// ErrPending: Down would remove events.
	ErrPending = errors.New("the outbox still holds events")
	// ErrNoVersion: Options.To is a version that this program doesn't know.
	ErrNoVersion = errors.New("there is no such version")
)

// Set is one of the table sets that a dialect has.
type Set string

const (
	// Stream is the native outbox; the zero value means it too.
	Stream Set = "stream"
	// Rows is the outbox whose rows carry their state. SQLite only.
	Rows Set = "rows"
)

// Options say what is to be migrated.
type Options struct {
	// Dialect of the database. Needed.
	Dialect outrider.Dialect

	// Set of tables. Default: Stream.
	Set Set

	// Payload is the type of the payload column on PostgreSQL. Zero means
	// bytea where the table is made, and whatever is there elsewhere. It can't
	// be changed later.
	Payload outrider.PayloadKind

	// To is the version at which Up and Down end. 0 means the newest for Up,
	// and for Down that nothing is left.
	To int

	// Force makes Down remove tables that hold events.
	Force bool
}

// Step is one migration.
type Step struct {
	Version int
	Name    string
	// AppliedAt is when it was applied, by the database's clock; zero: it was
	// not.
	AppliedAt time.Time
}

// State says how the database stands.
type State struct {
	// Version is the newest one applied; 0: none.
	Version int
	// Newest is the newest one that this program knows.
	Newest int
	// Steps are all that are known or applied, in order.
	Steps []Step
	// Drift lists what differs from how the migrations left the tables, a line
	// each. Among them is what Check tolerates: additions that do no harm, such
	// as an index that isn't unique, and views, which are for people.
	Drift []string
}

// Up applies what is not yet applied and returns it. Each migration is one
// transaction, under a lock: of two programs that call Up at once, one waits and
// finds nothing left to do.
func Up(ctx context.Context, db *sql.DB, o Options) ([]Step, error) {
	m, err := newMigrator(o)
	if err != nil {
		return nil, err
	}
	if err := m.known(o.To); err != nil {
		return nil, fmt.Errorf("migrate up: %w", err)
	}
	last := o.To
	if last == 0 {
		last = len(m.files)
	}
	var done []Step
	for {
		step, err := m.up(ctx, db, last)
		if err != nil {
			return done, m.explain(fmt.Errorf("migrate up: %w", err))
		}
		if step == nil {
			return done, nil
		}
		done = append(done, *step)
	}
}

// Down takes back migrations down to Options.To and returns them, newest first.
// It refuses with ErrPending while the tables hold events, delivered or not,
// unless Options.Force is set.
func Down(ctx context.Context, db *sql.DB, o Options) ([]Step, error) {
	m, err := newMigrator(o)
	if err != nil {
		return nil, err
	}
	if err := m.known(o.To); err != nil {
		return nil, fmt.Errorf("migrate down: %w", err)
	}
	var done []Step
	for {
		step, err := m.down(ctx, db, o.To)
		if err != nil {
			return done, m.explain(fmt.Errorf("migrate down: %w", err))
		}
		if step == nil {
			return done, nil
		}
		done = append(done, *step)
	}
}

// known refuses a version that does not exist.
func (m *migrator) known(version int) error {
	if version > len(m.files) {
		return fmt.Errorf("%w: %d, the newest is %d", ErrNoVersion, version, len(m.files))
	}
	return nil
}

// Status tells how the database stands. It takes no lock and changes nothing.
func Status(ctx context.Context, db *sql.DB, o Options) (State, error) {
	m, err := newMigrator(o)
	if err != nil {
		return State{}, err
	}
	s, err := m.read(ctx, db)
	if err != nil {
		return State{}, m.explain(fmt.Errorf("migrate status: %w", err))
	}
	st := State{Version: s.version(), Newest: len(m.files), Steps: m.steps(s)}
	for _, d := range s.drift {
		st.Drift = append(st.Drift, d.String())
	}
	return st, nil
}

// Check says whether this program can work with the tables as they are: nil, or
// an error that wraps one of ErrMissing, ErrOlder, ErrNewer and ErrDrift and
// carries a hint. It takes no lock and changes nothing; stores call it when
// they start.
func Check(ctx context.Context, db *sql.DB, o Options) error {
	m, err := newMigrator(o)
	if err != nil {
		return err
	}
	s, err := m.read(ctx, db)
	if err != nil {
		return m.explain(fmt.Errorf("check the outbox's schema: %w", err))
	}
	return m.check(s)
}

// steps merges what is known with what was applied.
func (m *migrator) steps(s *state) []Step {
	var out []Step
	for _, f := range m.files {
		out = append(out, Step{Version: f.version, Name: f.name})
	}
	for _, a := range s.applied {
		if a.version < 1 || a.version > len(out) {
			out = append(out, Step{Version: a.version, Name: a.name, AppliedAt: a.at})
			continue
		}
		out[a.version-1].AppliedAt = a.at
	}
	slices.SortFunc(out, func(a, b Step) int { return a.Version - b.Version })
	return out
}

func (m *migrator) check(s *state) error {
	if err := m.compare(s); err != nil {
		return err
	}
	if v := s.version(); v == 0 && s.tables == 0 {
		return outrider.WithHint(fmt.Errorf("%w: there is no table %s", ErrMissing, m.events),
			"run: "+m.command("up")+"; if it was, look at the database and the search_path that the connection names, and at the role's USAGE on the schema")
	} else if v == 0 {
		return outrider.WithHint(fmt.Errorf("%w: table %s exists, but outbox_migrations has no word of it", ErrMissing, m.events),
			"run the statements on outbox_migrations that "+m.command("sql")+" prints")
	} else if v < len(m.files) {
		return outrider.WithHint(fmt.Errorf("%w: it has version %d, version %d is needed", ErrOlder, v, len(m.files)),
			"run: "+m.command("up"))
	}
	return m.checkDrift(s)
}

// compare looks for migrations that are not those of this program. Up and Down
// stop at these too: they would build on something unknown.
func (m *migrator) compare(s *state) error {
	if v := s.version(); v > len(m.files) {
		return outrider.WithHint(fmt.Errorf("%w: it has version %d, this program knows %d", ErrNewer, v, len(m.files)),
			"use the newer release of outrider that migrated it")
	}
	for i, a := range s.applied {
		if a.version != i+1 {
			return outrider.WithHint(fmt.Errorf("%w: outbox_migrations lacks version %d but has %d", ErrDrift, i+1, a.version),
				"restore the missing row from a backup, or migrate an empty database")
		}
		if f := m.files[i]; a.checksum != f.checksum {
			return outrider.WithHint(fmt.Errorf("%w: version %d (%s) was applied from another text: checksum %.12s is recorded, %.12s expected",
				ErrDrift, f.version, f.name, a.checksum, f.checksum),
				"use the release of outrider that migrated it, or migrate an empty database")
		}
	}
	return m.checkPayload(s)
}

func (m *migrator) checkDrift(s *state) error {
	var found []difference
	for _, d := range s.drift {
		if !d.harmless {
			found = append(found, d)
		}
	}
	if len(found) == 0 {
		return nil
	}
	err := fmt.Errorf("%w: %s", ErrDrift, found[0])
	if n := len(found) - 1; n > 0 {
		err = fmt.Errorf("%w (and %d more)", err, n)
	}
	return outrider.WithHint(err, "undo the change; "+m.command("status")+" lists every difference and "+m.command("sql")+" prints the definitions")
}

// command is how the command line tool is called for these options.
func (m *migrator) command(verb string) string {
	if m.Set == Rows {
		return "outrider migrate " + verb + " --set rows"
	}
	return "outrider migrate " + verb
}
