//go:build unix

package sqlitestore_test

import (
	"context"
	"database/sql"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
)

// BenchmarkDrain carries a backlog to nowhere: bare is a loop of the same
// statements without a store, which is what a store is measured by.
func BenchmarkDrain(b *testing.B) {
	for _, page := range []int{100, 1000, 5000} {
		for _, c := range []struct {
			name string
			set  migrate.Set
			run  func(*testing.B, *testDB, int)
		}{
			{"bare", migrate.Stream, drainBare},
			{"stream", migrate.Stream, drainStore},
			{"rows-bare", migrate.Rows, drainBareRows},
			{"rows", migrate.Rows, drainStore},
		} {
			b.Run(fmt.Sprintf("%s/%d", c.name, page), func(b *testing.B) {
				db := makeDB(b, c.set)
				db.backlog(b, b.N)
				b.ReportAllocs()
				cpu = 0
				c.run(b, db, page)
				b.ReportMetric(float64(cpu.Nanoseconds())/float64(b.N), "cpu-ns/event")
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
			})
		}
	}
}

// cpu is what the process has used up between startTimer and stopTimer: unlike
// the time on the wall it can be compared on a busy machine.
var cpu time.Duration

func startTimer(b *testing.B) {
	b.Helper()
	cpu -= used(b)
	b.ResetTimer()
}

func stopTimer(b *testing.B) {
	b.Helper()
	b.StopTimer()
	cpu += used(b)
}

