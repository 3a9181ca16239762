package pgstore

import (
	"context"
	"fmt"
	"time"
)

// Maintain implements store.Maintainer: it notes how far the cluster has come,
// tidies up, and splits the last partition ahead of the sequence.
func (s *Store) Maintain(ctx context.Context) error {
	if err := s.tidy(ctx); err != nil {
		return err
	}
	return s.makeAhead(ctx)
}

func (s *Store) tidy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for _, f := range []func(context.Context) error{s.noteSeen, s.trimJournal, s.buryRelays, s.compact} {
		if err := f(ctx); err != nil {
			return err
		}
	}
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
