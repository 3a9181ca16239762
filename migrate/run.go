package migrate

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/outrider-dev/outrider"
)

// dialect is what databases differ in.
type dialect interface {
	// lock begins a transaction that no two runners are in at once.
	lock(ctx context.Context, c *sql.Conn) (unlock func(), err error)
	// exists is a query for how many of these tables there are.
	exists(tables ...string) string
	// createMigrations is the DDL of outbox_migrations.
	createMigrations() string
	// appliedMicros is an expression: applied_at in microseconds since 1970.
	appliedMicros() string
	// fingerprintSQL is a scalar subquery that describes these tables.
	fingerprintSQL(tables []string) string
	// lockTable keeps others from inserting into a table, until the end of the
	// transaction; "" where they can't anyway.
	lockTable(table string) string
	placeholders() string
}

// querier is what *sql.DB and *sql.Conn have in common.
type querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// applied is a row of outbox_migrations.
type applied struct {
	version     int
	name        string
	checksum    string
	fingerprint string
	at          time.Time
}

// state is what is known of a database.
type state struct {
	recorded bool // outbox_migrations exists
	tables   int  // how many tables of the newest version exist
	applied  []applied
	drift    []difference // from the newest applied version's tables
}

func (s *state) version() int {
	if len(s.applied) == 0 {
		return 0
	}
	return s.applied[len(s.applied)-1].version
}

// read gathers the state with plain reads.
func (m *migrator) read(ctx context.Context, q querier) (*state, error) {
	s, err := m.history(ctx, q)
	if err != nil {
		return nil, err
	}
	newest := m.files[len(m.files)-1]
	if err := q.QueryRowContext(ctx, m.exists(newest.tables...)).Scan(&s.tables); err != nil {
		return nil, err
	}
	if v := s.version(); v == 0 || v > len(m.files) {
		return s, nil
	}
	var now string
	tables := m.files[s.version()-1].tables
	if err := q.QueryRowContext(ctx, "select "+m.fingerprintSQL(tables)).Scan(&now); err != nil {
		return nil, err
	}
	s.drift = differences(s.applied[len(s.applied)-1].fingerprint, now)
	return s, nil
}

// history reads outbox_migrations alone.
func (m *migrator) history(ctx context.Context, q querier) (*state, error) {
	s := &state{}
	var n int
	if err := q.QueryRowContext(ctx, m.exists("outbox_migrations")).Scan(&n); err != nil {
		return nil, err
	}
	if s.recorded = n > 0; !s.recorded {
		return s, nil
	}
	rows, err := q.QueryContext(ctx, fmt.Sprintf(
		"select version, name, checksum, fingerprint, %s from outbox_migrations where set_name = '%s' order by version", m.appliedMicros(), m.Set))
	if err != nil {
		return nil, err
	}
	defer rows.Close() // Err below tells
	for rows.Next() {
		var a applied
		var micros int64
		if err := rows.Scan(&a.version, &a.name, &a.checksum, &a.fingerprint, &micros); err != nil {
			return nil, err
		}
		a.at = time.UnixMicro(micros).UTC()
		s.applied = append(s.applied, a)
	}
	return s, rows.Err()
}

// up applies the next migration up to last; nil: there is none.
func (m *migrator) up(ctx context.Context, db *sql.DB, last int) (*Step, error) {
	var step *Step
	err := m.transact(ctx, db, func(c *sql.Conn) error {
		s, err := m.history(ctx, c)
		if err != nil {
			return err
		}
		if err := m.compare(s); err != nil {
			return err
		}
		if s.version() >= last {
			return nil
		}
		if err := m.refuseUnknown(ctx, c, s); err != nil {
			return err
		}
		if !s.recorded {
			if _, err := c.ExecContext(ctx, m.createMigrations()); err != nil {
				return fmt.Errorf("create table outbox_migrations: %w", err)
			}
		}
		f := m.files[s.version()]
		if _, err := c.ExecContext(ctx, m.upSQL(f)); err != nil {
			return fmt.Errorf("version %d (%s): %w", f.version, f.name, err)
		}
		step, err = m.stepOf(ctx, c, f.version)
		return err
	})
	return step, err
}

