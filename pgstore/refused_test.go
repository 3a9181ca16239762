package pgstore_test

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/relay"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// logged keeps what is logged.
type logged struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logged) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func (l *logged) count(text string) int { return strings.Count(l.text(), text) }

// refusal is a database that refuses a relay what it needs, until mend.
type refusal struct {
	cause, mend []string // ROLE is the relay's
	anew        bool     // seen by connections that are made afterwards
	state       string   // SQLSTATE
	hint        string
}

// out has the server's error given by a trigger, by which it does not differ
// from one of the server's own for who gets it.
func out(state, text, hint string) refusal {
	return refusal{
		cause: []string{
			`create function refuse() returns trigger language plpgsql as $$ begin raise '` + text + `' using errcode = '` + state + `'; end $$`,
			`create trigger refuse before update on outbox_leases for each row execute function refuse()`,
		},
		mend:  []string{`drop trigger refuse on outbox_leases`},
		state: state, hint: hint,
	}
}

// What a database refuses a running relay is waited for and lost by nothing: the
// relay is not ready, says once why and what to do, and goes on when the cause
// is gone. Nothing comes twice or out of order, and no attempt is counted.
func TestRefusedWhileRunning(t *testing.T) {
	for name, c := range map[string]refusal{
		"rights_on_events": {state: "42501", hint: "Rights on PostgreSQL",
			cause: []string{`revoke select on outbox_events from ROLE`}, mend: []string{`grant select on outbox_events to ROLE`}},
		"rights_on_leases": {state: "42501", hint: "Rights on PostgreSQL",
			cause: []string{`revoke select, update on outbox_leases from ROLE`}, mend: []string{`grant select, update on outbox_leases to ROLE`}},
		"no_events": {state: "42P01", hint: "outrider migrate up",
			cause: []string{`alter table outbox_events rename to elsewhere`}, mend: []string{`alter table elsewhere rename to outbox_events`}},
		"no_leases": {state: "42P01", hint: "outrider migrate up",
			cause: []string{`alter table outbox_leases rename to elsewhere`}, mend: []string{`alter table elsewhere rename to outbox_leases`}},
		"search_path": {state: "42P01", hint: "search_path", anew: true,
			cause: []string{`alter role ROLE set search_path = nowhere`}, mend: []string{`alter role ROLE reset search_path`}},
		"read_only": {state: "25006", hint: "default_transaction_read_only", anew: true,
			cause: []string{`alter role ROLE set default_transaction_read_only = on`}, mend: []string{`alter role ROLE reset default_transaction_read_only`}},
		"disk_full":  out("53100", `could not extend file "base/5/16390": No space left on device`, "disk is full: make room"),
		"no_memory":  out("53200", "out of memory", "out of memory: give it more"),
		"a_limit":    out("53400", "temporary file size exceeds temp_file_limit", "raise it"),
		"resources":  out("53000", "insufficient resources", "lacks something"),
		"disk_fault": out("58030", `could not read block 1 in file "base/5/16390": Input/output error`, "look at its log"),
	} {
		t.Run(name, func(t *testing.T) { refusedWhileRunning(t, c) })
	}
}

func refusedWhileRunning(t *testing.T, c refusal) {
	t.Helper()
	const first, n, keys = 5, 60, 7
	owner, db := open(t, pgstore.Config{})
	s, role := asRole(t, owner, db)
	do := func(queries ...string) {
		t.Helper()
		for _, q := range queries {
			if _, err := db.Exec(strings.ReplaceAll(q, "ROLE", role)); err != nil {
				t.Fatalf("%s: %v", q, err)
			}
		}
	}
	add := func(from, to int) {
		t.Helper()
		do(fmt.Sprintf(`insert into outbox_events (aggregate_type, aggregate_id, event_type, payload)
			select 'a', 'k' || i %% %d, 'T', convert_to(i::text, 'UTF8') from generate_series(%d, %d) i`, keys, from, to-1))
	}
	gate := newGate(first)
	sk := memsink.New(memsink.Config{Decide: gate.decide})
	log := &logged{}
	r, stop := relaying(t, s, sk, relay.Config{Logger: slog.New(slog.NewTextHandler(log, nil)), LeaseTTL: 10 * time.Minute, Grace: 3 * time.Second, MaxRecords: 10})
	add(0, first)
	arrive(t, sk, first, "before")
	until(t, "it is at work", func() bool { return r.Health().Ready() })
	add(first, n)
	gate.wait(t) // some are in hand
	do(c.cause...)
	if c.anew {
		do(`select pg_terminate_backend(pid) from pg_stat_activity where usename = 'ROLE'`)
	}
	gate.open()
	until(t, "it is not ready", func() bool { h := r.Health(); return !h.Ready() && h.Stuck && strings.Contains(h.StoreHint, c.hint) })
	if h := r.Health(); !strings.Contains(h.StoreError, c.state) {
		t.Errorf("health: %+v", h)
	}
	do(c.mend...)
	until(t, "it is ready", func() bool { return r.Health().Ready() })
	add(n, n+keys)
	arrive(t, sk, n+keys, "when the cause was gone")
	until(t, "all is well", func() bool { return r.Health().StoreError == "" })
	stop()
	if off, on := log.count(c.hint), log.count("asked again"); off != 1 || on == 0 {
		t.Errorf("said %d times what is wrong, and %d times that it is over:\n%s", off, on, log.text())
	}
	mustBeOnceInOrder(t, sk, n+keys, keys)
	mustHaveCostNothing(t, s)
}

