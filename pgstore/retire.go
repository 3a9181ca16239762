package pgstore

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider/store"
)

var _ store.Retirer = (*Store)(nil)

// retireTimeout bounds a Retire: the journal may be long.
const retireTimeout = time.Minute

// Retire implements store.Retirer. It takes the lock under which leases are
// handed out and destinations made known; an owner that has expired and still
// writes finds no row under its epoch.
func (s *Store) Retire(ctx context.Context, destination string, dry bool) (store.RetireReport, error) {
	ctx, cancel := context.WithTimeout(ctx, retireTimeout)
	defer cancel()
	var d store.DestinationStatus
	err := s.look(ctx, func(ctx context.Context, v view) (err error) {
		d, err = v.destinationStatus(ctx, destination, 0)
		return err
	})
	if err == nil {
		err = s.inTx(ctx, func(tx pgx.Tx) error { return retire(ctx, tx, destination, dry) })
	}
	if err != nil {
		return store.RetireReport{}, Explain(fmt.Errorf("pgstore: retire %q: %w", destination, err))
	}
	return d.Retiring(), nil
}

func retire(ctx context.Context, tx pgx.Tx, destination string, dry bool) error {
	if err := lockDestination(ctx, tx, destination); err != nil {
		return err
	}
	rows, err := tx.Query(ctx, `
		select coalesce(owner, ''),
		       case when isfinite(expires_at) then extract(epoch from expires_at - clock_timestamp())::float8 else 0 end
		from outbox_leases where destination = $1 order by lease for update`, destination)
	if err != nil {
		return err
	}
	var owner, serving string
	var seconds float64
	var left time.Duration
	tag, err := pgx.ForEachRow(rows, []any{&owner, &seconds}, func() error {
		if d := time.Duration(seconds * float64(time.Second)); owner != "" && d > left {
			serving, left = owner, d
		}
		return nil
	})
	switch {
	case err != nil:
		return err
	case tag.RowsAffected() == 0:
		return store.ErrUnknownDestination
	case serving != "":
		return store.Served(serving, left)
	case dry:
		return nil
	}
	for _, table := range []string{"outbox_leases", "outbox_exceptions", "outbox_held_keys", "outbox_journal"} {
		if _, err := tx.Exec(ctx, `delete from `+table+` where destination = $1`, destination); err != nil {
			return err
		}
	}
	return nil
}

// missing is the error of an Acquire that finds nothing free: that there is
// nothing at all.
func missing(ctx context.Context, tx pgx.Tx, destination string) error {
	var known bool
	err := tx.QueryRow(ctx, `select exists (select from outbox_leases where destination = $1)`, destination).Scan(&known)
	if err == nil && !known {
		err = store.Retired(destination)
	}
	return err
}
