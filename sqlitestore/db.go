package sqlitestore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"modernc.org/sqlite"

	"github.com/outrider-dev/outrider"
)

// database is a file with an outbox, and the connections to it: one that
// writes, one that carries renewals, and some that read.
//
// SQLite lets one connection write at a time and has the others ask again and
// again. Within a process that is a waste, so here they queue for their turn.
type database struct {
	cfg   Config
	file  os.FileInfo
	began time.Time

	turn    chan struct{} // filled while somebody writes
	writer  *writer
	renewer *writer
	*reader         // for claims and people
	aside   *reader // for renewals and the watch, which wait for none of those
}

// reader is a pool of connections that read.
type reader struct {
	busy  time.Duration
	pool  *sql.DB
	stmts sync.Map         // *sql.Stmt by text
	see   func(sql string) // for tests; nil: nobody looks
}

// writer is a connection that writes.
type writer struct {
	pool  *sql.DB
	conn  *sql.Conn
	stmts map[string]*sql.Stmt
	see   func(sql string) // for tests; nil: nobody looks
}

// openDatabase opens an existing file that has the table given.
func openDatabase(ctx context.Context, cfg Config, table, set string) (_ *database, err error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	db := &database{cfg: cfg, began: time.Now(), turn: make(chan struct{}, 1)} //nolint:forbidigo // spans of this process are measured from it
	if db.file, err = statFile(cfg.Path); err != nil {
		return nil, err
	}
	dsn, err := db.dsn()
	if err != nil {
		return nil, err
	}
	open := func(query string, conns int) *sql.DB {
		p, _ := sql.Open("sqlite", dsn+query) // a driver that is linked in
		p.SetMaxOpenConns(conns)
		p.SetMaxIdleConns(conns)
		return p
	}
	db.writer = &writer{pool: open("&_pragma=synchronous(full)", 1)}
	db.renewer = &writer{pool: open("&_pragma=synchronous(full)", 1)}
	db.reader = &reader{busy: cfg.BusyTimeout, pool: open("&_pragma=query_only(1)", cfg.MaxReaders)}
	db.aside = &reader{busy: cfg.BusyTimeout, pool: open("&_pragma=query_only(1)", 2)}
	defer func() {
		if err != nil {
			_ = db.close()
		}
	}()
	return db, db.probe(ctx, table, set)
}

// dsn names the file in a form in which no character of its path means
// something else.
func (db *database) dsn() (string, error) {
	path, err := filepath.Abs(db.cfg.Path)
	if err != nil {
		return "", fmt.Errorf("sqlitestore: %w", err)
	}
	path = filepath.ToSlash(path)
	if path[0] != '/' { // a drive's letter
		path = "/" + path
	}
	u := url.URL{Scheme: "file", Path: path}
	// The wait of one try is kept short: a context that ends is looked at
	// between them.
	return fmt.Sprintf("%s?mode=rw&_pragma=busy_timeout(%d)", u.String(), busyStep.Milliseconds()), nil
}

var errNoFile = errors.New("there is no file")

func statFile(path string) (os.FileInfo, error) {
	fi, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		hint := "create it with: outrider migrate up --db sqlite:" + path
		if _, derr := os.Stat(filepath.Dir(path)); derr != nil {
			hint = "the directory does not exist either: check the path"
		}
		return nil, outrider.WithHint(fmt.Errorf("sqlitestore: %w %s", errNoFile, path), hint)
	case err != nil:
		return nil, outrider.WithHint(fmt.Errorf("sqlitestore: %w", err), "check who may enter the directory")
	case !fi.Mode().IsRegular():
		return nil, outrider.WithHint(fmt.Errorf("sqlitestore: %s is not a file", path), "give the path of a SQLite database")
	}
	return fi, nil
}

// minVersion of SQLite: octet_length is not there before 3.43.
const minVersion = 3_043_000

// probe looks at the file and sees to it that readers and the writer do not
// stand in each other's way.
func (db *database) probe(ctx context.Context, table, set string) error {
	var text string
	if err := db.row(ctx, []any{&text}, `select sqlite_version()`); err != nil {
		return explain(fmt.Errorf("sqlitestore: open %s: %w", db.cfg.Path, err))
	}
	if err := checkVersion(text); err != nil {
		return err
	}
	var mode string
	err := retry(ctx, db.busy, func() error {
		return db.writer.pool.QueryRowContext(ctx, `pragma journal_mode = wal`).Scan(&mode)
	})
	if err != nil {
		return explain(fmt.Errorf("sqlitestore: open %s: %w", db.cfg.Path, err))
	}
	if mode != "wal" {
		return outrider.WithHint(fmt.Errorf("sqlitestore: %s stays in journal mode %q, and write-ahead logging is needed", db.cfg.Path, mode),
			"its directory has to be writable and on a local disk, not on a network share")
	}
	var n int
	if err := db.row(ctx, []any{&n}, `select count(*) from sqlite_master where type = 'table' and name = ?`, table); err != nil {
		return explain(fmt.Errorf("sqlitestore: open %s: %w", db.cfg.Path, err))
	}
	if n == 0 {
		return outrider.WithHint(fmt.Errorf("sqlitestore: %s has no table %s", db.cfg.Path, table),
			"create it with: outrider migrate up --db sqlite:"+db.cfg.Path+set)
	}
	// A file or folder that may only be read is found out here, not at the
	// first claim.
	return db.write(ctx, db.writer, func(*tx) error { return nil })
}

