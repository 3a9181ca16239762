package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// toKafka drains n events of a database to a topic that is read along, and
// makes sure that all have arrived, in order.
func toKafka(ctx context.Context, e *env, d *database, n int, specs ...childSpec) (sample, error) {
	a := newAudit(n)
	t, err := newTopic(ctx, e, a.see)
	if err != nil {
		return nil, err
	}
	defer t.stop()
	for i := range specs {
		specs[i].DSN, specs[i].Kafka, specs[i].Topic = d.dsn, e.kafka, t.name
	}
	s, err := drain(ctx, n, specs...)
	if err != nil {
		return nil, err
	}
	return s, a.complete(ctx)
}

// relaySpecs are a number of relays.
func (e *env) relaySpecs(n int) []childSpec {
	var out []childSpec
	for i := range n {
		out = append(out, childSpec{Role: roleRelay, Name: fmt.Sprint("bench-", i)})
	}
	out[0].Profile = e.profile
	return out
}

func drainKafka(relays int) func(context.Context, *env) (sample, error) {
	return func(ctx context.Context, e *env) (sample, error) {
		n := e.drained()
		d, err := e.filled(ctx, n)
		if err != nil {
			return nil, err
		}
		defer d.drop()
		s, err := toKafka(ctx, e, d, n, e.relaySpecs(relays)...)
		if err != nil {
			return nil, err
		}
		return s, d.expect(ctx, n, journalled)
	}
}

func bareKafka(ctx context.Context, e *env) (sample, error) {
	n := e.drained()
	d, err := e.plain(ctx, n)
	if err != nil {
		return nil, err
	}
	defer d.drop()
	s, err := toKafka(ctx, e, d, n, childSpec{Role: roleBareKafka})
	if err != nil {
		return nil, err
	}
	return s, d.expect(ctx, 0, undeleted)
}

// barePgoutput is filled after its slot was made, and not copied: what a slot
// has is in the log.
func barePgoutput(ctx context.Context, e *env) (sample, error) {
	n := e.drained()
	d, err := e.create(ctx, "")
	if err != nil {
		return nil, err
	}
	defer d.drop()
	if err := d.makePlain(ctx); err != nil {
		return nil, err
	}
	if _, err := d.conn.Exec(ctx, `create publication `+slot(d.name)+` for table outbox with (publish = 'insert')`); err != nil {
		return nil, err
	}
	if _, err := d.conn.Exec(ctx, `select pg_create_logical_replication_slot($1, 'pgoutput')`, slot(d.name)); err != nil {
		return nil, err
	}
	if err := d.fillPlain(ctx, n); err != nil {
		return nil, err
	}
	return toKafka(ctx, e, d, n, childSpec{Role: roleBarePgoutput})
}

// drainMemory drains so many events, or 0: as many as all drains.
func drainMemory(full int) func(context.Context, *env) (sample, error) {
	return func(ctx context.Context, e *env) (sample, error) {
		n := e.drainedToMemory()
		if full > 0 {
			n = e.n(full)
		}
		d, err := e.filled(ctx, n)
		if err != nil {
			return nil, err
		}
		defer d.drop()
		return d.toMemory(ctx, n, childSpec{Role: roleRelay, DSN: d.dsn, Profile: e.profile})
	}
}

func bareMemory(ctx context.Context, e *env) (sample, error) {
	n := e.drainedToMemory()
	d, err := e.filled(ctx, n)
	if err != nil {
		return nil, err
	}
	defer d.drop()
	return d.toMemory(ctx, n, childSpec{Role: roleBareMemory, DSN: d.dsn})
}

func (d *database) toMemory(ctx context.Context, n int, spec childSpec) (sample, error) {
	s, err := drain(ctx, n, spec)
	if err != nil {
		return nil, err
	}
	return s, d.expect(ctx, n, journalled)
}

// hold keeps something open in a database, on the database's own connection's
// sister, until it is released.
type hold func(ctx context.Context, d *database) (release func(), err error)

func nothing(context.Context, *database) (func(), error) { return func() {}, nil }

// oldSnapshot is a reader that never ends: it has no transaction id, and keeps
// back all cleaning up.
func oldSnapshot(ctx context.Context, d *database) (func(), error) {
	return d.open(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, `select count(*) from outbox_leases`)
}

// openWriter has written an event that nobody may see yet.
func openWriter(ctx context.Context, d *database) (func(), error) {
	return d.open(ctx, pgx.TxOptions{}, `
		insert into outbox_events (aggregate_type, aggregate_id, event_type, payload, event_key)
		values ('order', 'open', 'OrderPlaced', '{}', null)`)
}

// open begins a transaction on a connection of its own, and leaves it open.
func (d *database) open(ctx context.Context, o pgx.TxOptions, statement string) (func(), error) {
	conn, err := pgx.Connect(ctx, d.dsn)
	if err != nil {
		return nil, err
	}
	release := func() { _ = conn.Close(context.WithoutCancel(ctx)) }
	tx, err := conn.BeginTx(ctx, o)
	if err == nil {
		_, err = tx.Exec(ctx, statement)
	}
	if err != nil {
		release()
		return nil, err
	}
	return release, nil
}

// drainHeld has something open from before the first event on, so none of them
// is older than it. So the table is filled for each run, and not copied.
func drainHeld(h hold) func(context.Context, *env) (sample, error) {
	return func(ctx context.Context, e *env) (sample, error) {
		n := e.drainedToMemory()
		d, err := e.empty(ctx)
		if err != nil {
			return nil, err
		}
		defer d.drop()
		release, err := h(ctx, d)
		if err != nil {
			return nil, err
		}
		defer release()
		if err := d.fill(ctx, n); err != nil {
			return nil, err
		}
		return d.toMemory(ctx, n, childSpec{Role: roleRelay, DSN: d.dsn, Profile: e.profile})
	}
}
