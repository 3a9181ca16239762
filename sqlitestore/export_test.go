package sqlitestore

import (
	"context"
	"fmt"
	"slices"
	"sync"

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
		ses.loseAnswer.Store(true)
	case *rowSession:
		ses.loseAnswer.Store(true)
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
	var db *database
	switch s := s.(type) {
	case *Stream:
		db = s.database
	case *Rows:
		db = s.database
	}
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

// LimitPages lets a store's file grow no more until restore is called, as a
// full disk does.
func LimitPages(t interface{ Fatal(...any) }, s store.Store) (restore func()) {
	w := s.(*Stream).writer
	set := func(query string) {
		var n int64
		if err := w.conn.QueryRowContext(context.Background(), query).Scan(&n); err != nil {
			t.Fatal(err)
		}
	}
	var pages int64
	if err := w.conn.QueryRowContext(context.Background(), `pragma page_count`).Scan(&pages); err != nil {
		t.Fatal(err)
	}
	set(fmt.Sprintf(`pragma max_page_count = %d`, pages+20))
	return func() {
		if w.conn != nil { // else it was given up, and the limit with it
			set(`pragma max_page_count = 1000000`)
		}
	}
}

// OnRead has f called before each query of a store that reads what is to be
// sent. It is called before the store is used.
func OnRead(s store.Store, f func(query string)) { s.(*Stream).reader.see = f }

// CloseReader has every query of a store that reads fail.
func CloseReader(t interface{ Fatal(...any) }, s store.Store) {
	db := (*database)(nil)
	switch s := s.(type) {
	case *Stream:
		db = s.database
	case *Rows:
		db = s.database
	}
	if err := db.reader.pool.Close(); err != nil {
		t.Fatal(err)
	}
}

// CheckVersion is what opening a file asks of SQLite's version.
var CheckVersion = checkVersion
