package sqlitestore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/outrider-dev/outrider/store"
)

// aim is an exception that an operator means.
type aim struct {
	destination, key, state string
	id                      int64
	head                    bool // it holds its key back
}

// Retry implements store.Operator.
func (s *Stream) Retry(ctx context.Context, target store.Target) (int, error) {
	return s.act(ctx, "retry", target, func(t *tx, a aim) error {
		if a.state == "WAITING" {
			_, err := t.exec(`update outbox_exceptions set due_at = ? where destination = ? and id = ?`, t.now, a.destination, a.id)
			return err
		}
		// One whose key has gone on comes at the place where it is sent now.
		_, err := t.exec(`
			update outbox_exceptions set state = 'WAITING', due_at = ?, attempts = 0, starts = 0, together = 0, first_failed = null,
				page = case when ? then page else 0 end
			where destination = ? and id = ?`, t.now, a.head, a.destination, a.id)
		return err
	})
}

// Skip implements store.Operator. Whoever holds the lease takes note that the
// key is free.
func (s *Stream) Skip(ctx context.Context, target store.Target) (int, error) {
	return s.act(ctx, "skip", target, func(t *tx, a aim) error {
		_, err := t.exec(`update outbox_exceptions set state = 'DISCARDED', due_at = null where destination = ? and id = ?`, a.destination, a.id)
		if err != nil || !a.head {
			return err
		}
		_, err = t.exec(`update outbox_held_keys set head = null, at = max(at, ?1), freed = ?1 where destination = ?2 and event_key = ?3`,
			a.id, a.destination, a.key)
		return err
	})
}

// act does something to each exception meant that has failed or waits.
func (s *Stream) act(ctx context.Context, what string, target store.Target, f func(*tx, aim) error) (int, error) {
	n := 0
	err := s.write(ctx, s.writer, func(t *tx) error {
		n = 0
		aims, err := aims(t, target)
		if err != nil {
			return err
		}
		for _, a := range aims {
			var head int64
			err := t.row([]any{&head}, `select coalesce(head, 0) from outbox_held_keys where destination = ? and event_key = ?`, a.destination, a.key)
			if err != nil && !errors.Is(err, sql.ErrNoRows) {
				return err
			}
			a.head = a.key != "" && head == a.id
			if err := f(t, a); err != nil {
				return err
			}
			n++
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("sqlitestore: %s: %w", what, err)
	}
	return n, nil
}

// aims finds the exceptions that a target means: of an id those that have
// failed or wait, of a key the heads that have failed.
func aims(t *tx, target store.Target) ([]aim, error) {
	const of = `select x.destination, x.event_key, x.state, x.id from `
	query, args := of+`(select distinct destination from outbox_leases where ?2 = '' or destination = ?2) l
		cross join outbox_held_keys h on h.destination = l.destination and h.event_key = ?1
		cross join outbox_exceptions x on x.destination = h.destination and x.id = h.head
		where x.state = 'FAILED'`, []any{target.Key, target.Destination}
	switch {
	case target.ID != "":
		query = of + `outbox_events e cross join outbox_exceptions x on x.id = e.id
			and x.destination in (select destination from outbox_leases)
			where (e.event_id = ?1 or e.id = ?1) and x.state in ('FAILED', 'WAITING') and (?2 = '' or x.destination = ?2)`
		args[0] = target.ID
	case target.Key == "":
		return nil, nil
	}
	var out []aim
	err := t.rows(func(r *sql.Rows) error {
		var a aim
		err := r.Scan(&a.destination, &a.key, &a.state, &a.id)
		out = append(out, a)
		return err
	}, query, args...)
	return out, err
}
