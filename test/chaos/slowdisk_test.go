//go:build linux

package chaos_test

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/store"
)

// slowDisk is the beginning of a command line: in what it runs each write to
// the disk takes a tenth of a second more. The trace has a line for each.
func slowDisk(trace string) []string {
	return []string{"strace", "-f", "-qq", "--seccomp-bpf", "-o", trace,
		"-e", "trace=fsync,fdatasync", "-e", "inject=fsync,fdatasync:delay_enter=100000"}
}

// needSlowDisk skips the test where processes cannot be traced.
func needSlowDisk(t testing.TB) {
	t.Helper()
	args := append(slowDisk(os.DevNull), "true")
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err == nil {
		return
	}
	why := fmt.Sprintf("needs strace, and the right to trace processes: %v %s", err, out)
	if os.Getenv("CI") != "" || os.Getenv(testdb.EnvRequire) != "" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// slowPause lets others come to write: SQLite has no queue for its lock, and
// who is back at once has it again before those who look now and then.
const slowPause = 200 * time.Millisecond

// TestSlowDisk has two relays and two writers share a SQLite file, four
// processes for each of which every write to the disk takes a tenth of a
// second, while somebody looks all the time. Nobody dies, so nothing may come
// twice, no lane may change hands and no event may be charged an attempt.
func TestSlowDisk(t *testing.T) {
	if testing.Short() {
		t.Skip("takes half a minute")
	}
	needSlowDisk(t)
	path := filepath.Join(t.TempDir(), "outbox.db")
	db, err := sql.Open("sqlite", path+sqliteOptions)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	w := newWriters(t, db, outrider.SQLite, 0, 40, 1)
	url := runNATS(t)
	seen, read := followStream(t, url)
	sup := supervise(t, relaySpec{SQLite: path, NATS: url, Topic: natsSubject, SlowDisk: true,
		TTL: 15 * time.Second, Grace: time.Second}, 2)
	t.Cleanup(func() {
		if t.Failed() {
			sup.logs()
		}
	})
	c := &campaign{t: t, writers: w, seen: seen, sup: sup, began: time.Now()}
	await(t, patience, "each relay to have half of the lanes", func() bool { return lanes(t, db, expiresSQLite).fair() })
	before := lanes(t, db, expiresSQLite)
	c.logf("each relay has half of the lanes")

	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	writing := []*slowWriter{
		startWriter(t, writerSpec{SQLite: path, Keys: w.keys, Writers: 1, Events: 70, Seed: 1, Pause: slowPause}),
		startWriter(t, writerSpec{SQLite: path, Keys: w.keys, Writers: 1, Events: 70, Seed: 2, Pause: slowPause}),
	}
	st, err := sup.spec.openStore(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close() // the test ends
	looks := 0
	await(t, patience, "all events, and the end of the first leases", func() bool {
		now := lanes(t, db, expiresSQLite)
		if !before.sameHolders(now) {
			t.Fatalf("lanes have changed hands: %v, now %v", before.of(), now.of())
		}
		nothingWaits(ctx, t, st)
		looks++
		ended := writing[0].hasEnded() && writing[1].hasEnded()
		n, err := w.count()
		return ended && err == nil && seen.arrived() >= n && now.firstExpiry() > before.lastExpiry()
	})
	for _, x := range writing {
		x.take(t, w)
	}
	if t.Failed() {
		return
	}
	refused := int64(0) // before the end: leases that are given back are lost, too
	for i := range sup.slots {
		refused += sup.get(i).gauges.Fenced.Load()
	}
	sup.stop()
	noExceptions(t, db)
	slow := slowWrites(t, writing, sup)

	want := w.truth(t)
	f := audit(want, w.rolled, read())
	c.logf("%d committed, %d delivered, %d duplicates; %d looks; slow writes to the disk: %v; longest stall %v",
		len(want), f.delivered, f.duplicates, looks, slow, seen.longest().Round(time.Millisecond))
	if len(f.faults) > 0 || f.duplicates > 0 {
		t.Errorf("%d duplicates, %v", f.duplicates, f)
	}
	if len(want) < 140 || sup.starts != 2 || refused > 0 {
		t.Errorf("%d events, %d relay processes, %d commits refused", len(want), sup.starts, refused)
	}
}

// nothingWaits checks that no event was charged an attempt: it would wait for
// the next one.
func nothingWaits(ctx context.Context, t testing.TB, st nativeStore) {
	t.Helper()
	status, err := st.(store.Inspector).Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range status.Destinations {
		if d.Waiting.N+d.Failed.N+d.BlockedKeys.N > 0 {
			t.Fatalf("events were put back: %+v", d)
		}
	}
}

// envWriter holds the writerSpec of a process that is to write events.
const envWriter = "OUTRIDER_CHAOS_WRITER"

type writerSpec struct {
	SQLite                string
	Keys, Writers, Events int
	Seed                  uint64
	Pause                 time.Duration // behind each transaction
}

// written is what such a process prints at its end.
type written struct {
	Known  map[string]event
	Rolled map[string]bool
}

// runWriter is an application that commits some events and ends, at once when
// its standard input does.
func runWriter(spec writerSpec) error {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
	db, err := sql.Open("sqlite", spec.SQLite+strings.Replace(sqliteOptions, "(normal)", "(full)", 1))
	if err != nil {
		return err
	}
	defer db.Close()
	w, err := openWriters(db, outrider.SQLite, spec.Keys)
	if err != nil {
		return err
	}
	w.pause = spec.Pause
	w.allow(spec.Events)
	w.start(spec.Writers, spec.Seed)
	all := awaited(patience, func() bool { _, all := w.written(); return all })
	w.close()
	if !all || w.errors > 0 {
		return fmt.Errorf("not all was written: %v", w)
	}
	return json.NewEncoder(os.Stdout).Encode(written{w.known, w.rolled})
}

// slowWriter is such a process, on a slow disk.
type slowWriter struct {
	cmd      *exec.Cmd
	out, err bytes.Buffer
	trace    string
	ended    chan struct{}
	failed   error
}

func startWriter(t testing.TB, spec writerSpec) *slowWriter {
	t.Helper()
	text, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	x := &slowWriter{trace: filepath.Join(t.TempDir(), "writer.trace"), ended: make(chan struct{})}
	args := append(slowDisk(x.trace), os.Args[0])
	x.cmd = exec.Command(args[0], args[1:]...)
	x.cmd.Env = append(os.Environ(), envWriter+"="+string(text))
	x.cmd.Stdout, x.cmd.Stderr = &x.out, &x.err
	stdin, err := x.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := x.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		x.failed = x.cmd.Wait()
		close(x.ended)
	}()
	t.Cleanup(func() {
		_ = stdin.Close()
		<-x.ended
	})
	return x
}

func (x *slowWriter) hasEnded() bool {
	select {
	case <-x.ended:
		return true
	default:
		return false
	}
}

// take waits for the end of the process and has w know what it knew.
func (x *slowWriter) take(t testing.TB, w *writers) {
	t.Helper()
	<-x.ended
	var got written
	if err := json.Unmarshal(x.out.Bytes(), &got); x.failed != nil || err != nil {
		t.Errorf("a writer: %v, %v: %s", x.failed, err, x.err.String())
	}
	maps.Copy(w.known, got.Known)
	maps.Copy(w.rolled, got.Rolled)
}

// slowWrites counts the delayed writes of each process; none may be without.
func slowWrites(t testing.TB, writing []*slowWriter, sup *supervisor) (counts []int) {
	t.Helper()
	var traces []string
	for _, x := range writing {
		traces = append(traces, x.trace)
	}
	more, err := filepath.Glob(filepath.Join(sup.dir, "*.trace"))
	if err != nil || len(more) != sup.starts {
		t.Errorf("traces of relays: %v, %v", more, err)
	}
	for _, name := range append(traces, more...) {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		n := bytes.Count(text, []byte("(DELAYED)"))
		if counts = append(counts, n); n < 10 {
			t.Errorf("%s: only %d writes were slow", filepath.Base(name), n)
		}
	}
	return counts
}
