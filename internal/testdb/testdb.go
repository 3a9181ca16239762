// Package testdb gives tests the real servers that scripts/servers brings up.
//
// Each helper reads the address of its server from the environment. Without it the test is skipped,
// with a line that says how to get the server; it fails instead where CI or OUTRIDER_TEST_REQUIRE is
// set, so that no run is green because a server was missing.
//
// The package is for tests only and must not be linked into the binary.
package testdb

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// The environment variables that scripts/servers env prints.
const (
	EnvPostgres  = "OUTRIDER_TEST_POSTGRES"        // URL, a superuser
	EnvPooler    = "OUTRIDER_TEST_POSTGRES_POOLER" // URL, pgbouncer in transaction mode before the same server
	EnvKafka     = "OUTRIDER_TEST_KAFKA"           // host:port, PLAINTEXT
	EnvKafkaSASL = "OUTRIDER_TEST_KAFKA_SASL"      // kafka://user:password@host:port, SASL_PLAINTEXT
	EnvNATS      = "OUTRIDER_TEST_NATS"            // URL, JetStream enabled

	// EnvRequire makes a missing server a failure. CI does the same.
	EnvRequire = "OUTRIDER_TEST_REQUIRE"
)

// limit bounds every single thing that is asked of a server. A test server that is slower than this
// is down.
const limit = 30 * time.Second

// Postgres creates an empty database with a name of its own and returns its URL, with the rights of
// a superuser. When the test ends the database is dropped, whoever is still connected to it, along
// with its replication slots and prepared transactions.
func Postgres(t testing.TB) string {
	t.Helper()
	server := lookup(t, EnvPostgres)
	name := databaseName(t.Name())
	quoted := pgx.Identifier{name}.Sanitize()

	// Nobody is ever connected to template0, so creation never waits for anybody.
	if err := exec(server, "CREATE DATABASE "+quoted+" TEMPLATE template0"); err != nil {
		t.Fatalf("testdb: create database: %v", err)
	}
	dsn, err := withDatabase(server, name)
	if err != nil {
		t.Fatalf("testdb: %s: %v", EnvPostgres, err)
	}
	t.Cleanup(func() {
		if err := drop(server, dsn, name); err != nil {
			t.Errorf("testdb: drop database %s: %v", name, err)
		}
	})
	return dsn
}

// Pooler returns the URL of a database of the Postgres server by way of pgbouncer in transaction
// mode: LISTEN, session locks and prepared statements do not work on it. dbname is a name as
// DatabaseName gives it.
func Pooler(t testing.TB, dbname string) string {
	t.Helper()
	dsn, err := withDatabase(lookup(t, EnvPooler), dbname)
	if err != nil {
		t.Fatalf("testdb: %s: %v", EnvPooler, err)
	}
	return dsn
}

// DatabaseName returns the database that a URL from Postgres names.
func DatabaseName(t testing.TB, dsn string) string {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatalf("testdb: %v", err)
	}
	return strings.TrimPrefix(u.Path, "/")
}

// Kafka returns the address of a broker, host:port. The broker creates no topics by itself, and its
// topics are shared by all tests: give yours names of their own.
func Kafka(t testing.TB) string {
	t.Helper()
	return lookup(t, EnvKafka)
}

// KafkaSASL returns the same broker's address that asks for a login, by PLAIN, SCRAM-SHA-256 or
// SCRAM-SHA-512 and without TLS, and the user and password that it takes.
func KafkaSASL(t testing.TB) (broker, user, password string) {
	t.Helper()
	u, err := url.Parse(lookup(t, EnvKafkaSASL))
	if err != nil {
		t.Fatalf("testdb: %s: %v", EnvKafkaSASL, err)
	}
	password, _ = u.User.Password()
	return u.Host, u.User.Username(), password
}

// NATS returns the URL of a NATS server with JetStream. Its streams are shared by all tests: give
// yours names and subjects of their own.
func NATS(t testing.TB) string {
	t.Helper()
	return lookup(t, EnvNATS)
}

func lookup(t testing.TB, key string) string {
	t.Helper()
	value := os.Getenv(key)
	if value == "" {
		if os.Getenv("CI") != "" || os.Getenv(EnvRequire) != "" {
			t.Fatalf(`testdb: %s is not set, and a missing server is a failure here: scripts/servers up, then eval "$(scripts/servers env)"`, key)
		}
		t.Skipf(`needs a real server, %s is not set: make test, or scripts/servers up and eval "$(scripts/servers env)"`, key)
	}
	return value
}

// databaseName makes a name that tells a person which test a database belongs to: lower case, without
// anything that needs quotes, and within PostgreSQL's 63 bytes.
func databaseName(test string) string {
	name := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		default:
			return '_'
		}
	}, strings.ToLower(test))
	var random [6]byte
	rand.Read(random[:])
	return "t_" + name[:min(len(name), 48)] + "_" + hex.EncodeToString(random[:])
}

func withDatabase(dsn, name string) (string, error) {
	u, err := url.Parse(dsn)
	if err != nil {
		return "", err
	}
	if u.Scheme != "postgres" && u.Scheme != "postgresql" {
		return "", errors.New("not a postgres:// URL")
	}
	u.Path = "/" + name
	return u.String(), nil
}

// drop retries while the server is away or still busy ending what used the database: a test may have
// restarted the server.
func drop(server, dsn, name string) error {
	deadline := time.Now().Add(limit)
	for {
		err := tryDrop(server, dsn, name)
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// tryDrop first removes what FORCE does not: it ends sessions, but refuses while a replication slot
// is active or a transaction is prepared. It may be called again after any failure.
func tryDrop(server, dsn, name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	conn, err := pgx.Connect(ctx, server)
	if err != nil {
		return err
	}
	defer conn.Close(ctx) // nothing depends on how it closes

	prepared, err := texts(ctx, conn, "SELECT gid FROM pg_prepared_xacts WHERE database = $1", name)
	if err != nil {
		return err
	}
	for _, gid := range prepared {
		if err := exec(dsn, "ROLLBACK PREPARED '"+strings.ReplaceAll(gid, "'", "''")+"'"); err != nil {
			return err
		}
	}
	slots, err := texts(ctx, conn, "SELECT slot_name::text FROM pg_replication_slots WHERE database = $1", name)
	if err != nil {
		return err
	}
	for _, slot := range slots {
		if _, err := conn.Exec(ctx, "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots WHERE slot_name = $1 AND active", slot); err != nil {
			return err
		}
		if _, err := conn.Exec(ctx, "SELECT pg_drop_replication_slot($1)", slot); err != nil {
			return err
		}
	}
	_, err = conn.Exec(ctx, "DROP DATABASE IF EXISTS "+pgx.Identifier{name}.Sanitize()+" WITH (FORCE)")
	return err
}

func texts(ctx context.Context, conn *pgx.Conn, query, arg string) ([]string, error) {
	rows, err := conn.Query(ctx, query, arg)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

func exec(dsn, statement string) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer conn.Close(ctx) // nothing depends on how it closes
	_, err = conn.Exec(ctx, statement)
	return err
}
