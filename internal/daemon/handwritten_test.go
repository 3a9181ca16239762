package daemon

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"math"
	"path/filepath"
	"strings"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/kafkasink"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/relay"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
)

// Rows that no library of ours would have written are relayed, or FAILED with
// their reason; and none of them keeps a lane from what comes after it.
func TestHandWrittenRows(t *testing.T) {
	for name, open := range map[string]func(*testing.T) (store.Store, *sql.DB){
		"Postgres": func(t *testing.T) (store.Store, *sql.DB) {
			dsn := testdb.Postgres(t)
			db := migrated(t, "pgx", dsn, migrate.Options{Dialect: outrider.Postgres})
			s, err := pgstore.Open(t.Context(), pgstore.Config{DSN: dsn})
			if err != nil {
				t.Fatal(err)
			}
			return s, db
		},
		"Stream": func(t *testing.T) (store.Store, *sql.DB) {
			path := filepath.Join(t.TempDir(), "db")
			db := migrated(t, "sqlite", path+lite, migrate.Options{Dialect: outrider.SQLite})
			s, err := sqlitestore.OpenStream(t.Context(), sqlitestore.Config{Path: path})
			if err != nil {
				t.Fatal(err)
			}
			return s, db
		},
		"Rows": func(t *testing.T) (store.Store, *sql.DB) {
			path := filepath.Join(t.TempDir(), "db")
			db := migrated(t, "sqlite", path+lite, migrate.Options{Dialect: outrider.SQLite, Set: migrate.Rows})
			s, err := sqlitestore.OpenRows(t.Context(), sqlitestore.Config{Path: path})
			if err != nil {
				t.Fatal(err)
			}
			return s, db
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Run("Memory", func(t *testing.T) {
				s, db := open(t)
				handWritten(t, s, db, name == "Rows", memsink.New(memsink.Config{MaxBytes: 8 << 20}), "anywhere")
			})
			t.Run("Kafka", func(t *testing.T) {
				k, topic := kafkaWithTopic(t)
				s, db := open(t)
				handWritten(t, s, db, name == "Rows", k, topic)
			})
		})
	}
}

const lite = "?_pragma=busy_timeout(60000)&_pragma=journal_mode(wal)&_txlock=immediate"

func migrated(t *testing.T, driver, dsn string, o migrate.Options) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	if _, err := migrate.Up(t.Context(), db, o); err != nil {
		t.Fatal(err)
	}
	return db
}

func kafkaWithTopic(t *testing.T) (sink.Sink, string) {
	t.Helper()
	broker := testdb.Kafka(t)
	kc, err := kgo.NewClient(kgo.SeedBrokers(broker))
	if err != nil {
		t.Fatal(err)
	}
	topic := "daemon-" + outrider.NewID()
	if _, err := kadm.NewClient(kc).CreateTopic(t.Context(), 1, 1, nil, topic); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, _ = kadm.NewClient(kc).DeleteTopics(context.Background(), topic)
		kc.Close()
	})
	k, err := kafkasink.New(kafkasink.Config{Brokers: []string{broker}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = k.Close(context.Background()) })
	return k, topic
}

func handWritten(t *testing.T, s store.Store, db *sql.DB, rows bool, k sink.Sink, topic string) {
	t.Helper()
	t.Cleanup(func() { _ = s.Close() })
	table := "outbox_events"
	if rows {
		table = "outbox_rows"
	}
	insert := `insert into ` + table + ` (aggregate_type, aggregate_id, event_type, payload, event_key, content_type, headers) values ($1, $2, $3, $4, $5, $6, $7)`
	run := func(query string, args ...any) {
		t.Helper()
		if _, err := db.ExecContext(t.Context(), query, args...); err != nil {
			t.Fatal(err)
		}
	}
	large := strings.Repeat("k", 200_000)
	run(insert, "a", "1", "null", nil, nil, "application/json", nil)
	run(insert, "a", "2", "unheard of", []byte("x"), nil, "no content type \x01 at all", nil)
	run(insert, "a", "3", "huge", make([]byte, 9<<20), nil, "application/octet-stream", nil)
	run(insert, "", "", "", []byte(""), "", "", nil)
	run(insert, "", "", "", []byte(""), nil, "", nil)
	run(insert, "a", "4", "array", []byte("{}"), nil, "application/json", `["a", 1, {"b": null}]`)
	run(insert, "a", "5", "large key", []byte("{}"), large, "application/json", nil)
	run(insert, "a", large, "large id", []byte("{}"), nil, "application/json", nil)
	run(`insert into `+table+` (id, aggregate_type, aggregate_id, event_type, payload) values ($1, 'a', '6', 'far', $2)`, int64(math.MaxInt64-1000), []byte("{}"))
	const odd, plain = 9, outrider.Lanes

	ctx, cancel := context.WithCancel(t.Context())
	r, err := relay.New(relay.Config{Store: s, Logger: slog.New(slog.DiscardHandler), LeaseTTL: time.Minute, Grace: time.Minute, Gate: relay.NewGate(),
		Destinations: []relay.Destination{{Name: "main", Sink: k, FromEarliest: true, To: func(*outrider.Record) (string, error) { return topic, nil }}}})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	ended(t, s, odd)
	// Ids of unordered ones go through all lanes.
	for range plain {
		run(insert, "a", "7", "plain", []byte("{}"), "", "application/json", nil)
	}
	for _, e := range ended(t, s, odd+plain) {
		switch {
		case e.Type == "huge" && e.State == store.Failed && e.Class == string(sink.ClassOversize) && e.Message != "":
		case e.Type != "huge" && e.State == store.Published:
		case e.State == store.Failed && e.Message != "":
			t.Errorf("FAILED: %q, %s: %s", e.Type, e.Class, e.Message)
		default:
			t.Errorf("%q of key %.20q is %v, %q", e.Type, e.Key, e.State, e.Message)
		}
	}
	if m, ok := k.(*memsink.Sink); ok {
		for _, got := range m.Messages() {
			if got.Type == "array" && got.Headers["headers"] == "" {
				t.Errorf("an array of headers became %v", got.Headers)
			}
			if got.Type == "null" && len(got.Payload) != 0 {
				t.Errorf("no payload became %q", got.Payload)
			}
		}
	}
}

// ended waits until so many events are published or FAILED.
func ended(t *testing.T, s store.Store, n int) []store.Entry {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		p, err := s.(store.Inspector).List(ctx, store.ListParams{Limit: 1000})
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		left := n
		for _, e := range p.Entries {
			if e.State == store.Published || e.State == store.Failed {
				left--
			}
		}
		if left == 0 {
			return p.Entries
		}
		if ctx.Err() != nil {
			for _, e := range p.Entries {
				if e.State != store.Published {
					t.Logf("%q of key %.20q is %v, %q %q", e.Type, e.Key, e.State, e.Reason, e.Message)
				}
			}
			t.Fatalf("%d of %d have not ended", left, n)
		}
	}
}
