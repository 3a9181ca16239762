package pgstore_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/faults"
	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/store"
)

// person is a relay that does as it is told.
type person struct {
	t testing.TB
	store.Session
	lease store.Lease
}

// joined makes one that holds up to so many lanes of the destination.
func joined(t testing.TB, s *pgstore.Store, lanes int) *person {
	t.Helper()
	ses, err := s.Join(t.Context(), store.JoinParams{Relay: "relay", TTL: time.Hour, Grace: time.Nanosecond,
		Destinations: []store.Destination{{Name: "main", FromEarliest: true}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ses.Leave(context.Background()) })
	p := &person{t: t, Session: ses}
	for end := time.Now().Add(time.Minute); p.lease.Lanes == 0; { // the grace passes
		if time.Now().After(end) {
			t.Fatal("no lanes can be acquired")
		}
		if leases := p.acquire(lanes); len(leases) > 0 {
			p.lease = leases[0]
		}
	}
	return p
}

func (p *person) acquire(lanes int) []store.Lease {
	p.t.Helper()
	leases, err := p.Acquire(p.t.Context(), store.AcquireParams{Destination: "main", Lanes: lanes})
	if err != nil {
		p.t.Fatal(err)
	}
	return leases
}

// claim wants the records of these events.
func (p *person) claim(c store.ClaimParams, want ...string) *store.Claim {
	p.t.Helper()
	c.Lease = p.lease
	if c.MaxRecords == 0 {
		c.MaxRecords = 100
	}
	c.MaxBytes = 1 << 20
	got, err := p.Claim(p.t.Context(), c)
	if err != nil {
		p.t.Fatal(err)
	}
	var ids []string
	for _, r := range got.Records {
		ids = append(ids, r.AggregateID)
	}
	if fmt.Sprint(ids) != fmt.Sprint(want) {
		p.t.Fatalf("claimed %v, want %v", ids, want)
	}
	return got
}

// settled is a settlement with these outcomes.
func settled(c *store.Claim, outcomes ...store.State) store.Settlement {
	s := store.Settlement{Claim: c}
	for _, o := range outcomes {
		s.Outcomes = append(s.Outcomes, store.Outcome{State: o, Attempts: 1})
	}
	return s
}

func (p *person) commit(settle []store.Settlement, start ...*store.Claim) {
	p.t.Helper()
	if err := p.Commit(p.t.Context(), store.CommitParams{Lease: p.lease, Settle: settle, Start: start}); err != nil {
		p.t.Fatal(err)
	}
}

// insert writes events of a key, each named by its aggregate.
func insert(t testing.TB, db interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
}, key string, names ...string) {
	t.Helper()
	o, err := outrider.New(outrider.Config{Dialect: outrider.Postgres})
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		e := outrider.Event{AggregateType: "thing", AggregateID: n, Type: "Happened", Key: key, Payload: []byte(`{}`)}
		if err := o.Add(t.Context(), db, e); err != nil {
			t.Fatal(err)
		}
	}
}

// A lease whose owner is gone is fenced off as a whole when a part of it is
// taken over. The owner may merely have been cut off: what it settled of the
// part would count beside its heir's.
func TestTakeOverOfAPartFencesTheRest(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	insert(t, db, "a", "a1")
	old := joined(t, s, 64)
	c := old.claim(store.ClaimParams{}, "a1")
	old.commit(nil, c)
	pgstore.Kill(old.Session)

	joined(t, s, 8)
	err := old.Commit(t.Context(), store.CommitParams{Lease: old.lease, Settle: []store.Settlement{settled(c, store.Published)}})
	if !errors.Is(err, store.ErrFenced) {
		t.Fatalf("settled under a lease of which lanes were taken over: %v, want ErrFenced", err)
	}
}

