package daemon

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite" // database/sql's "sqlite"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/config"
	"github.com/outrider-dev/outrider/kafkasink"
	"github.com/outrider-dev/outrider/logsink"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/natssink"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
)

// This file is the list of drivers. Nothing registers itself.

// OpenStore opens a source's outbox for a relay, after a look at its schema.
func OpenStore(ctx context.Context, s config.Source, log *slog.Logger) (store.Store, error) {
	return openStore(ctx, s, log, false)
}

// OpenInspector opens it for people, who may come through a transaction pooler.
func OpenInspector(ctx context.Context, s config.Source, log *slog.Logger) (store.Store, error) {
	return openStore(ctx, s, log, true)
}

func openStore(ctx context.Context, s config.Source, log *slog.Logger, inspect bool) (store.Store, error) {
	want := ToLook
	if !inspect {
		want = toRelay
	}
	if s.Postgres != nil && s.Postgres.Doorbell && !inspect {
		want = all(want, rights("update", bellSequence))
	}
	if err := checkSchema(ctx, s, want); err != nil {
		return nil, explain(err)
	}
	var st store.Store
	var err error
	switch {
	case s.Postgres != nil:
		st, err = openPostgres(ctx, *s.Postgres, log, inspect)
	case s.SQLite != nil:
		st, err = openSQLite(ctx, *s.SQLite, log)
	default:
		err = fmt.Errorf("source %s is of no kind", s.Name)
	}
	if err != nil {
		return nil, explain(err)
	}
	return st, nil
}

func openPostgres(ctx context.Context, c config.Postgres, log *slog.Logger, inspect bool) (store.Store, error) {
	st, err := pgstore.Open(ctx, pgstore.Config{
		DSN: c.DSN.Reveal(), Inspect: inspect, MaxConns: c.MaxConns, BusyPoll: c.BusyPoll, IdlePoll: c.IdlePoll,
		Doorbell: c.Doorbell, PartitionSize: int64(c.PartitionSize), Logger: log,
	})
	if err != nil {
		return nil, err // not st, whose nil would be none
	}
	return st, nil
}

func openSQLite(ctx context.Context, c config.SQLite, log *slog.Logger) (store.Store, error) {
	st, err := sqlitestore.OpenStream(ctx, sqlitestore.Config{
		Path: string(c.Path), MaxReaders: c.MaxReaders, BusyTimeout: c.BusyTimeout,
		BusyPoll: c.BusyPoll, IdlePoll: c.IdlePoll, Logger: log,
	})
	if err != nil {
		return nil, err // not st, whose nil would be none
	}
	return st, nil
}

func checkSchema(ctx context.Context, s config.Source, want Rights) error {
	db, dialect, err := OpenDB(s)
	if err != nil {
		return err
	}
	defer db.Close() // nothing was written
	if s.SQLite != nil {
		// Opening would make an empty file.
		if _, err := os.Stat(string(s.SQLite.Path)); err != nil {
			return outrider.WithHint(err, "make the database with: outrider migrate up --db sqlite:"+string(s.SQLite.Path))
		}
	}
	if s.Postgres != nil {
		if err := checkRights(ctx, db, want); err != nil {
			return err
		}
	}
	return migrate.Check(ctx, db, migrate.Options{Dialect: dialect})
}

// OpenDB opens a source's database for migrations and plain statements.
func OpenDB(s config.Source) (*sql.DB, outrider.Dialect, error) {
	if s.SQLite != nil {
		db, err := sql.Open("sqlite", sqliteDSN(*s.SQLite))
		if err != nil {
			return nil, 0, err
		}
		return db, outrider.SQLite, nil
	}
	c, err := pgx.ParseConfig(s.Postgres.DSN.Reveal())
	if err != nil {
		return nil, 0, explain(err)
	}
	// No statement is prepared, so that a transaction pooler may stand between.
	c.DefaultQueryExecMode = pgx.QueryExecModeExec
	return stdlib.OpenDB(*c), outrider.Postgres, nil
}

// CheckDSN reads a DSN as the driver does, and connects to nothing.
func CheckDSN(dsn string) error {
	_, err := pgx.ParseConfig(dsn)
	return err
}

