package pgstore_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/store"
)

// history writes events the hard way and knows what must arrive: of each key
// the numbers 1, 2, 3, ... in this order, as the rows of the keys' aggregates
// serialise their transactions.
type history struct {
	pool *pgxpool.Pool
	hold float64 // seconds for which a transaction stays open at most, once it has written
	mu   sync.Mutex
	want map[string]int // committed per key
}

const windowKeys = 40

func newHistory(t testing.TB, dsn string) *history {
	t.Helper()
	ctx := context.Background()
	cfg, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = 52 // as many as write
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	h := &history{pool: pool, want: map[string]int{}}
	if _, err := pool.Exec(ctx, `create table aggregates (key text primary key, n int not null)`); err != nil {
		t.Fatal(err)
	}
	for i := range windowKeys {
		if _, err := pool.Exec(ctx, `insert into aggregates values ($1, 0)`, "k"+strconv.Itoa(i)); err != nil {
			t.Fatal(err)
		}
	}
	return h
}

// write is one transaction: a key's aggregate is locked, its number raised, and
// an event written. It is rolled back, prepared, takes its transaction id early
// or late, or loses a savepoint, as chance will have it.
func (h *history) write(ctx context.Context, r *rand.Rand, gid string) error {
	conn, err := h.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	run := func(sql string, args ...any) {
		if err == nil {
			_, err = conn.Exec(ctx, sql, args...)
		}
	}
	key := "k" + strconv.Itoa(r.IntN(windowKeys))
	event := `insert into outbox_events (aggregate_type, aggregate_id, event_type, payload, event_key)
		select 'a', key, 'T', convert_to(n::text, 'UTF8'), null from aggregates where key = $1`
	run(`begin`)
	if r.IntN(3) == 0 { // an early transaction id, a late event
		run(`select pg_current_xact_id()`)
		run(`select pg_sleep($1)`, r.Float64()*0.01)
	}
	var id int64
	late := r.IntN(8) == 0
	if late { // an early row id of another key, and no transaction id yet
		if err == nil {
			err = conn.QueryRow(ctx, `select nextval('outbox_events_id_seq')`).Scan(&id)
		}
		run(`select pg_sleep($1)`, r.Float64()*0.02)
		run(`insert into outbox_events (id, aggregate_type, aggregate_id, event_type, payload, event_key)
			values ($1, 'a', $2, 'T', '1', null)`, id, "late"+strconv.FormatInt(id, 10))
	}
	if r.IntN(4) == 0 { // a savepoint that is lost
		run(`savepoint s`)
		run(`update aggregates set n = n + 1 where key = $1`, key)
		run(event, key)
		run(`rollback to savepoint s`)
	}
	if r.IntN(4) == 0 {
		run(`savepoint s2`)
	}
	run(`update aggregates set n = n + 1 where key = $1`, key)
	run(event, key)
	if err != nil {
		_, _ = conn.Exec(context.WithoutCancel(ctx), `rollback`)
		return err
	}
	run(`select pg_sleep($1)`, r.Float64()*h.hold)
	switch r.IntN(10) {
	case 0:
		run(`rollback`)
		return err
	case 1:
		run(`prepare transaction '` + gid + `'`)
		run(`select pg_sleep($1)`, r.Float64()*0.01)
		run(`commit prepared '` + gid + `'`)
	default:
		run(`commit`)
	}
	if err != nil {
		return err
	}
	h.mu.Lock()
	h.want[key]++
	if late {
		h.want["late"+strconv.FormatInt(id, 10)]++
	}
	h.mu.Unlock()
	return nil
}

// run has writers write until stop.
func (h *history) run(t testing.TB, writers, each int) (wait func(), busy *atomic.Bool) {
	t.Helper()
	busy = &atomic.Bool{}
	busy.Store(true)
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 7))
			for i := range each {
				if err := h.write(context.Background(), r, fmt.Sprintf("%s-%d-%d", h.pool.Config().ConnConfig.Database, w, i)); err != nil {
					t.Errorf("writer %d: %v", w, err)
					return
				}
			}
		})
	}
	go func() { wg.Wait(); busy.Store(false) }()
	return wg.Wait, busy
}

