package pgstore_test

import (
	"context"
	"math"
	"strings"
	"testing"

	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/store"
)

// What the outbox takes up is told: its size, its dead rows, how far the last
// partition has come to be filled.
func TestStorageIsTold(t *testing.T) {
	ctx := context.Background()
	s, db := open(t, pgstore.Config{PartitionSize: 1000})
	told := func() (store.Storage, string) {
		t.Helper()
		st, err := s.Status(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return st.Storage, strings.Join(st.Warnings, "; ")
	}
	run := func(sql string, args ...any) {
		t.Helper()
		if _, err := db.Exec(sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	const some = `insert into outbox_events (aggregate_type, aggregate_id, event_type, payload, event_key)
		select 'order', '1', 'Placed', '{}', null from generate_series(1, 700)`
	empty, warnings := told()
	if empty.Partitions != 1 || empty.LastPartitionIDs != 1 || empty.Bytes <= 0 || warnings != "" {
		t.Errorf("to begin with: %+v, %q", empty, warnings)
	}
	run(some)
	full, _ := told()
	if full.LastPartitionIDs != 700 || full.Bytes < empty.Bytes+700*50 {
		t.Errorf("with 700 events: %+v, %+v before", full, empty)
	}
	if err := s.Maintain(ctx); err != nil { // splits at 1700
		t.Fatal(err)
	}
	if got, _ := told(); got.Partitions != 2 || got.LastPartitionIDs != 0 {
		t.Errorf("with a partition ahead: %+v", got)
	}
	run(some)
	run(some)
	if got, _ := told(); got.LastPartitionIDs != 2100-1700 {
		t.Errorf("in the last partition: %+v", got)
	}
	run(`select setval('outbox_events_id_seq', $1)`, int64(math.MaxInt64-5))
	if got, _ := told(); got.LastPartitionIDs != math.MaxInt64-5-1700 {
		t.Errorf("at the end of all numbers: %+v", got)
	}

	run(`alter table outbox_exceptions set (autovacuum_enabled = off)`)
	run(`insert into outbox_exceptions (destination, id, lane, event_key, event_id, event_type, state, created_at)
		select 'd', g, 0, '', gen_random_uuid(), 'T', 'FAILED', now() from generate_series(1, 500) g`)
	run(`delete from outbox_exceptions`)
	until(t, "dead rows to be told", func() bool { got, _ := told(); return got.DeadRows >= 500 })

	run(`drop table outbox_events_p1700`)
	if got, warnings := told(); got.LastPartitionIDs != -1 || got.Partitions != 1 || !strings.Contains(warnings, "for values from (1700) to (maxvalue)") {
		t.Errorf("without the last partition: %+v, %q", got, warnings)
	}
}
