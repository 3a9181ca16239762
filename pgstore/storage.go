package pgstore

import (
	"context"
	"errors"
	"strings"

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
	last, err := v.lastPartition(ctx)
	switch {
	case errors.Is(err, errNoLastPartition):
		s.LastPartitionIDs = -1
		out.Warnings = append(out.Warnings, strings.TrimPrefix(err.Error(), "pgstore: ")+"; "+outrider.Hint(err))
		return nil
	case err != nil:
		return err
	case last.from == nil:
		s.LastPartitionIDs = lastID
	default:
		s.LastPartitionIDs = max(0, lastID-*last.from)
	}
	return nil
}
