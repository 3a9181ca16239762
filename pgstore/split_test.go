package pgstore_test

import (
	"context"
	"strings"
	"testing"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/pgstore"
)

// A split that fails, at whatever step, is said, and no insert fails for it: the
// check that prepares it goes again, also one that is left from a death.
func TestSplitThatFailsLeavesInsertsAlone(t *testing.T) {
	ctx := context.Background()
	for what, c := range map[string]struct {
		before []string
		want   string
		after  []string
	}{
		"an id of somebody's own": {
			[]string{`insert into outbox_events (id, aggregate_type, aggregate_id, event_type, payload) values (5000000, 'a', 'k', 'T', '{}')`,
				`alter table outbox_events_p0 add constraint outbox_events_p0_bound check (id < 1600) not valid`},
			"an event with the id 5000000", []string{`delete from outbox_events where id = 5000000`},
		},
		"a table of that name": {[]string{`create table outbox_events_p1600 ()`}, `"outbox_events_p1600" already exists`,
			[]string{`drop table outbox_events_p1600`}},
	} {
		t.Run(what, func(t *testing.T) {
			s, db := open(t, pgstore.Config{PartitionSize: 1000})
			execAll(t, db, `create sequence counted`, `select setval('outbox_events_id_seq', 600)`)
			execAll(t, db, c.before...)
			if err := s.Maintain(ctx); err == nil || !strings.Contains(err.Error(), c.want) || outrider.Hint(err) == "" {
				t.Errorf("maintain: %v, hint %q", err, outrider.Hint(err))
			}
			execAll(t, db, `select setval('outbox_events_id_seq', 1700)`, some(3))
			execAll(t, db, c.after...)
			if err := s.Maintain(ctx); err != nil {
				t.Error(err)
			}
			if got := partitions(t, db); len(got) != 2 {
				t.Errorf("partitions are %q", got)
			}
		})
	}
}
