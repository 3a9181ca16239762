package pgstore_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/store"
)

// PGO-01: beside a transaction that was forgotten, and beside a standby whose
// feedback holds back the same, what a relay writes again and again stays below
// a bound however many events pass, as long as it is maintained. The journal
// grows with claims, not with events. The short form has bounds that are reached
// soon; OUTRIDER_SIZES_EVENTS=1000000 is the case's hour at 300 events a second,
// with those that relays have.
func TestSizesBesideAnOldSnapshot(t *testing.T) {
	events := 3_600
	bounds := map[string]int64{"outbox_leases": 128 << 10, "outbox_relays": 32 << 10, "outbox_exceptions": 640 << 10, "outbox_held_keys": 640 << 10}
	if text := os.Getenv("OUTRIDER_SIZES_EVENTS"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil {
			t.Fatal(err)
		}
		events, bounds = n, nil
	}
	for name, hold := range map[string]func(*testing.T, string){"transaction": forget, "standby": standBy} {
		t.Run(name, func(t *testing.T) {
			bounds := pgstore.HotBounds(t, bounds)
			var cut bytes.Buffer
			x := newSole(t, store.ClaimParams{MaxRecords: 500})
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute+time.Duration(events)*2*time.Millisecond)
			defer cancel()
			x.ctx = ctx
			logged, err := pgstore.Open(ctx, pgstore.Config{DSN: pgstore.DSN(x.store), Logger: slog.New(slog.NewTextHandler(&cut, nil)), JournalRetention: time.Hour})
			if err != nil {
				t.Fatal(err)
			}
			defer logged.Close()
			hold(t, pgstore.DSN(x.store))
			testSizes(x, logged, events, bounds)
			for table := range bounds {
				// The server may count rows twice that came during a vacuum; in
				// the short form that is as much as there is of the others.
				sure := events > 50_000 || table == "outbox_leases" || table == "outbox_relays"
				if sure && !strings.Contains(cut.String(), "table="+table+" ") {
					t.Errorf("%s was never cut: nothing was held, or its bound is not reached", table)
				}
			}
		})
	}
}

const (
	sizesAlone = 60  // events of a round that come one by one
	sizesTried = 300 // and such as are tried twice, each of a key of its own
)

func testSizes(x *sole, maintain *pgstore.Store, events int, bounds map[string]int64) {
	x.t.Helper()
	tables := []string{"outbox_leases", "outbox_relays", "outbox_exceptions", "outbox_held_keys", "outbox_journal"}
	size := func(table string, whole bool) (n int64) {
		x.t.Helper()
		f := "pg_relation_size"
		if whole {
			f = "pg_total_relation_size"
		}
		if err := x.db.QueryRowContext(x.ctx, `select `+f+`($1::text::regclass)`, table).Scan(&n); err != nil {
			x.t.Fatal(err)
		}
		return n
	}
	// A table may have four times what its rows need, as the server counts them.
	over := func(table string) bool {
		x.t.Helper()
		var rows int64
		if err := x.db.QueryRowContext(x.ctx, `select pg_stat_get_live_tuples($1::text::regclass)`, table).Scan(&rows); err != nil {
			x.t.Fatal(err)
		}
		return size(table, false) > max(bounds[table], 4*rows*500)
	}
	line := fmt.Sprintf("%9s", "events")
	for _, table := range tables {
		line += fmt.Sprintf("%19s", table)
	}
	x.t.Log(line + "   KiB with indexes, before and after maintenance; ms for an event alone")
	most := map[string]int64{} // before maintenance, in the first half
	done, claims := 0, 0
	for done < events {
		began := time.Now()
		for range sizesAlone {
			x.add("alone")
			if got := x.publish(1); len(got) != 1 {
				x.t.Fatalf("%d events came alone", len(got))
			}
			claims++
		}
		alone := time.Since(began) / sizesAlone
		keys := numbered(fmt.Sprintf("%d-", done), sizesTried)
		x.add(keys...)
		c := x.claim(store.Fresh)
		for tries := 0; len(c.Records) == 0 && tries < 50; tries++ { // refused now and then, so that keys can rejoin
			c = x.claim(store.Fresh)
		}
		if len(c.Records) != sizesTried {
			x.t.Fatalf("%d of %d events came to be put off", len(c.Records), sizesTried)
		}
		x.commit(store.CommitParams{Start: []*store.Claim{c}})
		x.settle(c, store.Outcome{State: store.Waiting, Attempts: 1, Class: "other"})
		x.want("what was put off", keys...)
		claims += 50
		for range 50 {
			if r, err := x.ses.Renew(x.ctx, []store.Lease{x.lease}); err != nil || len(r.Lost) > 0 {
				x.t.Fatalf("renewed: %+v, %v", r, err)
			}
		}
		done += sizesAlone + sizesTried
		line := fmt.Sprintf("%9d", done)
		before := map[string]int64{}
		for _, table := range tables {
			before[table] = size(table, true)
		}
		for again := true; again; { // autovacuum may be in the way for a moment
			if err := maintain.Maintain(x.ctx); err != nil {
				x.t.Fatal(err)
			}
			again = false
			for table := range bounds {
				again = again || over(table)
			}
		}
		for _, table := range tables {
			n := size(table, true)
			line += fmt.Sprintf("%9d %9d", before[table]>>10, n>>10)
			switch bound, hot := bounds[table]; {
			case !hot && n > int64(claims)*400+128<<10:
				x.t.Errorf("%s has %d bytes after %d claims", table, n, claims)
			case hot && done <= events/2:
				most[table] = max(most[table], before[table])
			case hot && before[table] > 3*max(most[table], bound):
				x.t.Errorf("%s has grown to %d bytes after %d events, and to %d in the first half", table, before[table], done, most[table])
			}
		}
		x.t.Logf("%s   %.1f", line, float64(alone.Microseconds())/1000)
		if x.t.Failed() {
			return
		}
	}
}