// arrived is what a reader saw, and what was wrong with it.
type arrived struct {
	last   map[string]int // highest number per key
	breaks int
	again  int
}

func (a *arrived) note(key string, n int) {
	switch {
	case n == a.last[key]+1:
		a.last[key] = n
	case n <= a.last[key]:
		a.again++
	default:
		a.breaks++
		a.last[key] = n
	}
}

// lost counts what was committed and never arrived.
func (h *history) lost(a *arrived) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	lost := 0
	for key, n := range h.want {
		if a.last[key] < n {
			lost += n - a.last[key]
		}
	}
	return lost
}

// TestWindow holds the window algorithm against what transactions can do, with
// readers that die at any moment.
func TestWindow(t *testing.T) {
	for _, size := range []int{7, 40, 100} {
		t.Run(strconv.Itoa(size), func(t *testing.T) {
			s, _ := open(t, pgstore.Config{})
			h := newHistory(t, dsnOf(s))
			wait, busy := h.run(t, 16, 60)
			got := &arrived{last: map[string]int{}}
			r := rand.New(rand.NewPCG(1, uint64(size)))
			died := 0
			for quiet := 0; quiet < 3; {
				if !readUntilDeath(t, s, size, r, got, busy) {
					quiet++
				}
				died++
			}
			wait()
			t.Logf("%d events, %d readers died, %d repeated", total(h.want), died, got.again)
			if lost := h.lost(got); lost != 0 || got.breaks != 0 {
				t.Errorf("%d lost, %d order breaks", lost, got.breaks)
			}
		})
	}
}

func total(m map[string]int) (n int) {
	for _, v := range m {
		n += v
	}
	return n
}