// asRole opens a store as a role of its own that has what a relay needs.
func asRole(t *testing.T, owner *pgstore.Store, db *sql.DB) (s *pgstore.Store, role string) {
	t.Helper()
	u, err := url.Parse(pgstore.DSN(owner))
	if err != nil {
		t.Fatal(err)
	}
	role = testdb.DatabaseName(t, pgstore.DSN(owner))
	role = "r_" + role[max(0, len(role)-20):]
	u.User = url.User(role)
	for _, q := range []string{`create role ROLE login`, `grant all on all tables in schema public to ROLE`, `grant all on all sequences in schema public to ROLE`} {
		if _, err := db.Exec(strings.ReplaceAll(q, "ROLE", role)); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		for _, q := range []string{`drop owned by ROLE`, `drop role ROLE`} {
			if _, err := db.Exec(strings.ReplaceAll(q, "ROLE", role)); err != nil {
				t.Error(err)
			}
		}
	})
	s, err = pgstore.Open(context.Background(), pgstore.Config{DSN: u.String()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s, role
}

// gate lets some messages pass, and holds those behind them until open.
type gate struct {
	pass     int64
	n        atomic.Int64
	reached  chan struct{}
	released chan struct{}
}

func newGate(pass int64) *gate {
	return &gate{pass: pass, reached: make(chan struct{}), released: make(chan struct{})}
}

func (g *gate) decide(ctx context.Context, _ sink.Message) sink.Result {
	n := g.n.Add(1)
	if n == g.pass+1 {
		close(g.reached)
	}
	if n > g.pass {
		select {
		case <-g.released:
		case <-ctx.Done():
		}
	}
	return memsink.Deliver
}

func (g *gate) wait(t *testing.T) {
	t.Helper()
	select {
	case <-g.reached:
	case <-time.After(2 * time.Minute):
		t.Fatal("nothing came to the gate within two minutes")
	}
}

func (g *gate) open() { close(g.released) }

// mustBeOnceInOrder: payloads are numbers, and go round the keys.
func mustBeOnceInOrder(t *testing.T, sk *memsink.Sink, n, keys int) {
	t.Helper()
	last := map[string]int{}
	for _, m := range sk.Messages() {
		var i int
		if _, err := fmt.Sscan(string(m.Payload), &i); err != nil {
			t.Fatal(err)
		}
		if l, ok := last[m.Key]; ok && i != l+keys {
			t.Errorf("of %s, %d came behind %d", m.Key, i, l)
		}
		last[m.Key] = i
	}
	if sk.Len() != n || len(last) != keys {
		t.Errorf("%d messages of %d keys arrived, not %d of %d", sk.Len(), len(last), n, keys)
	}
}

func mustHaveCostNothing(t *testing.T, s *pgstore.Store) {
	t.Helper()
	st, err := s.Status(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if d := st.Destinations[0]; d.Failed.N+d.Waiting.N+d.Pending.N+d.Publishing.N != 0 {
		t.Errorf("status: %+v", d)
	}
	page, err := s.List(context.Background(), store.ListParams{Limit: 1000})
	if err != nil || len(page.Entries) == 0 {
		t.Fatalf("listed %d, %v", len(page.Entries), err)
	}
	for _, e := range page.Entries {
		if e.Attempts != 0 || e.State != store.Published {
			t.Errorf("%s is %v after %d attempts", e.EventID, e.State, e.Attempts)
		}
	}
}
