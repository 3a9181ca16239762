package main

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/twmb/franz-go/pkg/kgo"
)

// kafkaClient has the settings of kafkasink's client, so that no side has
// another Kafka.
func kafkaClient(broker, topic string) (*kgo.Client, error) {
	return kgo.NewClient(
		kgo.SeedBrokers(broker), kgo.DefaultProduceTopic(topic), kgo.DisableClientMetrics(),
		kgo.RequiredAcks(kgo.AllISRAcks()), // idempotent: kgo's default
		kgo.ProducerBatchCompression(kgo.NoCompression()), kgo.ProducerLinger(0),
		kgo.RecordPartitioner(kgo.StickyKeyPartitioner(nil)),
		kgo.MaxBufferedRecords(50_000), // as many as a relay has in hand
		kgo.MetadataMinAge(250*time.Millisecond))
}

// plainRecord is an event of a hand-written relay: no more headers than a
// consumer needs.
func plainRecord(id, key, typ string, value []byte) *kgo.Record {
	return &kgo.Record{Key: []byte(key), Value: value, Headers: []kgo.RecordHeader{
		{Key: "id", Value: []byte(id)}, {Key: "type", Value: []byte(typ)}}}
}

// runBareKafka is the loop that everybody writes: lock a thousand, produce,
// delete, commit.
func runBareKafka(ctx context.Context, spec childSpec, m *meter) error {
	conn, err := pgx.Connect(ctx, spec.DSN)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	cl, err := kafkaClient(spec.Kafka, spec.Topic)
	if err != nil {
		return err
	}
	defer cl.Close()
	if err := cl.Ping(ctx); err != nil {
		return err
	}
	m.begin(time.Now())
	for left := spec.Events; left > 0; {
		n, err := bareTurn(ctx, conn, cl)
		if err != nil {
			return err
		}
		left -= n
		m.count(n, n)
	}
	return nil
}

func bareTurn(ctx context.Context, conn *pgx.Conn, cl *kgo.Client) (int, error) {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return 0, err
	}
	rows, err := tx.Query(ctx, `
		select id, event_id::text, aggregate_id, event_type, payload
		from outbox order by id limit 1000 for update skip locked`)
	if err != nil {
		return 0, err
	}
	var ids []int64
	var records []*kgo.Record
	for rows.Next() {
		var id int64
		var event, key, typ string
		var value []byte
		if err := rows.Scan(&id, &event, &key, &typ, &value); err != nil {
			return 0, err
		}
		ids = append(ids, id)
		records = append(records, plainRecord(event, key, typ, value))
	}
	if err := rows.Err(); err != nil {
		return 0, err
	}
	if err := cl.ProduceSync(ctx, records...).FirstErr(); err != nil {
		return 0, err
	}
	if _, err := tx.Exec(ctx, `delete from outbox where id = any($1)`, ids); err != nil {
		return 0, err
	}
	return len(ids), tx.Commit(ctx)
}

// runBareMemory is a loop of a relay's statements without anything around them:
// a page is read while the one before is noted.
func runBareMemory(ctx context.Context, spec childSpec, m *meter) error {
	read, err := bareConn(ctx, spec.DSN)
	if err != nil {
		return err
	}
	defer read.Close(context.WithoutCancel(ctx))
	write, err := bareConn(ctx, spec.DSN)
	if err != nil {
		return err
	}
	defer write.Close(context.WithoutCancel(ctx))
	l := bareLease{conn: write}
	err = write.QueryRow(ctx, `
		insert into outbox_leases (destination, lanes, base, owner, epoch)
		values ('bare', -1, '1:1:', 'bare', 1) returning lease, base::text`).Scan(&l.id, &l.base)
	if err != nil {
		return err
	}
	m.begin(time.Now())
	if err := read.QueryRow(ctx, `select pg_current_snapshot()::text, coalesce((select max(id) from outbox_events), 0)`).
		Scan(&l.target, &l.top); err != nil {
		return err
	}
	noted := make(chan error, 1)
	noted <- nil
	pending := 0 // read, being noted
	for left := spec.Events; left > 0; {
		from := l.at
		events, err := barePage(ctx, read, l)
		if err != nil {
			return err
		}
		if err := <-noted; err != nil {
			return err
		}
		m.count(pending, pending)
		pending = len(events)
		left -= pending
		l.at = events[pending-1].id
		l.writes++
		go func(l bareLease, n int) { noted <- l.note(ctx, from, n) }(l, pending)
	}
	if err := <-noted; err != nil {
		return err
	}
	m.count(pending, pending)
	return nil
}

