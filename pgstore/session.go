package pgstore

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/store"
)

// session is one relay's membership. It holds an advisory lock on a connection
// of its own: when that connection ends, the lock is free, and others know that
// the relay is gone without waiting for its leases to expire.
type session struct {
	st     *Store
	params store.JoinParams
	leases locked

	acquiring sync.Mutex // held by Acquire: what it has taken is known before it looks again

	// conn carries Renew alone; connMu also guards lock and gone.
	connMu sync.Mutex
	conn   *pgx.Conn
	lock   int64
	left   bool
	// gone is the relays whose lock was found free, by its number.
	gone map[int64]departed
}

// departed is a relay whose connection has ended.
type departed struct {
	since time.Time // when that was first noticed
	grace time.Duration
}

// Join implements store.Store.
func (s *Store) Join(ctx context.Context, p store.JoinParams) (_ store.Session, err error) {
	defer s.explain(&err)
	if p.TTL <= 0 || p.Grace <= 0 {
		return nil, errors.New("pgstore: JoinParams.TTL and Grace are needed")
	}
	if s.cfg.Inspect {
		return nil, errors.New("pgstore: the store was opened with Config.Inspect, which no relay can join")
	}
	if err := s.checkSchema(ctx); err != nil {
		return nil, err
	}
	if err := s.view().checkSource(ctx); err != nil {
		return nil, err
	}
	if err := s.checkPartitions(ctx); err != nil {
		return nil, fmt.Errorf("pgstore: %w", err)
	}
	ses := &session{st: s, params: p, gone: map[int64]departed{}}
	ses.leases.m = map[int64]*lease{}
	for _, d := range p.Destinations {
		if err := s.addDestination(ctx, d); err != nil {
			return nil, err
		}
	}
	ses.connMu.Lock()
	defer ses.connMu.Unlock()
	if err := ses.connect(ctx); err != nil {
		return nil, err
	}
	return ses, nil
}

// checkSchema makes sure that the tables are as this program expects them.
func (s *Store) checkSchema(ctx context.Context) error {
	db := stdlib.OpenDBFromPool(s.pool)
	defer db.Close()
	if err := migrate.Check(ctx, db, migrate.Options{Dialect: outrider.Postgres}); err != nil {
		return fmt.Errorf("pgstore: %w", err)
	}
	if !s.cfg.Doorbell {
		return nil
	}
	var there bool
	if err := s.pool.QueryRow(ctx, `select to_regclass('outbox_doorbell') is not null`).Scan(&there); err != nil {
		return fmt.Errorf("pgstore: %w", err)
	}
	if !there {
		return outrider.WithHint(errors.New("pgstore: the doorbell is to be used, and its trigger is not there"),
			"make it with: outrider migrate doorbell on --db DSN")
	}
	return nil
}

