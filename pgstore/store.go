// Package pgstore is the stream on PostgreSQL: events are inserted and never
// updated; what moves is a position per lease, and a small table of exceptions.
//
// A position cannot be an id, since ids commit out of order. It is a snapshot:
// everything visible in it is done. Candidates are the rows of transactions
// that were open in it or began after it; docs/DESIGN.md has the algorithm,
// and position.go its form in code.
package pgstore

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// Config configures a Store.
type Config struct {
	// DSN of the database, directly, not through a transaction pooler: the
	// relay needs session locks. See Inspect. Needed.
	DSN string

	// Inspect opens the store for people alone, as store.Inspector, Operator,
	// Retirer and Rebaser; Join is refused. It needs nothing of a session, so a
	// transaction pooler may stand in front of the database.
	Inspect bool

	// MaxConns bounds the connections that carry claims and commits. Each
	// session has one more for its renewals, and a doorbell one. 0: 6.
	MaxConns int

	// BusyPoll is how often the database is asked whether anything has been
	// committed while events are coming. 0: 2 ms.
	BusyPoll time.Duration
	// IdlePoll is how far that backs off when none come. 0: 25 ms.
	IdlePoll time.Duration

	// Doorbell listens for the trigger that `outrider migrate doorbell on`
	// makes, and polls only as a safety net while idle.
	Doorbell bool

	// PartitionSize is how many ids a partition holds. 0: 10,000,000.
	PartitionSize int64

	// JournalRetention is for how long it is kept what was sent when and
	// where. 0: 7 days.
	JournalRetention time.Duration

	// Logger gets what operators should know. nil: slog.Default().
	Logger *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.MaxConns == 0 {
		c.MaxConns = 6
	}
	if c.BusyPoll == 0 {
		c.BusyPoll = 2 * time.Millisecond
	}
	if c.IdlePoll == 0 {
		c.IdlePoll = 25 * time.Millisecond
	}
	if c.PartitionSize == 0 {
		c.PartitionSize = 10_000_000
	}
	if c.JournalRetention == 0 {
		c.JournalRetention = 7 * 24 * time.Hour
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

func (c Config) validate() error {
	switch {
	case c.DSN == "":
		return errors.New("pgstore: Config.DSN is empty")
	case c.MaxConns < 0, c.BusyPoll < 0, c.IdlePoll < 0, c.PartitionSize < 0:
		return errors.New("pgstore: Config.MaxConns, BusyPoll, IdlePoll and PartitionSize cannot be negative")
	case c.MaxConns == 1:
		return errors.New("pgstore: Config.MaxConns is 1; a claim runs beside a commit, so at least 2 are needed")
	}
	return nil
}

// Store is an outbox in a PostgreSQL database.
type Store struct {
	cfg  Config
	pool *pgxpool.Pool
	sql  statements
	rows chan []row // spare ones, see takeBatch
	// parts is what partitions there were when none was missing.
	parts partitionsKnown
	// oldTx is the age of transactions that are warned of.
	oldTx time.Duration
}

var (
	_ store.Store      = (*Store)(nil)
	_ store.Watcher    = (*Store)(nil)
	_ store.Maintainer = (*Store)(nil)
)

// Open connects. What the database lacks is found at Join.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	pc, err := pgxpool.ParseConfig(cfg.DSN)
	if err != nil {
		return nil, ErrDSN
	}
	pc.MaxConns = int32(cfg.MaxConns)
	if cfg.Inspect {
		nameSession(pc.ConnConfig)
		// Statements are described inside their transaction, and none is kept.
		pc.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeDescribeExec
	} else {
		setSession(pc.ConnConfig)
	}
	pool, err := pgxpool.NewWithConfig(ctx, pc)
	if err != nil {
		return nil, fmt.Errorf("pgstore: %w", err)
	}
	s := &Store{cfg: cfg, pool: pool, rows: make(chan []row, 4), oldTx: oldTransaction}
	if err := s.probe(ctx); err != nil {
		pool.Close()
		return nil, err
	}
	return s, nil
}

// settings are what every connection of the store lives under. A range of
// transaction ids looks to the planner like a third of the table as long as
// there are no statistics, and like a reason to read all of it. No query here
// ever wants that.
const settings = `
	set enable_seqscan = off;
	set enable_bitmapscan = off;
	set jit = off;
	set plan_cache_mode = force_generic_plan;
	set statement_timeout = '60s';
	set idle_in_transaction_session_timeout = '60s'`

// setSession has a connection live under the settings.
func setSession(c *pgx.ConnConfig) {
	nameSession(c)
	c.AfterConnect = func(ctx context.Context, conn *pgconn.PgConn) error {
		_, err := conn.Exec(ctx, settings).ReadAll()
		return err
	}
}

// nameSession gives a connection its name and a time-out.
func nameSession(c *pgx.ConnConfig) {
	if c.RuntimeParams == nil {
		c.RuntimeParams = map[string]string{}
	}
	if c.RuntimeParams["application_name"] == "" {
		c.RuntimeParams["application_name"] = "outrider"
	}
	if c.ConnectTimeout == 0 {
		c.ConnectTimeout = 10 * time.Second
	}
}

// Capabilities implements store.Store.
func (s *Store) Capabilities() store.Capabilities {
	return store.Capabilities{FanOut: true, Sequences: true, LiveTakeOver: true}
}

// Close implements store.Store.
func (s *Store) Close() error {
	s.pool.Close()
	return nil
}

// probe looks at the database and prepares the statements that fit it.
func (s *Store) probe(ctx context.Context) error {
	if s.cfg.Inspect {
		return s.inTx(ctx, func(tx pgx.Tx) error { return s.probeBy(ctx, tx) })
	}
	// First of all: through a pooler, the settings of this store's sessions
	// would become those of others.
	if err := s.checkPooler(ctx); err != nil {
		return err
	}
	return s.probeBy(ctx, s.pool)
}

func (s *Store) probeBy(ctx context.Context, q querier) error {
	var number, text string
	if err := q.QueryRow(ctx, `select current_setting('server_version_num'), current_setting('server_version')`).Scan(&number, &text); err != nil {
		return fmt.Errorf("pgstore: %w", err)
	}
	if err := checkVersion(number, text); err != nil {
		return err
	}
	var typ *string
	if err := q.QueryRow(ctx, `
		select (select format_type(atttypid, null) from pg_attribute
		        where attrelid = to_regclass('outbox_events') and attname = 'payload' and not attisdropped)`).Scan(&typ); err != nil {
		return fmt.Errorf("pgstore: %w", err)
	}
	if typ == nil {
		return outrider.WithHint(errors.New("pgstore: there is no table outbox_events on the search path"),
			"create it with: outrider migrate up --db DSN")
	}
	s.sql = newStatements(*typ)
	return nil
}

// minVersion of PostgreSQL: 14 is the oldest that the tests and plans are for.
const minVersion = 140_000

// checkVersion refuses a server that is too old, by server_version_num. The
// text is for people alone: packagers write what they like into it. A number
// that is none is no PostgreSQL's, and nothing is known of what it would do.
func checkVersion(number, text string) error {
	n, err := strconv.Atoi(number)
	switch {
	case err != nil || n <= 0:
		return outrider.WithHint(fmt.Errorf("pgstore: the server's version %q (server_version_num %q) cannot be understood", text, number),
			"PostgreSQL 14 or newer is needed, and this does not call itself one")
	case n < minVersion:
		return outrider.WithHint(fmt.Errorf("pgstore: PostgreSQL %s is too old", text), "PostgreSQL 14 or newer is needed")
	}
	return nil
}

// checkPooler finds out whether a transaction pooler stands between: one
// connection's server process then serves another as soon as it is idle.
// Poolers hand out the server used last, so the second asks right behind the
// first.
func (s *Store) checkPooler(ctx context.Context) error {
	cfg, err := pgx.ParseConfig(s.cfg.DSN)
	if err != nil {
		return fmt.Errorf("pgstore: %w", err)
	}
	cfg.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	var conns [2]*pgx.Conn
	for i := range conns {
		c, err := pgx.ConnectConfig(ctx, cfg)
		if err != nil {
			return connectError(err)
		}
		defer c.Close(context.WithoutCancel(ctx))
		conns[i] = c
	}
	for range 3 {
		var pid [2]int
		for i, c := range conns {
			if err := c.QueryRow(ctx, `select pg_backend_pid()`).Scan(&pid[i]); err != nil {
				return fmt.Errorf("pgstore: %w", err)
			}
		}
		if pid[0] == pid[1] {
			return outrider.WithHint(errors.New("pgstore: a transaction pooler stands in front of the database: two connections were served by one server process"),
				"the relay needs session locks and prepared statements: give it a DSN that leads to PostgreSQL itself (applications may go on enqueueing through the pooler, and status, list, show, retry, skip and retire work through it)")
		}
	}
	return nil
}

// ErrDSN says that a DSN cannot be understood, without showing it.
var ErrDSN = outrider.WithHint(errors.New("pgstore: the DSN cannot be understood"),
	"write postgres://USER:PASSWORD@HOST:PORT/DATABASE, with special characters of the password percent-encoded, as @ is %40")

// randomLock is a number for an advisory lock that no two relays share.
func randomLock() int64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails: see crypto/rand
	return int64(binary.BigEndian.Uint64(b[:]) >> 1)
}

// locked is a mutex-guarded map of the leases that a session holds.
type locked struct {
	sync.Mutex
	m map[int64]*lease
}

// drop forgets a lease, unless it has been acquired anew.
func (l *locked) drop(sl store.Lease) {
	l.Lock()
	defer l.Unlock()
	if have := l.m[sl.ID]; have != nil && have.Epoch == sl.Epoch {
		delete(l.m, sl.ID)
	}
}

func (l *locked) get(id int64) *lease {
	l.Lock()
	defer l.Unlock()
	return l.m[id]
}

// ids are those of the leases held.
func (l *locked) ids() []int64 {
	l.Lock()
	defer l.Unlock()
	out := make([]int64, 0, len(l.m))
	for id := range l.m {
		out = append(out, id)
	}
	return out
}