// bareConn is a connection with the settings of a relay's.
func bareConn(ctx context.Context, dsn string) (*pgx.Conn, error) {
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	cfg.AfterConnect = func(ctx context.Context, conn *pgconn.PgConn) error {
		_, err := conn.Exec(ctx, `
			set enable_seqscan = off;
			set enable_bitmapscan = off;
			set jit = off;
			set plan_cache_mode = force_generic_plan`).ReadAll()
		return err
	}
	return pgx.ConnectConfig(ctx, cfg)
}

// bareEvent is what a page's row is read into.
type bareEvent struct {
	id                                                int64
	event                                             [16]byte
	aggregateType, aggregateID, typ, key, contentType string
	headers, payload                                  []byte
	created                                           time.Time
	available                                         *time.Time
	lane                                              int16
	later                                             bool
	size                                              int32
}

// barePage reads with the statement that pgstore reads a page of a backlog with.
func barePage(ctx context.Context, conn *pgx.Conn, l bareLease) ([]bareEvent, error) {
	rows, err := conn.Query(ctx, `
		select e.id, e.event_id, e.aggregate_type, e.aggregate_id, e.event_type,
			coalesce(e.event_key, e.aggregate_id) as key, e.content_type, e.headers,
			e.created_at, e.lane, coalesce(e.available_at > clock_timestamp(), false) as later, e.available_at,
			coalesce(octet_length(e.payload), 0) as size,
			case when octet_length(e.payload) <= $2 then e.payload end as payload
		from outbox_events e
		where e.id > $3 and e.id <= $4 and (($1::bigint >> e.lane::int) & 1) = 1
		  and pg_visible_in_snapshot(e.tx_id, $5::pg_snapshot)
		order by e.id limit $6`, int64(-1), 4096, l.at, l.top, l.target, 5000)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	events := make([]bareEvent, 0, 5000)
	for rows.Next() {
		events = append(events, bareEvent{})
		e := &events[len(events)-1]
		if err := rows.Scan(&e.id, &e.event, &e.aggregateType, &e.aggregateID, &e.typ, &e.key, &e.contentType, &e.headers,
			&e.created, &e.lane, &e.later, &e.available, &e.size, &e.payload); err != nil {
			return nil, err
		}
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	if len(events) == 0 {
		return nil, errShort
	}
	return events, nil
}

// bareLease is where the loop stands.
type bareLease struct {
	conn           *pgx.Conn
	id, writes, at int64
	top            int64
	base, target   string
}

// note writes with the statement that pgstore settles and starts a page with.
func (l bareLease) note(ctx context.Context, from int64, n int) error {
	hand, err := json.Marshal(map[string]any{"open": []any{map[string]any{
		"page": l.writes, "base": l.base, "snap": l.target, "from": l.at, "to": l.top, "top": l.top, "n": n}}})
	if err != nil {
		return err
	}
	journal, err := json.Marshal([]any{map[string]any{
		"kind": "FRESH", "from": from, "to": l.at, "records": n, "published": n, "receipts": []string{}}})
	if err != nil {
		return err
	}
	tag, err := l.conn.Exec(ctx, `
		with l as (
			update outbox_leases set writes = writes + 1, base = $4::pg_snapshot, target = $5::pg_snapshot,
				at = $6, top = $7, hi = $8, page = greatest(page, $9), open = $10,
				expires_at = clock_timestamp() + $11 * interval '1 microsecond'
			where lease = $1 and epoch = $2 and writes = $3
			returning lease, destination, epoch, owner),
		j as (
			insert into outbox_journal (destination, lease, epoch, relay, kind, from_id, to_id, records, published, receipts)
			select l.destination, l.lease, l.epoch, l.owner, r.kind, r."from", r."to", r.records, r.published, r.receipts
			from l, json_to_recordset($12) as r(kind text, "from" bigint, "to" bigint, records int, published int, receipts json))
		select from l`,
		l.id, 1, l.writes-1, l.base, l.target, l.at, l.top, l.at, l.writes, hand, int64(15_000_000), journal)
	if err == nil && tag.RowsAffected() != 1 {
		err = errNotNoted
	}
	return err
}

var (
	errShort    = errors.New("there are fewer events than were filled in")
	errNotNoted = errors.New("the lease was not written")
)