// An event that was not due when its page was read first, and is when the page
// is read again after a death, has lost its place in its key: a consumer that
// drops by sequence must not drop it.
func TestDelayedEventOfAPageReadAgain(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	insert(t, db, "a", "a1", "a2")
	if _, err := db.ExecContext(t.Context(), `update outbox_events set available_at = clock_timestamp() + interval '1 hour' where aggregate_id = 'a1'`); err != nil {
		t.Fatal(err)
	}
	p := joined(t, s, 64)
	p.commit(nil, p.claim(store.ClaimParams{}, "a2"))
	pgstore.Kill(p.Session)

	if _, err := db.ExecContext(t.Context(), `update outbox_events set available_at = available_at - interval '2 hours' where aggregate_id = 'a1'`); err != nil {
		t.Fatal(err)
	}
	p = joined(t, s, 64)
	c := p.claim(store.ClaimParams{}, "a1")
	if !c.Records[0].Sequence.IsZero() {
		t.Errorf("a delayed event comes with sequence %v behind a later one of its key", c.Records[0].Sequence)
	}
}

// Starts are counted when a claim is started. One that was read and not started
// yet, because it waits to be alone in its process, is innocent of a death.
func TestDeathBeforeTheStartOfADueClaimCountsNothing(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	insert(t, db, "a", "a1")
	p := joined(t, s, 64)
	c := p.claim(store.ClaimParams{}, "a1")
	p.commit(nil, c)
	p.commit([]store.Settlement{settled(c, store.Waiting)})
	p.commit(nil, p.claim(store.ClaimParams{Kind: store.Due}, "a1"))
	for range 2 {
		pgstore.Kill(p.Session)
		p = joined(t, s, 64)
		c = p.claim(store.ClaimParams{Kind: store.Due}, "a1")
		if !c.Alone || c.Records[0].Starts != 0 {
			t.Fatalf("alone %v, %d deaths counted; want it alone, and none", c.Alone, c.Records[0].Starts)
		}
	}
	p.commit(nil, c)
	pgstore.Kill(p.Session)
	if c = joined(t, s, 64).claim(store.ClaimParams{Kind: store.Due}, "a1"); c.Records[0].Starts != 1 {
		t.Fatalf("%d deaths counted, want 1", c.Records[0].Starts)
	}
}

// A page of which nothing is to be sent, between two that are in hand at a
// death, is read again with them: what it passed over is not lost.
func TestEmptyPageBetweenPagesInHandAtADeath(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	insert(t, db, "a", "a1")
	insert(t, db, "b", "b1")
	insert(t, db, "c", "c1")
	if _, err := db.ExecContext(t.Context(), `update outbox_events set available_at = clock_timestamp() + interval '1 hour' where aggregate_id = 'b1'`); err != nil {
		t.Fatal(err)
	}
	p := joined(t, s, 64)
	one := store.ClaimParams{MaxRecords: 1}
	p.commit(nil, p.claim(one, "a1"), p.claim(one, "c1"))
	pgstore.Kill(p.Session)

	if _, err := db.ExecContext(t.Context(), `update outbox_events set available_at = available_at - interval '2 hours' where aggregate_id = 'b1'`); err != nil {
		t.Fatal(err)
	}
	p = joined(t, s, 64)
	for _, want := range []string{"a1", "b1", "c1"} {
		c := p.claim(one, want)
		p.commit(nil, c)
		p.commit([]store.Settlement{settled(c, store.Published)})
	}
}

// behindProxy is an outbox whose answers can be lost.
func behindProxy(t testing.TB) (*pgstore.Store, *sql.DB, *faults.Proxy) {
	t.Helper()
	u, err := url.Parse(testdb.Postgres(t))
	if err != nil {
		t.Fatal(err)
	}
	proxy := faults.NewProxy(t, u.Host)
	u.Host = proxy.Addr()
	s, db := open(t, pgstore.Config{DSN: u.String()})
	return s, db, proxy
}

