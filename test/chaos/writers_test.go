//go:build linux

package chaos_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
)

// event is what a payload holds: the number of the event within its key. One
// of an unordered event has neither.
type event struct {
	Key string `json:"key"`
	N   int    `json:"n"`
}

// writers are an application. A key has an aggregate row, whose lock serialises
// the key's transactions and which counts its events.
type writers struct {
	db      *sql.DB
	dialect outrider.Dialect
	outbox  *outrider.Outbox
	keys    int
	pause   time.Duration // behind each transaction of a writer

	mu        sync.Mutex
	more      *sync.Cond
	allowed   int // events, at least
	open      int // writers in a transaction
	committed int
	closed    bool
	known     map[string]event // by id, those whose commit was confirmed
	rolled    map[string]bool  // ids, rolled back
	rollbacks int
	errors    int // transactions whose end is not known or that failed

	busy atomic.Int64
	done sync.WaitGroup
}

// newWriters makes the tables and starts n writers, which wait to be allowed.
func newWriters(t testing.TB, db *sql.DB, dialect outrider.Dialect, n, keys int, seed uint64) *writers {
	t.Helper()
	ctx := context.Background()
	if _, err := migrate.Up(ctx, db, migrate.Options{Dialect: dialect}); err != nil {
		t.Fatal(err)
	}
	w, err := openWriters(db, dialect, keys)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(ctx, `create table aggregates (key text primary key, n integer not null)`); err != nil {
		t.Fatal(err)
	}
	for i := range keys {
		if _, err := db.ExecContext(ctx, w.sql(`insert into aggregates values ($1, 0)`), "key-"+strconv.Itoa(i)); err != nil {
			t.Fatal(err)
		}
	}
	w.start(n, seed)
	t.Cleanup(w.close)
	return w
}

// openWriters is for tables that are there.
func openWriters(db *sql.DB, dialect outrider.Dialect, keys int) (*writers, error) {
	w := &writers{db: db, dialect: dialect, keys: keys, known: map[string]event{}, rolled: map[string]bool{}}
	w.more = sync.NewCond(&w.mu)
	var err error
	w.outbox, err = outrider.New(outrider.Config{Dialect: dialect})
	return w, err
}

func (w *writers) start(n int, seed uint64) {
	for i := range n {
		w.busy.Add(1)
		w.done.Go(func() {
			defer w.busy.Add(-1)
			w.write(rand.New(rand.NewPCG(seed, uint64(i))))
		})
	}
}

// sql writes parameters as the dialect has them.
func (w *writers) sql(query string) string {
	if w.dialect == outrider.SQLite {
		return strings.ReplaceAll(query, "$", "?")
	}
	return query
}

// allow lets the writers go on until so many events are committed.
func (w *writers) allow(events int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.allowed = events
	w.more.Broadcast()
}

// close ends the writers.
func (w *writers) close() {
	w.mu.Lock()
	w.closed = true
	w.more.Broadcast()
	w.mu.Unlock()
	w.done.Wait()
}

// next waits until there is more to be written.
func (w *writers) next() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for !w.closed && w.committed >= w.allowed {
		w.more.Wait()
	}
	if w.closed {
		return false
	}
	w.open++
	return true
}

// written is how many commits have been confirmed, and whether that is all that
// is allowed, with nothing under way.
func (w *writers) written() (events int, all bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.committed, w.committed >= w.allowed && w.open == 0
}

func (w *writers) write(r *rand.Rand) {
	for w.next() {
		x := &transaction{w: w, r: r, events: map[string]event{}, lost: map[string]bool{}}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		committed, err := x.run(ctx)
		cancel()
		w.mu.Lock()
		w.open--
		switch {
		case err != nil: // of its events those that were committed are in the table
			w.errors++
		case committed:
			w.committed += len(x.events)
			for id, e := range x.events {
				w.known[id] = e
			}
		default:
			w.rollbacks++
			for id := range x.events {
				w.rolled[id] = true
			}
		}
		if err == nil {
			for id := range x.lost {
				w.rolled[id] = true
			}
		}
		w.mu.Unlock()
		if err != nil {
			<-time.After(20 * time.Millisecond) // the database is away: it need not be asked faster
		}
		if w.pause > 0 {
			<-time.After(w.pause)
		}
	}
}

// transaction is one of the application's.
type transaction struct {
	w      *writers
	r      *rand.Rand
	tx     *sql.Tx
	events map[string]event
	lost   map[string]bool // with a savepoint
}