// checkSource compares the cluster with the one that the positions belong to.
// Ids are those that the sequence has given out: one in a row may have been
// written by hand, and be far beyond.
func (v view) checkSource(ctx context.Context) error {
	// What was seen is read first: others go on, and raise it meanwhile.
	var seenSystem string
	var seenXid, seenID uint64
	err := v.q.QueryRow(ctx, `
		select system_identifier, seen_xid, seen_id from outbox_source`).Scan(&seenSystem, &seenXid, &seenID)
	first := errors.Is(err, pgx.ErrNoRows)
	if err != nil && !first {
		return Explain(fmt.Errorf("pgstore: outbox_source: %w", err))
	}
	var system string
	var xid, lastID uint64
	err = v.q.QueryRow(ctx, `
		select (select system_identifier::text from pg_control_system()),
		       pg_snapshot_xmax(pg_current_snapshot()),
		       (select last_value from outbox_events_id_seq)`).Scan(&system, &xid, &lastID)
	if err != nil {
		return Explain(fmt.Errorf("pgstore: look at the cluster: %w", err))
	}
	if first {
		if _, err := v.q.Exec(ctx, `
			insert into outbox_source (system_identifier, seen_xid, seen_id) values ($1, $2::xid8, $3)
			on conflict (only_row) do nothing`, system, xid, lastID); err != nil {
			return Explain(fmt.Errorf("pgstore: outbox_source: %w", err))
		}
		return nil
	}
	switch {
	case system != seenSystem:
		return outrider.WithHint(fmt.Errorf("pgstore: this is another cluster (%s) than the one that the positions belong to (%s): it was restored or copied", system, seenSystem),
			"nothing is sent until the positions are moved: see what is pending with `outrider rebase --dry-run`, then run `outrider rebase`")
	case xid < seenXid:
		return outrider.WithHint(fmt.Errorf("pgstore: the cluster's transaction ids went back, from %d to %d: it was restored", seenXid, xid),
			"nothing is sent until the positions are moved: see what is pending with `outrider rebase --dry-run`, then run `outrider rebase`")
	case lastID < seenID:
		return outrider.WithHint(fmt.Errorf("pgstore: the sequence outbox_events_id_seq went back, from %d to %d: new events would sort before old ones", seenID, lastID),
			fmt.Sprintf("set it forward: select setval('outbox_events_id_seq', %d)", seenID))
	}
	return nil
}

// addDestination makes a destination known that is not yet.
func (s *Store) addDestination(ctx context.Context, d store.Destination) error {
	return s.inTx(ctx, func(tx pgx.Tx) error {
		if err := lockDestination(ctx, tx, d.Name); err != nil {
			return err
		}
		base := `pg_current_snapshot()`
		hi := `coalesce((select max(id) from outbox_events), 0)`
		if d.FromEarliest {
			base, hi = `'3:3:'::pg_snapshot`, `0`
		}
		tag, err := tx.Exec(ctx, `
			insert into outbox_leases (destination, lanes, base, hi)
			select $1, -1, `+base+`, `+hi+`
			where not exists (select from outbox_leases where destination = $1)`, d.Name)
		if err != nil {
			return Explain(fmt.Errorf("pgstore: make destination %q known: %w", d.Name, err))
		}
		if tag.RowsAffected() > 0 && !d.FromEarliest {
			s.cfg.Logger.Info("a destination is new and begins at now; events that are there already are not sent", "destination", d.Name)
		}
		return nil
	})
}

// lockDestination serialises what splits, joins and hands out leases.
func lockDestination(ctx context.Context, tx pgx.Tx, name string) error {
	_, err := tx.Exec(ctx, `select pg_advisory_xact_lock(hashtextextended('outrider destination ' || $1, 0))`, name)
	if err != nil {
		return fmt.Errorf("pgstore: lock destination %q: %w", name, err)
	}
	return nil
}

// inTx runs f in a READ COMMITTED transaction.
func (s *Store) inTx(ctx context.Context, f func(pgx.Tx) error) error {
	tx, err := s.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return connectError(err)
	}
	defer tx.Rollback(context.WithoutCancel(ctx)) // after a commit it is a no-op, else the first error counts
	if s.cfg.Inspect {
		if _, err := tx.Exec(ctx, strings.ReplaceAll(settings, "set ", "set local ")); err != nil {
			return fmt.Errorf("pgstore: %w", err)
		}
	}
	if err := f(tx); err != nil {
		return err
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("pgstore: commit: %w", err)
	}
	return nil
}

