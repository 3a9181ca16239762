package pgstore_test

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"testing"

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
	if _, err := poor.Join(ctx, p); err == nil || !strings.Contains(outrider.Hint(err), "INSERT") {
		t.Errorf("join without privileges: %v, hint %q", err, outrider.Hint(err))
	}
	if _, err := db.Exec(`alter table outbox_leases drop column hi`); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Join(ctx, p); err == nil || outrider.Hint(err) == "" {
		t.Errorf("join after drift: %v, hint %q", err, outrider.Hint(err))
	}
}