// forget holds a snapshot until the test ends.
func forget(t *testing.T, dsn string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	if _, err := conn.Exec(t.Context(), `begin isolation level repeatable read; select count(*) from pg_class`); err != nil {
		t.Fatal(err)
	}
}

// standBy does what a standby with hot_standby_feedback does: it takes the log,
// and tells of a query that needs what is visible now.
func standBy(t *testing.T, dsn string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	watcher, err := pgx.Connect(ctx, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = watcher.Close(context.Background()) })
	var xmin uint64
	if err := watcher.QueryRow(ctx, `select pg_snapshot_xmax(pg_current_snapshot())::text::bigint`).Scan(&xmin); err != nil {
		t.Fatal(err)
	}
	cfg, err := pgconn.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	cfg.RuntimeParams["replication"] = "true"
	cfg.RuntimeParams["application_name"] = t.Name()
	conn, err := pgconn.ConnectConfig(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { cancel(); <-done; _ = conn.Close(context.Background()) })
	err = takeLog(ctx, conn)
	if err != nil {
		close(done)
		t.Fatal(err)
	}
	feedback := func() error {
		m := binary.BigEndian.AppendUint64([]byte{'h'}, 0) // sent at
		m = binary.BigEndian.AppendUint32(m, uint32(xmin)) //nolint:gosec // the lower half
		m = binary.BigEndian.AppendUint32(m, uint32(xmin>>32))
		m = binary.BigEndian.AppendUint64(m, 0) // no catalogue's
		conn.Frontend().Send(&pgproto3.CopyData{Data: m})
		return conn.Frontend().Flush()
	}
	if err := feedback(); err != nil {
		close(done)
		t.Fatal(err)
	}
	go func() {
		defer close(done)
		for {
			m, err := conn.ReceiveMessage(ctx)
			if err != nil {
				return
			}
			if c, ok := m.(*pgproto3.CopyData); ok && c.Data[0] == 'k' { // it wants an answer now and then
				if err := feedback(); err != nil {
					return
				}
			}
		}
	}()
	until(t, "the standby's feedback", func() bool {
		var held bool
		err := watcher.QueryRow(context.Background(), `select exists (select from pg_stat_replication where application_name = $1 and backend_xmin is not null)`, t.Name()).Scan(&held)
		return err == nil && held
	})
}

// takeLog has the server send its log from now on, as to a standby.
func takeLog(ctx context.Context, conn *pgconn.PgConn) error {
	res, err := conn.Exec(ctx, `IDENTIFY_SYSTEM`).ReadAll()
	if err != nil {
		return err
	}
	conn.Frontend().SendQuery(&pgproto3.Query{String: `START_REPLICATION PHYSICAL ` + string(res[0].Rows[0][2])})
	if err := conn.Frontend().Flush(); err != nil {
		return err
	}
	for {
		m, err := conn.ReceiveMessage(ctx)
		if err != nil {
			return err
		}
		switch m := m.(type) {
		case *pgproto3.CopyBothResponse:
			return nil
		case *pgproto3.ErrorResponse:
			return pgconn.ErrorResponseToPgError(m)
		}
	}
}