// refuseUnknown: tables that something else made are not built upon.
func (m *migrator) refuseUnknown(ctx context.Context, c *sql.Conn, s *state) error {
	if s.version() > 0 {
		return nil
	}
	if err := c.QueryRowContext(ctx, m.exists(m.events)).Scan(&s.tables); err != nil || s.tables == 0 {
		return err
	}
	return m.check(s)
}

// down takes back the newest migration above last; nil: there is none.
func (m *migrator) down(ctx context.Context, db *sql.DB, last int) (*Step, error) {
	var step *Step
	err := m.transact(ctx, db, func(c *sql.Conn) error {
		s, err := m.history(ctx, c)
		if err != nil {
			return err
		}
		if err := m.compare(s); err != nil {
			return err
		}
		if s.version() <= last {
			return nil
		}
		if err := m.refusePending(ctx, c); err != nil {
			return err
		}
		f := m.files[s.version()-1]
		if step, err = m.stepOf(ctx, c, f.version); err != nil {
			return err
		}
		if _, err := c.ExecContext(ctx, m.render(f.down)); err != nil {
			return fmt.Errorf("version %d (%s): %w", f.version, f.name, err)
		}
		return m.unrecord(ctx, c, f.version)
	})
	if err != nil {
		return nil, err
	}
	return step, nil
}

// unrecord removes a migration's row, and the table of them with the last one.
func (m *migrator) unrecord(ctx context.Context, c *sql.Conn, version int) error {
	if _, err := c.ExecContext(ctx, fmt.Sprintf("delete from outbox_migrations where set_name = '%s' and version = %d", m.Set, version)); err != nil {
		return err
	}
	var left int
	if err := c.QueryRowContext(ctx, "select count(*) from outbox_migrations").Scan(&left); err != nil || left > 0 {
		return err
	}
	_, err := c.ExecContext(ctx, "drop table outbox_migrations")
	return err
}

func (m *migrator) refusePending(ctx context.Context, c *sql.Conn) error {
	if m.Force {
		return nil
	}
	if lock := m.lockTable(m.events); lock != "" {
		if _, err := c.ExecContext(ctx, lock); err != nil {
			return err
		}
	}
	var some int
	err := c.QueryRowContext(ctx, "select 1 from "+m.events+" limit 1").Scan(&some)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	return outrider.WithHint(fmt.Errorf("%w: table %s has rows, delivered or not, and would be dropped with them", ErrPending, m.events),
		"let the relays finish and keep what you need, then use --force")
}

func (m *migrator) stepOf(ctx context.Context, q querier, version int) (*Step, error) {
	s, err := m.history(ctx, q)
	if err != nil {
		return nil, err
	}
	for _, a := range s.applied {
		if a.version == version {
			return &Step{Version: a.version, Name: a.name, AppliedAt: a.at}, nil
		}
	}
	return nil, errors.New("outbox_migrations has no row of version " + strconv.Itoa(version))
}

// transact runs fn in a transaction of which there is one at a time.
func (m *migrator) transact(ctx context.Context, db *sql.DB, fn func(*sql.Conn) error) (err error) {
	c, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // the commit has told
	unlock, err := m.lock(ctx, c)
	if err != nil {
		rollback(ctx, c)
		return fmt.Errorf("lock against other migrations: %w", err)
	}
	defer unlock()
	done := false
	defer func() {
		if !done {
			rollback(ctx, c)
		}
	}()
	if err := fn(c); err != nil {
		return err
	}
	if _, err := c.ExecContext(ctx, "commit"); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	done = true
	return nil
}

// rollback works after ctx has ended too. A connection that can't be rolled back
// is closed instead of going back to the pool in a transaction.
func rollback(ctx context.Context, c *sql.Conn) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if _, err := c.ExecContext(ctx, "rollback"); err != nil {
		_ = c.Raw(func(any) error { return driver.ErrBadConn })
	}
}
