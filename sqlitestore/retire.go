package sqlitestore

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/outrider-dev/outrider/store"
)

var _ store.Retirer = (*Stream)(nil)

// Retire implements store.Retirer. An owner that has expired and still writes
// finds no row under its epoch.
func (s *Stream) Retire(ctx context.Context, destination string, dry bool) (store.RetireReport, error) {
	r, err := s.retiring(ctx, destination)
	if err == nil {
		err = s.write(ctx, s.writer, func(t *tx) error { return retire(t, destination, dry) })
	}
	if err != nil {
		return store.RetireReport{}, fmt.Errorf("sqlitestore: retire %q: %w", destination, explain(err))
	}
	return r, nil
}

// retiring counts what would be given up.
func (s *Stream) retiring(ctx context.Context, destination string) (store.RetireReport, error) {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	v, err := s.look(ctx, destination)
	if err != nil || v.dests[destination] == nil {
		return store.RetireReport{}, err
	}
	t, err := v.sum(ctx, v.dests[destination])
	if err != nil {
		return store.RetireReport{}, err
	}
	return t.status().Retiring(), nil
}

func retire(t *tx, destination string, dry bool) error {
	known, serving, left := false, "", int64(0)
	err := t.rows(func(r *sql.Rows) error {
		var owner string
		var expires int64
		err := r.Scan(&owner, &expires)
		known = true
		if owner != "" && expires-t.now > left {
			serving, left = owner, expires-t.now
		}
		return err
	}, `select coalesce(owner, ''), coalesce(expires_at, 0) from outbox_leases where destination = ?`, destination)
	switch {
	case err != nil:
		return err
	case !known:
		return store.ErrUnknownDestination
	case serving != "":
		return store.Served(serving, time.Duration(left)*time.Microsecond)
	case dry:
		return nil
	}
	for _, table := range []string{"outbox_leases", "outbox_exceptions", "outbox_held_keys", "outbox_journal"} {
		if _, err := t.exec(`delete from `+table+` where destination = ?`, destination); err != nil {
			return err
		}
	}
	return nil
}

// missing is the error of an Acquire that finds nothing free: that there is
// nothing at all.
func missing(t *tx, destination string) error {
	var known bool
	err := t.row([]any{&known}, `select exists (select 1 from outbox_leases where destination = ?)`, destination)
	if err == nil && !known {
		err = store.Retired(destination)
	}
	return err
}
