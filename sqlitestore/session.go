package sqlitestore

import (
	"context"
	"errors"
	"fmt"

	"github.com/outrider-dev/outrider/store"
)

// session is one relay's membership in a Stream.
type session struct {
	st *Stream
	*member
	leases locked[*lease]
}

var (
	_ store.Merger  = (*session)(nil)
	_ store.Sweeper = (*session)(nil)
)

// Join implements store.Store.
func (s *Stream) Join(ctx context.Context, p store.JoinParams) (store.Session, error) {
	if p.TTL <= 0 || p.Grace <= 0 {
		return nil, errors.New("sqlitestore: JoinParams.TTL and Grace are needed")
	}
	if err := s.checkSource(ctx); err != nil {
		return nil, err
	}
	for _, d := range p.Destinations {
		if err := s.addDestination(ctx, d); err != nil {
			return nil, err
		}
	}
	m, err := s.members.join(ctx, p)
	if err != nil {
		return nil, err
	}
	return &session{st: s, member: m, leases: locked[*lease]{m: map[int64]*lease{}}}, nil
}

// addDestination makes a destination known that is not yet.
func (s *Stream) addDestination(ctx context.Context, d store.Destination) error {
	var known bool
	err := s.row(ctx, []any{&known}, `select exists (select 1 from outbox_leases where destination = ?)`, d.Name)
	if err != nil {
		return fmt.Errorf("sqlitestore: look for destination %q: %w", d.Name, explain(err))
	}
	if known {
		return nil
	}
	base := `coalesce((select seq from sqlite_sequence where name = 'outbox_events'), 0)`
	if d.FromEarliest {
		base = `0`
	} else {
		s.cfg.Logger.Info("a destination is new and begins at now; events that are there already are not sent", "destination", d.Name)
	}
	err = s.write(ctx, s.writer, func(t *tx) error {
		_, err := t.exec(`
			insert into outbox_leases (destination, lanes, base)
			select ?1, -1, `+base+`
			where not exists (select 1 from outbox_leases where destination = ?1)`, d.Name)
		return err
	})
	if err != nil {
		return fmt.Errorf("sqlitestore: make destination %q known: %w", d.Name, err)
	}
	return nil
}

// lease finds the session's own state of a lease, nil if it is not held.
func (ses *session) lease(sl store.Lease) *lease {
	l, _ := ses.leases.get(sl)
	return l
}

// Renew implements store.Session.
func (ses *session) Renew(ctx context.Context, leases []store.Lease) (store.Renewal, error) {
	return ses.renew(ctx, leases, ses.leases.drop)
}

// Leave implements store.Session.
func (ses *session) Leave(ctx context.Context) error { return ses.leave(ctx) }
