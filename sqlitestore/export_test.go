package sqlitestore

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"modernc.org/sqlite"

	"github.com/outrider-dev/outrider/store"
)

// Kill ends a session without Leave, as the death of its process does.
func Kill(s store.Session) {
	switch ses := s.(type) {
	case *session:
		ses.kill()
	case *rowSession:
		ses.kill()
	}
}

// LoseAnswer lets the next write of a session take effect and return an error.
func LoseAnswer(s store.Session) {
	switch ses := s.(type) {
	case *session:
		ses.LoseAnswer(true)
	case *rowSession:
		ses.LoseAnswer(true)
	}
}

// DropWriter begins to write, and gives the connection up as one whose state is
// not known.
func DropWriter(ctx context.Context, s store.Store) error {
	w := s.(*Stream).writer
	if err := w.begin(ctx); err != nil {
		return err
	}
	t := &tx{ctx: ctx, w: w}
	_, err := t.exec(`update outbox_leases set writes = writes`)
	w.drop()
	return err
}

// Record notes the text of each statement that a store runs from now on. It is
// called before the store is used.
func Record(s store.Store) (queries func() []string) {
	var mu sync.Mutex
	seen := map[string]bool{}
	db := databaseOf(s)
	see := func(query string) {
		mu.Lock()
		defer mu.Unlock()
		seen[query] = true
	}
	db.reader.see, db.aside.see, db.writer.see, db.renewer.see = see, see, see, see
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		var out []string
		for q := range seen {
			out = append(out, q)
		}
		slices.Sort(out)
		return out
	}
}

// limits are the files that may not grow, with their pages, for connections
// that are made: SQLite keeps the limit by connection, and one is made anew when
// it was told that the file is full.
var limits = func() *sync.Map {
	var m sync.Map
	sqlite.RegisterConnectionHook(func(c sqlite.ExecQuerierContext, dsn string) error {
		name, _, _ := strings.Cut(dsn, "?")
		pages, ok := m.Load(name)
		if !ok {
			return nil
		}
		_, err := c.ExecContext(context.Background(), fmt.Sprintf(`pragma max_page_count = %d`, pages), nil)
		return err
	})
	return &m
}()

// LimitPages lets a store's file grow by no more than so many pages until restore
// is called, as a full disk does. A relay may be at work.
func LimitPages(t interface{ Fatal(...any) }, s store.Store, spare int64) (restore func()) {
	db := databaseOf(s)
	dsn, err := db.dsn()
	if err != nil {
		t.Fatal(err)
	}
	name, _, _ := strings.Cut(dsn, "?")
	ctx := context.Background()
	set := func(pages int64) {
		for _, w := range []*writer{db.writer, db.renewer} {
			if w.conn == nil { // one that is made knows the limit
				continue
			}
			var n int64
			if err := w.conn.QueryRowContext(ctx, fmt.Sprintf(`pragma max_page_count = %d`, pages)).Scan(&n); err != nil {
				t.Fatal(err)
			}
		}
	}
	db.turn <- struct{}{}
	defer func() { <-db.turn }()
	var pages int64
	if err := db.row(ctx, []any{&pages}, `pragma page_count`); err != nil {
		t.Fatal(err)
	}
	limits.Store(name, pages+spare)
	set(pages + spare)
	return func() {
		db.turn <- struct{}{}
		defer func() { <-db.turn }()
		limits.Delete(name)
		set(1 << 30)
	}
}

func databaseOf(s store.Store) *database {
	if r, ok := s.(*Rows); ok {
		return r.database
	}
	return s.(*Stream).database
}

// OnRead has f called before each query of a store that reads what is to be
// sent. It is called before the store is used.
func OnRead(s store.Store, f func(query string)) { s.(*Stream).reader.see = f }

// CloseReader has every query of a store that reads fail.
func CloseReader(t interface{ Fatal(...any) }, s store.Store) {
	if err := databaseOf(s).reader.pool.Close(); err != nil {
		t.Fatal(err)
	}
}

// CheckVersion is what opening a file asks of SQLite's version.
var CheckVersion = checkVersion
