package pgstore

import (
	"context"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// storage is what the outbox takes up, by the database's own books: no table is
// read. What vanishes meanwhile counts nothing.
func (v view) storage(ctx context.Context, out *store.Status) error {
	s := &out.Storage
	var lastID int64
	err := v.q.QueryRow(ctx, `
		select coalesce(sum(pg_total_relation_size(t.oid)), 0)::bigint, coalesce(sum(pg_stat_get_dead_tuples(t.oid)), 0)::bigint,
		       count(*) filter (where part), (select last_value from outbox_events_id_seq)
		from (select inhrelid as oid, true as part from pg_inherits where inhparent = 'outbox_events'::regclass
		      union all
		      select to_regclass(name)::oid, false from unnest(array['outbox_leases', 'outbox_relays', 'outbox_exceptions',
		          'outbox_held_keys', 'outbox_journal', 'outbox_source']) name) t`).Scan(&s.Bytes, &s.DeadRows, &s.Partitions, &lastID)
	if err != nil {
		return err
	}
	_, parts, err := v.partitions(ctx)
	if err != nil {
		out.Warnings = append(out.Warnings, err.Error()+"; "+outrider.Hint(err))
	}
	s.LastPartitionIDs = -1
	if end := last(parts); end != nil {
		s.LastPartitionIDs = max(0, lastID-max(0, end.from))
	}
	return nil
}
