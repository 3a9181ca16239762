package sqlitestore_test

import (
	"bufio"
	"context"
	"database/sql"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
)

// The test's binary is also each of the processes of TestProcesses.
const roleEnv = "SQLITESTORE_TEST_ROLE"

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		if err := play(role, os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, role, err, outrider.Hint(err))
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

const (
	processKeys  = 20
	processTxs   = 150
	processInTx  = 4
	processHand  = 40 // records in hand
	processLimit = 2 * time.Minute
)

func play(role string, args []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), processLimit)
	defer cancel()
	set, path := migrate.Set(args[0]), args[1]
	switch role {
	case "producer":
		return produce(ctx, set, path, args[2])
	case "old":
		return openOld(ctx, set, path)
	}
	return carry(ctx, set, path, args[2])
}

// produce inserts transactions as an application does.
func produce(ctx context.Context, set migrate.Set, path, name string) error {
	db, err := sql.Open("sqlite", path+"?_pragma=busy_timeout(60000)&_txlock=immediate")
	if err != nil {
		return err
	}
	defer db.Close()
	o, err := outrider.New(outrider.Config{Dialect: outrider.SQLite, Table: (&testDB{set: set}).table()})
	if err != nil {
		return err
	}
	n := 0
	for range processTxs {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		for range processInTx {
			e := outrider.Event{AggregateType: "t", AggregateID: fmt.Sprintf("%s-%d", name, n%processKeys), Type: fmt.Sprint(n)}
			if err := o.Add(ctx, tx, e); err != nil {
				return err
			}
			n++
		}
		if err := tx.Commit(); err != nil {
			return err
		}
	}
	return nil
}

// carry is a small relay. What it delivers goes to a file that all share, a
// line each; it ends when its input does.
func carry(ctx context.Context, set migrate.Set, path, out string) error {
	f, err := os.OpenFile(out, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); cancel() }()
	s, err := openSet(ctx, set, sqlitestore.Config{Path: path})
	if err != nil {
		return quiet(ctx, err)
	}
	defer s.Close()
	ses, err := s.Join(ctx, store.JoinParams{Relay: "r", TTL: 30 * time.Second, Grace: 50 * time.Millisecond,
		Destinations: []store.Destination{{Name: "main", FromEarliest: true}}})
	if err != nil {
		return quiet(ctx, err)
	}
	defer func() { _ = ses.Leave(context.WithoutCancel(ctx)) }() // it may have been fenced
	var leases []store.Lease
	for ctx.Err() == nil {
		r, err := ses.Renew(ctx, leases)
		if err != nil {
			return quiet(ctx, err)
		}
		lanes := 0
		for _, l := range leases {
			lanes += l.Lanes.Len()
		}
		if len(r.Lost) > 0 {
			return fmt.Errorf("lost leases %v", r.Lost)
		}
		got, err := ses.Acquire(ctx, store.AcquireParams{Destination: "main", Lanes: 64/max(1, r.Relays) - lanes})
		if err != nil {
			return quiet(ctx, err)
		}
		leases = append(leases, got...)
		for _, l := range leases {
			for _, kind := range []store.Kind{store.Fresh, store.Due} {
				if err := carryOne(ctx, ses, l, kind, f); err != nil {
					return quiet(ctx, err)
				}
			}
		}
	}
	return nil
}

// quiet drops the error of a process that was told to end.
func quiet(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil //nolint:nilerr // what it is for
	}
	return err
}

func carryOne(ctx context.Context, ses store.Session, l store.Lease, kind store.Kind, f io.Writer) error {
	c, err := ses.Claim(ctx, store.ClaimParams{Lease: l, Kind: kind, MaxRecords: processHand, MaxBytes: 1 << 20})
	if err != nil || len(c.Records) == 0 {
		return err
	}
	if err := ses.Commit(ctx, store.CommitParams{Lease: l, Start: []*store.Claim{c}}); err != nil {
		return err
	}
	outcomes := make([]store.Outcome, len(c.Records))
	for i, r := range c.Records {
		outcomes[i].State = store.Published
		if _, err := fmt.Fprintf(f, "%s %s\n", r.Key, r.Type); err != nil {
			return err
		}
	}
	return ses.Commit(ctx, store.CommitParams{Lease: l, Settle: []store.Settlement{{Claim: c, Outcomes: outcomes}}})
}

