package pgstore

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// Watch implements store.Watcher. It asks for the sequence's last value and the
// current snapshot: one row, without touching a table. While anything changes
// it asks every BusyPoll, else it backs off to IdlePoll.
func (s *Store) Watch(ctx context.Context, notify func()) error {
	if s.cfg.Doorbell {
		return s.watchDoorbell(ctx, notify)
	}
	poll := poller{s: s, notify: notify}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(poll.wait):
		}
		poll.once(ctx)
	}
}

// poller looks for commits, ever more rarely while there are none.
type poller struct {
	s      *Store
	notify func()
	id     int64  // the sequence's last value
	snap   string // what was committed
	quiet  int    // looks since an event was written
	wait   time.Duration
}

// quietLooks is how many looks without news go by before the pace slows down.
const quietLooks = 250

func (p *poller) once(ctx context.Context) {
	id, snap, err := p.s.mark(ctx)
	if err != nil {
		p.wait = p.s.cfg.IdlePoll
		p.notify() // whoever asks next finds out what is wrong
		return
	}
	p.quiet++
	if id != p.id {
		p.quiet = 0
	}
	// Snapshots change with anything that goes on in the cluster: a reason to
	// look, and none to hurry.
	if id != p.id || snap != p.snap {
		p.notify()
	}
	p.id, p.snap = id, snap
	p.wait = p.s.cfg.BusyPoll
	if p.quiet > quietLooks {
		p.wait = min(p.s.cfg.IdlePoll, p.s.cfg.BusyPoll*time.Duration(1+(p.quiet-quietLooks)/10))
	}
}

// mark changes with every commit that may have brought an event.
func (s *Store) mark(ctx context.Context) (id int64, snap string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	err = s.pool.QueryRow(ctx, `select last_value, pg_current_snapshot()::text from outbox_events_id_seq`).Scan(&id, &snap)
	return id, snap, err
}

// watchDoorbell sleeps until a writer rings, once everything has been quiet for
// a while. The trigger rings only while the flag is up; after raising it the
// poll goes on until every transaction that was open then has ended, since
// those may have looked at the flag before.
func (s *Store) watchDoorbell(ctx context.Context, notify func()) error {
	poll := poller{s: s, notify: notify}
	for ctx.Err() == nil {
		if poll.quiet <= quietLooks {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(poll.wait):
			}
			poll.once(ctx)
			continue
		}
		if err := s.sleepUntilRung(ctx, &poll); err != nil && ctx.Err() == nil {
			s.cfg.Logger.Warn("doorbell does not work, polling instead", "error", err)
			poll.quiet = 0
		}
	}
	return ctx.Err()
}

// sleepUntilRung raises the flag, polls until nobody can have missed it, and
// listens.
func (s *Store) sleepUntilRung(ctx context.Context, poll *poller) error {
	cfg, err := pgx.ParseConfig(s.cfg.DSN)
	if err != nil {
		return err
	}
	setSession(cfg)
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, `listen outrider_events`); err != nil {
		return err
	}
	for ctx.Err() == nil {
		var snap string
		if _, err := conn.Exec(ctx, `select setval('outbox_doorbell', 2)`); err != nil {
			return err
		}
		if err := conn.QueryRow(ctx, `select pg_current_snapshot()::text`).Scan(&snap); err != nil {
			return err
		}
		open, err := parseSnapshot(snap)
		if err != nil {
			return err
		}
		for {
			// In this order: what has ended by now is seen by the look.
			var xmin uint64
			if err := conn.QueryRow(ctx, `select pg_snapshot_xmin(pg_current_snapshot())`).Scan(&xmin); err != nil {
				return err
			}
			poll.once(ctx)
			if poll.quiet == 0 {
				return s.lowerFlag(ctx, conn, true)
			}
			if xmin >= open.xmax {
				break
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(s.cfg.IdlePoll):
			}
		}
		wctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		_, err = conn.WaitForNotification(wctx)
		cancel()
		if err == nil {
			poll.quiet = 0
			poll.notify()
			return s.lowerFlag(ctx, conn, false)
		}
		if conn.IsClosed() {
			return err
		}
	}
	return ctx.Err()
}

// lowerFlag stops writers from ringing. Whoever has not been rung, since what
// was seen is not committed and may never be, rings those that sleep: nobody
// else would.
func (s *Store) lowerFlag(ctx context.Context, conn *pgx.Conn, ring bool) error {
	_, err := conn.Exec(ctx, `
		select setval('outbox_doorbell', 1),
			case when $1 and pg_notification_queue_usage() < 0.5 then pg_notify('outrider_events', 'relay') end`, ring)
	return err
}