func (x *transaction) run(ctx context.Context) (committed bool, err error) {
	if x.tx, err = x.w.db.BeginTx(ctx, nil); err != nil {
		return false, err
	}
	defer x.tx.Rollback() // after a commit it is a no-op, else the first error counts
	if x.w.dialect == outrider.Postgres && x.r.IntN(4) == 0 {
		// An early transaction id, late events.
		if _, err := x.tx.ExecContext(ctx, `select pg_current_xact_id(), pg_sleep($1)`, x.r.Float64()*0.01); err != nil {
			return false, err
		}
	}
	if x.r.IntN(10) == 0 {
		if err := x.savepoint(ctx); err != nil {
			return false, err
		}
	}
	for _, key := range x.some() {
		if err := x.add(ctx, key, 1+x.r.IntN(3)*x.r.IntN(2), x.events); err != nil {
			return false, err
		}
	}
	if x.r.IntN(20) == 0 {
		id := outrider.NewID()
		if err := x.w.outbox.Add(ctx, x.tx, outrider.Event{ID: id, AggregateType: "aggregate", AggregateID: "none",
			Type: "Happened", Unordered: true, Payload: []byte(`{"key":"","n":0}`)}); err != nil {
			return false, err
		}
		x.events[id] = event{}
	}
	if x.r.IntN(10) == 0 {
		return false, x.tx.Rollback()
	}
	return true, x.tx.Commit()
}

// some keys, in the order in which every transaction locks them. A few keys
// have much of the traffic.
func (x *transaction) some() []string {
	var keys []string
	for range 1 + x.r.IntN(2) {
		i := x.r.IntN(x.w.keys)
		if x.r.IntN(3) == 0 {
			i = x.r.IntN(3)
		}
		keys = append(keys, "key-"+strconv.Itoa(i))
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

// savepoint writes events that are lost with it.
func (x *transaction) savepoint(ctx context.Context) error {
	if _, err := x.tx.ExecContext(ctx, `savepoint s`); err != nil {
		return err
	}
	lost := map[string]event{}
	if err := x.add(ctx, "key-0", 1, lost); err != nil { // the first to be locked by all
		return err
	}
	for id := range lost {
		x.lost[id] = true
	}
	_, err := x.tx.ExecContext(ctx, `rollback to savepoint s`)
	return err
}

// add locks and counts up an aggregate and writes its events.
func (x *transaction) add(ctx context.Context, key string, n int, into map[string]event) error {
	var last int
	if err := x.tx.QueryRowContext(ctx, x.w.sql(`update aggregates set n = n + $1 where key = $2 returning n`), n, key).
		Scan(&last); err != nil {
		return err
	}
	var events []outrider.Event
	for i := last - n + 1; i <= last; i++ {
		e := event{Key: key, N: i}
		payload, err := json.Marshal(e)
		if err != nil {
			return err
		}
		id := outrider.NewID()
		into[id] = e
		events = append(events, outrider.Event{ID: id, AggregateType: "aggregate", AggregateID: key,
			Type: "Counted", Payload: payload})
	}
	return x.w.outbox.Add(ctx, x.tx, events...)
}

// truth is what the database holds, by id. It is held against what the writers
// know.
func (w *writers) truth(t testing.TB) map[string]event {
	t.Helper()
	query := `select event_id, payload from outbox_events`
	if w.dialect == outrider.Postgres {
		query = `select event_id::text, payload from outbox_events`
	}
	rows, err := w.db.Query(query)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	want := map[string]event{}
	counts := map[string]int{}
	for rows.Next() {
		var id string
		var payload []byte
		var e event
		if err := rows.Scan(&id, &payload); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(payload, &e); err != nil {
			t.Fatal(err)
		}
		want[id] = e
		counts[e.Key]++
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, e := range w.known {
		if want[id] != e {
			t.Errorf("event %s, %+v, was committed and is not in the database", id, e)
		}
	}
	for i := range w.keys {
		key := "key-" + strconv.Itoa(i)
		var n int
		if err := w.db.QueryRow(w.sql(`select n from aggregates where key = $1`), key).Scan(&n); err != nil {
			t.Fatal(err)
		}
		if n != counts[key] {
			t.Errorf("%s: the aggregate counts %d events, the outbox has %d", key, n, counts[key])
		}
	}
	return want
}

// count is how many events are in the outbox, and whether the database could be
// asked.
func (w *writers) count() (n int, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err = w.db.QueryRowContext(ctx, `select count(*) from outbox_events`).Scan(&n)
	return n, err
}

func (w *writers) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return fmt.Sprintf("%d events committed, %d transactions rolled back, %d broken off", w.committed, w.rollbacks, w.errors)
}