// process is one that the test has started.
type process struct {
	*exec.Cmd
	t   *testing.T
	in  io.Closer
	err strings.Builder
}

func start(t *testing.T, role string, args ...string) *process {
	t.Helper()
	p := &process{Cmd: exec.Command(os.Args[0], args...), t: t}
	p.Env = append(os.Environ(), roleEnv+"="+role)
	p.Stderr = &p.err
	in, err := p.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.in = in
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	return p
}

// end waits for a process's end, and is not content with an error.
func (p *process) end() {
	p.t.Helper()
	_ = p.in.Close()
	if err := p.Wait(); err != nil {
		p.t.Errorf("%v: %v: %s", p.Args[1:], err, p.err.String())
	}
}

// Several processes write and claim while somebody reads in one transaction from
// beginning to end, backups are made, and people look; one relay is killed.
// Nothing is refused as busy, nothing lost, nothing out of order, and nothing
// comes twice but what was in hand at the death.
func TestProcesses(t *testing.T) {
	for _, set := range []migrate.Set{migrate.Stream, migrate.Rows} {
		t.Run(string(set), func(t *testing.T) { testProcesses(t, set) })
	}
}

func testProcesses(t *testing.T, set migrate.Set) { //nolint:thelper // the body of a test: its own lines tell more
	ctx, cancel := context.WithTimeout(context.Background(), processLimit)
	defer cancel()
	db := makeDB(t, set)
	s := open(t, set, sqlitestore.Config{Path: db.path})
	reader := longReader(t, db)
	defer reader.Rollback() // it only read
	out := filepath.Join(t.TempDir(), "delivered")
	if err := os.WriteFile(out, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{string(set), db.path}
	producers := []*process{start(t, "producer", append(args, "a")...), start(t, "producer", append(args, "b")...)}
	relays := []*process{start(t, "relay", append(args, out)...), start(t, "relay", append(args, out)...)}
	total := len(producers) * processTxs * processInTx
	killed := false
	for backups := 0; ; backups++ {
		lines := delivered(t, out)
		if len(lines) > total/4 && !killed {
			killed = true
			_ = relays[0].Process.Kill()
			_ = relays[0].Wait()
			relays[0] = start(t, "relay", append(args, out)...)
		}
		if missing := check(t, lines, total); missing == 0 || ctx.Err() != nil {
			if missing > 0 {
				t.Errorf("%d of %d events are missing", missing, total)
			}
			break
		}
		db.exec(t, `vacuum into ?`, filepath.Join(t.TempDir(), fmt.Sprint("backup", backups)))
		if _, err := s.(store.Inspector).Status(ctx); err != nil {
			t.Error(err)
		}
	}
	for _, p := range append(producers, relays...) {
		p.end()
	}
	lines := delivered(t, out)
	if twice := len(lines) - total; twice > 2*processHand || !killed {
		t.Errorf("%d events came twice, killed %v", twice, killed)
	}
}

func longReader(t *testing.T, db *testDB) *sql.Tx {
	t.Helper()
	other, err := sql.Open("sqlite", db.path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = other.Close() })
	tx, err := other.BeginTx(context.Background(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var n int
	if err := tx.QueryRow(`select count(*) from ` + db.table()).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return tx
}

// delivered are the lines that are complete.
func delivered(t *testing.T, path string) []string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var out []string
	r := bufio.NewReader(f)
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return out
		}
		out = append(out, strings.TrimSpace(line))
	}
}

// check looks at the order of first deliveries and counts what is missing.
func check(t *testing.T, lines []string, total int) int {
	t.Helper()
	seen := map[string]bool{}
	last := map[string]int{}
	for _, line := range lines {
		if seen[line] {
			continue
		}
		seen[line] = true
		var n int
		key, num, _ := strings.Cut(line, " ")
		if _, err := fmt.Sscan(num, &n); err != nil {
			t.Fatalf("line %q", line)
		}
		if before, ok := last[key]; ok && n != before+processKeys {
			t.Errorf("key %s: %d came behind %d", key, n, before)
		}
		last[key] = n
	}
	return total - len(seen)
}
