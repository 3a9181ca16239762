package pgstore_test

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/store"
)

// A restored database has transaction ids that mean nothing in its new cluster.
// Here those of this one are moved far up, as if it had been older; what was
// pending, and only that, is delivered after the rebase, to each destination.
func TestRebase(t *testing.T) {
	ctx := context.Background()
	s, db := open(t, pgstore.Config{})
	insert := func(n int, key string) {
		t.Helper()
		if _, err := db.Exec(`insert into outbox_events (aggregate_type, aggregate_id, event_type, payload, event_key)
			select 'order', $2, 'Placed', '{}', null from generate_series(1, $1::int)`, n, key); err != nil {
			t.Fatal(err)
		}
	}
	p := store.JoinParams{Relay: "r", TTL: time.Minute, Grace: time.Second, Destinations: []store.Destination{
		{Name: "d", FromEarliest: true}, {Name: "behind", FromEarliest: true}}}
	ses, err := s.Join(ctx, p)
	if err != nil {
		t.Fatal(err)
	}
	insert(10, "a") // rows 1-10
	insert(10, "b") // rows 11-20
	// d: row 3 has failed and holds back the rest of a.
	rows := step(t, ses, "d", 15, func(r outrider.Record) store.Outcome {
		switch {
		case r.Row == "3":
			return store.Outcome{State: store.Failed, Attempts: 1, Class: "refused"}
		case r.Key == "a" && len(r.Row) > 1 || r.Key == "a" && r.Row > "3":
			return store.Outcome{State: store.Pending}
		}
		return store.Outcome{State: store.Published}
	})
	if len(rows) != 15 {
		t.Fatalf("d got %v", rows)
	}
	insert(5, "c") // rows 21-25: pending for both
	if _, err := s.Rebase(ctx, true); err == nil || !strings.Contains(err.Error(), "at work") {
		t.Fatalf("rebase beside a relay: %v", err)
	}
	if err := ses.Leave(ctx); err != nil {
		t.Fatal(err)
	}
	moveUp(t, db)
	if _, err := s.Join(ctx, p); err == nil || !strings.Contains(outrider.Hint(err), "rebase") {
		t.Fatalf("join after a restore: %v, hint %q", err, outrider.Hint(err))
	}
	insert(2, "new") // rows 26 and 27, with ids of this cluster

	dry, err := s.Rebase(ctx, true)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]int64{"d": 7 + 5 + 5 + 2, "behind": 27}
	if fmt.Sprint(dry.Pending) != fmt.Sprint(want) || dry.Changed {
		t.Errorf("dry run: %+v, want pending %v", dry, want)
	}
	if r, err := s.Rebase(ctx, false); err != nil || !r.Changed || fmt.Sprint(r.Pending) != fmt.Sprint(want) {
		t.Fatalf("rebase: %+v, %v", r, err)
	}
	if ses, err = s.Join(ctx, p); err != nil {
		t.Fatal(err)
	}
	defer ses.Leave(ctx) //nolint:errcheck // the database goes with the test
	published := func(outrider.Record) store.Outcome { return store.Outcome{State: store.Published} }
	if n, err := s.Retry(ctx, store.Target{Destination: "d", ID: "3"}); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	got := step(t, ses, "d", 1000, published)
	if want := append([]int{3, 4, 5, 6, 7, 8, 9, 10}, span(16, 27)...); !slices.Equal(sorted(got), want) {
		t.Errorf("d got rows %v after the rebase, want %v", sorted(got), want)
	}
	if got := step(t, ses, "behind", 1000, published); !slices.Equal(got, span(1, 27)) {
		t.Errorf("behind got rows %v after the rebase", got)
	}
	var left int
	if err := db.QueryRow(`select count(*) from outbox_exceptions`).Scan(&left); err != nil || left != 0 {
		t.Errorf("%d exceptions are left, %v", left, err)
	}
}

func span(from, to int) (out []int) {
	for i := from; i <= to; i++ {
		out = append(out, i)
	}
	return out
}

func sorted(v []int) []int { v = slices.Clone(v); slices.Sort(v); return v }

// step hands out up to n records of a destination and settles them; it ends when
// nothing comes any more, and returns the rows.
func step(t *testing.T, ses store.Session, destination string, n int, decide func(outrider.Record) store.Outcome) []int {
	t.Helper()
	ctx := context.Background()
	leases, err := ses.Acquire(ctx, store.AcquireParams{Destination: destination, Lanes: outrider.Lanes})
	if err != nil || len(leases) != 1 {
		t.Fatal(leases, err)
	}
	l := leases[0]
	var out []int
	for empty := 0; empty < 20 && n > 0; {
		for _, kind := range []store.Kind{store.Fresh, store.Due} {
			c, err := ses.Claim(ctx, store.ClaimParams{Lease: l, Kind: kind, MaxRecords: max(1, min(n, 100)), MaxBytes: 1 << 20})
			if err != nil {
				t.Fatal(err)
			}
			if len(c.Records) == 0 {
				empty++
				continue
			}
			empty = 0
			if kind == store.Fresh {
				n -= len(c.Records)
			}
			outcomes := make([]store.Outcome, len(c.Records))
			for i, r := range c.Records {
				outcomes[i] = decide(r)
				row, _ := strconv.Atoi(r.Row)
				out = append(out, row)
			}
			for _, p := range []store.CommitParams{{Start: []*store.Claim{c}}, {Settle: []store.Settlement{{Claim: c, Outcomes: outcomes}}}} {
				p.Lease = l
				if err := ses.Commit(ctx, p); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if _, err := ses.Release(ctx, l, 0); err != nil {
		t.Fatal(err)
	}
	return out
}

// moveUp makes the database look like one restored from a cluster with higher
// transaction ids.
func moveUp(t *testing.T, db *sql.DB) {
	t.Helper()
	for _, q := range []string{
		`create function up(s pg_snapshot) returns pg_snapshot language sql as $$
			select ((pg_snapshot_xmin(s)::text::bigint + 1000000000000) || ':' || (pg_snapshot_xmax(s)::text::bigint + 1000000000000) || ':' ||
				coalesce((select string_agg((x::text::bigint + 1000000000000)::text, ',') from pg_snapshot_xip(s) x), ''))::pg_snapshot $$`,
		`update outbox_events set tx_id = (tx_id::text::bigint + 1000000000000)::text::xid8`,
		`update outbox_leases set base = case when base::text = '3:3:' then base else up(base) end, target = up(target)`,
		`update outbox_held_keys set base = case when base::text = '3:3:' then base else up(base) end, target = up(target)`,
		`update outbox_source set system_identifier = '1'`,
	} {
		if _, err := db.Exec(q); err != nil {
			t.Fatalf("%v in %s", err, q)
		}
	}
}
