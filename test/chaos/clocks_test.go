//go:build linux

package chaos_test

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/testdb"
)

const (
	skew = 90 * time.Second

	// Whatever is early or late by a clock that is off, is so by more.
	skewSeen = 60 * time.Second

	clocksTTL      = 3 * time.Second
	clocksGrace    = time.Second
	clocksBackOff  = 2 * time.Second
	clocksDelay    = 3 * time.Second
	clocksInFlight = 100
)

// TestClocks has two relays work whose hosts' clocks are 90 s ahead and 90 s
// behind the database's, thirty times as much as a lease lives. Neither takes a
// lane of the other while it is well; what one has that was killed is taken
// over after its grace, what one has that was halted when its leases expire.
// Delayed events and back-off are due by the database's clock, which is this
// process's as well.
func TestClocks(t *testing.T) {
	if testing.Short() {
		t.Skip("builds a program, and takes half a minute")
	}
	dsn := testdb.Postgres(t)
	program := buildSkewed(t)
	db, err := sql.Open("pgx", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	w := newWriters(t, db, outrider.Postgres, 8, 20, 1)
	d := openDesk(t)
	run := &clocks{t: t, db: db, desk: d, program: program, dsn: dsn,
		c: &campaign{t: t, writers: w, seen: d.tail, began: time.Now()}}
	ahead, behind := run.start("ahead-1", skew), run.start("behind-1", -skew)
	run.fair()

	refused := run.work(500)
	run.kill(ahead, 900)
	ahead = run.start("ahead-2", skew)
	run.fair()
	run.halt(behind, 1300)
	w.allow(1500)
	run.quiet()

	w.close()
	ahead.end()
	behind.end()
	nothingFailed(t, dsn)
	run.judge(refused)
}

// clocks is one run of TestClocks.
type clocks struct {
	t            *testing.T
	db           *sql.DB
	desk         *desk
	program, dsn string
	c            *campaign
	timed        []string // ids of all events that are delayed or refused
}

func (r *clocks) lanes() lanesHeld {
	r.t.Helper()
	return lanes(r.t, r.db, expiresPostgres)
}

func (r *clocks) fair() {
	r.t.Helper()
	await(r.t, patience, "each relay to have half of the lanes", func() bool { return r.lanes().fair() })
}

func (r *clocks) quiet() {
	r.t.Helper()
	await(r.t, patience, "all events", func() bool {
		n, all := r.c.writers.written()
		return all && r.desk.tail.arrived() >= n+len(r.timed)
	})
}

// work has both relays work for longer than two lives of a lease, with nothing
// taken from either. The ids are those of events that were refused.
func (r *clocks) work(events int) (refused []string) {
	r.t.Helper()
	before := r.lanes()
	r.c.writers.allow(events)
	refused = r.addTimed()
	await(r.t, patience, "two lives of a lease", func() bool {
		now := r.lanes()
		if !before.sameHolders(now) {
			r.t.Fatalf("lanes have changed hands: %v, now %v", before.of(), now.of())
		}
		return now.firstExpiry() > before.lastExpiry()+2*clocksTTL.Microseconds()
	})
	r.quiet()
	r.c.logf("both have worked, with %v lanes, and nothing has changed hands", before.of())
	return refused
}

// kill ends one by kill -9, amid its work. The other keeps its own lanes and
// takes the rest, not before the dead one's grace.
func (r *clocks) kill(victim *skewedRelay, events int) {
	r.t.Helper()
	before := r.lanes()
	r.addTimed()
	n := r.desk.tail.arrived()
	r.c.writers.allow(events)
	await(r.t, patience, "some events", func() bool { return r.desk.tail.arrived() > n+20 })
	died := time.Now()
	victim.kill()
	await(r.t, skewSeen, "the other one to have all lanes", func() bool {
		now := r.lanes()
		for i := range before {
			switch {
			case before[i].owner == victim.name && now[i].owner != victim.name && time.Since(died) < clocksGrace:
				r.t.Fatalf("lane %d was taken %v after the death, before the grace", i, time.Since(died))
			case before[i].owner != victim.name && now[i].owner != before[i].owner:
				r.t.Fatalf("lane %d of the one that is well went from %q to %q", i, before[i].owner, now[i].owner)
			}
		}
		return now.of()[victim.name] == 0 && len(now.of()) == 1
	})
	r.c.logf("what the dead one had was taken over after %v", time.Since(died).Round(time.Millisecond))
	r.quiet()
}

// halt stops one for longer than its leases live. The other takes all lanes,
// not before they have expired by the database's clock.
func (r *clocks) halt(victim *skewedRelay, events int) {
	r.t.Helper()
	before := r.lanes()
	r.addTimed()
	r.c.writers.allow(events)
	if err := victim.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		r.t.Fatal(err)
	}
	halted := time.Now()
	await(r.t, skewSeen, "the other one to have all lanes", func() bool {
		now := r.lanes()
		at := r.databaseTime()
		for i := range before {
			switch {
			case now[i].owner == before[i].owner:
				before[i].expires = now[i].expires
			case before[i].owner != victim.name:
				r.t.Fatalf("lane %d of the one that is well went from %q to %q", i, before[i].owner, now[i].owner)
			case at < before[i].expires:
				r.t.Fatalf("lane %d was taken %d us before it expired", i, before[i].expires-at)
			}
		}
		return now.of()[victim.name] == 0 && len(now.of()) == 1
	})
	r.c.logf("what the halted one had was taken over after %v", time.Since(halted).Round(time.Millisecond))
	r.quiet()
	if err := victim.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		r.t.Fatal(err)
	}
	r.fair()
}