// checkVersion refuses a SQLite that is too old, by the text that it says of
// itself. Text that does not begin with two numbers is no release's, and of that
// nothing is known.
func checkVersion(text string) error {
	const hint = "SQLite 3.43 or newer is needed: this program was linked with another modernc.org/sqlite than it was tested with"
	var a, b, c int
	switch n, _ := fmt.Sscanf(text, "%d.%d.%d", &a, &b, &c); {
	case n < 2:
		return outrider.WithHint(fmt.Errorf("sqlitestore: SQLite's version %q cannot be understood", text), hint)
	case a*1_000_000+b*1_000+c < minVersion:
		return outrider.WithHint(fmt.Errorf("sqlitestore: SQLite %s is too old", text), hint)
	}
	return nil
}

// close gives up all connections: the last one puts what is in the WAL into the
// file. A pool closes those in use when they are given back.
func (db *database) close() error {
	db.turn <- struct{}{} // what still writes comes to its end
	db.writer.giveBack()
	db.renewer.giveBack()
	<-db.turn
	var first error
	for _, p := range []*sql.DB{db.pool, db.aside.pool, db.renewer.pool, db.writer.pool} {
		if err := p.Close(); err != nil && first == nil {
			first = fmt.Errorf("sqlitestore: %w", err)
		}
	}
	return first
}

// sameFile finds out whether the path leads to another file by now, or to none.
func (db *database) sameFile() error {
	fi, err := statFile(db.cfg.Path)
	switch {
	case errors.Is(err, errNoFile):
		return outrider.WithHint(fmt.Errorf("sqlitestore: %s was deleted or moved while it was open", db.cfg.Path),
			"nothing is sent, as nobody writes to it any more: move it back, or stop the relay, restore a backup and start it")
	case err == nil && !os.SameFile(fi, db.file):
		return outrider.WithHint(fmt.Errorf("sqlitestore: %s was replaced by another file while it was open", db.cfg.Path),
			"nothing that is written to the new file is seen: restart the relay; to restore a backup, stop the relay first")
	}
	return err
}

// busyStep is how long SQLite itself waits for a lock, at one try. It looks less
// and less often while it does; on a slow disk that writers keep busy, one that
// has waited for long hardly ever finds it free, and a renewal came too late.
const busyStep = 10 * time.Millisecond

// retry repeats what failed because another process writes, for some time.
func retry(ctx context.Context, busy time.Duration, f func() error) error {
	end := time.Now().Add(busy) //nolint:forbidigo // how long this process waits
	for {
		err := f()
		if !isBusy(err) || ctx.Err() != nil || time.Now().After(end) { //nolint:forbidigo // as above
			return err
		}
	}
}

// stmt prepares a query once.
func (r *reader) stmt(ctx context.Context, query string) (*sql.Stmt, error) {
	if r.see != nil {
		r.see(query)
	}
	if s, ok := r.stmts.Load(query); ok {
		return s.(*sql.Stmt), nil //nolint:errcheck // nothing else is stored
	}
	s, err := r.pool.PrepareContext(ctx, query)
	if err != nil {
		return nil, err
	}
	if old, loaded := r.stmts.LoadOrStore(query, s); loaded {
		_ = s.Close()               //nolint:sqlclosecheck // s is the one too many
		return old.(*sql.Stmt), nil //nolint:errcheck // nothing else is stored
	}
	return s, nil
}

// query calls scan for each row until it says that it has enough.
func (r *reader) query(ctx context.Context, scan func(*sql.Rows) (more bool, err error), query string, args ...any) error {
	var rows *sql.Rows
	err := retry(ctx, r.busy, func() error {
		s, err := r.stmt(ctx, query) //nolint:sqlclosecheck // statements are kept
		if err == nil {
			rows, err = s.QueryContext(ctx, args...) //nolint:sqlclosecheck,rowserrcheck // below, by who called retry
		}
		return err
	})
	if err != nil {
		return err
	}
	defer rows.Close() // Err below tells
	for rows.Next() {
		if more, err := scan(rows); err != nil || !more {
			return err
		}
	}
	return rows.Err()
}

// row runs a query that gives one row.
func (r *reader) row(ctx context.Context, dest []any, query string, args ...any) error {
	return retry(ctx, r.busy, func() error {
		s, err := r.stmt(ctx, query) //nolint:sqlclosecheck // statements are kept
		if err != nil {
			return err
		}
		return s.QueryRowContext(ctx, args...).Scan(dest...)
	})
}

// nowSQL is SQLite's clock in microseconds since 1970. It ticks in milliseconds.
const nowSQL = `cast(round((julianday('now') - 2440587.5) * 86400000.0) as integer) * 1000`

