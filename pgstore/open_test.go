package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/store"
)

// PGO-02: behind a transaction pooler the relay refuses, says why and what to
// do, while applications go on enqueueing through it.
func TestOpenBehindPooler(t *testing.T) {
	dsn := testdb.Postgres(t)
	open(t, pgstore.Config{DSN: dsn}) // migrates
	s, err := pgstore.Open(context.Background(), pgstore.Config{DSN: testdb.Pooler(t, testdb.DatabaseName(t, dsn))})
	if err == nil {
		_ = s.Close()
		t.Fatal("opened through a transaction pooler")
	}
	if !strings.Contains(err.Error(), "pooler") || !strings.Contains(outrider.Hint(err), "DSN") {
		t.Errorf("error %v, hint %q", err, outrider.Hint(err))
	}
}

// People come through a pooler, whose sessions serve others too: they look and
// decide as without one, and leave nothing behind on its connections.
func TestInspectBehindPooler(t *testing.T) {
	ctx := t.Context()
	s, db := open(t, pgstore.Config{})
	pooler := testdb.Pooler(t, testdb.DatabaseName(t, pgstore.DSN(s)))
	in, err := pgstore.Open(ctx, pgstore.Config{DSN: pooler, Inspect: true})
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	if _, err := in.Join(ctx, store.JoinParams{Relay: "r", TTL: 1e9, Grace: 1e8}); err == nil {
		t.Error("a relay joined a store that is for people")
	}
	p := joined(t, s, 64)
	if _, err := db.Exec(`insert into outbox_events (aggregate_type, aggregate_id, event_type, payload)
		select 'a', 'k' || n, 'T', '{}' from generate_series(1, 20) n`); err != nil {
		t.Fatal(err)
	}
	c, err := p.Claim(ctx, store.ClaimParams{Lease: p.lease, MaxRecords: 100, MaxBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	outcomes := make([]store.Outcome, len(c.Records))
	for i := range outcomes {
		outcomes[i] = store.Outcome{State: store.Failed, Attempts: 1, Class: "invalid"}
	}
	for _, cp := range []store.CommitParams{{Lease: p.lease, Start: []*store.Claim{c}}, {Lease: p.lease, Settle: []store.Settlement{{Claim: c, Outcomes: outcomes}}}} {
		if err := p.Commit(ctx, cp); err != nil {
			t.Fatal(err)
		}
	}
	// At once, so that the pooler hands its connections round.
	var all sync.WaitGroup
	for i := range c.Records {
		all.Go(func() {
			r := c.Records[i].Row
			st, err := in.Status(ctx)
			if err != nil || len(st.Destinations) != 1 || !st.Destinations[0].Leases[0].Held() || len(st.Relays) != 1 || st.Relays[0].Gone || len(st.Warnings) > 0 {
				t.Errorf("status: %+v, %v", st, err)
			}
			if page, err := in.List(ctx, store.ListParams{Key: c.Records[i].Key, State: store.Failed}); err != nil || len(page.Entries) != 1 {
				t.Errorf("list: %+v, %v", page, err)
			}
			if d, err := in.Show(ctx, c.Records[i].ID); err != nil || len(d) != 1 || d[0].Record.Row != r || string(d[0].Record.Payload) != "{}" {
				t.Errorf("show: %+v, %v", d, err)
			}
			if d, err := in.Show(ctx, "nothing"); err != nil || len(d) != 0 {
				t.Errorf("show of nothing: %+v, %v", d, err)
			}
			do := in.Retry
			if i%2 == 0 {
				do = in.Skip
			}
			if n, err := do(ctx, store.Target{ID: r}); n != 1 || err != nil {
				t.Errorf("retry or skip: %d, %v", n, err)
			}
			if _, err := in.Retire(ctx, "main", true); !errors.Is(err, store.ErrServed) {
				t.Errorf("retire: %v", err)
			}
		})
	}
	all.Wait()
	cfg, err := pgx.ParseConfig(pooler)
	if err != nil {
		t.Fatal(err)
	}
	cfg.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	var open []pgx.Tx
	for range 8 { // each in a transaction, so each on another of its connections
		conn, err := pgx.ConnectConfig(ctx, cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(context.Background())
		tx, err := conn.Begin(ctx)
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, tx)
		var seqscan, timeout string
		var prepared int
		if err := tx.QueryRow(ctx, `select current_setting('enable_seqscan'), current_setting('statement_timeout'), (select count(*) from pg_prepared_statements)`).
			Scan(&seqscan, &timeout, &prepared); err != nil || seqscan != "on" || timeout != "0" || prepared != 0 {
			t.Errorf("a connection of the pooler has seqscan %s, time-out %s, %d prepared statements: %v", seqscan, timeout, prepared, err)
		}
	}
	for _, tx := range open {
		_ = tx.Rollback(ctx)
	}
}

// What is wrong at start is said with the way to mend it.
func TestOpenErrors(t *testing.T) {
	ctx := context.Background()
	dsn := testdb.Postgres(t)
	with := func(change func(*url.URL)) string {
		u, err := url.Parse(dsn)
		if err != nil {
			t.Fatal(err)
		}
		change(u)
		return u.String()
	}
	for _, c := range []struct{ what, dsn, hint string }{
		{"no DSN", "", ""},
		{"not a DSN", "postgres://%zz", "postgres://"},
		{"a password that is not encoded", "postgres://u:sec@ret@host:foo/x", "percent-encoded"},
		{"nobody listens", "postgres://postgres@127.0.0.1:1/outrider?sslmode=disable", "host, port"},
		{"no such database", with(func(u *url.URL) { u.Path = "/nothing_here" }), "database's name"},
		{"no such role", with(func(u *url.URL) { u.User = url.User("nobody_here") }), "user, password"},
		{"not migrated", dsn, "outrider migrate up"},
	} {
		s, err := pgstore.Open(ctx, pgstore.Config{DSN: c.dsn})
		if err == nil {
			_ = s.Close()
			t.Errorf("%s: opened", c.what)
			continue
		}
		if strings.Contains(err.Error(), "ret@host") {
			t.Errorf("%s: the error shows a part of the password: %v", c.what, err)
		}
		if !strings.Contains(outrider.Hint(err), c.hint) {
			t.Errorf("%s: error %v, hint %q, want one with %q", c.what, err, outrider.Hint(err), c.hint)
		}
	}
}

// A role without privileges is told which ones it needs; drift is found at Join.
func TestJoinErrors(t *testing.T) {
	ctx := context.Background()
	s, db := open(t, pgstore.Config{})
	p := store.JoinParams{Relay: "r", TTL: 1e9, Grace: 1e8, Destinations: []store.Destination{{Name: "d"}}}
	role := "r_" + testdb.DatabaseName(t, pgstore.DSN(s))
	role = role[:min(len(role), 60)]
	for _, q := range []string{
		fmt.Sprintf(`create role %q login`, role),
		fmt.Sprintf(`grant select on all tables in schema public to %q`, role),
		fmt.Sprintf(`grant select on all sequences in schema public to %q`, role),
	} {
		if _, err := db.Exec(q); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		for _, q := range []string{`drop owned by %q`, `drop role %q`} {
			if _, err := db.Exec(fmt.Sprintf(q, role)); err != nil {
				t.Error(err)
			}
		}
	})
	u, err := url.Parse(pgstore.DSN(s))
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.User(role)
	poor, err := pgstore.Open(ctx, pgstore.Config{DSN: u.String()})
	if err != nil {
		t.Fatal(err)
	}
	defer poor.Close()
	if _, err := poor.Join(ctx, p); err == nil || !strings.Contains(outrider.Hint(err), "Rights on PostgreSQL") {
		t.Errorf("join without privileges: %v, hint %q", err, outrider.Hint(err))
	}
	if _, err := db.Exec(`alter table outbox_leases drop column hi`); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Join(ctx, p); err == nil || outrider.Hint(err) == "" {
		t.Errorf("join after drift: %v, hint %q", err, outrider.Hint(err))
	}
}
