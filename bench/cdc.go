package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/twmb/franz-go/pkg/kgo"
)

// slot is the name of a database's replication slot and publication: its own,
// since slots are the whole server's.
func slot(database string) string { return database + "_slot" }

// confirmEvery is how often the server is told how far all is acknowledged.
const confirmEvery = 10 * time.Millisecond

// runBarePgoutput is the smallest relay by change data capture: what the slot
// has is produced as it comes, and confirmed as far as all is acknowledged.
func runBarePgoutput(ctx context.Context, spec childSpec, m *meter) error {
	cfg, err := pgconn.ParseConfig(spec.DSN)
	if err != nil {
		return err
	}
	name := slot(cfg.Database)
	cfg.RuntimeParams["replication"] = "database"
	conn, err := pgconn.ConnectConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // the process ends
	cl, err := kafkaClient(spec.Kafka, spec.Topic)
	if err != nil {
		return err
	}
	defer cl.Close()
	if err := cl.Ping(ctx); err != nil {
		return err
	}
	c := &capture{conn: conn, cl: cl, m: m}
	m.begin(time.Now())
	err = pglogrepl.StartReplication(ctx, conn, name, 0, pglogrepl.StartReplicationOptions{
		Mode:       pglogrepl.LogicalReplication,
		PluginArgs: []string{"proto_version '1'", "publication_names '" + name + "'", "binary 'true'"}})
	if err != nil {
		return err
	}
	for c.committed < spec.Events {
		if err := c.receive(ctx); err != nil {
			return err
		}
	}
	if err := cl.Flush(ctx); err != nil {
		return err
	}
	if err := c.confirm(ctx); err != nil {
		return err
	}
	return confirmed(ctx, spec.DSN, name, c.sent)
}

// confirmed makes sure that the server has taken note, so that the loop did all
// that it is measured for.
func confirmed(ctx context.Context, dsn, name string, at pglogrepl.LSN) error {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		var ok bool
		err := conn.QueryRow(ctx, `select confirmed_flush_lsn >= $2::text::pg_lsn from pg_replication_slots where slot_name = $1`,
			name, at.String()).Scan(&ok)
		switch {
		case err != nil || ok:
			return err
		case time.Now().After(deadline):
			return fmt.Errorf("the slot was not moved to %v", at)
		}
	}
}

// capture is where the loop stands.
type capture struct {
	conn *pgconn.PgConn
	cl   *kgo.Client
	m    *meter

	columns   map[string]int
	current   *transaction
	committed int // events
	last      time.Time
	sent      pglogrepl.LSN

	acks tracker
}

func (c *capture) receive(ctx context.Context) error {
	raw, err := c.conn.ReceiveMessage(ctx)
	if err != nil {
		return err
	}
	data, ok := raw.(*pgproto3.CopyData)
	if !ok {
		if e, failed := raw.(*pgproto3.ErrorResponse); failed {
			return pgconn.ErrorResponseToPgError(e)
		}
		return fmt.Errorf("the stream brought %T", raw)
	}
	switch data.Data[0] {
	case pglogrepl.PrimaryKeepaliveMessageByteID:
		k, err := pglogrepl.ParsePrimaryKeepaliveMessage(data.Data[1:])
		if err != nil || !k.ReplyRequested {
			return err
		}
		return c.confirm(ctx)
	case pglogrepl.XLogDataByteID:
		x, err := pglogrepl.ParseXLogData(data.Data[1:])
		if err != nil {
			return err
		}
		if err := c.take(ctx, x.WALData); err != nil {
			return err
		}
	}
	if time.Since(c.last) >= confirmEvery {
		return c.confirm(ctx)
	}
	return nil
}

func (c *capture) take(ctx context.Context, wal []byte) error {
	msg, err := pglogrepl.Parse(wal)
	if err != nil {
		return err
	}
	switch msg := msg.(type) {
	case *pglogrepl.RelationMessage:
		c.columns = map[string]int{}
		for i, col := range msg.Columns {
			c.columns[col.Name] = i
		}
	case *pglogrepl.BeginMessage:
		c.current = c.acks.begin()
	case *pglogrepl.InsertMessage:
		c.produce(ctx, msg.Tuple.Columns)
	case *pglogrepl.CommitMessage:
		c.committed += c.current.events
		c.acks.end(c.current, msg.TransactionEndLSN)
	}
	return nil
}

func (c *capture) produce(ctx context.Context, row []*pglogrepl.TupleDataColumn) {
	text := func(name string) string { return string(row[c.columns[name]].Data) }
	id := row[c.columns["event_id"]].Data
	t := c.current
	c.acks.add(t)
	r := plainRecord(uuidText(id), text("aggregate_id"), text("event_type"), row[c.columns["payload"]].Data)
	c.cl.Produce(ctx, r, func(_ *kgo.Record, err error) { c.acks.ack(t, err) })
}

// uuidText is a UUID that came in its 16 bytes.
func uuidText(b []byte) string {
	h := hex.EncodeToString(b)
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// confirm tells the server up to where all is acknowledged.
func (c *capture) confirm(ctx context.Context) error {
	at, n, err := c.acks.done()
	if err != nil {
		return err
	}
	c.last, c.sent = time.Now(), at
	err = pglogrepl.SendStandbyStatusUpdate(ctx, c.conn, pglogrepl.StandbyStatusUpdate{WALWritePosition: at})
	if err == nil && n > 0 {
		c.m.count(n, n)
	}
	return err
}

// tracker knows up to where all is acknowledged, without a gap.
type tracker struct {
	mu   sync.Mutex
	open []*transaction
	at   pglogrepl.LSN
	err  error
}

// transaction is one of the stream's.
type transaction struct {
	events, left int
	end          pglogrepl.LSN // 0: its commit is to come
}

func (t *tracker) begin() *transaction {
	t.mu.Lock()
	defer t.mu.Unlock()
	x := &transaction{}
	t.open = append(t.open, x)
	return x
}

func (t *tracker) add(x *transaction) {
	t.mu.Lock()
	defer t.mu.Unlock()
	x.events++
	x.left++
}

func (t *tracker) ack(x *transaction, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil && t.err == nil {
		t.err = err
	}
	x.left--
}

func (t *tracker) end(x *transaction, at pglogrepl.LSN) {
	t.mu.Lock()
	defer t.mu.Unlock()
	x.end = at
}

// done is up to where all is acknowledged, and how many events that adds.
func (t *tracker) done() (at pglogrepl.LSN, events int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for len(t.open) > 0 && t.open[0].end > 0 && t.open[0].left == 0 {
		t.at = t.open[0].end
		events += t.open[0].events
		t.open = t.open[1:]
	}
	return t.at, events, t.err
}
