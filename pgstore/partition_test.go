package pgstore_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/relay"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

const (
	detachOldest = `alter table outbox_events detach partition outbox_events_p0`
	attachOldest = `alter table outbox_events attach partition outbox_events_p0 for values from (minvalue) to (1600)`
)

func execAll(t testing.TB, db *sql.DB, queries ...string) {
	t.Helper()
	for _, q := range queries {
		if _, err := db.Exec(q); err != nil {
			t.Fatalf("%v\n%s", err, q)
		}
	}
}

// some inserts n events of ten keys.
func some(n int) string {
	return fmt.Sprintf(`insert into outbox_events (aggregate_type, aggregate_id, event_type, payload, event_key)
		select 'a', 'k' || i %% 10, 'T', convert_to(nextval('counted')::text, 'UTF8'), null from generate_series(1, %d) i`, n)
}

// twoPartitions has n events in the oldest partition, which ends at 1600, and
// the sequence beyond it.
func twoPartitions(t testing.TB, cfg pgstore.Config, n int) (*pgstore.Store, *sql.DB) {
	t.Helper()
	cfg.PartitionSize = 1000
	s, db := open(t, cfg)
	execAll(t, db, `create sequence counted`, some(n), `select setval('outbox_events_id_seq', 600)`)
	if err := s.Maintain(context.Background()); err != nil {
		t.Fatal(err)
	}
	execAll(t, db, `select setval('outbox_events_id_seq', 2000)`)
	if got := partitions(t, db); len(got) != 2 || got[0] != "FOR VALUES FROM (MINVALUE) TO ('1600')" {
		t.Fatalf("partitions are %q", got)
	}
	return s, db
}

// inOrder checks that n events arrived, each once, and each key's in order.
func inOrder(t testing.TB, sk *memsink.Sink, n int) {
	t.Helper()
	last, seen := map[string]int{}, map[string]bool{}
	for _, m := range sk.Messages() {
		v, err := strconv.Atoi(string(m.Payload))
		if err != nil {
			t.Fatal(err)
		}
		if v <= last[m.Key] {
			t.Errorf("of key %s came %d behind %d", m.Key, v, last[m.Key])
		}
		last[m.Key], seen[m.ID] = v, true
	}
	if got := len(sk.Messages()); got != n || len(seen) != n {
		t.Errorf("%d messages of %d events, want %d", got, len(seen), n)
	}
}

// saysMissing waits until the relay says what is missing.
func saysMissing(t testing.TB, r *relay.Relay, want string) {
	t.Helper()
	until(t, "the relay to say: "+want, func() bool { return strings.Contains(fmt.Sprintf("%+v", r.Health()), want) })
}

// untilTrue waits until the database answers yes.
func untilTrue(t testing.TB, db *sql.DB, what, query string) {
	t.Helper()
	until(t, what, func() (yes bool) {
		if err := db.QueryRow(query).Scan(&yes); err != nil {
			t.Fatal(err)
		}
		return yes
	})
}

// A relay does not start without a partition that may hold events, and loses
// none once it is there again.
func TestPartitionMissingAtStart(t *testing.T) {
	ctx := context.Background()
	s, db := twoPartitions(t, pgstore.Config{}, 30)
	p := store.JoinParams{Relay: "a", TTL: time.Minute, Grace: time.Second, Destinations: []store.Destination{{Name: "main", FromEarliest: true}}}
	ses, err := s.Join(ctx, p)
	if err != nil {
		t.Fatal(err)
	}
	if err := ses.Leave(ctx); err != nil {
		t.Fatal(err)
	}
	execAll(t, db, detachOldest)
	const want = "no partition for the ids from 1 to 1599"
	_, err = s.Join(ctx, p)
	if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(outrider.Hint(err), "for values from (minvalue) to (1600)") ||
		!strings.Contains(outrider.Hint(err), "set first_id = 1600") {
		t.Errorf("join: %v, hint %q", err, outrider.Hint(err))
	}
	for what, err := range map[string]error{"maintain": s.Maintain(ctx), "rebase": second(s.Rebase(ctx, true))} {
		if err == nil || !strings.Contains(err.Error(), want) || outrider.Hint(err) == "" {
			t.Errorf("%s: %v, hint %q", what, err, outrider.Hint(err))
		}
	}
	st, err := s.Status(ctx)
	if err != nil || !slices.ContainsFunc(st.Warnings, func(w string) bool { return strings.Contains(w, want) }) {
		t.Errorf("status: %v, warnings %q", err, st.Warnings)
	}
	execAll(t, db, some(3), attachOldest)
	sk := memsink.New(memsink.Config{})
	relaying(t, s, sk, relay.Config{})
	arrive(t, sk, 33, "once it is there again")
	inOrder(t, sk, 33)
}