// time is the time by the database's clock.
func (db *database) time(ctx context.Context, r *reader) (int64, error) {
	if db.cfg.Now != nil {
		return db.cfg.Now().UnixMicro(), nil
	}
	var us int64
	err := r.row(ctx, []any{&us}, `select `+nowSQL)
	return us, err
}

// since is the time that has passed for this process.
func (db *database) since() time.Duration {
	if db.cfg.Now != nil {
		return db.cfg.Now().Sub(time.Unix(0, 0))
	}
	return time.Since(db.began)
}

// tx is a transaction that writes.
type tx struct {
	ctx context.Context
	w   *writer
	now int64 // microseconds since 1970, by the database's clock
}

// errUnknown marks a transaction of which nobody knows whether it took effect.
var errUnknown = errors.New("the transaction may or may not have taken effect")

// write runs f in a transaction. It begins as a writer: one that reads first
// and writes later fails at once when somebody else has written in between.
// Waiting ends with ctx; what has begun is brought to its end.
func (db *database) write(ctx context.Context, w *writer, f func(*tx) error) error {
	select {
	case db.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-db.turn }()
	t := &tx{ctx: context.WithoutCancel(ctx), w: w}
	if err := retry(ctx, db.busy, func() error { return w.begin(ctx) }); err != nil {
		if isBusy(err) {
			err = outrider.WithHint(fmt.Errorf("sqlitestore: another process has been writing for more than %v: %w", db.cfg.BusyTimeout, err),
				"keep transactions short, and look for a shell or a tool with an open one")
		}
		return explain(err)
	}
	err := db.inside(t, f)
	if err != nil {
		t.rollback()
		return explain(err)
	}
	if _, err := t.exec(`commit`); err != nil {
		t.rollback()
		return fmt.Errorf("%w: %w", errUnknown, explain(err))
	}
	return nil
}

func (db *database) inside(t *tx, f func(*tx) error) error {
	if db.cfg.Now != nil {
		t.now = db.cfg.Now().UnixMicro()
	} else if err := t.row([]any{&t.now}, `select `+nowSQL); err != nil {
		return err
	}
	return f(t)
}

func (w *writer) begin(ctx context.Context) error {
	if w.conn == nil {
		c, err := w.pool.Conn(ctx)
		if err != nil {
			return err
		}
		w.conn, w.stmts = c, map[string]*sql.Stmt{}
	}
	_, err := w.conn.ExecContext(ctx, `begin immediate`)
	if err != nil && !isBusy(err) {
		w.drop()
	}
	return err
}

// drop gives up a connection whose state is not known.
func (w *writer) drop() {
	if w.conn == nil {
		return
	}
	w.endStmts()
	_ = w.conn.Raw(func(any) error { return driverErrBadConn })
	_ = w.conn.Close()
	w.conn = nil
}

// giveBack leaves the connection to its pool.
func (w *writer) giveBack() {
	if w.conn == nil {
		return
	}
	w.endStmts()
	_ = w.conn.Close()
	w.conn = nil
}

// endStmts ends the statements before their connection: SQLite keeps it open, and
// what was begun on it, for as long as there are any, and package sql does not
// end those of a single connection.
func (w *writer) endStmts() {
	for _, s := range w.stmts {
		_ = s.Close()
	}
	w.stmts = nil
}

func (t *tx) rollback() {
	if _, err := t.exec(`rollback`); err != nil {
		t.w.drop() // SQLite may have rolled back by itself: see that nothing is left of it
	}
}

func (t *tx) stmt(query string) (*sql.Stmt, error) {
	if t.w.see != nil {
		t.w.see(query)
	}
	if s := t.w.stmts[query]; s != nil {
		return s, nil
	}
	s, err := t.w.conn.PrepareContext(t.ctx, query)
	if err == nil {
		t.w.stmts[query] = s
	}
	return s, err
}

// exec runs a statement and tells how many rows it changed.
func (t *tx) exec(query string, args ...any) (int64, error) {
	s, err := t.stmt(query) //nolint:sqlclosecheck // statements are kept
	if err != nil {
		return 0, err
	}
	r, err := s.ExecContext(t.ctx, args...)
	if err != nil {
		return 0, err
	}
	return r.RowsAffected()
}

func (t *tx) row(dest []any, query string, args ...any) error {
	s, err := t.stmt(query) //nolint:sqlclosecheck // statements are kept
	if err != nil {
		return err
	}
	return s.QueryRowContext(t.ctx, args...).Scan(dest...)
}

func (t *tx) rows(scan func(*sql.Rows) error, query string, args ...any) error {
	s, err := t.stmt(query) //nolint:sqlclosecheck // statements are kept
	if err != nil {
		return err
	}
	rows, err := s.QueryContext(t.ctx, args...)
	if err != nil {
		return err
	}
	defer rows.Close() // Err below tells
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// code is SQLite's primary result code of an error; 0: it is not SQLite's.
func code(err error) int {
	var e *sqlite.Error
	if errors.As(err, &e) {
		return e.Code() & 0xff
	}
	return 0
}
