package cli

import (
	"database/sql"
	"path/filepath"
	"strings"
	"testing"

	"github.com/outrider-dev/outrider/internal/testdb"
)

// What migrate status ends with is what a deployment goes by.
func TestMigrateStatusCodes(t *testing.T) {
	cleanEnvironment(t)
	file := filepath.Join(t.TempDir(), "shop.db")
	dsn := "sqlite:" + file
	status := func(name, want string, code int) {
		t.Helper()
		for _, args := range [][]string{{}, {"-o", "json"}} {
			got := call(t, nil, append([]string{"migrate", "status", "--db", dsn}, args...)...)
			if !strings.Contains(got, "--- exit "+string(rune('0'+code))+"\n") || len(args) == 0 && !strings.Contains(got, want) {
				t.Errorf("%s: want %q and exit %d\n%s", name, want, code, got)
			}
			if state := map[string]string{"current": `"state": "ok"`, "added": `"state": "ok"`, "dropped": `"state": "changed"`, "newer": `"state": "newer"`, "empty": `"state": "missing"`}[name]; len(args) > 0 && !strings.Contains(got, state) {
				t.Errorf("%s: want %s\n%s", name, state, got)
			}
		}
	}
	status("no file", "hint: outrider migrate up --db "+dsn+" makes it", exitMigrate)
	mustRun(t, "migrate", "up", "--db", dsn)
	status("current", "version 1, the newest", exitOK)
	db, err := sql.Open("sqlite", file)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	exec := func(sql string) {
		t.Helper()
		if _, err := db.ExecContext(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec("create index extra on outbox_events (event_type)")
	status("added", "none of that does harm", exitOK)
	exec("drop index outbox_events_key_idx")
	status("dropped", "no relay of this version starts: the outbox's schema was changed by something else: index outbox_events_key_idx is missing", exitDrift)
	exec("update outbox_migrations set version = 7")
	status("newer", "no relay of this version starts: the outbox's schema is newer than this program", exitDrift)
	exec("drop table outbox_migrations")
	for _, table := range []string{"journal", "held_keys", "exceptions", "relays", "leases", "source", "events"} {
		exec("drop table outbox_" + table)
	}
	status("empty", "there is no outbox in this database", exitMigrate)
}

// A payload that was asked for and is not there is said, both ways.
func TestMigratePayload(t *testing.T) {
	cleanEnvironment(t)
	for made, other := range map[string]string{"json": "bytea", "bytea": "json"} {
		t.Run(made, func(t *testing.T) {
			dsn := testdb.Postgres(t)
			up := []string{"migrate", "up", "--db", dsn}
			mustRun(t, append(up, "--payload", made)...)
			mustRun(t, up...)
			mustRun(t, append(up, "--payload", made)...)
			mustRun(t, "migrate", "status", "--db", dsn)
			got := call(t, nil, append(up, "--payload", other)...)
			if !strings.Contains(got, "outbox_events.payload is of type "+made+", and "+other+" was asked for") || !strings.Contains(got, "--- exit 1") {
				t.Error(got)
			}
			if got := call(t, nil, "migrate", "status", "--db", dsn, "--payload", other); !strings.Contains(got, "and "+other+" was asked for") || !strings.Contains(got, "--- exit 4") {
				t.Error(got)
			}
		})
	}
}

// The doorbell says how it is, and takes nothing but on and off.
func TestMigrateDoorbell(t *testing.T) {
	cleanEnvironment(t)
	dsn := testdb.Postgres(t)
	mustRun(t, "migrate", "up", "--db", dsn)
	for _, want := range []string{"off", "on", "off"} {
		got := mustRun(t, "migrate", "doorbell", "--db", dsn)
		other := map[string]string{"on": "off", "off": "on"}[want]
		if !strings.HasPrefix(got, "the doorbell is "+want+"\nnext: outrider migrate doorbell "+other) {
			t.Errorf("want %s: %s", want, got)
		}
		mustRun(t, "migrate", "doorbell", other, "--db", dsn)
	}
}