func used(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// backlog makes events of 300 bytes.
func (db *testDB) backlog(b *testing.B, n int) {
	b.Helper()
	db.exec(b, `with recursive c(i) as (select 1 union all select i + 1 from c where i < ?)
		insert into `+db.table()+` (event_id, aggregate_type, aggregate_id, event_type, payload)
		select printf('00000000-0000-7000-8000-%012d', i), 'order', 'key-' || (i % 1000), 'Done', randomblob(300) from c`, n)
	db.exec(b, "pragma wal_checkpoint(truncate)")
}

func drainStore(b *testing.B, db *testDB, page int) {
	b.Helper()
	ctx := context.Background()
	s := open(b, db.set, sqlitestore.Config{Path: db.path})
	ses, err := s.Join(ctx, store.JoinParams{Relay: "r", TTL: time.Hour, Grace: time.Hour, Destinations: []store.Destination{{Name: "main", FromEarliest: true}}})
	if err != nil {
		b.Fatal(err)
	}
	leases, err := ses.Acquire(ctx, store.AcquireParams{Destination: "main", Lanes: 64})
	if err != nil {
		b.Fatal(err)
	}
	l := leases[0]
	startTimer(b)
	var last *store.Claim
	for n := 0; n < b.N; {
		c, err := ses.Claim(ctx, store.ClaimParams{Lease: l, MaxRecords: page, MaxBytes: 64 << 20})
		if err != nil {
			b.Fatal(err)
		}
		p := store.CommitParams{Lease: l, Start: []*store.Claim{c}}
		if last != nil {
			p.Settle = settled(last)
		}
		if err := ses.Commit(ctx, p); err != nil {
			b.Fatal(err)
		}
		n += len(c.Records)
		last = c
	}
	if err := ses.Commit(ctx, store.CommitParams{Lease: l, Settle: settled(last)}); err != nil {
		b.Fatal(err)
	}
	stopTimer(b)
	if err := ses.Leave(ctx); err != nil {
		b.Fatal(err)
	}
}

func settled(c *store.Claim) []store.Settlement {
	outcomes := make([]store.Outcome, len(c.Records))
	for i := range outcomes {
		outcomes[i].State = store.Published
	}
	return []store.Settlement{{Claim: c, Outcomes: outcomes}}
}

// bare is what a loop without a store needs.
type bare struct {
	b           *testing.B
	read, write *sql.DB
	query       *sql.Stmt
}

func newBare(b *testing.B, db *testDB, query string) *bare {
	b.Helper()
	open := func() *sql.DB {
		d, err := sql.Open("sqlite", db.path+"?_pragma=synchronous(full)&_txlock=immediate")
		if err != nil {
			b.Fatal(err)
		}
		d.SetMaxOpenConns(1)
		b.Cleanup(func() { _ = d.Close() })
		return d
	}
	x := &bare{b: b, read: open(), write: open()}
	x.query = x.prepare(x.read, query)
	return x
}

func (x *bare) prepare(db *sql.DB, query string) *sql.Stmt {
	s, err := db.Prepare(query)
	if err != nil {
		x.b.Fatal(err)
	}
	return s
}

const bareColumns = `select id, event_id, aggregate_type, aggregate_id, event_type, event_key,
	content_type, headers, created_at, available_at, coalesce(octet_length(payload), 0), payload from `

// page reads rows behind an id.
func (x *bare) page(after int64, page int) (ids []int64) {
	rows, err := x.query.Query(after, page)
	if err != nil {
		x.b.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var id, size int64
		var event, at, aid, et, ct string
		var created int64
		var key sql.NullString
		var available sql.NullInt64
		var headers, payload []byte
		if err := rows.Scan(&id, &event, &at, &aid, &et, &key, &ct, &headers, &created, &available, &size, &payload); err != nil {
			x.b.Fatal(err)
		}
		ids = append(ids, id)
	}
	if err := rows.Err(); err != nil {
		x.b.Fatal(err)
	}
	return ids
}

func (x *bare) tx(f func(tx *sql.Tx) error) {
	tx, err := x.write.Begin()
	if err == nil {
		err = f(tx)
	}
	if err == nil {
		err = tx.Commit()
	}
	if err != nil {
		x.b.Fatal(err)
	}
}

func drainBare(b *testing.B, db *testDB, page int) {
	b.Helper()
	x := newBare(b, db, bareColumns+`outbox_events where id > ? order by id limit ?`)
	db.exec(b, `insert into outbox_leases (destination, lanes) values ('main', -1)`)
	move := x.prepare(x.write, `update outbox_leases set writes = writes + 1, base = ?, open = ?, page = page + 1, expires_at = 1 where lease = 1 and epoch = 0`)
	note := x.prepare(x.write, `insert into outbox_journal (destination, lease, epoch, relay, kind, from_id, to_id, records, published) values ('main', 1, 1, 'r', 'FRESH', ?, ?, ?, ?)`)
	startTimer(b)
	defer stopTimer(b)
	after := int64(0)
	for {
		ids := x.page(after, page)
		x.tx(func(tx *sql.Tx) error {
			if _, err := tx.Stmt(move).Exec(after, `{"open":[{"from":1,"to":2,"page":3,"n":4}]}`); err != nil {
				return err
			}
			_, err := tx.Stmt(note).Exec(after, after, page, page)
			return err
		})
		if len(ids) == 0 {
			return
		}
		after = ids[len(ids)-1]
	}
}

func drainBareRows(b *testing.B, db *testDB, page int) {
	b.Helper()
	x := newBare(b, db, bareColumns+`outbox_rows where state = 'PENDING' and state <> 'PUBLISHED' and id > ? order by id limit ?`)
	start := x.prepare(x.write, `update outbox_rows set state = 'PUBLISHING', token = ?3, lane = 1 where id >= ?1 and id <= ?2 and state = 'PENDING'`)
	end := x.prepare(x.write, `update outbox_rows set state = 'PUBLISHED', token = null, done_at = 1 where token = ? and state = 'PUBLISHING'`)
	startTimer(b)
	defer stopTimer(b)
	after := int64(0)
	token := ""
	for {
		ids := x.page(after, page)
		x.tx(func(tx *sql.Tx) error {
			if _, err := tx.Stmt(end).Exec(token); err != nil || len(ids) == 0 {
				return err
			}
			token = fmt.Sprint(ids[0])
			after = ids[len(ids)-1]
			_, err := tx.Stmt(start).Exec(ids[0], after, token)
			return err
		})
		if len(ids) == 0 {
			return
		}
	}
}
