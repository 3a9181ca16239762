package pgstore_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/pgstore"
)

// PGO-01: what keeps vacuum from its work is shown with its age, and from some
// age on warned of, by what it takes to end it.
func TestOldTransactionIsSeen(t *testing.T) {
	ctx := context.Background()
	s, db := open(t, pgstore.Config{})
	oldest := func() (age time.Duration, warnings string) {
		t.Helper()
		st, err := s.Status(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return st.OldestTransaction, strings.Join(st.Warnings, "; ")
	}
	none := func(what string) {
		t.Helper()
		until(t, "no old transaction "+what, func() bool { age, _ := oldest(); return age == 0 })
	}
	none("to begin with")

	conn, err := pgx.Connect(ctx, dsnOf(s)+"&application_name=reports")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx) // the database goes with the test
	run := func(sql string) {
		t.Helper()
		if _, err := conn.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	run(`begin; select 'secret'`)
	none("while one is open that holds nothing")
	run(`rollback; begin isolation level repeatable read; select 'secret'`)
	var since time.Duration
	until(t, "the snapshot to be seen to grow older", func() bool {
		age, warnings := oldest()
		if age == 0 || warnings != "" {
			t.Fatalf("of a snapshot: age %v, warnings %q", age, warnings)
		}
		grown := since > 0 && age > since
		since = age
		return grown
	})
	pgstore.WarnOf(s, 1)
	_, warnings := oldest()
	for _, want := range []string{fmt.Sprintf("pg_terminate_backend(%d)", conn.PgConn().PID()), `"reports"`} {
		if !strings.Contains(warnings, want) {
			t.Errorf("warnings %q, want %q in them", warnings, want)
		}
	}
	if strings.Contains(warnings, "secret") {
		t.Errorf("warnings tell a query's text: %q", warnings)
	}
	run(`rollback`)
	none("behind a snapshot")

	gid := testdb.DatabaseName(t, dsnOf(s))
	insertPrepared := fmt.Sprintf(`begin; %s; prepare transaction '%s'`, oneEvent, gid)
	run(insertPrepared)
	if age, warnings := oldest(); age == 0 || !strings.Contains(warnings, gid) {
		t.Errorf("of a prepared transaction: age %v, warnings %q", age, warnings)
	}
	if _, err := db.Exec(`rollback prepared '` + gid + `'`); err != nil {
		t.Fatal(err)
	}
	none("behind a prepared transaction")
}
