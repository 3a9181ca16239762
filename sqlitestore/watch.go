package sqlitestore

import (
	"context"
	"time"
)

// Watch implements store.Watcher. It asks for the number by which SQLite tells
// that somebody else has committed, and only then for the last id; on a
// connection that never writes, so that commits of this process count as well.
// While anything changes it asks every BusyPoll, else it backs off to IdlePoll.
func (db *database) watch(ctx context.Context, notify func(), lastID string) error {
	c, err := db.aside.pool.Conn(ctx)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // it was only read from
	version, err := c.PrepareContext(ctx, `pragma data_version`)
	if err != nil {
		return err
	}
	defer version.Close() //nolint:errcheck // as above
	ids, err := c.PrepareContext(ctx, lastID)
	if err != nil {
		return err
	}
	defer ids.Close() //nolint:errcheck // as above
	p := poller{db: db}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
		}
		v, id := p.version, p.id
		err := version.QueryRowContext(ctx).Scan(&v)
		if err == nil && v != p.version {
			err = ids.QueryRowContext(ctx).Scan(&id)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if p.look(v, id, err) {
			notify()
		}
		timer.Reset(p.wait)
	}
}

// poller looks for commits, ever more rarely while there are none.
type poller struct {
	db          *database
	version, id int64
	quiet       int // looks since something changed
	wait        time.Duration
}

// quietLooks is how many looks without news go by before the pace slows down.
const quietLooks = 250

// look takes note of what was read, and says whether somebody should know.
func (p *poller) look(version, id int64, err error) bool {
	cfg := &p.db.cfg
	if err != nil {
		p.wait = cfg.IdlePoll
		return true // whoever asks next finds out what is wrong
	}
	news := id != p.id
	p.version, p.id = version, id
	p.quiet++
	if news {
		p.quiet = 0
	}
	p.wait = cfg.BusyPoll
	if p.quiet > quietLooks {
		p.wait = min(cfg.IdlePoll, cfg.BusyPoll*time.Duration(1+(p.quiet-quietLooks)/10))
	}
	return news
}

// Watch implements store.Watcher.
func (s *Stream) Watch(ctx context.Context, notify func()) error {
	return s.watch(ctx, notify, `select coalesce((select seq from sqlite_sequence where name = 'outbox_events'), 0)`)
}
