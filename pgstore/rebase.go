package pgstore

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

var _ store.Rebaser = (*Store)(nil)

// Rebase implements store.Rebaser.
//
// What is pending is a function of the old positions and the rows alone: no
// transaction id is compared with one of this cluster. Pending rows then get
// the rebasing transaction's id, all others one that every snapshot has seen,
// and every lease begins at a snapshot from just before. Rows that one
// destination has done and another has not are noted for the former to pass
// over.
//
// The table is locked against writers meanwhile, and all of its rows may be
// rewritten.
func (s *Store) Rebase(ctx context.Context, dry bool) (store.RebaseReport, error) {
	r := store.RebaseReport{Pending: map[string]int64{}}
	err := s.inTx(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `set local statement_timeout = 0; lock table outbox_leases in exclusive mode;
			lock table outbox_events in share row exclusive mode`); err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, `
			select s.system_identifier, (select system_identifier::text from pg_control_system())
			from outbox_source s`).Scan(&r.From, &r.To); err != nil {
			return err
		}
		if err := nobodyAtWork(ctx, tx); err != nil {
			return err
		}
		// What is pending in a partition that is missing would not be counted,
		// and its rows would keep the old cluster's transaction ids.
		if _, _, err := (view{s, tx}).partitions(ctx); err != nil {
			return err
		}
		// Taken before this transaction has an id, which is beyond it then:
		// a snapshot does not list its own transaction as open.
		var base string
		if err := tx.QueryRow(ctx, `select pg_current_snapshot()::text`).Scan(&base); err != nil {
			return err
		}
		if err := pendingRows(ctx, tx, r.Pending); err != nil {
			return err
		}
		if dry {
			return errDry
		}
		for _, sql := range rebaseSQL {
			if _, err := tx.Exec(ctx, strings.ReplaceAll(sql, "{{base}}", "'"+base+"'::pg_snapshot")); err != nil {
				return fmt.Errorf("%w in %q", err, sql)
			}
		}
		r.Changed = true
		return nil
	})
	if errors.Is(err, errDry) {
		err = nil
	}
	if err != nil {
		return store.RebaseReport{}, Explain(fmt.Errorf("pgstore: rebase: %w", err))
	}
	return r, nil
}

var errDry = errors.New("dry run")

// nobodyAtWork refuses while a relay of this cluster is alive.
func nobodyAtWork(ctx context.Context, tx pgx.Tx) error {
	var name string
	err := tx.QueryRow(ctx, `
		select coalesce(max(relay), '') from outbox_relays
		where not pg_try_advisory_xact_lock_shared(lock)`).Scan(&name)
	if err != nil {
		return err
	}
	if name != "" {
		return outrider.WithHint(fmt.Errorf("relay %q is at work", name), "stop all relays of this database first")
	}
	return nil
}

// pendingRows makes the table rebase_pending and counts it. A row is done for
// a lease if it is visible in base, in which no row is above hi; in a window
// also if it has been passed there; and for a held key by the key's own place.
func pendingRows(ctx context.Context, tx pgx.Tx, counts map[string]int64) error {
	if _, err := tx.Exec(ctx, `
		create temporary table rebase_pending on commit drop as
		select l.destination, e.id
		from outbox_events e
		join outbox_leases l on ((l.lanes >> e.lane::int) & 1) = 1
		left join outbox_held_keys h on h.destination = l.destination
			and h.event_key = coalesce(e.event_key, e.aggregate_id) and h.event_key <> ''
		where not exists (select from outbox_exceptions x where x.destination = l.destination and x.id = e.id)
		  and case when h.event_key is null then
			not (e.id <= l.hi and pg_visible_in_snapshot(e.tx_id, l.base))
			and not coalesce(e.id <= least(l.at, l.top) and pg_visible_in_snapshot(e.tx_id, l.target), false)
		else
			not (e.id <= greatest(l.hi, l.top) and pg_visible_in_snapshot(e.tx_id, h.base))
			and not coalesce(e.id <= h.at and pg_visible_in_snapshot(e.tx_id, h.target), false)
		end;
		create index on rebase_pending (id);
		analyze rebase_pending`); err != nil {
		return err
	}
	rows, err := tx.Query(ctx, `
		select d.destination, (select count(*) from rebase_pending p where p.destination = d.destination)
		from (select distinct destination from outbox_leases) d`)
	if err != nil {
		return err
	}
	var name string
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&name, &n}, func() error { counts[name] = n; return nil })
	return err
}

var rebaseSQL = []string{
	// Done for one, pending for another.
	`insert into outbox_exceptions (destination, id, lane, event_key, event_id, event_type, state, pass, created_at)
	 select distinct l.destination, e.id, e.lane, coalesce(e.event_key, e.aggregate_id), e.event_id, e.event_type, 'PUBLISHED', true, e.created_at
	 from rebase_pending p
	 join outbox_events e using (id)
	 join outbox_leases l on ((l.lanes >> e.lane::int) & 1) = 1
	 where not exists (select from rebase_pending q where q.destination = l.destination and q.id = e.id)
	 on conflict (destination, id) do update set pass = true`,
	`update outbox_events set tx_id = pg_current_xact_id() where id in (select id from rebase_pending)`,
	`update outbox_events set tx_id = '3' where tx_id <> '3' and id not in (select id from rebase_pending)`,
	// A held key without a failed head moves with its lease from here on.
	`delete from outbox_held_keys where head is null`,
	`update outbox_held_keys set base = {{base}}, target = null, at = 0, low = null, in_hand = 0, suspects = 0`,
	`update outbox_exceptions set state = 'WAITING', due_at = clock_timestamp(), alone = false where state = 'PUBLISHING'`,
	`update outbox_leases set base = {{base}}, target = null, at = 0, top = 0,
		hi = (select coalesce(max(id), 0) from outbox_events), open = '{"open":[]}',
		owner = null, owner_lock = null, expires_at = null, epoch = epoch + 1`,
	`delete from outbox_relays`,
	`update outbox_source set system_identifier = (select system_identifier::text from pg_control_system()),
		seen_xid = pg_snapshot_xmax(pg_current_snapshot()), seen_id = (select last_value from outbox_events_id_seq)`,
}
