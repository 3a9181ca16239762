package pgstore_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/store"
)

// Rows with columns that only the database should fill, as copied rows have: one
// that claims a transaction yet to come is not sent again and again, and a sweep
// names it; one with an id near the end of all ids keeps no relay from joining;
// one with a negative id is refused.
func TestColumnsWrittenByHand(t *testing.T) {
	h := newHandler(t, pgstore.Config{})
	h.lease = acquire(t, h.ses)
	sweep := func() store.Swept {
		t.Helper()
		got, err := h.ses.(store.Sweeper).Sweep(h.ctx)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	sweep()
	_, err := h.db.Exec(`insert into outbox_events (tx_id, aggregate_type, aggregate_id, event_type, payload)
		values ('99999999', 'a', 'future', 'T', '{}')`)
	if err != nil {
		t.Fatal(err)
	}
	h.add("a")
	if got := h.pump(done, 0); len(got) != 1 || got[0] != "a" {
		t.Errorf("keys %v came, want a alone", got)
	}
	if got := sweep(); got.Found != 1 || got.Rows[0] != "d 1" {
		t.Errorf("a sweep found %+v, want row 1", got)
	}
	const large = "9223372036854775800"
	_, err = h.db.Exec(`insert into outbox_events (id, aggregate_type, aggregate_id, event_type, payload)
		values (` + large + `, 'a', 'large', 'T', '{}')`)
	if err != nil {
		t.Fatal(err)
	}
	if got := h.pump(done, 0); len(got) != 1 || got[0] != "large" {
		t.Errorf("keys %v came, want large", got)
	}
	if err := h.ses.Leave(h.ctx); err != nil {
		t.Fatal(err)
	}
	if err := h.s.Maintain(h.ctx); err != nil {
		t.Errorf("maintain: %v", err)
	}
	h.ses, err = h.s.Join(h.ctx, store.JoinParams{Relay: "next", TTL: 1e10, Grace: 1e9, Destinations: []store.Destination{{Name: "d"}}})
	if err != nil {
		t.Fatalf("the next relay cannot join: %v", err)
	}
	h.lease = acquire(t, h.ses)
	h.add("b")
	if got := h.pump(done, 0); len(got) != 1 || got[0] != "b" {
		t.Errorf("keys %v came, want b", got)
	}
	if _, err := h.db.Exec(`insert into outbox_events (id, aggregate_type, aggregate_id, event_type) values (-7, 'a', 'k', 'T')`); err == nil {
		t.Error("a negative id was taken")
	}
}

// Behind rows with ids near the end of all numbers a backlog is walked along the
// primary key as before, and not looked up and sorted anew for each page: of
// 300,000 events that took 29 s instead of 0.7.
func TestBacklogBelowAFarID(t *testing.T) {
	x := newSole(t, store.ClaimParams{MaxRecords: 7})
	far := func(from, n int) (keys []string) {
		for i := from; i < from+n; i++ {
			keys = append(keys, fmt.Sprint("far", i))
		}
		x.exec(`insert into outbox_events (id, aggregate_type, aggregate_id, event_type)
			select 4611686018427387904 + n::bigint * 1000000000, 'a', 'far' || n, 'T' from generate_series($1::int, $2::int) n`, from, from+n-1)
		return keys
	}
	far(1, 2)
	x.publish(2)
	pgstore.WalkOnly(x.store)
	for round := range 2 {
		var want []string
		for i := range 40 {
			want = append(want, fmt.Sprint(round, "-", i))
		}
		x.add(want...)
		// Above and below the last that has been read, more than a page of them.
		want = append(want, far(10*(2-round), 10)...)
		if got := x.publish(len(want)); !slices.Equal(got, want) {
			t.Fatalf("%v came, want %v", got, want)
		}
	}
	if got := x.round(store.Outcome{State: store.Published}); len(got) > 0 {
		t.Errorf("%v came again", got)
	}
}
