package sqlitestore_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/relay"
	"github.com/outrider-dev/outrider/sqlitestore"
)

// A relay whose file was replaced, deleted or moved away notices by itself: it
// is not ready, says once why and what to do, and sends nothing more. It goes on
// with a file that comes back.
func TestFileReplacedUnderARelay(t *testing.T) {
	other := func(t *testing.T, db *testDB, path string) {
		t.Helper()
		if err := os.Rename(db.path, path); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		do         func(t *testing.T, db *testDB, path string)
		text, hint string
		back       bool
	}{
		"replaced": {text: "was replaced by another file", hint: "restart the relay", do: func(t *testing.T, db *testDB, path string) {
			t.Helper()
			db.exec(t, "vacuum into ?", path)
			if err := os.Rename(path, db.path); err != nil {
				t.Fatal(err)
			}
		}},
		"deleted": {text: "was deleted or moved", hint: "restore a backup", do: func(t *testing.T, db *testDB, _ string) {
			t.Helper()
			if err := os.Remove(db.path); err != nil {
				t.Fatal(err)
			}
		}},
		"moved": {text: "was deleted or moved", hint: "move it back", do: other, back: true},
	} {
		for _, set := range []migrate.Set{migrate.Stream, migrate.Rows} {
			t.Run(name+"/"+string(set), func(t *testing.T) {
				db := makeDB(t, set)
				s := open(t, set, sqlitestore.Config{Path: db.path})
				add := func() {
					x := db.begin(t)
					x.Add(t, outrider.Event{AggregateType: "t", AggregateID: "a", Type: "T"})
					x.Commit(t)
				}
				add()
				sk := memsink.New(memsink.Config{})
				r := relaying(t, s, sk, relay.Config{LeaseTTL: 10 * time.Minute, Grace: 3 * time.Second})
				wait, cancel := context.WithTimeout(context.Background(), untilLimit)
				defer cancel()
				if err := sk.Wait(wait, 1); err != nil {
					t.Fatal(err)
				}
				until(t, "it is at work", func() bool { return r.Health().Ready() })
				path := filepath.Join(filepath.Dir(db.path), "other")
				c.do(t, db, path)
				until(t, "it is not ready", func() bool { h := r.Health(); return !h.Ready() && h.Stuck })
				if h := r.Health(); !h.Starved || !strings.Contains(h.StoreError, c.text) || !strings.Contains(h.StoreHint, c.hint) {
					t.Errorf("health: %+v", h)
				}
				add() // to the file that the application has open, too
				tries := r.tries.Load()
				until(t, "it has asked again", func() bool { return r.tries.Load() > tries+1 })
				if n := sk.Len(); n != 1 {
					t.Errorf("%d messages were sent", n)
				}
				if c.back {
					if err := os.Rename(path, db.path); err != nil {
						t.Fatal(err)
					}
					until(t, "it is ready", func() bool { return r.Health().Ready() })
					if err := sk.Wait(wait, 2); err != nil {
						t.Fatal(err)
					}
				}
				if off, on := r.log.count(c.text), r.log.count("asked again"); off != 1 || c.back && on == 0 {
					t.Errorf("said %d times what is wrong and %d times that it is over:\n%s", off, on, r.log.text())
				}
			})
		}
	}
}
