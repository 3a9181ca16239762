package pgstore

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider"
)

// fewIDs are so few that their end is in sight.
const fewIDs = 1_000_000_000

// Maintain implements store.Maintainer: it splits the last partition ahead of
// the sequence, notes how far the cluster has come, and tidies up.
func (s *Store) Maintain(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := s.noteSeen(ctx); err != nil {
		return err
	}
	if err := s.trimJournal(ctx); err != nil {
		return err
	}
	if err := s.buryRelays(ctx); err != nil {
		return err
	}
	if err := s.compact(ctx); err != nil {
		return err
	}
	_, parts, err := s.view().partitions(ctx)
	if err != nil {
		return fmt.Errorf("pgstore: %w", err)
	}
	var seq int64
	if err := s.pool.QueryRow(ctx, `select last_value from outbox_events_id_seq`).Scan(&seq); err != nil {
		return fmt.Errorf("pgstore: %w", err)
	}
	if left := math.MaxInt64 - seq; left < fewIDs {
		return outrider.WithHint(fmt.Errorf("pgstore: the ids of outbox_events run out: the sequence outbox_events_id_seq stands at %d, %d are left", seq, left),
			"no insert works after the last. Somebody has set the sequence that far: begin anew in tables of another schema, before it ends")
	}
	end := last(parts)
	from := max(0, end.from)
	// The border lies ahead of the sequence by a whole partition's half at
	// least, so that no open transaction holds an id beyond it.
	size := s.cfg.PartitionSize
	if from >= math.MaxInt64-2*size || seq < from+size/2 {
		return nil
	}
	border := max(from, seq) + size
	if border < seq { // close to the end of the numbers: one partition is enough
		return nil
	}
	if err := s.splitLast(ctx, end, border); err != nil {
		return outrider.WithHint(fmt.Errorf("pgstore: make a partition ahead, from id %d: %w", border, err),
			"events still fit the last partition; it only grows. The relay's role needs to own the tables for this; another way is to have their owner attach partitions by hand")
	}
	s.cfg.Logger.Info("made a partition ahead", "from_id", border)
	return nil
}

// trimJournal deletes the oldest entries that have been kept long enough, some
// at a time: more than can be written between two rounds of maintenance.
func (s *Store) trimJournal(ctx context.Context) error {
	_, err := s.pool.Exec(ctx, `
		delete from outbox_journal where entry = any(array(
			select entry from (select entry, settled_at from outbox_journal order by entry limit 50000) j
			where settled_at < clock_timestamp() - $1 * interval '1 second'))`, s.cfg.JournalRetention.Seconds())
	if err != nil {
		return Explain(fmt.Errorf("pgstore: trim the journal: %w", err))
	}
	return nil
}

// buryRelays deletes what relays left that died: those that have expired, whose
// lock is free and who own no lease any more. Else every renewal of every relay
// would try the locks of all that have ever died.
func (s *Store) buryRelays(ctx context.Context) error {
	_, err := s.pool.Exec(ctx, `
		with expired as materialized (
			select lock from outbox_relays r where expires_at < clock_timestamp()
			and not exists (select from outbox_leases where owner_lock = r.lock)),
		dead as materialized (select lock from expired where pg_try_advisory_xact_lock_shared(lock))
		delete from outbox_relays where lock in (select lock from dead)`)
	if err != nil {
		return Explain(fmt.Errorf("pgstore: outbox_relays: %w", err))
	}
	return nil
}

// noteSeen remembers what a restored cluster would fall behind of.
func (s *Store) noteSeen(ctx context.Context) error {
	tag, err := s.pool.Exec(ctx, `
		with now as materialized (
			select pg_snapshot_xmax(pg_current_snapshot()) as xid, (select last_value from outbox_events_id_seq) as id)
		update outbox_source set seen_xid = now.xid, seen_id = now.id from now
		where now.id >= seen_id and now.xid >= seen_xid
		  and (now.id > seen_id + 1000 or now.xid::text::bigint > seen_xid::text::bigint + 100000)`)
	if err != nil {
		return Explain(fmt.Errorf("pgstore: outbox_source: %w", err))
	}
	if tag.RowsAffected() == 0 {
		return s.view().checkSource(ctx)
	}
	return nil
}

// splitLast closes the last partition at border and makes a new last one. The
// check that makes attaching it free of a scan is validated beforehand, so that
// the strong lock is held for an instant; who is in its way makes it give up
// and try again at the next round.
func (s *Store) splitLast(ctx context.Context, last *partition, border int64) error {
	var far *int64
	if err := s.pool.QueryRow(ctx, `select max(id) from outbox_events where id >= $1`, border).Scan(&far); err != nil {
		return err
	}
	var err error
	if far != nil {
		err = fmt.Errorf("there is an event with the id %d, which is not of the sequence", *far)
	} else {
		err = s.bindAndSplit(ctx, last, border)
	}
	if err == nil {
		return nil
	}
	if left := s.unbind(ctx, last); left != nil {
		return fmt.Errorf("%w; %w", err, left)
	}
	return err
}

func (s *Store) bindAndSplit(ctx context.Context, last *partition, border int64) error {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release() // one in an open transaction is closed by it
	name := pgx.Identifier{last.name}.Sanitize()
	next := pgx.Identifier{fmt.Sprintf("outbox_events_p%d", border)}.Sanitize()
	check := pgx.Identifier{last.check()}.Sanitize()
	for _, sql := range []string{
		fmt.Sprintf(gently+`
			alter table %s drop constraint if exists %s;
			alter table %s add constraint %s check (id < %d) not valid; commit`, name, check, name, check, border),
		fmt.Sprintf(`alter table %s validate constraint %s`, name, check),
		fmt.Sprintf(gently+`
			alter table outbox_events detach partition %[1]s;
			alter table outbox_events attach partition %[1]s for values from (%[2]s) to (%[3]d);
			create table %[4]s partition of outbox_events for values from (%[3]d) to (maxvalue)
				with (autovacuum_vacuum_insert_scale_factor = 0.05, vacuum_truncate = off);
			alter table %[1]s drop constraint %[5]s;
			commit`, name, last.start(), border, next, check),
	} {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return nil
}

// gently begins a change of partitions that gives way to who holds the table.
const gently = `begin; set local lock_timeout = '2s';
	select pg_advisory_xact_lock(hashtextextended('outrider partitions', 0));`

// check is the name of the constraint that a partition has while it is split.
func (p partition) check() string { return p.name + "_bound" }

// unbind removes the check that a split left which failed, or died: inserts
// beyond the border would fail, of a relay that does no more than stand still.
// It looks first, and has its own time: that of the split may be over.
func (s *Store) unbind(ctx context.Context, last *partition) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	var err error
	for range 3 {
		var bound bool
		if err = s.pool.QueryRow(ctx, `select exists (select from pg_constraint
			where conrelid = to_regclass($1) and conname = $2::text::name)`, pgx.Identifier{last.name}.Sanitize(), last.check()).Scan(&bound); err == nil && !bound {
			return nil
		}
		drop := fmt.Sprintf(`alter table %s drop constraint if exists %s`, pgx.Identifier{last.name}.Sanitize(), pgx.Identifier{last.check()}.Sanitize())
		if err = s.gently(ctx, drop); err == nil {
			return nil
		}
	}
	return fmt.Errorf("remove the check %s of %s, which refuses ids beyond the border until the next try: %w", last.check(), last.name, err)
}

// gently runs a change of partitions by itself.
func (s *Store) gently(ctx context.Context, sql string) error {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release() // as in bindAndSplit
	_, err = conn.Exec(ctx, gently+sql+`; commit`)
	return err
}