func (r *clocks) databaseTime() (us int64) {
	r.t.Helper()
	if err := r.db.QueryRow(`select (extract(epoch from clock_timestamp()) * 1000000)::bigint`).Scan(&us); err != nil {
		r.t.Fatal(err)
	}
	return us
}

// addTimed commits events that are delayed, either way, and some that are
// refused twice, whose ids it gives.
func (r *clocks) addTimed() (refused []string) {
	r.t.Helper()
	var events []outrider.Event
	for range 5 {
		e := outrider.Event{AggregateType: "aggregate", AggregateID: "timed", Type: "Timed", Unordered: true,
			Payload: []byte(`{"key":"","n":0}`)}
		e.ID = outrider.NewID()
		refused = append(refused, e.ID)
		events = append(events, e)
		e.ID, e.Delay = outrider.NewID(), clocksDelay
		events = append(events, e)
		e.ID, e.Delay, e.AvailableAt = outrider.NewID(), 0, time.Now().Add(clocksDelay)
		events = append(events, e)
	}
	for _, e := range events {
		r.timed = append(r.timed, e.ID)
	}
	r.desk.refuse(refused...)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	tx, err := r.db.BeginTx(ctx, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	defer tx.Rollback() // after a commit it is a no-op
	if err := r.c.writers.outbox.Add(ctx, tx, events...); err != nil {
		r.t.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		r.t.Fatal(err)
	}
	return refused
}

// judge looks at what arrived, and when. The refused were tried while nobody
// died, so that each back-off is known.
func (r *clocks) judge(refused []string) {
	t := r.t
	t.Helper()
	d := r.desk
	d.mu.Lock()
	defer d.mu.Unlock()
	want := r.c.writers.truth(t)
	timed := map[string]bool{}
	for _, id := range r.timed {
		timed[id] = true
		delete(want, id) // it has no place in the order
	}
	var got []delivery
	for _, x := range d.arrivals {
		if x.taken && !timed[x.id] {
			got = append(got, x.delivery)
		}
	}
	f := audit(want, r.c.writers.rolled, got)
	r.c.logf("%v; %d delivered, %d duplicates, at most %d can be; %d delayed or refused; clocks off by %v",
		r.c.writers, f.delivered, f.duplicates, 2*clocksInFlight, len(timed), d.off)
	if len(f.faults) > 0 {
		t.Errorf("%v", f)
	}
	if f.duplicates > 2*clocksInFlight {
		t.Errorf("%d duplicates, more than had been in hand with the one that was killed and the one that was halted", f.duplicates)
	}
	for name, by := range map[string]time.Duration{"ahead-1": skew, "ahead-2": skew, "behind-1": -skew} {
		if off, ok := d.off[name]; !ok || (off-by).Abs() > skew/3 {
			t.Errorf("%s: its clock is off by %v, want %v", name, off, by)
		}
	}
	r.delays()
	for _, id := range refused {
		if n := len(d.of(id)); n != 3 {
			t.Errorf("a refused event was tried %d times, not 3", n)
		}
		for i, at := range d.of(id)[1:] {
			inTime(t, "a try", at, d.of(id)[i].Add(clocksBackOff))
		}
	}
}

// delays checks when the delayed events came first.
func (r *clocks) delays() {
	r.t.Helper()
	rows, err := r.db.Query(`select event_id::text, available_at from outbox_events where available_at is not null`)
	if err != nil {
		r.t.Fatal(err)
	}
	defer rows.Close()
	n := 0
	for ; rows.Next(); n++ {
		var id string
		var due time.Time
		if err := rows.Scan(&id, &due); err != nil {
			r.t.Fatal(err)
		}
		inTime(r.t, "a delayed event", r.desk.of(id)[0], due)
	}
	if err := rows.Err(); err != nil {
		r.t.Fatal(err)
	}
	if want := 2 * len(r.timed) / 3; n != want {
		r.t.Errorf("%d delayed events, want %d", n, want)
	}
}

// inTime finds what a clock that is off would do.
func inTime(t testing.TB, what string, at, due time.Time) {
	t.Helper()
	if off := at.Sub(due); off < 0 || off > skewSeen {
		t.Errorf("%s came %v after it was due", what, off)
	}
}

// desk is the destination of the relays: it takes messages over TCP, and
// refuses some of them twice.
type desk struct {
	address string
	tail    *tail

	mu       sync.Mutex
	arrivals []arrival
	refusals map[string]int           // by id: how many are to come
	off      map[string]time.Duration // by relay: its clock
}

type arrival struct {
	delivery
	at    time.Time
	taken bool
}

// skewedLine is what a relay sends: Line in its program.
type skewedLine struct {
	Relay             string
	Now               time.Time
	ID, Key, Sequence string
	Payload           event
}

func openDesk(t testing.TB) *desk {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := &desk{address: l.Addr().String(), tail: newTail(), refusals: map[string]int{}, off: map[string]time.Duration{}}
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return // closed, at the end
			}
			serving.Go(func() {
				defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
				defer conn.Close()
				d.serve(t, conn)
			})
		}
	})
	t.Cleanup(func() {
		cancel()
		_ = l.Close()
		serving.Wait()
	})
	return d
}

