package sqlitestore_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
)

// Every query that a store runs is planned on an empty outbox, and on one with
// a long history: none reads a whole table of events, or sorts one.
func TestPlans(t *testing.T) {
	for _, set := range []migrate.Set{migrate.Stream, migrate.Rows} {
		for _, done := range []int{0, history} {
			t.Run(fmt.Sprintf("%s/%d", set, done), func(t *testing.T) {
				t.Parallel()
				db := makeDB(t, set)
				db.fill(t, done)
				s := open(t, set, sqlitestore.Config{Path: db.path})
				queries := sqlitestore.Record(s)
				exercise(t, db, s)
				seen := 0
				for _, q := range queries() {
					if !strings.Contains(q, "outbox_") {
						continue
					}
					seen++
					db.checkPlan(t, q)
				}
				if seen < 40 {
					t.Errorf("%d queries were recorded; the test has lost its grip", seen)
				}
			})
		}
	}
}

// checkPlan looks for what grows with history.
func (db *testDB) checkPlan(t *testing.T, query string) {
	t.Helper()
	rows, err := db.QueryContext(context.Background(), "explain query plan "+query, make([]any, maxParam(query))...)
	if err != nil {
		t.Errorf("explain %s: %v", query, err)
		return
	}
	defer rows.Close()
	var plan []string
	for rows.Next() {
		var id, parent, unused int
		var detail string
		if err := rows.Scan(&id, &parent, &unused, &detail); err != nil {
			t.Fatal(err)
		}
		plan = append(plan, detail)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(query, "e.state = 'PENDING'") && !strings.Contains(strings.Join(plan, " "), "outbox_rows_state_idx") {
		t.Errorf("what is done is read too: %s\n\t%s", query, strings.Join(plan, "\n\t"))
	}
	for _, p := range plan {
		if strings.Contains(p, "(rowid<?)") {
			t.Errorf("read from the beginning: %s\n\t%s", query, p)
		}
		for _, table := range []string{"outbox_events", "outbox_rows", "outbox_exceptions", "outbox_journal", "outbox_held_keys", " e", " x", " r", " h"} {
			scan := strings.HasPrefix(p, "SCAN"+pad(table)) && !strings.Contains(p, "outbox_rows_token_idx") && !allowed(query)
			sort := strings.HasPrefix(p, "USE TEMP B-TREE") && !strings.Contains(query, "found") && !strings.Contains(query, "outbox_relays") && !strings.Contains(query, "outbox_row_relays")
			if scan || sort {
				t.Errorf("%s\n\t%s", strings.Join(strings.Fields(query), " "), strings.Join(plan, "\n\t"))
				return
			}
		}
	}
}

func pad(s string) string { return " " + strings.TrimSpace(s) }

// allowed are scans of tables (beside that of an index of what is in hand) that hold what is wrong at the moment and no more.
func allowed(query string) bool {
	for _, q := range []string{"delete from outbox_held_keys where", "from outbox_held_keys where", "outbox_row_keys"} {
		if strings.Contains(query, q) && !strings.Contains(query, "outbox_events") && !strings.Contains(query, "outbox_rows") {
			return true
		}
	}
	return false
}

// maxParam is how many parameters a query has, numbered or not.
func maxParam(query string) int {
	n, most := 0, 0
	for i := 0; i < len(query); i++ {
		if query[i] != '?' {
			continue
		}
		k := 0
		for i+1 < len(query) && query[i+1] >= '0' && query[i+1] <= '9' {
			i++
			k = 10*k + int(query[i]-'0')
		}
		if k == 0 {
			n++
			k = n
		}
		most = max(most, k)
	}
	return most
}

// fill makes a history of events that are done.
func (db *testDB) fill(t testing.TB, n int) {
	t.Helper()
	if n == 0 {
		return
	}
	cols, vals := "", ""
	if db.set == migrate.Rows {
		cols, vals = ", state, lane", ", 'PUBLISHED', 0"
	}
	db.exec(t, `with recursive c(i) as (select 1 union all select i + 1 from c where i < ?)
		insert into `+db.table()+` (aggregate_type, aggregate_id, event_type, payload`+cols+`)
		select 'order', 'key-' || (i % 1000), 'Done', '{}'`+vals+` from c`, n)
	db.exec(t, "analyze")
}

// exercise makes a store run all of its queries.
func exercise(t *testing.T, db *testDB, s store.Store) {
	t.Helper()
	ctx := context.Background()
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	join := func() store.Session {
		ses, err := s.Join(ctx, store.JoinParams{Relay: "r", TTL: time.Hour, Grace: time.Nanosecond, Destinations: []store.Destination{{Name: "main"}}})
		ok(err)
		return ses
	}
	take := func(ses store.Session, lanes int) store.Lease {
		l, err := ses.Acquire(ctx, store.AcquireParams{Destination: "main", Lanes: lanes})
		ok(err)
		if len(l) != 1 {
			t.Fatalf("acquired %v", l)
		}
		return l[0]
	}
	ses := join()
	l := take(ses, 64)
	x := db.begin(t)
	for i := range 40 {
		e := outrider.Event{AggregateType: "order", AggregateID: fmt.Sprint("k", i%4), Type: "Made", Payload: make([]byte, 10)}
		if i == 7 {
			e.Delay = time.Hour
		}
		if i == 5 {
			e.Payload = make([]byte, 100_000)
		}
		x.Add(t, e)
	}
	x.Commit(t)
	claim := func(kind store.Kind, share int) *store.Claim {
		c, err := ses.Claim(ctx, store.ClaimParams{Lease: l, Kind: kind, MaxRecords: 20, MaxBytes: 1 << 20, KeyShare: share, MaxExceptions: 2})
		ok(err)
		return c
	}
	settle := func(c *store.Claim, first store.Outcome) {
		out := make([]store.Outcome, len(c.Records))
		stopped := false
		for i := range out {
			out[i].State = store.Published
			if c.Records[i].Key == c.Records[0].Key {
				if out[i] = first; stopped {
					out[i] = store.Outcome{State: store.Pending}
				}
				stopped = true
			}
		}
		ok(ses.Commit(ctx, store.CommitParams{Lease: l, Settle: []store.Settlement{{Claim: c, Outcomes: out}}}))
	}
	c := claim(store.Fresh, 3)
	first := c.Records[0].ID
	ok(ses.Commit(ctx, store.CommitParams{Lease: l, Start: []*store.Claim{c}}))
	settle(c, store.Outcome{State: store.Failed, Class: "x"})
	claim(store.Fresh, 3)
	op, in := s.(store.Operator), s.(store.Inspector)
	for _, target := range []store.Target{{ID: first}, {Key: "k0"}} {
		_, err := op.Retry(ctx, target)
		ok(err)
	}
	for range 4 {
		if c := claim(store.Due, 3); len(c.Records) > 0 {
			settle(c, store.Outcome{State: store.Waiting, Attempts: 1, Class: "x"})
		}
	}
	_, err := op.Skip(ctx, store.Target{ID: first})
	ok(err)
	claim(store.Due, 0)
	for _, p := range []store.ListParams{{}, {Key: "k0"}, {State: store.Failed}, {State: store.Pending}, {State: store.InHand}} {
		_, err := in.List(ctx, p)
		ok(err)
	}
	for _, id := range []string{first, "1"} {
		_, err := in.Show(ctx, id)
		ok(err)
	}
	_, err = in.Status(ctx)
	ok(err)
	ok(s.(store.Maintainer).Maintain(ctx))
	_, err = ses.Renew(ctx, []store.Lease{l})
	ok(err)
	l, err = ses.Release(ctx, l, store.AllLanes.First(32))
	ok(err)
	other := take(ses, 64)
	_, _, err = ses.(store.Merger).Merge(ctx, l, other)
	ok(err)
	sqlitestore.Kill(ses)
	heir := join()
	_, err = heir.Acquire(ctx, store.AcquireParams{Destination: "main", Lanes: 64})
	ok(err)
	_, err = heir.Acquire(ctx, store.AcquireParams{Destination: "main", Lanes: 64})
	ok(err)
	ok(heir.Leave(ctx))
}
