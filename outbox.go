package outrider

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// Execer is what Add writes through: *sql.Tx, *sql.DB and *sql.Conn as they are,
// pgx by way of package outriderpgx, and whatever else has the method.
type Execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// Transactor is an Execer that may stand outside of a transaction and can begin
// one. Add uses it when it needs more than one statement. *sql.DB needs none of
// it: Add knows how to begin there.
type Transactor interface {
	Execer
	// InTx calls fn with an Execer in a transaction, which it commits if fn
	// returns nil and rolls back otherwise. Inside of a transaction already, it
	// just calls fn.
	InTx(ctx context.Context, fn func(Execer) error) error
}

// Outbox writes events. It holds no connection and no state, and may be used by
// many goroutines.
type Outbox struct {
	config    Config
	table     string // quoted
	maxParams int
	maxBytes  int
}

// New makes an Outbox. The database is not asked; a table that is missing shows
// at the first Add.
func New(cfg Config) (*Outbox, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	table, err := quoteTable(cfg.Dialect, cfg.Table)
	if err != nil {
		return nil, err
	}
	return &Outbox{config: cfg, table: table, maxParams: maxParams(cfg.Dialect), maxBytes: maxStatement}, nil
}

// Add stores events, in their order. Give it the transaction that writes the
// data which they speak of: then both exist, or neither does.
//
// All events are checked before the database is touched; the first that can't be
// taken is named by an *EventError. A context that has ended already writes
// nothing. The events given are only read; an ID that is empty is made for the
// row alone, so set one from NewID where it has to be known.
//
// It takes as few statements as there can be: one, up to 65,535 parameters
// (5 to 9 for an event; SQLite: 32,766) and 8 MiB of payloads and texts. Given a
// *sql.DB, Add is a transaction by itself. On a *sql.Conn or any other Execer,
// which may be in a transaction of yours, it begins none: without one, an error
// can leave the events of earlier statements stored. Inside of a transaction
// roll back after any error.
func (o *Outbox) Add(ctx context.Context, tx Execer, events ...Event) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("outrider: nothing was written: %w", err)
	}
	if tx == nil {
		return errors.New("outrider: the transaction is nil")
	}
	for i := range events {
		if r := o.config.check(&events[i]); r != nil {
			return WithHint(&EventError{Index: i, Field: r.field, Problem: r.problem}, r.hint)
		}
	}
	rows := make([]row, len(events))
	for i := range events {
		rows[i] = newRow(&events[i])
	}
	head, tail, cols := o.cut(rows)
	if len(tail) == 0 {
		return o.exec(ctx, tx, head, cols, 0)
	}
	return o.inTx(ctx, tx, func(tx Execer) error {
		for first := 0; first < len(rows); {
			head, _, cols := o.cut(rows[first:])
			if err := o.exec(ctx, tx, head, cols, first); err != nil {
				return err
			}
			first += len(head)
		}
		return nil
	})
}

// exec runs one statement; first is the index of its first event.
func (o *Outbox) exec(ctx context.Context, tx Execer, rows []row, cols columns, first int) error {
	if len(rows) == 0 {
		return nil
	}
	query, args := o.insert(rows, cols)
	if _, err := tx.ExecContext(ctx, query, args...); err != nil {
		which := fmt.Sprintf("event %d", first)
		if n := len(rows); n > 1 {
			which = fmt.Sprintf("events %d to %d", first, first+n-1)
		}
		return o.explain(fmt.Errorf("outrider: insert %s into %s: %w", which, o.table, err))
	}
	return nil
}

// explain adds a hint to what drivers report.
func (o *Outbox) explain(err error) error {
	var coded interface{ SQLState() string }
	if !errors.As(err, &coded) {
		if strings.Contains(err.Error(), "no such table") { // SQLite's drivers have no codes in common
			return WithHint(err, "make the table: outrider migrate up; or look at Config.Table and the file's path")
		}
		if lockedFile.MatchString(err.Error()) {
			return WithHint(err, hintLocked)
		}
		if otherDialect.MatchString(err.Error()) {
			return WithHint(err, o.dialectHint())
		}
		return err
	}
	switch coded.SQLState() {
	case "42P01", "3F000": // undefined_table, invalid_schema_name
		return WithHint(err, "make the table: outrider migrate up; or look at Config.Table, at the search_path and at the role's USAGE on the schema")
	case "42601": // syntax_error
		return WithHint(err, o.dialectHint())
	case "42703": // undefined_column
		return WithHint(err, "the table is not the outbox's, or an old one: outrider migrate status")
	case "42804": // datatype_mismatch
		return WithHint(err, "the payload column is of another type than Config.Payload ("+o.config.Payload.String()+")")
	case "42501": // insufficient_privilege
		return WithHint(err, "the role needs INSERT on "+o.table+" and USAGE on the sequence of its id: docs/OPERATING.md, \"Rights on PostgreSQL\"")
	case "25P02": // in_failed_sql_transaction
		return WithHint(err, "an earlier statement of the transaction failed; its error is the one to look at")
	}
	return err
}

// lockedFile is what SQLite says while another connection writes.
var lockedFile = regexp.MustCompile(`database( table| schema)? is locked`)

// hintLocked: without a busy timeout SQLite does not wait at all, and a
// transaction that has read before it writes cannot be waited for.
const hintLocked = "another connection writes: roll back and try again; open the file with _pragma=busy_timeout(10000), _pragma=journal_mode(wal) and _txlock=immediate (modernc.org/sqlite's spelling), so that a writer waits for its turn"

// otherDialect is what drivers say of a statement in another dialect, which has
// other signs for parameters: some find out before the database is asked.
var otherDialect = regexp.MustCompile(`(?i)syntax|unrecognized token|(named|unused|extra|insufficient|enough|\d) (arg|param)`)

// dialectHint: no database but the one of the dialect understands the INSERT.
func (o *Outbox) dialectHint() string {
	return "the statement is written for Config.Dialect " + o.config.Dialect.String() + ": set the one of the database that the connection leads to"
}

// beginner is what *sql.DB and what embeds it have. *sql.Conn has it too, but may
// be in a transaction that was begun by a statement; it alone has Raw.
type beginner interface {
	BeginTx(ctx context.Context, opts *sql.TxOptions) (*sql.Tx, error)
}

func (o *Outbox) inTx(ctx context.Context, tx Execer, fn func(Execer) error) (err error) {
	if t, ok := tx.(Transactor); ok {
		return t.InTx(ctx, fn)
	}
	db, ok := tx.(beginner)
	if _, conn := tx.(interface{ Raw(func(any) error) error }); !ok || conn {
		return fn(tx)
	}
	own, err := db.BeginTx(ctx, nil)
	if err != nil {
		return o.explain(fmt.Errorf("outrider: begin: %w", err))
	}
	defer own.Rollback() // nothing to roll back after the commit
	if err := fn(own); err != nil {
		return err
	}
	if err := own.Commit(); err != nil {
		return o.explain(fmt.Errorf("outrider: commit: %w", err))
	}
	return nil
}
