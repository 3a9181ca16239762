package sqlitestore_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/relay"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
)

// logged keeps what is logged.
type logged struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logged) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func (l *logged) count(text string) int { return strings.Count(l.text(), text) }

// untilLimit bounds waiting for what has to happen.
const untilLimit = 2 * time.Minute

// until waits for what has to happen.
func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(untilLimit); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", untilLimit, what)
		}
	}
}

// running is a relay at work on a store.
type running struct {
	*relay.Relay
	log   logged
	tries atomic.Int64 // questions to the store that failed
	stop  func()
}

// relaying runs a relay until the test ends, or until stop.
func relaying(t *testing.T, s store.Store, sk sink.Sink, cfg relay.Config) *running {
	t.Helper()
	out := &running{}
	cfg.Store, cfg.Logger, cfg.Gate = s, slog.New(slog.NewTextHandler(&out.log, nil)), relay.NewGate()
	cfg.Destinations = []relay.Destination{{Name: "main", Sink: sk, FromEarliest: true}}
	cfg.Hooks.StoreError = func(string, string) { out.tries.Add(1) }
	r, err := relay.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	out.Relay = r
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	var once sync.Once
	out.stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("the relay ended with %v", err)
			}
		})
	}
	t.Cleanup(out.stop)
	return out
}

// diskFull is a way to have no room. It makes a database, and then takes the
// room away until free is called.
type diskFull struct {
	dir  func(t *testing.T) string
	fill func(t *testing.T, s store.Store, db *testDB) (free func())
}

// limited is a file that may not grow, which can be had anywhere.
var limited = diskFull{
	dir: func(t *testing.T) string { return t.TempDir() },
	fill: func(t *testing.T, s store.Store, _ *testDB) func() {
		return sqlitestore.LimitPages(t, s, 0)
	},
}

// small is a file system without room.
var small = diskFull{
	dir: smallDisk,
	fill: func(t *testing.T, _ store.Store, db *testDB) func() {
		until(t, "the log is written into the file", func() bool {
			var busy, n, m int
			return db.QueryRow(`pragma wal_checkpoint(truncate)`).Scan(&busy, &n, &m) == nil && busy == 0
		})
		ballast := filepath.Join(filepath.Dir(db.path), "ballast")
		f, err := os.Create(ballast)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for block := make([]byte, 4096); err == nil; {
			_, err = f.Write(block)
		}
		if !errors.Is(err, errNoSpace) {
			t.Fatal(err)
		}
		return func() {
			if err := os.Remove(ballast); err != nil {
				t.Error(err)
			}
		}
	},
}

// A relay whose file cannot grow waits and says so once. When there is room
// again it goes on and says that once: nothing is lost, comes twice or out of
// order, and no attempt is counted.
func TestRelayOnAFullDisk(t *testing.T) {
	for name, disk := range map[string]diskFull{"file_that_may_not_grow": limited, "file_system": small} {
		for _, set := range []migrate.Set{migrate.Stream, migrate.Rows} {
			t.Run(name+"/"+string(set), func(t *testing.T) { relayOnAFullDisk(t, disk, set) })
		}
	}
}

func relayOnAFullDisk(t *testing.T, disk diskFull, set migrate.Set) {
	t.Helper()
	const n, before, keys = 3000, 500, 20
	db := makeDBIn(t, set, disk.dir(t))
	s := open(t, set, sqlitestore.Config{Path: db.path, BusyTimeout: time.Minute})
	x := db.begin(t)
	for i := range n {
		x.Add(t, outrider.Event{AggregateType: "t", AggregateID: fmt.Sprint("k", i%keys), Type: "T", Payload: fmt.Append(nil, i)})
	}
	x.Commit(t)
	var some atomic.Int64
	reached, full := make(chan struct{}), make(chan struct{})
	sk := memsink.New(memsink.Config{Decide: func(ctx context.Context, _ sink.Message) sink.Result {
		switch k := some.Add(1); {
		case k == before:
			close(reached)
			fallthrough
		case k > before:
			select {
			case <-full:
			case <-ctx.Done():
			}
		}
		return memsink.Deliver
	}})
	// Times that no busy machine reaches, so that nothing is sent again.
	r := relaying(t, s, sk, relay.Config{MaxRecords: 10, LeaseTTL: 10 * time.Minute, Grace: 10 * time.Minute})
	select {
	case <-reached:
	case <-time.After(untilLimit):
		t.Fatal("nothing was sent")
	}
	free := disk.fill(t, s, db)
	close(full)
	until(t, "it has tried several times", func() bool { return r.tries.Load() >= 5 })
	if h := r.Health(); !strings.Contains(h.StoreHint, "disk is full") {
		t.Errorf("health: %+v", h)
	}
	if sk.Len() == n {
		t.Error("everything was sent on a full disk")
	}
	if off, on := r.log.count("cannot be asked"), r.log.count("asked again"); off != 1 || on != 0 || r.log.count("disk is full: make room") != 1 {
		t.Errorf("said %d times that the disk is full, %d times that it is not:\n%s", off, on, r.log.text())
	}
	free()
	wait, cancel := context.WithTimeout(context.Background(), untilLimit)
	defer cancel()
	if err := sk.Wait(wait, n); err != nil {
		t.Fatal(err)
	}
	r.stop() // settles
	if off, on := r.log.count("cannot be asked"), r.log.count("asked again"); off != 1 || on != 1 {
		t.Errorf("said %d times that the disk is full, %d times that it is not:\n%s", off, on, r.log.text())
	}
	last := map[string]int{}
	for _, m := range sk.Messages() {
		var i int
		if _, err := fmt.Sscan(string(m.Payload), &i); err != nil {
			t.Fatal(err)
		}
		if l, ok := last[m.Key]; ok && i != l+keys {
			t.Errorf("of %s, %d came behind %d", m.Key, i, l)
		}
		last[m.Key] = i
	}
	if sk.Len() != n || len(last) != keys {
		t.Errorf("%d messages of %d keys arrived", sk.Len(), len(last))
	}
	st, err := s.(store.Inspector).Status(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if d := st.Destinations[0]; d.Failed.N+d.Waiting.N+d.Pending.N+d.Publishing.N != 0 {
		t.Errorf("status: %+v", d)
	}
	page, err := s.(store.Inspector).List(context.Background(), store.ListParams{Limit: n})
	if err != nil || len(page.Entries) == 0 {
		t.Fatalf("listed %d, %v", len(page.Entries), err)
	}
	for _, e := range page.Entries {
		if e.Attempts != 0 || e.State != store.Published {
			t.Errorf("%s is %v after %d attempts", e.EventID, e.State, e.Attempts)
		}
	}
	// Nor is a connection left open that was given up: on a disk that stays full
	// there would be ever more.
	if err := errors.Join(db.Close(), s.Close()); err != nil {
		t.Fatal(err)
	}
	if left, err := filepath.Glob(db.path + "?*"); err != nil || len(left) > 0 {
		t.Errorf("left beside the closed file: %v, %v", left, err)
	}
}