// connect makes the session's own connection, takes a new lock on it, and moves
// what the session holds to that lock. Called with connMu held.
func (ses *session) connect(ctx context.Context) error {
	cfg, err := pgx.ParseConfig(ses.st.cfg.DSN)
	if err != nil {
		return fmt.Errorf("pgstore: %w", err)
	}
	setSession(cfg)
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return connectError(err)
	}
	lock := randomLock()
	_, err = conn.Exec(ctx, `select pg_advisory_lock($1)`, lock)
	if err == nil {
		_, err = conn.Exec(ctx, `
			with old as (delete from outbox_relays where lock = $2),
			     moved as (update outbox_leases set owner_lock = $1 where owner_lock = $2)
			insert into outbox_relays (lock, relay, destinations, grace, expires_at)
			values ($1, $3, $6, $5 * interval '1 microsecond', clock_timestamp() + $4 * interval '1 microsecond')`,
			lock, ses.lock, ses.params.Relay, ses.params.TTL.Microseconds(), ses.params.Grace.Microseconds(), ses.params.Names())
	}
	if err != nil {
		_ = conn.Close(context.WithoutCancel(ctx))
		return Explain(fmt.Errorf("pgstore: join: %w", err))
	}
	ses.conn, ses.lock = conn, lock
	return nil
}

// Renew implements store.Session.
func (ses *session) Renew(ctx context.Context, leases []store.Lease) (_ store.Renewal, err error) {
	defer ses.st.explain(&err)
	ses.connMu.Lock()
	defer ses.connMu.Unlock()
	if err := ses.ensure(ctx); err != nil {
		return store.Renewal{}, err
	}
	held, r, err := ses.renew(ctx, leases)
	if err != nil {
		return store.Renewal{}, fmt.Errorf("pgstore: renew: %w", err)
	}
	for _, l := range leases {
		if held[l.ID] != l.Epoch {
			r.Lost = append(r.Lost, l.ID)
			ses.leases.drop(l)
		}
	}
	return r, nil
}

// renew looks which of the leases are still held, prolongs them, and looks who
// else is alive: a relay is if its lock is taken. The probe is a shared lock, so
// that two probes do not take each other for the owner.
func (ses *session) renew(ctx context.Context, leases []store.Lease) (map[int64]int64, store.Renewal, error) {
	ttl := ses.params.TTL.Microseconds()
	held := map[int64]int64{} // epochs
	var ids, gens, slow []int64
	for _, l := range leases {
		ids = append(ids, l.ID)
		gen := int64(0)
		if have := ses.leases.get(l.ID); have != nil {
			gen = have.seen.Load() >> 5
		}
		gens = append(gens, gen)
	}
	var b pgx.Batch
	b.Queue(heldSQL, ids, gens, ses.lock, ttl).
		Query(func(rows pgx.Rows) error {
			var id, epoch int64
			var due bool
			_, err := pgx.ForEachRow(rows, []any{&id, &epoch, &due}, func() error {
				held[id] = epoch
				if due {
					slow = append(slow, id)
				}
				return nil
			})
			return err
		})
	b.Queue(`
		update outbox_relays set seen_at = clock_timestamp(), expires_at = clock_timestamp() + $2 * interval '1 microsecond'
		where lock = $1 and expires_at < clock_timestamp() + $2 * interval '0.67 microseconds'`, ses.lock, ttl)
	r := ses.params.Alone()
	seen := map[int64]departed{}
	b.Queue(`select lock, pg_try_advisory_xact_lock_shared(lock), expires_at < clock_timestamp(),
			(extract(epoch from grace) * 1000000)::bigint, destinations
		from outbox_relays where lock <> $1`, ses.lock).
		Query(func(rows pgx.Rows) error {
			var lock, grace int64
			var free, expired bool
			var destinations []string
			_, err := pgx.ForEachRow(rows, []any{&lock, &free, &expired, &grace, &destinations}, func() error {
				switch {
				case free:
					d, ok := ses.gone[lock]
					if !ok {
						d = departed{time.Now(), time.Duration(grace) * time.Microsecond} //nolint:forbidigo // monotonic, of this process alone: how long the lock has been free
					}
					seen[lock] = d
				case !expired:
					r.Count(destinations)
				}
				return nil
			})
			return err
		})
	if err := ses.conn.SendBatch(ctx, &b).Close(); err != nil {
		return nil, store.Renewal{}, err
	}
	ses.gone = seen
	for _, id := range ids {
		if _, ok := held[id]; !ok {
			slow = append(slow, id) // lost; or written more often since than was looked for
		}
	}
	if len(slow) == 0 {
		return held, r, nil
	}
	return held, r, ses.prolong(ctx, slow, held)
}

