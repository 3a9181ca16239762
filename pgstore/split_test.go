package pgstore_test

import (
	"context"
	"net/url"
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
				`alter table outbox_events_p0 add constraint outbox_events_bound check (id < 1600) not valid`},
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

// Two relays that maintain at once make one partition, and the one that comes
// while the other is at it stays out of its way.
func TestOneSplitsAtATime(t *testing.T) {
	ctx := context.Background()
	s, db := open(t, pgstore.Config{PartitionSize: 1000})
	execAll(t, db, `select setval('outbox_events_id_seq', 600)`)
	conn, err := db.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.ExecContext(ctx, `select pg_advisory_lock(hashtextextended('outrider partitions of ' || 'outbox_events'::regclass::oid, 0))`); err != nil {
		t.Fatal(err)
	}
	if err := s.Maintain(ctx); err != nil {
		t.Errorf("beside one who is at it: %v", err)
	}
	if got := partitions(t, db); len(got) != 1 {
		t.Errorf("beside one who is at it: %q", got)
	}
	if _, err := conn.ExecContext(ctx, `select pg_advisory_unlock_all()`); err != nil {
		t.Fatal(err)
	}
	errs := make(chan error)
	for range 4 {
		go func() { errs <- s.Maintain(ctx) }()
	}
	for range 4 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if got := partitions(t, db); len(got) != 2 {
		t.Errorf("partitions are %q", got)
	}
	var held int
	if err := db.QueryRow(`select count(*) from pg_locks where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())`).Scan(&held); err != nil || held != 0 {
		t.Errorf("%d locks are left, %v", held, err)
	}
}

// The outbox may stand in a schema behind another on the path, which has tables
// of the partitions' names.
func TestSplitInAnotherSchema(t *testing.T) {
	ctx := context.Background()
	s, db := open(t, pgstore.Config{PartitionSize: 1000})
	execAll(t, db, `select setval('outbox_events_id_seq', 600)`, `create schema "InFront"`,
		`create table "InFront".outbox_events_p0 (id bigint)`, `create table "InFront".outbox_events_p1600 (id bigint)`)
	dsn, err := url.Parse(dsnOf(s))
	if err != nil {
		t.Fatal(err)
	}
	q := dsn.Query()
	q.Set("search_path", `"InFront",public`)
	dsn.RawQuery = q.Encode()
	other, err := pgstore.Open(ctx, pgstore.Config{DSN: dsn.String(), PartitionSize: 1000})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := other.Maintain(ctx); err != nil {
		t.Fatal(err)
	}
	if got := partitions(t, db); len(got) != 2 || got[1] != "FOR VALUES FROM ('1600') TO (MAXVALUE)" {
		t.Errorf("partitions are %q", got)
	}
	var where string
	if err := db.QueryRow(`select string_agg(c.relnamespace::regnamespace::text, ' ') from pg_inherits join pg_class c on c.oid = inhrelid
		where inhparent = 'outbox_events'::regclass`).Scan(&where); err != nil || where != "public public" {
		t.Errorf("they are in %s, %v", where, err)
	}
}

// Of a partition that has partitions itself nobody would notice what is missing.
func TestDividedPartitionIsRefused(t *testing.T) {
	ctx := context.Background()
	s, db := twoPartitions(t, pgstore.Config{}, 0)
	execAll(t, db, detachOldest, `create table divided (like outbox_events including all) partition by range (id)`,
		`alter table outbox_events attach partition divided for values from (minvalue) to (1600)`)
	if err := s.Maintain(ctx); err == nil || !strings.Contains(err.Error(), "the partition divided of outbox_events has partitions itself") || outrider.Hint(err) == "" {
		t.Errorf("it says %v, hint %q", err, outrider.Hint(err))
	}
}
