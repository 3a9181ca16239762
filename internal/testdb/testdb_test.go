package testdb

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// Each test gets a database of its own, and it is gone afterwards even with a session, a prepared
// transaction and an active replication slot left in it.
func TestPostgresDropsWhatIsLeftBehind(t *testing.T) {
	// A new slot waits for every transaction in the server, other tests' too.
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	server := lookup(t, EnvPostgres)
	var names []string
	for i := range 2 {
		t.Run(fmt.Sprint("Database ", i), func(t *testing.T) {
			dsn := Postgres(t)
			names = append(names, DatabaseName(t, dsn))
			left := connect(t, dsn)
			for _, statement := range []string{
				"CREATE TABLE used (id int)",
				"SELECT pg_create_logical_replication_slot('" + names[i] + "', 'pgoutput')",
				"BEGIN",
				"INSERT INTO used VALUES (1)",
				"PREPARE TRANSACTION 'it''s " + names[i] + "'",
			} {
				if _, err := left.Exec(ctx, statement); err != nil {
					t.Fatalf("%s: %v", statement, err)
				}
			}
			replicate(t, dsn, names[i])
		})
	}
	if len(names) != 2 || names[0] == names[1] {
		t.Fatalf("want two databases of different names, got %q", names)
	}
	conn := connect(t, server)
	defer conn.Close(ctx) // the test is over
	for _, name := range names {
		var left int
		err := conn.QueryRow(ctx, "SELECT (SELECT count(*) FROM pg_database WHERE datname = $1) + (SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1)", name).Scan(&left)
		if err != nil || left != 0 {
			t.Errorf("%s: %d left, error %v", name, left, err)
		}
	}
}

func TestPoolerReachesTheSameDatabase(t *testing.T) {
	dsn := Postgres(t)
	pooled, err := pgx.ParseConfig(Pooler(t, DatabaseName(t, dsn)))
	if err != nil {
		t.Fatal(err)
	}
	pooled.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	conn, err := pgx.ConnectConfig(t.Context(), pooled)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background()) // the test is over
	var name string
	if err := conn.QueryRow(t.Context(), "SELECT current_database()").Scan(&name); err != nil {
		t.Fatal(err)
	}
	if want := DatabaseName(t, dsn); name != want {
		t.Errorf("got database %q, want %q", name, want)
	}
}

func TestAddresses(t *testing.T) {
	t.Setenv(EnvKafka, "127.0.0.1:1")
	t.Setenv(EnvKafkaSASL, "kafka://someone:secret@127.0.0.1:2")
	t.Setenv(EnvNATS, "nats://127.0.0.1:3")
	broker, user, password := KafkaSASL(t)
	got := []string{Kafka(t), broker, user, password, NATS(t)}
	if want := "127.0.0.1:1 127.0.0.1:2 someone secret nats://127.0.0.1:3"; strings.Join(got, " ") != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A missing server skips a test for a person and fails it in CI.
func TestMissingServer(t *testing.T) {
	for _, c := range []struct{ ci, require, want string }{
		{"", "", "skip"},
		{"true", "", "fatal"},
		{"", "1", "fatal"},
	} {
		t.Setenv("CI", c.ci)
		t.Setenv(EnvRequire, c.require)
		t.Setenv(EnvKafka, "")
		tb := &recorder{TB: t}
		done := make(chan struct{})
		go func() {
			defer close(done)
			defer func() { _ = recover() }()
			Kafka(tb)
		}()
		<-done
		if tb.how != c.want || !strings.Contains(tb.message, "scripts/servers env") || strings.Contains(tb.message, "\n") {
			t.Errorf("CI=%q, %s=%q: %s with %q, want %s and one line that says what to do", c.ci, EnvRequire, c.require, tb.how, tb.message, c.want)
		}
	}
}

func TestDatabaseName(t *testing.T) {
	name := databaseName("TestÄ/" + strings.Repeat("Long name, ", 20))
	if len(name) > 63 || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789_") != "" {
		t.Errorf("%q needs quotes or has more than 63 bytes", name)
	}
}

type recorder struct {
	testing.TB
	how, message string
}

func (r *recorder) Helper() {}

func (r *recorder) Skipf(format string, args ...any) {
	r.how, r.message = "skip", fmt.Sprintf(format, args...)
	panic(r.how)
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.how, r.message = "fatal", fmt.Sprintf(format, args...)
	panic(r.how)
}

func connect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

// replicate makes a slot active and leaves it so.
func replicate(t *testing.T, dsn, slot string) {
	t.Helper()
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	config.RuntimeParams["replication"] = "database"
	config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	conn, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	go conn.Exec(context.Background(), "START_REPLICATION SLOT "+slot+" LOGICAL 0/0 (proto_version '1', publication_names 'none')") //nolint:errcheck // ended by the clean-up
	watcher := connect(t, dsn)
	for deadline := time.Now().Add(limit); ; time.Sleep(10 * time.Millisecond) {
		var active bool
		if err := watcher.QueryRow(t.Context(), "SELECT active FROM pg_replication_slots WHERE slot_name = $1", slot).Scan(&active); err != nil {
			t.Fatal(err)
		}
		if active {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the replication slot never became active")
		}
	}
}