func (d *desk) serve(t testing.TB, conn net.Conn) {
	t.Helper()
	for in := bufio.NewScanner(conn); in.Scan(); {
		var l skewedLine
		if err := json.Unmarshal(in.Bytes(), &l); err != nil {
			t.Errorf("%q: %v", in.Text(), err) // nothing is halved: a line that is cut has no end
			return
		}
		answer := "no"
		if d.take(l) {
			answer = "yes"
		}
		if _, err := fmt.Fprintln(conn, answer); err != nil {
			return // the relay is gone
		}
	}
}

func (d *desk) take(l skewedLine) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	d.off[l.Relay] = l.Now.Sub(now)
	x := arrival{delivery: delivery{id: l.ID, key: l.Key, sequence: l.Sequence, payload: l.Payload}, at: now}
	if d.refusals[l.ID]--; d.refusals[l.ID] < 0 {
		x.taken = true
		d.tail.note(x.delivery)
	}
	d.arrivals = append(d.arrivals, x)
	return x.taken
}

func (d *desk) refuse(ids ...string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, id := range ids {
		d.refusals[id] = 2
	}
}

// of is when an event arrived; called with mu held.
func (d *desk) of(id string) (at []time.Time) {
	for _, x := range d.arrivals {
		if x.id == id {
			at = append(at, x.at)
		}
	}
	return at
}

