package main

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/relay"
	"github.com/outrider-dev/outrider/sqlitestore"
)

// drainSQLite drains a file, against a loop that reads a page and notes how far
// it has come, with the same settings.
func drainSQLite(ctx context.Context, e env) (a, b sample, err error) {
	n := e.events / 4
	for i, side := range []*sample{&a, &b} {
		dir, err := os.MkdirTemp("", "outrider-bench")
		if err != nil {
			return a, b, err
		}
		defer os.RemoveAll(dir)
		path := filepath.Join(dir, "outbox.db")
		if err := fillSQLite(ctx, path, n); err != nil {
			return a, b, err
		}
		run := drainOneSQLite
		if i == 1 {
			run = bareSQLite
		}
		if *side, err = timed(n, func() error { return run(ctx, path, n) }); err != nil {
			return a, b, err
		}
	}
	return a, b, nil
}

func fillSQLite(ctx context.Context, path string, n int) error {
	db, err := sql.Open("sqlite", "file:"+path+"?_pragma=journal_mode(wal)&_pragma=synchronous(full)")
	if err != nil {
		return err
	}
	defer db.Close()
	if _, err := migrate.Up(ctx, db, migrate.Options{Dialect: outrider.SQLite}); err != nil {
		return err
	}
	o, err := outrider.New(outrider.Config{Dialect: outrider.SQLite})
	if err != nil {
		return err
	}
	events := make([]outrider.Event, n)
	for i := range events {
		events[i] = outrider.Event{AggregateType: "order", AggregateID: strconv.Itoa(i % keys), Type: "OrderPlaced", Payload: make([]byte, payload)}
	}
	return o.Add(ctx, db, events...)
}

func drainOneSQLite(ctx context.Context, path string, n int) error {
	st, err := sqlitestore.OpenStream(ctx, sqlitestore.Config{Path: path})
	if err != nil {
		return err
	}
	defer st.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var left atomic.Int64
	left.Store(int64(n))
	done := make(chan struct{})
	r, err := relay.New(relay.Config{Store: st, Destinations: []relay.Destination{{
		Name: "bench", Sink: counting{nil, &left, done}, FromEarliest: true}}})
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	select {
	case <-done:
	case err := <-ended:
		return err
	}
	cancel()
	return <-ended
}

func bareSQLite(ctx context.Context, path string, n int) error {
	db, err := sql.Open("sqlite", "file:"+path+"?_pragma=journal_mode(wal)&_pragma=synchronous(full)")
	if err != nil {
		return err
	}
	defer db.Close()
	if _, err := db.ExecContext(ctx, `create table bare (at integer)`); err != nil {
		return err
	}
	at := int64(0)
	for n > 0 {
		rows, err := db.QueryContext(ctx, `select id, event_id, aggregate_type, aggregate_id, event_type, coalesce(event_key, aggregate_id),
			payload, content_type, headers, available_at, created_at from outbox_events where id > ? order by id limit 5000`, at)
		if err != nil {
			return err
		}
		for rows.Next() {
			var event, aggregateType, aggregateID, typ, key, contentType string
			var headers sql.NullString
			var available, created sql.NullInt64
			var body []byte
			if err := rows.Scan(&at, &event, &aggregateType, &aggregateID, &typ, &key, &body, &contentType, &headers, &available, &created); err != nil {
				return err
			}
			n--
		}
		if err := errors.Join(rows.Err(), rows.Close()); err != nil {
			return err
		}
		if _, err := db.ExecContext(ctx, `insert into bare values (?)`, at); err != nil {
			return err
		}
	}
	return nil
}