// loseCommit loses the answer to the next commit of a transaction.
func loseCommit(p *faults.Proxy) {
	p.LoseAnswer(func(b []byte) bool { return b[0] == 'Q' && bytes.Contains(b, []byte("commit\x00")) })
}

// One lane is a; the others' events are not its business.
func lane(key string) store.LaneSet { return 1 << outrider.Lane(key) }

// Lanes that were given back are not worked on because nobody heard that they
// were: somebody else has them.
func TestLostAnswerOfARelease(t *testing.T) {
	s, db, proxy := behindProxy(t)
	p := joined(t, s, 64)
	loseCommit(proxy)
	if _, err := p.Release(t.Context(), p.lease, lane("a")); err == nil {
		t.Fatal("the answer was not lost")
	}
	other := joined(t, s, 64)
	if other.lease.Lanes != ^lane("a") {
		t.Fatalf("lanes %x were given back, want %x", other.lease.Lanes, ^lane("a"))
	}
	insert(t, db, "a", "a1")
	insert(t, db, "b", "b1")
	c, err := p.Claim(t.Context(), store.ClaimParams{Lease: p.lease, MaxRecords: 10, MaxBytes: 100})
	if err != nil || len(c.Records) != 1 || c.Records[0].Key != "a" || c.Lease.Lanes != lane("a") {
		t.Fatalf("claim: %+v, %v; want the event of the lane that was kept", c, err)
	}
	p.Forget(c)
	left, err := p.Release(t.Context(), p.lease, lane("a"))
	if err != nil || left.Lanes != lane("a") {
		t.Fatalf("the same release again: %+v, %v", left, err)
	}
	other.claim(store.ClaimParams{}, "b1")
	var n int
	if err := db.QueryRowContext(t.Context(), `select count(*) from outbox_leases`).Scan(&n); err != nil || n != 2 {
		t.Errorf("%d leases, %v; want 2", n, err)
	}
}

// Leases that were joined are one, whoever has heard it, and the first write
// behind it is not taken for one that had been done.
func TestLostAnswerOfAMerge(t *testing.T) {
	s, db, proxy := behindProxy(t)
	p := joined(t, s, 32)
	a, b := p.lease, p.acquire(32)[0]
	loseCommit(proxy)
	if _, _, err := p.Session.(store.Merger).Merge(t.Context(), b, a); err == nil {
		t.Fatal("the answer was not lost")
	}
	insert(t, db, "a", "a1")
	insert(t, db, "b", "b1")
	p.lease = store.Lease{ID: b.ID, Destination: b.Destination, Epoch: b.Epoch}
	c, err := p.Claim(t.Context(), store.ClaimParams{Lease: b, MaxRecords: 10, MaxBytes: 100})
	if err != nil || len(c.Records) != 2 {
		t.Fatalf("claim: %+v, %v; want the events of all lanes", c, err)
	}
	p.commit(nil, c)
	p.commit([]store.Settlement{settled(c, store.Waiting, store.Published)})
	if _, err := p.Claim(t.Context(), store.ClaimParams{Lease: a, MaxRecords: 10, MaxBytes: 100}); !errors.Is(err, store.ErrFenced) {
		t.Errorf("claim of the lease that is gone: %v, want ErrFenced", err)
	}
	if l, ok, err := p.Session.(store.Merger).Merge(t.Context(), b, a); err != nil || !ok || l.ID != b.ID || l.Lanes != store.AllLanes {
		t.Errorf("the same merge again: %+v, %v, %v", l, ok, err)
	}
	p.claim(store.ClaimParams{Kind: store.Due}, "a1")
}

// Leases that were acquired without an answer are free for the one who asks
// again, instead of nobody's until they expire.
func TestLostAnswerOfAnAcquire(t *testing.T) {
	s, _, proxy := behindProxy(t)
	p := joined(t, s, 8)
	loseCommit(proxy)
	if _, err := p.Acquire(t.Context(), store.AcquireParams{Destination: "main", Lanes: 56}); err == nil {
		t.Fatal("the answer was not lost")
	}
	if l := p.acquire(64); len(l) != 1 || l[0].Lanes.Len() != 56 {
		t.Fatalf("acquired %+v, want the 56 lanes", l)
	}
	if l := p.acquire(64); len(l) != 0 {
		t.Fatalf("acquired %+v, which it has already", l)
	}
}