// skewedRelay is a process of the program in skewed.
type skewedRelay struct {
	t     testing.TB
	name  string
	cmd   *exec.Cmd
	stdin io.Closer
	log   strings.Builder
	ended bool
}

func (r *clocks) start(name string, off time.Duration) *skewedRelay {
	r.t.Helper()
	text, err := json.Marshal(map[string]any{"Name": name, "Postgres": r.dsn, "Address": r.desk.address,
		"TTL": clocksTTL, "Grace": clocksGrace, "RetryBase": clocksBackOff, "MaxRecordsInFlight": clocksInFlight})
	if err != nil {
		r.t.Fatal(err)
	}
	p := &skewedRelay{t: r.t, name: name, cmd: exec.Command(r.program)}
	p.cmd.Env = append(os.Environ(), "OUTRIDER_SKEWED_RELAY="+string(text), fmt.Sprintf("%s=%d", envSkew, int(off.Seconds())))
	p.cmd.Stderr = &p.log
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		r.t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		p.kill()
		if r.t.Failed() {
			r.t.Logf("%s:\n%s", name, p.log.String())
		}
	})
	return p
}

// kill is kill -9, if it runs.
func (p *skewedRelay) kill() {
	if !p.ended {
		p.ended = true
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	}
}

// end stops it softly.
func (p *skewedRelay) end() {
	p.t.Helper()
	p.ended = true
	_ = p.stdin.Close()
	if err := p.cmd.Wait(); err != nil {
		p.t.Errorf("%s: %v\n%s", p.name, err, p.log.String())
	}
}

// envSkew holds how many seconds a process's clock is off.
const envSkew = "OUTRIDER_SKEW"

// now is the line of package time in which time.Now asks for the time.
var now = regexp.MustCompile(`(?m)^(\tsec, nsec, mono := \w+\(\))$`)

// skewOf is added to package time.
const skewOf = `package time

import "syscall"

var skew = func() (n int64) {
	text, _ := syscall.Getenv("` + envSkew + `")
	sign := int64(1)
	for i, c := range []byte(text) {
		if i == 0 && c == '-' {
			sign = -1
			continue
		}
		n = n*10 + int64(c-'0')
	}
	return sign * n
}()
`

// buildSkewed builds the relay with a package time of which the wall clock is
// off: what a process sees of its host's clock cannot be changed from outside.
func buildSkewed(t testing.TB) (program string) {
	t.Helper()
	dir := t.TempDir()
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	src := filepath.Join(strings.TrimSpace(string(root)), "src", "time")
	text, err := os.ReadFile(filepath.Join(src, "time.go"))
	if err != nil {
		t.Fatal(err)
	}
	if n := len(now.FindAll(text, -1)); n != 1 {
		t.Fatalf("%d lines of package time fit %v, want 1", n, now)
	}
	write := func(name string, text []byte) string {
		name = filepath.Join(dir, name)
		if err := os.WriteFile(name, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{
		filepath.Join(src, "time.go"): write("time.go", now.ReplaceAll(text, []byte("$1; sec += skew"))),
		filepath.Join(src, "skew.go"): write("skew.go", []byte(skewOf)),
	}})
	if err != nil {
		t.Fatal(err)
	}
	program = filepath.Join(dir, "relay")
	out, err := exec.Command("go", "build", "-buildvcs=false", "-overlay", write("overlay.json", overlay), "-o", program, "./skewed").CombinedOutput()
	if err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	return program
}
