package pgstore

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outrider-dev/outrider"
)

const (
	// fewIDs are so few that their end is in sight.
	fewIDs = 1_000_000_000
	// splitTime bounds a split. Nearly all of it is for the validation of a
	// check, which reads the whole partition and is in nobody's way.
	splitTime = time.Hour
	// splitCheck is the constraint that the last partition has meanwhile.
	splitCheck = "outbox_events_bound"
)

// makeAhead splits the last partition ahead of the sequence. One relay does it
// at a time; the others leave it to that one.
func (s *Store) makeAhead(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, splitTime)
	defer cancel()
	end, border, err := s.view().due(ctx)
	if err != nil || end == nil {
		return err
	}
	tried := false
	err = s.aloneAtIt(ctx, func(conn *pgxpool.Conn) error {
		if end, border, err = (view{s, conn}).due(ctx); err != nil || end == nil {
			return err // another was faster
		}
		tried = true
		return splitLast(ctx, conn, end, border)
	})
	if tried && err != nil {
		err = fmt.Errorf("pgstore: make a partition ahead, from id %d: %w", border, err)
		if left := s.unbind(ctx, end); left != nil {
			err = fmt.Errorf("%w; %w", err, left)
		}
		return outrider.WithHint(err,
			"events still fit the last partition; it only grows. The relay's role needs to own the tables for this; another way is to have their owner attach partitions by hand")
	}
	if tried {
		s.cfg.Logger.Info("made a partition ahead", "from_id", border)
	}
	return err
}

// due finds out whether the last partition is to be split, and where. nil: it is
// not.
func (v view) due(ctx context.Context) (end *partition, border int64, err error) {
	_, parts, err := v.partitions(ctx)
	if err != nil {
		return nil, 0, fmt.Errorf("pgstore: %w", err)
	}
	var seq int64
	if err := v.q.QueryRow(ctx, `select last_value from outbox_events_id_seq`).Scan(&seq); err != nil {
		return nil, 0, fmt.Errorf("pgstore: %w", err)
	}
	if left := math.MaxInt64 - seq; left < fewIDs {
		return nil, 0, outrider.WithHint(fmt.Errorf("pgstore: the ids of outbox_events run out: the sequence outbox_events_id_seq stands at %d, %d are left", seq, left),
			"no insert works after the last. Somebody has set the sequence that far: begin anew in tables of another schema, before it ends")
	}
	end = last(parts)
	from := max(0, end.from)
	// The border lies ahead of the sequence by a whole partition's half at
	// least, so that no open transaction holds an id beyond it.
	size := v.cfg.PartitionSize
	if from >= math.MaxInt64-2*size || seq < from+size/2 {
		return nil, 0, nil
	}
	border = max(from, seq) + size
	if border < seq { // close to the end of the numbers: one partition is enough
		return nil, 0, nil
	}
	return end, border, nil
}

// splitLast closes the last partition at border and makes a new last one. The check
// that makes attaching it free of a scan is validated beforehand, so that the
// strong lock is held for an instant; who is in its way makes it give up and try
// again at the next round.
func splitLast(ctx context.Context, conn *pgxpool.Conn, last *partition, border int64) error {
	var far *int64
	var schema string
	if err := conn.QueryRow(ctx, `select (select max(id) from outbox_events where id >= $1),
			(select relnamespace::regnamespace::text from pg_class where oid = 'outbox_events'::regclass)`, border).Scan(&far, &schema); err != nil {
		return err
	}
	if far != nil {
		return fmt.Errorf("there is an event with the id %d, which is not of the sequence", *far)
	}
	for _, sql := range []string{
		fmt.Sprintf(gently+`
			alter table %[1]s drop constraint if exists %[2]s;
			alter table %[1]s add constraint %[2]s check (id < %[3]d) not valid; commit`, last.name, splitCheck, border),
		fmt.Sprintf(`begin; set local statement_timeout = 0; alter table %s validate constraint %s; commit`, last.name, splitCheck),
		fmt.Sprintf(gently+`
			alter table outbox_events detach partition %[1]s;
			alter table outbox_events attach partition %[1]s for values from (%[2]s) to (%[3]d);
			create table %[4]s.outbox_events_p%[3]d partition of outbox_events for values from (%[3]d) to (maxvalue)
				with (autovacuum_vacuum_insert_scale_factor = 0.05, vacuum_truncate = off);
			alter table %[1]s drop constraint %[5]s;
			commit`, last.name, last.start(), border, schema, splitCheck),
	} {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return nil
}

// gently begins a change of partitions that gives way to who holds the table.
const gently = `begin; set local lock_timeout = '2s';`

// unbind removes the check that a split left which failed, or whose relay died:
// inserts beyond the border would fail once the sequence has come there. It has
// its own time: that of the split may be over.
func (s *Store) unbind(ctx context.Context, last *partition) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	err := s.aloneAtIt(ctx, func(conn *pgxpool.Conn) (err error) {
		for range 3 {
			var bound bool
			if err = conn.QueryRow(ctx, `select exists (select from pg_constraint
				where conrelid = to_regclass($1) and conname = $2::text::name)`, last.name, splitCheck).Scan(&bound); err != nil || !bound {
				return err
			}
			if _, err = conn.Exec(ctx, fmt.Sprintf(gently+`alter table %s drop constraint if exists %s; commit`, last.name, splitCheck)); err == nil {
				return nil
			}
			if _, err := conn.Exec(ctx, `rollback`); err != nil {
				return err
			}
		}
		return err
	})
	if err == nil {
		return nil
	}
	return fmt.Errorf("remove the check %s of %s, which refuses ids beyond the border until the next try: %w", splitCheck, last.name, err)
}

// aloneAtIt calls f unless somebody else is at work on the partitions: two who
// split at once would take each other's check away, and the strong lock would be
// held for a scan. The lock ends with the connection.
func (s *Store) aloneAtIt(ctx context.Context, f func(*pgxpool.Conn) error) error {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("pgstore: %w", err)
	}
	defer conn.Release() // one in an open transaction is closed by it
	const lock = `hashtextextended('outrider partitions of ' || 'outbox_events'::regclass::oid, 0)`
	var mine bool
	if err := conn.QueryRow(ctx, `select pg_try_advisory_lock(`+lock+`)`).Scan(&mine); err != nil || !mine {
		return err
	}
	err = f(conn)
	if conn.Conn().IsClosed() || conn.Conn().PgConn().TxStatus() != 'I' {
		return err // it is closed, and the lock with it
	}
	_, unlocked := conn.Exec(ctx, `select pg_advisory_unlock(`+lock+`)`)
	return errors.Join(err, unlocked)
}