// heldSQL finds the session's leases by the writes that it knows of: it is asked
// all the time, and must not get slower while versions pile up. The limit takes
// nothing away, but keeps the planner from joining all versions once it knows
// from statistics that there are but few leases.
const heldSQL = `
	select l.lease, l.epoch, l.expires_at < clock_timestamp() + $4 * interval '0.67 microseconds'
	from unnest($1::bigint[], $2::bigint[]) as k(lease, gen) cross join lateral (
		select * from outbox_leases o where o.lease = k.lease and o.gen between k.gen and k.gen + 1 limit 1) l
	where l.owner_lock = $3`

// prolong gives leases their whole time again, passing over rows that a commit
// has locked (a commit prolongs too), and says in held which there are. Commits
// prolong, so only idle leases come here, once in a third of their time.
func (ses *session) prolong(ctx context.Context, ids []int64, held map[int64]int64) error {
	ttl := ses.params.TTL.Microseconds()
	var b pgx.Batch
	b.Queue(`
		with due as (
			select lease from outbox_leases
			where lease = any($1) and owner_lock = $2
			  and expires_at < clock_timestamp() + $3 * interval '0.67 microseconds'
			for update skip locked)
		update outbox_leases l set expires_at = clock_timestamp() + $3 * interval '1 microsecond'
		from due where l.lease = due.lease`, ids, ses.lock, ttl)
	for _, id := range ids {
		delete(held, id)
	}
	b.Queue(`select lease, epoch from outbox_leases where lease = any($1) and owner_lock = $2`, ids, ses.lock).
		Query(func(rows pgx.Rows) error {
			var id, epoch int64
			_, err := pgx.ForEachRow(rows, []any{&id, &epoch}, func() error {
				held[id] = epoch
				return nil
			})
			return err
		})
	return ses.conn.SendBatch(ctx, &b).Close()
}

// look brings up to date who else is alive, and returns the session's own lock
// and those of relays that have been gone for at least their grace.
func (ses *session) look(ctx context.Context) (own int64, dead []int64, err error) {
	ses.connMu.Lock()
	defer ses.connMu.Unlock()
	if err := ses.ensure(ctx); err != nil {
		return 0, nil, err
	}
	if _, _, err := ses.renew(ctx, nil); err != nil {
		return 0, nil, fmt.Errorf("pgstore: %w", err)
	}
	dead = []int64{}
	for lock, d := range ses.gone {
		if time.Since(d.since) >= d.grace {
			dead = append(dead, lock)
		}
	}
	return ses.lock, dead, nil
}

// ensure reconnects if need be. Called with connMu held.
func (ses *session) ensure(ctx context.Context) error {
	if ses.left {
		return errors.New("pgstore: the session has left")
	}
	if ses.conn != nil && !ses.conn.IsClosed() {
		return nil
	}
	if err := ses.connect(ctx); err != nil {
		return err
	}
	ses.st.pool.Reset() // what this one was lost by may have been wrong with others as well
	return nil
}

// Leave implements store.Session.
func (ses *session) Leave(ctx context.Context) error {
	ses.connMu.Lock()
	defer ses.connMu.Unlock()
	if ses.left {
		return nil
	}
	ses.left = true
	if ses.conn == nil {
		return nil
	}
	// What is still held is over at once, and for whoever takes it over it is
	// as after a death. Not on the session's own connection: that may be what
	// it leaves for.
	_, err := ses.st.pool.Exec(ctx, `
		with gone as (delete from outbox_relays where lock = $1)
		update outbox_leases set expires_at = '-infinity' where owner_lock = $1`, ses.lock)
	_ = ses.conn.Close(ctx)
	if err != nil {
		return fmt.Errorf("pgstore: leave: %w", err)
	}
	return nil
}
