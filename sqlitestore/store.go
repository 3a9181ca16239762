// Package sqlitestore keeps an outbox in a SQLite file. It has two stores:
//
//   - Stream, opened with OpenStream, whose events are inserted and never
//     updated; what moves is a position per lease, and a small table of
//     exceptions. It is the PostgreSQL stream with a simple position: SQLite has
//     one writer at a time, so commit order is id order and the position is an
//     id.
//   - Rows, opened with OpenRows, whose rows carry their state.
//
// A relay runs on the machine that has the file. Each session keeps a side file
// locked, <file>-outrider-<number>.lock, by which others know that it lives:
// the lock of a process that was killed is free at once.
package sqlitestore

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// Config configures a store.
type Config struct {
	// Path of the database's file. Needed.
	Path string

	// MaxReaders bounds the connections that read. 0: 4.
	MaxReaders int

	// BusyTimeout is how long a write waits for writers of other processes
	// before it is given up with an error; the relay then tries again, and no
	// attempt is counted. 0: 10 s.
	BusyTimeout time.Duration

	// BusyPoll is how often the file is asked whether anything has been
	// committed while events are coming. 0: 2 ms.
	BusyPoll time.Duration
	// IdlePoll is how far that backs off when none come. 0: 25 ms.
	IdlePoll time.Duration

	// Logger gets what operators should know. nil: slog.Default().
	Logger *slog.Logger

	// Now is a clock for tests, by which everything is decided. nil: SQLite's.
	Now func() time.Time
}

func (c Config) withDefaults() Config {
	if c.MaxReaders == 0 {
		c.MaxReaders = 4
	}
	if c.BusyTimeout == 0 {
		c.BusyTimeout = 10 * time.Second
	}
	if c.BusyPoll == 0 {
		c.BusyPoll = 2 * time.Millisecond
	}
	if c.IdlePoll == 0 {
		c.IdlePoll = 25 * time.Millisecond
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

func (c Config) validate() error {
	switch {
	case c.Path == "":
		return errors.New("sqlitestore: Config.Path is empty")
	case c.Path == ":memory:":
		return outrider.WithHint(errors.New("sqlitestore: Config.Path is :memory:, which each connection has for itself"), "give the path of a file, or use memstore")
	case c.MaxReaders < 0, c.BusyTimeout < 0, c.BusyPoll < 0, c.IdlePoll < 0:
		return errors.New("sqlitestore: Config.MaxReaders, BusyTimeout, BusyPoll and IdlePoll cannot be negative")
	}
	return nil
}

// Stream is an outbox whose events are inserted and never updated.
type Stream struct {
	*database
	members members
	source  source
}

var (
	_ store.Store      = (*Stream)(nil)
	_ store.Watcher    = (*Stream)(nil)
	_ store.Maintainer = (*Stream)(nil)
)

// OpenStream opens the stream in an existing file.
func OpenStream(ctx context.Context, cfg Config) (*Stream, error) {
	db, err := openDatabase(ctx, cfg, "outbox_events", "")
	if err != nil {
		return nil, err
	}
	return &Stream{database: db, members: newMembers(db, "outbox_relays", "outbox_leases")}, nil
}

// Capabilities implements store.Store. LiveTakeOver needs file locks, which
// some network and container file systems have not: it was tried when the store
// was opened.
func (s *Stream) Capabilities() store.Capabilities {
	return store.Capabilities{FanOut: true, Sequences: true, LiveTakeOver: s.members.locks}
}

// Close implements store.Store.
func (s *Stream) Close() error { return s.close() }

// Maintain implements store.Maintainer: it notes how far the ids have come, and
// looks for a file that was replaced or ids that were set back.
func (s *Stream) Maintain(ctx context.Context) error {
	if err := s.checkSource(ctx); err != nil {
		return err
	}
	var behind bool
	err := s.row(ctx, []any{&behind}, `
		select coalesce((select seq from sqlite_sequence where name = 'outbox_events'), 0)
		       >= coalesce((select seen_id from outbox_source), -1000) + 1000`)
	if err != nil || !behind {
		return explain(err)
	}
	return s.write(ctx, s.writer, func(t *tx) error {
		_, err := t.exec(`
			insert into outbox_source (only_row, seen_id)
			values (1, coalesce((select seq from sqlite_sequence where name = 'outbox_events'), 0))
			on conflict (only_row) do update set seen_id = max(seen_id, excluded.seen_id) where seen_id >= 0`)
		return err
	})
}