// What a Due claim holds is in nobody's hand when its answer was lost,
// whichever of its requests that was.
func TestLostAnswerOfADueClaim(t *testing.T) {
	s, db, proxy := behindProxy(t)
	p := joined(t, s, 64)
	written := 0
	for i := range 8 {
		name := fmt.Sprintf("a%d", i)
		insert(t, db, name, name)
		c := p.claim(store.ClaimParams{}, name)
		p.commit(nil, c)
		p.commit([]store.Settlement{settled(c, store.Waiting)})
		n := 0
		proxy.LoseAnswer(func([]byte) bool { n++; return n == i })
		c, err := p.Claim(t.Context(), store.ClaimParams{Lease: p.lease, Kind: store.Due, MaxRecords: 10, MaxBytes: 100})
		proxy.LoseAnswer(nil)
		if err != nil {
			var state string
			if err := db.QueryRowContext(t.Context(), `select max(state) from outbox_exceptions`).Scan(&state); err != nil {
				t.Fatal(err)
			}
			if state == "PUBLISHING" {
				written++
			}
			c = p.claim(store.ClaimParams{Kind: store.Due}, name)
		}
		p.commit(nil, c)
		p.commit([]store.Settlement{settled(c, store.Published)})
	}
	if written == 0 {
		t.Error("no claim was written whose answer was lost")
	}
}

// A Due claim holds no more than it may, however many keys wait.
func TestDueClaimOfManyHeldKeys(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	keys := []string{"a", "b", "c", "d", "e"}
	for _, k := range keys {
		insert(t, db, k, k+"1", k+"2")
	}
	p := joined(t, s, 64)
	c, err := p.Claim(t.Context(), store.ClaimParams{Lease: p.lease, MaxRecords: 10, MaxBytes: 1000, KeyShare: 1})
	if err != nil || len(c.Records) != len(keys) {
		t.Fatalf("claim: %+v, %v", c, err)
	}
	p.commit(nil, c)
	p.commit([]store.Settlement{settled(c, slices.Repeat([]store.State{store.Published}, len(keys))...)})
	for left := len(keys); left > 0; {
		c, err := p.Claim(t.Context(), store.ClaimParams{Lease: p.lease, Kind: store.Due, MaxRecords: 2, MaxBytes: 1000})
		if err != nil || len(c.Records) == 0 || len(c.Records) > 2 {
			t.Fatalf("%d records, %v; asked for 2", len(c.Records), err)
		}
		left -= len(c.Records)
		p.commit(nil, c)
		p.commit([]store.Settlement{settled(c, slices.Repeat([]store.State{store.Published}, len(c.Records))...)})
	}
}

// What others raise while a relay joins is no sign of a restored cluster.
func TestJoinBesideWork(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	p := joined(t, s, 64)
	var wg sync.WaitGroup
	var left atomic.Int64
	left.Store(200)
	for range 4 {
		wg.Go(func() {
			for left.Add(-1) > 0 {
				ses, err := s.Join(t.Context(), store.JoinParams{Relay: "relay", TTL: time.Hour, Grace: time.Second})
				if err != nil {
					t.Error(err)
					return
				}
				_ = ses.Leave(t.Context())
			}
		})
	}
	for i := 0; left.Load() > 0 && !t.Failed(); i++ {
		name := fmt.Sprintf("a%d", i)
		insert(t, db, name, name)
		c := p.claim(store.ClaimParams{}, name)
		p.commit(nil, c)
		p.commit([]store.Settlement{settled(c, store.Published)})
	}
	wg.Wait()
}