func second[T any](_ T, err error) error { return err }

// A relay that runs reads nothing while a partition is missing, says so, and
// goes on by itself when it is back.
func TestPartitionDetachedUnderARelay(t *testing.T) {
	s, db := twoPartitions(t, pgstore.Config{}, 0)
	sk := memsink.New(memsink.Config{})
	r, _ := relaying(t, s, sk, relay.Config{})
	execAll(t, db, some(20))
	arrive(t, sk, 20, "before")

	// Thirty events whose ids are of the oldest partition, in a transaction
	// that also takes it away: no claim can have seen them.
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback() // after the commit it is a no-op
	for _, q := range []string{`lock table outbox_events`, `select setval('outbox_events_id_seq', 100)`, some(30), `select setval('outbox_events_id_seq', 3000)`, detachOldest} {
		if _, err := tx.Exec(q); err != nil {
			t.Fatalf("%v\n%s", err, q)
		}
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	execAll(t, db, some(7))
	saysMissing(t, r, "no partition for the ids from 1 to 1599")
	if n := len(sk.Messages()); n != 20 {
		t.Errorf("%d messages while a partition is missing, want the 20 from before", n)
	}
	execAll(t, db, attachOldest)
	arrive(t, sk, 57, "once it is there again")
	inOrder(t, sk, 57)
}

// What is gone in the middle of a window, of a page that has to be read again
// and of a held key is missed as well: each way of reading is stopped by itself.
func TestPartitionMissingForEachReading(t *testing.T) {
	ctx := context.Background()
	const records = 7
	settle := func(t *testing.T, ses store.Session, c *store.Claim, state store.State) {
		t.Helper()
		o := make([]store.Outcome, len(c.Records))
		for i := range o {
			o[i].State = state
			if state == store.Waiting {
				o[i].Attempts, o[i].Class = 1, "other"
			}
		}
		for _, p := range []store.CommitParams{{Start: []*store.Claim{c}}, {Settle: []store.Settlement{{Claim: c, Outcomes: o}}}} {
			p.Lease = c.Lease
			if err := ses.Commit(ctx, p); err != nil {
				t.Fatal(err)
			}
		}
	}
	claim := func(t *testing.T, ses store.Session, l store.Lease, kind store.Kind) *store.Claim {
		t.Helper()
		c, err := ses.Claim(ctx, store.ClaimParams{Lease: l, Kind: kind, MaxRecords: records, MaxBytes: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		if len(c.Records) == 0 {
			t.Fatal("the claim is empty")
		}
		return c
	}
	for what, run := range map[string]func(t *testing.T, ses store.Session, l store.Lease) store.Kind{
		"window": func(t *testing.T, ses store.Session, l store.Lease) store.Kind {
			settle(t, ses, claim(t, ses, l, store.Fresh), store.Published)
			return store.Fresh
		},
		"page read again": func(t *testing.T, ses store.Session, l store.Lease) store.Kind {
			c := claim(t, ses, l, store.Fresh)
			if err := ses.Commit(ctx, store.CommitParams{Lease: l, Start: []*store.Claim{c}}); err != nil {
				t.Fatal(err)
			}
			pgstore.Kill(ses)
			return store.Fresh
		},
		"waiting": func(t *testing.T, ses store.Session, l store.Lease) store.Kind {
			settle(t, ses, claim(t, ses, l, store.Fresh), store.Waiting)
			return store.Due
		},
	} {
		t.Run(what, func(t *testing.T) {
			s, db := twoPartitions(t, pgstore.Config{}, 30)
			p := store.JoinParams{Relay: "a", TTL: time.Second, Grace: time.Millisecond, Destinations: []store.Destination{{Name: "d", FromEarliest: true}}}
			ses, err := s.Join(ctx, p)
			if err != nil {
				t.Fatal(err)
			}
			defer pgstore.Kill(ses)
			l := acquire(t, ses)
			kind := run(t, ses, l)
			// Who takes over joined before.
			p.Relay = "b"
			other, err := s.Join(ctx, p)
			if err != nil {
				t.Fatal(err)
			}
			defer pgstore.Kill(other)
			execAll(t, db, some(3), detachOldest)
			if what == "page read again" {
				ses, l = other, acquire(t, other)
			}
			for range 3 {
				c, err := ses.Claim(ctx, store.ClaimParams{Lease: l, Kind: kind, MaxRecords: records, MaxBytes: 1 << 20})
				if err == nil || !strings.Contains(err.Error(), "no partition for the ids from 1 to 1599") || outrider.Hint(err) == "" {
					t.Fatalf("claim: %+v, %v, hint %q", c, err, outrider.Hint(err))
				}
			}
			execAll(t, db, attachOldest)
			if n := len(claim(t, ses, l, kind).Records); n > records {
				t.Errorf("%d records", n)
			}
			var failed int
			if err := db.QueryRow(`select count(*) from outbox_exceptions where state = 'FAILED'`).Scan(&failed); err != nil || failed != 0 {
				t.Errorf("%d exceptions are FAILED, %v", failed, err)
			}
		})
	}
}

// A claim that waits for the lock of who detaches has its snapshot from before:
// the partition is gone from what it reads, and not yet from the catalogue as
// its own transaction sees it.
func TestPartitionDetachedWhileAClaimWaits(t *testing.T) {
	ctx := context.Background()
	s, db := twoPartitions(t, pgstore.Config{}, 30)
	ses, err := s.Join(ctx, store.JoinParams{Relay: "a", TTL: time.Minute, Grace: time.Second, Destinations: []store.Destination{{Name: "d", FromEarliest: true}}})
	if err != nil {
		t.Fatal(err)
	}
	defer pgstore.Kill(ses)
	l := acquire(t, ses)
	// The statements are prepared by now: those would wait else, before there
	// is a snapshot.
	c, err := ses.Claim(ctx, store.ClaimParams{Lease: l, MaxRecords: 100, MaxBytes: 1 << 20})
	if err != nil || len(c.Records) != 30 {
		t.Fatalf("claim: %+v, %v", c, err)
	}
	ses.Forget(c)
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback() // after the commit it is a no-op
	if _, err := tx.Exec(detachOldest); err != nil {
		t.Fatal(err)
	}
	got := make(chan error, 1)
	go func() {
		c, err := ses.Claim(ctx, store.ClaimParams{Lease: l, MaxRecords: 100, MaxBytes: 1 << 20})
		if err == nil {
			err = fmt.Errorf("a claim of %d records", len(c.Records))
		}
		got <- err
	}()
	untilTrue(t, db, "the claim to wait for the lock", `select exists (select from pg_locks where relation = 'outbox_events'::regclass and not granted)`)
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	if err := <-got; !strings.Contains(err.Error(), "no partition for the ids from 1 to 1599") {
		t.Errorf("claim: %v", err)
	}
}

// One that is being detached concurrently is there until nobody uses it any
// more, and queries pass it over already.
func TestPartitionBeingDetachedConcurrently(t *testing.T) {
	ctx := context.Background()
	s, db := twoPartitions(t, pgstore.Config{}, 30)
	ses, err := s.Join(ctx, store.JoinParams{Relay: "a", TTL: time.Minute, Grace: time.Second, Destinations: []store.Destination{{Name: "d", FromEarliest: true}}})
	if err != nil {
		t.Fatal(err)
	}
	defer pgstore.Kill(ses)
	l := acquire(t, ses)
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback() // after the commit it is a no-op
	if _, err := tx.Exec(`lock table outbox_events in access share mode`); err != nil {
		t.Fatal(err)
	}
	detached := make(chan error, 1)
	go func() {
		_, err := db.Exec(detachOldest + ` concurrently`)
		detached <- err
	}()
	untilTrue(t, db, "the partition to be on its way", `select bool_or(inhdetachpending) from pg_inherits where inhparent = 'outbox_events'::regclass`)
	c, err := ses.Claim(ctx, store.ClaimParams{Lease: l, MaxRecords: 100, MaxBytes: 1 << 20})
	if err == nil || !strings.Contains(err.Error(), "no partition for the ids from 1 to 1599") {
		t.Errorf("claim: %+v, %v", c, err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	if err := <-detached; err != nil {
		t.Fatal(err)
	}
}

// A partition that is made ahead by somebody else makes no claim fail.
func TestPartitionsMadeAheadStopNobody(t *testing.T) {
	ctx := context.Background()
	s, db := twoPartitions(t, pgstore.Config{}, 0)
	ses, err := s.Join(ctx, store.JoinParams{Relay: "a", TTL: time.Minute, Grace: time.Second, Destinations: []store.Destination{{Name: "d", FromEarliest: true}}})
	if err != nil {
		t.Fatal(err)
	}
	defer pgstore.Kill(ses)
	l := acquire(t, ses)
	other, err := pgstore.Open(ctx, pgstore.Config{DSN: dsnOf(s), PartitionSize: 1000})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	for n := range 3 {
		execAll(t, db, some(5), fmt.Sprintf(`select setval('outbox_events_id_seq', %d)`, 5000*(n+1)))
		if err := other.Maintain(ctx); err != nil {
			t.Fatal(err)
		}
		c, err := ses.Claim(ctx, store.ClaimParams{Lease: l, MaxRecords: 100, MaxBytes: 1 << 20})
		if err != nil || len(c.Records) != 5 {
			t.Fatalf("claim: %+v, %v", c, err)
		}
		ses.Forget(c)
		out := make([]store.Outcome, 5)
		for i := range out {
			out[i].State = store.Published
		}
		if c, err = ses.Claim(ctx, store.ClaimParams{Lease: l, MaxRecords: 100, MaxBytes: 1 << 20}); err != nil {
			t.Fatal(err)
		}
		for _, p := range []store.CommitParams{{Start: []*store.Claim{c}}, {Settle: []store.Settlement{{Claim: c, Outcomes: out}}}} {
			p.Lease = l
			if err := ses.Commit(ctx, p); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got := partitions(t, db); len(got) != 5 {
		t.Errorf("partitions are %q", got)
	}
}

// removeSQL is the statement of docs/OPERATING.md.
func removeSQL(t testing.TB) string {
	t.Helper()
	doc, err := os.ReadFile("../docs/OPERATING.md")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?s)```sql\n(do \\$\\$\n.*?end \\$\\$;)\n```").FindSubmatch(doc)
	if m == nil {
		t.Fatal("docs/OPERATING.md has no statement for it")
	}
	return string(m[1])
}

// The statement of docs/OPERATING.md takes a partition away when nobody needs
// it, says who does, and stops no relay.
func TestRemovingAPartition(t *testing.T) {
	remove := removeSQL(t)
	s, db := twoPartitions(t, pgstore.Config{}, 30)
	refused := func(want string) {
		t.Helper()
		if _, err := db.Exec(remove); err == nil || !strings.Contains(err.Error(), want) {
			t.Fatalf("it answers %v, want %q", err, want)
		}
	}
	var mended atomic.Bool
	sk := memsink.New(memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
		if m.Key == "k3" && !mended.Load() {
			return sink.Result{Status: sink.Reject, Class: "other", Err: errors.New("no")}
		}
		return memsink.Deliver
	}})
	_, stop := relaying(t, s, sk, relay.Config{})
	arrive(t, sk, 27, "all but those of a key")
	stop()
	refused("main has events that are FAILED in or before it")
	refused("main holds back key k3")
	execAll(t, db, `insert into outbox_leases (destination, lanes, base) values ('late', -1, '3:3:')`)
	refused("late has not read all of it")
	execAll(t, db, `delete from outbox_leases where destination = 'late'`,
		`update outbox_exceptions set state = 'WAITING', due_at = clock_timestamp()`)
	mended.Store(true)
	r, _ := relaying(t, s, sk, relay.Config{})
	arrive(t, sk, 30, "once it is mended")
	until(t, "the last of it to be settled", func() bool {
		_, err := db.Exec(remove)
		if err != nil && !strings.Contains(err.Error(), "not yet:") && !strings.Contains(err.Error(), "55P03") {
			t.Fatal(err)
		}
		return err == nil
	})
	execAll(t, db, `drop table outbox_events_p0`, some(5))
	arrive(t, sk, 35, "without the oldest partition")
	inOrder(t, sk, 35)
	if h := r.Health(); h.MaintainError != "" {
		t.Errorf("it says %q", h.MaintainError)
	}
	if _, err := db.Exec(strings.Replace(remove, "outbox_events_p0", "outbox_events_p1600", 1)); err == nil || !strings.Contains(err.Error(), "is the last partition") {
		t.Errorf("of the last one it says %v", err)
	}
}

// However much was declared removed, the ids to come need their partition.
func TestPartitionThatIsWrittenToIsMissed(t *testing.T) {
	ctx := context.Background()
	s, db := twoPartitions(t, pgstore.Config{}, 0)
	execAll(t, db, `insert into outbox_source (system_identifier, seen_xid, seen_id) select system_identifier::text, '3', 1 from pg_control_system() on conflict do nothing`,
		`select setval('outbox_events_id_seq', 700)`, detachOldest, `update outbox_source set first_id = 1600`)
	if err := s.Maintain(ctx); err == nil || !strings.Contains(err.Error(), "no partition for the ids from 701 to 1599") {
		t.Errorf("it says %v", err)
	}
	execAll(t, db, `select setval('outbox_events_id_seq', 1599)`)
	if err := s.Maintain(ctx); err != nil {
		t.Error(err)
	}
}
