package pgstore

import (
	"context"

	"github.com/outrider-dev/outrider/store"
)

// Kill ends a session's own connection without Leave, as the death of its
// process does.
func Kill(s store.Session) {
	ses := s.(*session)
	ses.connMu.Lock()
	defer ses.connMu.Unlock()
	ses.left = true
	if ses.conn != nil {
		_ = ses.conn.Close(context.Background())
	}
}

// DSN is the one that the store was opened with.
func DSN(s *Store) string { return s.cfg.DSN }