// sqliteDSN is how an application opens the file, as the documentation asks.
func sqliteDSN(c config.SQLite) string {
	q := url.Values{}
	q.Set("_txlock", "immediate")
	for _, p := range []string{"journal_mode(wal)", "synchronous(full)", fmt.Sprintf("busy_timeout(%d)", c.BusyTimeout.Milliseconds())} {
		q.Add("_pragma", p)
	}
	return "file:" + (&url.URL{Path: string(c.Path)}).EscapedPath() + "?" + q.Encode()
}

// newSink makes a destination's sink. stdout is where log: writes to.
func newSink(d config.Destination, stdout io.Writer, log *slog.Logger) (sink.Sink, error) {
	switch {
	case d.Kafka != nil:
		return newKafka(*d.Kafka, d, log)
	case d.NATS != nil:
		return newNATS(*d.NATS, d, log)
	case d.Log != nil:
		return newLog(*d.Log, d, stdout)
	default:
		return nil, fmt.Errorf("destination %s is of no kind", d.Name)
	}
}

func newKafka(c config.Kafka, d config.Destination, log *slog.Logger) (sink.Sink, error) {
	cfg := kafkasink.Config{
		Brokers: c.Brokers, ClientID: c.ClientID, Topics: routes(d), Compression: c.Compression,
		Linger: c.Linger, DeliveryTimeout: c.DeliveryTimeout, MaxMessageBytes: int(c.MaxMessageBytes),
		TopicRefresh: c.TopicRefresh, Partitioner: c.Partitioner, Logger: log,
	}
	if t := c.TLS; t != nil {
		cfg.TLS = &kafkasink.TLS{
			CAFile: string(t.CAFile), CertFile: string(t.CertFile), KeyFile: string(t.KeyFile),
			ServerName: t.ServerName, InsecureSkipVerify: t.InsecureSkipVerify,
		}
	}
	if l := c.SASL; l != nil {
		cfg.SASL = &kafkasink.SASL{Mechanism: l.Mechanism, User: l.User, Password: l.Password.Reveal()}
	}
	s, err := kafkasink.New(cfg)
	if err != nil {
		return nil, err
	}
	return s, nil
}

func newNATS(c config.NATS, d config.Destination, log *slog.Logger) (sink.Sink, error) {
	cfg := natssink.Config{
		URLs: c.URLs, Name: c.Name, Subjects: routes(d), AckTimeout: c.AckTimeout, MaxInFlight: c.MaxInFlight,
		User: c.User, Password: c.Password.Reveal(), Token: c.Token.Reveal(),
		NKeyFile: string(c.NKeyFile), CredsFile: string(c.CredsFile), Logger: log,
	}
	if t := c.TLS; t != nil {
		cfg.TLS = &natssink.TLS{
			CAFile: string(t.CAFile), CertFile: string(t.CertFile), KeyFile: string(t.KeyFile),
			ServerName: t.ServerName, InsecureSkipVerify: t.InsecureSkipVerify,
		}
	}
	s, err := natssink.New(cfg)
	if err != nil {
		return nil, err
	}
	return s, nil
}

func newLog(c config.LogSink, d config.Destination, stdout io.Writer) (sink.Sink, error) {
	if c.File == "" {
		return logsink.New(logsink.Config{Writer: stdout, Rules: routes(d)})
	}
	f, err := os.OpenFile(string(c.File), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	s, err := logsink.New(logsink.Config{Writer: f, Rules: routes(d)})
	if err != nil {
		return nil, err
	}
	return &fileSink{Sink: s, file: f}, nil
}

// fileSink is a log sink that closes its file.
type fileSink struct {
	*logsink.Sink
	file *os.File
}

func (s *fileSink) Close(context.Context) error { return s.file.Close() }

// Place shows where a destination's events go, without secrets.
func Place(d config.Destination) string {
	to := ""
	if d.To != nil {
		to = "/" + d.To.String()
	}
	switch {
	case d.Kafka != nil:
		return "kafka://" + strings.Join(d.Kafka.Brokers, ",") + to
	case d.NATS != nil:
		return strings.Join(d.NATS.URLs, ",") + to
	case d.Log != nil && d.Log.File != "":
		return "log:" + string(d.Log.File)
	default:
		return "log:"
	}
}
