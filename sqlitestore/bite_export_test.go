package sqlitestore

import (
	"context"
	"errors"
	"time"

	"github.com/outrider-dev/outrider/store"
)

// InsideWrite calls f in a transaction of the store's writer, which has done
// nothing yet.
func InsideWrite(ctx context.Context, s store.Store, f func() error) error {
	db := s.(*Stream).database
	return db.write(ctx, db.writer, func(*tx) error { return f() })
}

// Synchronous is SQLite's setting of the store's connections that write.
func Synchronous(ctx context.Context, s store.Store) (modes map[string]int, err error) {
	db := s.(*Stream).database
	modes = map[string]int{}
	for name, w := range map[string]*writer{"writer": db.writer, "renewer": db.renewer} {
		var mode int
		err = errors.Join(err, db.write(ctx, w, func(t *tx) error { return t.row([]any{&mode}, `pragma synchronous`) }))
		modes[name] = mode
	}
	return modes, err
}

// Retry is how the store repeats what failed because another process writes.
func Retry(ctx context.Context, busy time.Duration, f func() error) error { return retry(ctx, busy, f) }
