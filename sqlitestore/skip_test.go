package sqlitestore_test

import (
	"strings"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
)

// A head is skipped in the instant in which it is taken to be sent again. What
// has waited for it is due, also if nobody asks before the key moves with its
// lease again.
func TestHeadIsSkippedWhileItIsTaken(t *testing.T) {
	ctx, c := t.Context(), newClock()
	db := makeDB(t, migrate.Stream)
	db.clock = c
	s := open(t, migrate.Stream, sqlitestore.Config{Path: db.path, Now: c.Now})
	put := func(key string, delay time.Duration) {
		t.Helper()
		x := db.begin(t)
		x.Add(t, outrider.Event{AggregateType: "t", AggregateID: key, Type: "T", Payload: []byte("{}"), Delay: delay})
		x.Commit(t)
	}
	skip := func() {}
	sqlitestore.OnRead(s, func(query string) {
		if strings.Contains(query, "coalesce(e.event_key, e.aggregate_id)") { // what is behind the head
			skip()
		}
	})
	ses := join(t, s, 24*time.Hour)
	l := acquire(t, ses)
	due := func() *store.Claim {
		t.Helper()
		c, err := ses.Claim(ctx, store.ClaimParams{Lease: l, Kind: store.Due, MaxRecords: 10, MaxBytes: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	commit := func(c store.CommitParams) {
		t.Helper()
		c.Lease = l
		if err := ses.Commit(ctx, c); err != nil {
			t.Fatal(err)
		}
	}
	settle := func(c *store.Claim, o store.Outcome) {
		t.Helper()
		if len(c.Records) != 1 {
			t.Fatalf("the claim holds %v", c.Records)
		}
		commit(store.CommitParams{Start: []*store.Claim{c}})
		commit(store.CommitParams{Settle: []store.Settlement{{Claim: c, Outcomes: []store.Outcome{o}}}})
	}

	put("a", time.Minute)
	put("a", 0)
	settle(claim(t, ses, l, 10), store.Outcome{State: store.Waiting, Attempts: 1, Due: time.Hour})
	c.Advance(2 * time.Minute)
	if c := due(); len(c.Records) > 0 {
		t.Fatalf("due beside its key's head: %v", c.Records)
	}
	put("a", 0)
	c.Advance(time.Hour)
	put("b", 0)
	settle(claim(t, ses, l, 10), store.Outcome{State: store.Published}) // passes over the last one of key a
	skipped := false
	skip = func() {
		skip, skipped = func() {}, true
		if n, err := s.(store.Operator).Skip(ctx, store.Target{ID: "2"}); n != 1 || err != nil {
			t.Errorf("skipped %d, %v", n, err)
		}
	}
	next := due()
	if !skipped {
		t.Fatal("nothing was read behind the head, which this test is of")
	}
	settle(next, store.Outcome{State: store.Published})
	for range 2 {
		put("b", 0)
		settle(claim(t, ses, l, 10), store.Outcome{State: store.Published})
	}
	if c := due(); len(c.Records) != 1 || c.Records[0].Row != "1" {
		t.Errorf("what waited for the head is not due: %v", c.Records)
	}
}