// readUntilDeath reads under one session, which dies after a random number of
// claims, with some of them in hand. It reports whether anything was read, and
// ends when nothing has come for a while and nobody writes any more.
func readUntilDeath(t *testing.T, s *pgstore.Store, size int, r *rand.Rand, got *arrived, busy *atomic.Bool) bool {
	t.Helper()
	ctx := context.Background()
	ses, err := s.Join(ctx, store.JoinParams{Relay: "reader", TTL: time.Hour, Grace: time.Millisecond,
		Destinations: []store.Destination{{Name: "d", FromEarliest: true}}})
	if err != nil {
		t.Fatal(err)
	}
	defer pgstore.Kill(ses)
	lease := acquire(t, ses)
	deliver := func(c *store.Claim) store.Settlement {
		out := make([]store.Outcome, len(c.Records))
		for i, rec := range c.Records {
			n, err := strconv.Atoi(string(rec.Payload))
			if err != nil {
				t.Fatal(err)
			}
			got.note(rec.Key, n)
			out[i].State = store.Published
		}
		return store.Settlement{Claim: c, Outcomes: out}
	}
	commit := func(p store.CommitParams) {
		p.Lease = lease
		if err := ses.Commit(ctx, p); err != nil {
			t.Fatal(err)
		}
	}
	life := 5 + r.IntN(60)
	var before *store.Claim // in hand
	any := false
	for empty := 0; life > 0 && (busy.Load() || empty < 20); {
		c, err := ses.Claim(ctx, store.ClaimParams{Lease: lease, MaxRecords: size, MaxBytes: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		if len(c.Records) == 0 {
			if before != nil {
				commit(store.CommitParams{Settle: []store.Settlement{deliver(before)}})
				before = nil
			}
			if !c.More {
				empty++
			}
			continue
		}
		any, empty = true, 0
		life--
		if life%3 == 0 {
			swept, err := ses.(store.Sweeper).Sweep(ctx)
			if err != nil || swept.Found != 0 {
				t.Errorf("a sweep found %+v, %v", swept, err)
			}
		}
		if before == nil || c.Exclusive {
			if before != nil {
				commit(store.CommitParams{Settle: []store.Settlement{deliver(before)}})
			}
			commit(store.CommitParams{Start: []*store.Claim{c}})
		} else {
			commit(store.CommitParams{Settle: []store.Settlement{deliver(before)}, Start: []*store.Claim{c}})
		}
		before = c
	}
	if before != nil && r.IntN(2) == 0 {
		deliver(before) // died between delivery and settlement
	}
	return any
}

// acquire waits for the one lease of a destination.
func acquire(t testing.TB, ses store.Session) store.Lease {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for {
		if _, err := ses.Renew(ctx, nil); err != nil {
			t.Fatal(err)
		}
		leases, err := ses.Acquire(ctx, store.AcquireParams{Destination: "d", Lanes: outrider.Lanes})
		if err != nil {
			t.Fatal(err)
		}
		if len(leases) > 0 {
			return leases[0]
		}
	}
}

// TestWindowBites shows that what TestWindow checks is hard: two simpler ways
// to read the same history go wrong.
func TestWindowBites(t *testing.T) {
	t.Run("bare cursor loses", func(t *testing.T) {
		s, db := open(t, pgstore.Config{})
		h := newHistory(t, dsnOf(s))
		_, busy := h.run(t, 16, 60)
		got := &arrived{last: map[string]int{}}
		cursor := int64(0)
		readAll(t, db, busy, func() (string, []any) {
			return `select id, coalesce(event_key, aggregate_id), payload from outbox_events where id > $1 order by id limit 40`, []any{cursor}
		}, func(id int64, key string, n int) {
			cursor = id
			got.note(key, n)
		})
		if h.lost(got)+got.breaks == 0 {
			t.Error("the bare cursor lost nothing: this history would not find an error")
		}
		t.Logf("%d of %d lost, %d order breaks", h.lost(got), total(h.want), got.breaks)
	})
	t.Run("cut by transaction id breaks the order", func(t *testing.T) {
		s, db := open(t, pgstore.Config{})
		h := newHistory(t, dsnOf(s))
		_, busy := h.run(t, 16, 60)
		got := &arrived{last: map[string]int{}}
		done := map[int64]bool{} // what a position would stand for
		readAll(t, db, busy, func() (string, []any) {
			ids := make([]int64, 0, len(done))
			for id := range done {
				ids = append(ids, id)
			}
			return `select id, coalesce(event_key, aggregate_id), payload from outbox_events
				where id <> all($1) order by tx_id, id limit 7`, []any{ids}
		}, func(id int64, key string, n int) {
			done[id] = true
			got.note(key, n)
		})
		if got.breaks == 0 {
			t.Error("cutting by transaction id broke no order: this history would not find an error")
		}
		t.Logf("%d lost, %d order breaks", h.lost(got), got.breaks)
	})
}

// readAll polls with a query until nobody writes and nothing comes any more.
func readAll(t *testing.T, db *sql.DB, busy *atomic.Bool, query func() (string, []any), note func(id int64, key string, n int)) {
	t.Helper()
	for quiet := 0; quiet < 5; {
		wasBusy := busy.Load()
		q, args := query()
		rows, err := db.Query(q, args...)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for rows.Next() {
			var id int64
			var key string
			var payload []byte
			if err := rows.Scan(&id, &key, &payload); err != nil {
				t.Fatal(err)
			}
			v, err := strconv.Atoi(string(payload))
			if err != nil {
				t.Fatal(err)
			}
			note(id, key, v)
			n++
		}
		if err := errors.Join(rows.Err(), rows.Close()); err != nil {
			t.Fatal(err)
		}
		if n == 0 && !wasBusy {
			quiet++
		}
	}
}

func dsnOf(s *pgstore.Store) string { return pgstore.DSN(s) }
