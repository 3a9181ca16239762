package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
)

func drainSQLite(ctx context.Context, e *env) (sample, error) {
	return e.onFile(ctx, childSpec{Role: roleRelay, Profile: e.profile})
}

func bareSQLite(ctx context.Context, e *env) (sample, error) {
	return e.onFile(ctx, childSpec{Role: roleBareSQLite})
}

// onFile drains a copy of a filled file.
func (e *env) onFile(ctx context.Context, spec childSpec) (sample, error) {
	n := e.drained()
	from, err := e.file(ctx, n)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(e.dir, "run")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir) //nolint:errcheck // the directory that it is in goes at the end
	spec.File = filepath.Join(dir, "outbox.db")
	if err := copyFile(from, spec.File); err != nil {
		return nil, err
	}
	return drain(ctx, n, spec)
}

// file is a SQLite file with n events, made once.
func (e *env) file(ctx context.Context, n int) (string, error) {
	if path, ok := e.files[n]; ok {
		return path, nil
	}
	if e.dir == "" {
		dir, err := os.MkdirTemp("", "outrider-bench")
		if err != nil {
			return "", err
		}
		e.dir, e.files = dir, map[int]string{}
	}
	path := filepath.Join(e.dir, fmt.Sprint(n, ".db"))
	if err := fillSQLite(ctx, path, n); err != nil {
		return "", err
	}
	e.files[n] = path
	return path, nil
}

func fillSQLite(ctx context.Context, path string, n int) (err error) {
	db, err := sql.Open("sqlite", "file:"+path+"?_pragma=journal_mode(wal)&_pragma=synchronous(normal)")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }() // it writes the log into the file
	if _, err := migrate.Up(ctx, db, migrate.Options{Dialect: outrider.SQLite}); err != nil {
		return err
	}
	o, err := outrider.New(outrider.Config{Dialect: outrider.SQLite})
	if err != nil {
		return err
	}
	for from := 0; from < n; from += 1000 {
		events := make([]outrider.Event, min(1000, n-from))
		for i := range events {
			events[i] = outrider.Event{AggregateType: "order", AggregateID: strconv.Itoa((from + i) * 7919 % keys), Type: "OrderPlaced",
				Payload: make([]byte, payload)}
		}
		if err := o.Add(ctx, db, events...); err != nil {
			return err
		}
	}
	return nil
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close() //nolint:errcheck // only read
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Sync(), out.Close())
}

// runBareSQLite is a loop of a relay's statements with its settings: read a
// page, note how far that goes and what was sent.
func runBareSQLite(ctx context.Context, spec childSpec, m *meter) error {
	dsn := "file:" + spec.File + "?_pragma=journal_mode(wal)&_pragma=synchronous(full)"
	write, err := sql.Open("sqlite", dsn+"&_txlock=immediate")
	if err != nil {
		return err
	}
	defer write.Close()
	read, err := sql.Open("sqlite", dsn+"&_pragma=query_only(1)")
	if err != nil {
		return err
	}
	defer read.Close()
	page, err := read.PrepareContext(ctx, `
		select e.id, e.event_id, e.aggregate_type, e.aggregate_id, e.event_type, e.event_key,
			e.content_type, e.headers, e.created_at, e.available_at, coalesce(octet_length(e.payload), 0),
			case when octet_length(e.payload) <= ?1 then e.payload end
		from outbox_events e where e.id > ?2 and e.id <= ?3 order by e.id`)
	if err != nil {
		return err
	}
	defer page.Close() //nolint:errcheck // it only read
	var lease int64
	if err := write.QueryRowContext(ctx, `insert into outbox_leases (destination, lanes, owner, epoch) values ('bare', -1, 'bare', 1) returning lease`).
		Scan(&lease); err != nil {
		return err
	}
	m.begin(time.Now())
	at := int64(0)
	for left := spec.Events; left > 0; {
		events, err := barePageSQLite(ctx, page, at)
		if err != nil {
			return err
		}
		if len(events) == 0 {
			return errShort
		}
		from := at
		at = events[len(events)-1].id
		if err := bareNoteSQLite(ctx, write, lease, from, at, len(events)); err != nil {
			return err
		}
		left -= len(events)
		m.count(len(events), len(events))
	}
	return nil
}

// bareRow is what a row is read into.
type bareRow struct {
	id                                           int64
	event, aggregateType, aggregateID, typ, kind string
	key                                          sql.NullString
	headers, payload                             []byte
	created, size                                int64
	available                                    sql.NullInt64
}

func barePageSQLite(ctx context.Context, page *sql.Stmt, at int64) ([]bareRow, error) {
	rows, err := page.QueryContext(ctx, 4096, at, int64(1)<<62)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	events := make([]bareRow, 0, 5000)
	for len(events) < 5000 && rows.Next() {
		events = append(events, bareRow{})
		e := &events[len(events)-1]
		if err := rows.Scan(&e.id, &e.event, &e.aggregateType, &e.aggregateID, &e.typ, &e.key, &e.kind, &e.headers,
			&e.created, &e.available, &e.size, &e.payload); err != nil {
			return nil, err
		}
	}
	return events, rows.Err()
}

func bareNoteSQLite(ctx context.Context, db *sql.DB, lease, from, to int64, n int) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	hand, err := json.Marshal(map[string]any{"open": []any{map[string]any{"page": 1, "from": from, "to": to, "n": n}}})
	if err != nil {
		return err
	}
	var now int64
	if err := tx.QueryRowContext(ctx, `select cast(round((julianday('now') - 2440587.5) * 86400000.0) as integer) * 1000`).Scan(&now); err != nil {
		return err
	}
	for _, s := range []struct {
		query string
		args  []any
	}{
		{`update outbox_leases set writes = writes + 1 where lease = ? and epoch = ?`, []any{lease, 1}},
		{`update outbox_leases set base = ?, page = max(page, ?), open = ?, expires_at = ? where lease = ?`, []any{to, 1, string(hand), now + 15_000_000, lease}},
		{`insert into outbox_journal (destination, lease, epoch, relay, kind, from_id, to_id, records, published, receipts)
			values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`, []any{"bare", lease, 1, "bare", "FRESH", from, to, n, n, "[]"}},
	} {
		if _, err := tx.ExecContext(ctx, s.query, s.args...); err != nil {
			return err
		}
	}
	return tx.Commit()
}
