package sqlitestore

import (
	"context"
	"database/sql"
	"fmt"
	"sync"

	"github.com/outrider-dev/outrider"
)

// source is what this process has seen of the ids that are given out. They only
// grow, unless somebody sets them back: then new events have ids that the
// positions have passed, and would never be sent.
type source struct {
	mu sync.Mutex
	// highest is the last id given out. A backup that is put into the open file
	// takes back what the file itself noted.
	highest int64
	// id and event are of an event that was read. With another event in its
	// place the ids went back and have climbed up again between two looks.
	id    int64
	event string
	fell  int64 // from where ids went back, until the database knows; 0: they did not
}

const sourceSQL = `
	select coalesce((select seq from sqlite_sequence where name = 'outbox_events'), 0),
	       coalesce((select seen_id from outbox_source), 0),
	       coalesce((select max(base) from outbox_leases), 0),
	       (select event_id from outbox_events where id = ?)`

// read notes an event that was read, which its id has to stay with.
func (o *source) read(id int64, event string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if id > o.id {
		o.id, o.event = id, event
	}
}

// checkSource makes sure that ids go on from where they were. That they do not is
// kept in the database, as a seen_id below 0, until somebody puts it right: ids
// that climb up again give back nothing of what was passed over.
func (s *Stream) checkSource(ctx context.Context) error {
	if err := s.sameFile(); err != nil {
		return err
	}
	return s.checkIDs(ctx)
}

// checkIDs is checkSource for who is about to pass over ids: one row, each time.
func (s *Stream) checkIDs(ctx context.Context) error {
	o := &s.source
	o.mu.Lock()
	before, id, event, fell := o.highest, o.id, o.event, o.fell // before the look: others look, too
	o.mu.Unlock()
	var seq, seen, base int64
	var there sql.NullString
	if err := s.row(ctx, []any{&seq, &seen, &base, &there}, sourceSQL, id); err != nil {
		return explain(fmt.Errorf("sqlitestore: look at the source: %w", err))
	}
	switch most := max(seen, base, before); {
	case seen < 0:
		o.mu.Lock()
		o.id, o.event, o.fell = 0, "", 0
		o.mu.Unlock()
		return wentBack(-seen, seq)
	case fell > 0:
	case seq < most:
		fell = most
	case there.Valid && event != "" && there.String != event:
		fell = max(id, 1)
	default:
		o.mu.Lock()
		o.highest = max(o.highest, seq)
		o.mu.Unlock()
		return nil
	}
	o.mu.Lock()
	o.fell = max(o.fell, fell)
	o.mu.Unlock()
	err := s.write(ctx, s.writer, func(t *tx) error {
		_, err := t.exec(`
			insert into outbox_source (only_row, seen_id) values (1, ?)
			on conflict (only_row) do update set seen_id = excluded.seen_id where seen_id >= 0`, -fell)
		return err
	})
	if err == nil {
		o.mu.Lock()
		o.id, o.event, o.fell = 0, "", 0
		o.mu.Unlock()
	}
	return wentBack(fell, seq) // not written: the next look writes it
}

func wentBack(from, seq int64) error {
	to := max(from, seq)
	return outrider.WithHint(fmt.Errorf("sqlitestore: the ids of outbox_events were set back, from %d: events that came since have ids that were given out before, and would never be sent (the last id is %d)", from, seq),
		fmt.Sprintf("stop all relays; set the ids forward: update sqlite_sequence set seq = %d where name = 'outbox_events' (insert the row if there is none); "+
			"insert the events that came since then again, and delete them under their former ids; then update outbox_source set seen_id = %d", to, to))
}
