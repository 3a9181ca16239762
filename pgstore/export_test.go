package pgstore

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

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

// Occupy takes all connections of a store's pool until free.
func Occupy(t testing.TB, s *Store) (free func()) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var all []*pgxpool.Conn
	for range s.pool.Config().MaxConns {
		c, err := s.pool.Acquire(ctx)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	return sync.OnceFunc(func() {
		for _, c := range all {
			c.Release()
		}
	})
}

// KnowsDead reports whether a session has seen that another relay is gone.
func KnowsDead(s store.Session) bool {
	ses := s.(*session)
	ses.connMu.Lock()
	defer ses.connMu.Unlock()
	return len(ses.gone) > 0
}

// WarnOf sets the age of transactions from which on they are warned of.
func WarnOf(s *Store, age time.Duration) { s.oldTx = age }

// CheckVersion is what Open asks of a server's version.
var CheckVersion = checkVersion

// WalkOnly has windows fail that are not read along the primary key.
func WalkOnly(s *Store) { s.sql.older = `select 'looked up page by page'::bigint` }

// HotBounds sets the sizes up to which tables may grow that are written again
// and again, until the test ends, and gives all of them.
func HotBounds(t testing.TB, bounds map[string]int64) map[string]int64 {
	t.Helper()
	all := map[string]int64{}
	for i := range hot {
		if n, ok := bounds[hot[i].table]; ok {
			was := hot[i].bytes
			hot[i].bytes = n
			t.Cleanup(func() { hot[i].bytes = was })
		}
		all[hot[i].table] = hot[i].bytes
	}
	return all
}
