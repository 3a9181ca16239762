package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/config"
	"github.com/outrider-dev/outrider/internal/daemon"
	"github.com/outrider-dev/outrider/store"
)

var update = flag.Bool("update", false, "write the golden files")

// fakeStore shows one event in each state, and can be operated on.
type fakeStore struct {
	store.Store
	relays  bool
	moved   bool
	retired bool
	targets []store.Target
	entries []store.Entry // in place of those of all states
	page    func(store.ListParams) store.Page
}

func (*fakeStore) Close() error { return nil }

var at = time.Date(2026, 1, 2, 3, 4, 5, 678_000_000, time.UTC)

func (f *fakeStore) Status(context.Context) (store.Status, error) {
	s := store.Status{
		Destinations: []store.DestinationStatus{
			{Name: "audit", Leases: []store.LeaseStatus{{ID: 1, Count: 64, Epoch: 3}}},
			{
				Name: "orders", OldestPending: 2*time.Hour + 4*time.Minute, OldestBlocked: 90 * time.Second, OldestFailed: 50 * time.Hour,
				Pending: store.Count{N: 100000, Estimate: true}, Publishing: store.Count{N: 12}, Waiting: store.Count{N: 3},
				Scheduled: store.Count{N: 1}, Failed: store.Count{N: 2}, BlockedKeys: store.Count{N: 1},
				Leases: []store.LeaseStatus{{ID: 9007199254740993, Count: 40, Owner: "a/1", Epoch: 9007199254740993, Expires: 14 * time.Second}, {ID: 3, Count: 10},
					{ID: 4, Count: 8, Owner: "b/2", Expires: -40 * time.Second}, {ID: 5, Count: 1, Owner: "b/2", Expires: -40 * time.Second},
					{ID: 6, Count: 3, Owner: "c/3", Expires: 9 * time.Second, Gone: true}, {ID: 7, Count: 2, Owner: "d/4"}},
			},
		},
		Warnings: []string{"partitions end in 2 days\nmake more"},
	}
	if f.relays {
		s.Relays = []store.RelayStatus{{Name: "0/0", Seen: 6 * time.Second, Gone: true}, {Name: "a/1", Seen: 250 * time.Millisecond}, {Name: "c/3", Seen: 6 * time.Second, Gone: true}}
	}
	return s, nil
}

var entries = []store.Entry{
	{Destination: "orders", Row: "17", EventID: "0190a6e2-0000-7000-8000-000000000017", Type: "OrderPlaced", AggregateType: "order", AggregateID: "42",
		Key: "customer-7", State: store.Failed, Attempts: 20, Class: "oversize", Message: "payload and headers are over\nthe limit \x1b[31m", CreatedAt: at, LastFailure: at.Add(time.Minute)},
	{Destination: "orders", Row: "18", EventID: "0190a6e2-0000-7000-8000-000000000018", Type: "OrderPaid", AggregateType: "order", AggregateID: "42",
		Key: "customer-7", State: store.Pending, Reason: "held behind 17", CreatedAt: at.Add(time.Second)},
	{Destination: "orders", Row: "19", EventID: "0190a6e2-0000-7000-8000-000000000019", Type: "OrderPaid", AggregateType: "order", AggregateID: "43",
		Key: "it's a key", State: store.Waiting, Reason: "retry", Attempts: 2, Class: "timeout", Message: "no answer", DueIn: 3500 * time.Millisecond, CreatedAt: at, LastFailure: at.Add(time.Second)},
	{Destination: "orders", Row: "9007199254740993", EventID: "0190a6e2-0000-7000-8000-000000000020", Type: "Ping", AggregateType: "probe", AggregateID: "1",
		Unordered: true, State: store.Scheduled, Reason: "due later", DueIn: 25 * time.Hour, CreatedAt: at},
}

func (f *fakeStore) all() []store.Entry {
	if f.entries != nil {
		return f.entries
	}
	return entries
}

func (f *fakeStore) List(_ context.Context, p store.ListParams) (store.Page, error) {
	if p.Type == "None" {
		return store.Page{}, nil
	}
	page := store.Page{Entries: f.all()}
	if f.page != nil {
		return f.page(p), nil
	}
	if p.Limit == 2 {
		page.Entries, page.Next = entries[:2], "18"
	}
	return page, nil
}

func (f *fakeStore) Show(_ context.Context, id string) ([]store.Detail, error) {
	for _, e := range f.all() {
		if e.Row == id || e.EventID == id {
			d := store.Detail{Entries: []store.Entry{e}, Record: outrider.Record{Row: e.Row, Lane: 5, CreatedAt: e.CreatedAt}}
			d.Record.Event = outrider.Event{
				ID: e.EventID, Type: e.Type, AggregateType: e.AggregateType, AggregateID: e.AggregateID, Key: e.Key,
				Unordered: e.Unordered, ContentType: "application/json", Payload: []byte("{\"total\": 1.00,\n \"big\": 9007199254740993}"),
				Headers: map[string]string{"tenant": "acme", "b": "2"}, Traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
			}
			switch id {
			case "18":
				d.Record.Payload = []byte{0xff, 0}
			case "19":
				d.Record.Payload = []byte(strings.Repeat("0123456789", 500))
			}
			return []store.Detail{d}, nil
		}
	}
	return nil, nil
}

func (f *fakeStore) Retry(_ context.Context, t store.Target) (int, error) { return f.operate(t) }

func (f *fakeStore) Skip(_ context.Context, t store.Target) (int, error) { return f.operate(t) }

func (f *fakeStore) operate(t store.Target) (int, error) {
	f.targets = append(f.targets, t)
	for _, e := range f.all() {
		if e.Row == t.ID && e.State != store.Failed {
			return 0, nil
		}
	}
	if t.ID == "99" || t.Key == "nobody's" || t.Destination == "order" {
		return 0, nil
	}
	if t.ID == "broken" {
		return 0, outrider.WithHint(errors.New("connection to postgres://app:s3cr3t@db/shop lost"), "look at s3cr3t")
	}
	return 1, nil
}

func (f *fakeStore) Retire(_ context.Context, name string, dry bool) (store.RetireReport, error) {
	switch name {
	case "served":
		return store.RetireReport{}, fmt.Errorf("pgstore: retire %q: %w", name, store.Served("a/1", 11700*time.Millisecond))
	case "orders":
		f.retired = f.retired || !dry
		return store.RetireReport{Pending: store.Count{N: 10000, Estimate: true}, Failed: store.Count{N: 2}}, nil
	case "audit":
		f.retired = f.retired || !dry
		return store.RetireReport{}, nil
	default:
		return store.RetireReport{}, fmt.Errorf("pgstore: retire %q: %w", name, store.ErrUnknownDestination)
	}
}

func (f *fakeStore) Rebase(_ context.Context, dry bool) (store.RebaseReport, error) {
	if !f.moved {
		return store.RebaseReport{From: "7300", To: "7300"}, nil
	}
	return store.RebaseReport{From: "7300", To: "7400", Pending: map[string]int64{"orders": 12, "audit": 1}, Changed: !dry}, nil
}

// bareStore can do nothing of it.
type bareStore struct{ store.Store }

func (bareStore) Close() error { return nil }

// call runs a command line against a store and gives back all that it printed.
func call(t *testing.T, st store.Store, args ...string) string {
	t.Helper()
	return callWithin(t.Context(), st, args...)
}

func callWithin(ctx context.Context, st store.Store, args ...string) string {
	var out, errs strings.Builder
	a := &app{ctx: ctx, in: strings.NewReader(""), out: &out, err: &errs, open: daemon.OpenInspector}
	if st != nil {
		a.open = func(context.Context, config.Source, *slog.Logger) (store.Store, error) { return st, nil }
	}
	code := a.run(args)
	var b strings.Builder
	fmt.Fprintf(&b, "$ outrider")
	for _, arg := range args {
		b.WriteString(" " + quote(arg))
	}
	fmt.Fprintf(&b, "\n%s", out.String())
	if errs.Len() > 0 {
		fmt.Fprintf(&b, "--- standard error\n%s", errs.String())
	}
	fmt.Fprintf(&b, "--- exit %d\n\n", code)
	return b.String()
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s differs (-want +got); go test ./internal/cli -run %s -update\n%s", file, t.Name(), diff)
	}
}

// cleanEnvironment takes away what would change the outputs.
func cleanEnvironment(t *testing.T) {
	t.Helper()
	for _, name := range []string{"OUTRIDER_DB", "OUTRIDER_CONFIG"} {
		t.Setenv(name, "")
		if err := os.Unsetenv(name); err != nil {
			t.Fatal(err)
		}
	}
}

const db = "postgres://app:s3cr3t@db/shop"

func TestLook(t *testing.T) {
	cleanEnvironment(t)
	for name, calls := range map[string][][]string{
		"status": {
			{"status", "--db", db}, {"status", "--db", db, "-o", "json"}, {"status", "-c", "testdata/two.yaml"},
			{"status", "-c", "testdata/two.yaml", "--source", "shop"},
		},
		"list": {
			{"list", "--db", db}, {"list", "--db", db, "-o", "json", "--limit", "2"},
			{"list", "--db", db, "--limit", "2", "--state", "failed", "--key", "it's", "--destination", "orders"},
			{"list", "--db", db, "--type", "None"}, {"list", "--db", db, "--type", "None", "-o", "json"},
			{"list", "--db", db, "--type", "None", "--destination", "order"}, {"list", "--db", db, "--type", "None", "--destination", "audit"},
			{"list", "-c", "testdata/two.yaml"}, {"list", "--db", db, "--state", "lost"}, {"list", "--db", db, "--limit", "0"},
		},
		"show": {
			{"show", "17", "--db", db}, {"show", "17", "--db", db, "-o", "json"}, {"show", "18", "--db", db}, {"show", "18", "--db", db, "-o", "json"},
			{"show", "19", "--db", db}, {"show", "9007199254740993", "--db", db}, {"show", "1", "--db", db}, {"show", "--db", db},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var got strings.Builder
			for _, args := range calls {
				got.WriteString(call(t, &fakeStore{relays: true}, args...))
			}
			golden(t, name, got.String())
		})
	}
}

// What a destination's match passes over is told from what was sent, as far as
// the command knows the match.
func TestNotMatched(t *testing.T) {
	cleanEnvironment(t)
	f := &fakeStore{}
	for i, e := range []store.Entry{
		{Destination: "orders", AggregateType: "order"},
		{Destination: "orders", AggregateType: "probe"},
		{Destination: "orders", AggregateType: "probe", State: store.Failed},
		{Destination: "tenants", AggregateType: "probe"}, // that has the header which is wanted
		{Destination: "strangers", AggregateType: "probe"},
		{Destination: "all", AggregateType: "probe"},
		{Destination: "elsewhere", AggregateType: "probe"}, // of another source
		{Destination: "unheard-of", AggregateType: "probe"},
	} {
		e.Row, e.EventID = fmt.Sprint(20+i), fmt.Sprintf("0190a6e2-0000-7000-8000-0000000000%d", 20+i)
		e.Type, e.AggregateID, e.Key, e.CreatedAt = "Happened", "1", "1", at
		if e.State == store.Unchanged {
			e.State = store.Published
		}
		f.entries = append(f.entries, e)
	}
	file := []string{"-c", "testdata/matched.yaml", "--source", "shop"}
	var got strings.Builder
	for _, args := range [][]string{
		append([]string{"list"}, file...), {"list", "--db", db}, append([]string{"show", "21", "-o", "json"}, file...),
		append([]string{"show", "20"}, file...), append([]string{"show", "21"}, file...), {"show", "21", "--db", db},
		append([]string{"show", "23"}, file...), append([]string{"show", "24"}, file...), append([]string{"show", "26"}, file...),
		append([]string{"retry", "21"}, file...), {"retry", "21", "--db", db},
	} {
		got.WriteString(call(t, f, args...))
	}
	golden(t, "matched", got.String())
}

func TestOperate(t *testing.T) {
	cleanEnvironment(t)
	f := &fakeStore{}
	var got strings.Builder
	for _, args := range [][]string{
		{"retry", "17", "--db", db}, {"retry", "17", "--db", db, "-o", "json", "--destination", "orders"},
		{"skip", "--key", "customer-7", "--db", db}, {"skip", "99", "--db", db}, {"retry", "--key", "nobody", "17", "--db", db},
		{"skip", "--db", db}, {"skip", "broken", "--db", db}, {"skip", "17"}, {"skip", "17", "--db", db, "-c", "x"}, {"skip", "17", "--db", "mysql://x"},
		{"status", "--db", db}, {"retry", "18", "--db", db}, {"skip", "9007199254740993", "--db", db}, {"skip", "--key", "nobody's", "--db", db},
		{"skip", "17", "--destination", "order", "--db", db},
	} {
		got.WriteString(call(t, f, args...))
	}
	got.WriteString(call(t, bareStore{}, "retry", "17", "--db", db))
	golden(t, "operate", got.String())
	want := []store.Target{{ID: "17"}, {ID: "17", Destination: "orders"}, {Key: "customer-7"}, {ID: "99"}, {ID: "broken"}, {ID: "18"}, {ID: "9007199254740993"}, {Key: "nobody's"}, {ID: "17", Destination: "order"}}
	if diff := cmp.Diff(want, f.targets); diff != "" {
		t.Errorf("targets (-want +got)\n%s", diff)
	}
}

func TestRetire(t *testing.T) {
	cleanEnvironment(t)
	var got strings.Builder
	for _, c := range []struct {
		args    string
		retired bool
	}{
		{"retire orders --dry-run", false}, {"retire orders", false}, {"retire orders --yes", true},
		{"retire audit --dry-run", false}, {"retire audit", true}, {"retire audit -o json", true}, {"retire orders --dry-run -o json", false},
		{"retire served", false}, {"retire oders --yes", false}, {"retire", false},
	} {
		f := &fakeStore{}
		got.WriteString(call(t, f, append(strings.Fields(c.args), "--db", db)...))
		if f.retired != c.retired {
			t.Errorf("%s: retired is %v", c.args, f.retired)
		}
	}
	got.WriteString(call(t, bareStore{}, "retire", "orders", "--db", db))
	golden(t, "retire", got.String())
}

func TestRebase(t *testing.T) {
	cleanEnvironment(t)
	var got strings.Builder
	for _, args := range [][]string{
		{"rebase", "--db", db, "--dry-run"}, {"rebase", "--db", db}, {"rebase", "--db", db, "-o", "json"},
	} {
		got.WriteString(call(t, &fakeStore{moved: true}, args...))
	}
	got.WriteString(call(t, &fakeStore{}, "rebase", "--db", db))
	got.WriteString(call(t, bareStore{}, "rebase", "--db", db))
	golden(t, "rebase", got.String())
}

// Help texts are part of the interface.
func TestHelp(t *testing.T) {
	cleanEnvironment(t)
	t.Setenv("COLUMNS", "100")
	var got strings.Builder
	for _, command := range []string{
		"", "demo", "dev", "run", "migrate", "migrate up", "migrate status", "migrate down", "migrate sql", "migrate doorbell", "config", "config validate",
		"status", "list", "show", "retry", "skip", "retire", "rebase", "version",
	} {
		got.WriteString(call(t, nil, append(strings.Fields(command), "--help")...))
	}
	golden(t, "help", got.String())
}

func TestUsage(t *testing.T) {
	cleanEnvironment(t)
	var got strings.Builder
	for _, args := range [][]string{
		{"lst"}, {"list", "--kee", "x"}, {"run"}, {"migrate"}, {"migrate", "sql"}, {"dev", "--db", "sqlite:x"},
		{"dev", "--db", "sqlite:x", "--to", "kafka://h"}, {"dev", "--db", "sqlite:x", "--to", "redis://h/x"},
		{"dev", "--db", "sqlite:x", "--to", "nats://h:4222/a.{tipe}"}, {"run", "-c", "testdata/absent.yaml"},
		{"migrate", "sql", "--dialect", "sqlite", "--payload", "json"}, {"migrate", "sql", "--dialect", "postgres", "--set", "rows"}, {"demo", "--script", "2s dance"}, {"demo", "--for", "2s", "--script", "9s kill"}, {"demo", "--rate", "0"},
		{"show", "-5", "--db", db}, {"show", "--db", db, "--", "-5"}, {"skip", "3", "--key"}, {"skip", "--key", "-x", "--db", db},
		{"skip", "--key=-x", "--db", db}, {"migrate", "doorbell", "maybe", "--db", db}, {"migrate", "up", "--payload", "text", "--db", db},
		{"lst", "-o", "json"}, {"show", "--output=json", "-5"}, {"show", "1", "-o", "json", "--db", db}, {"run", "-c", "testdata/wrong.yaml", "-ojson"},
		{"skip", "broken", "-o", "json", "--db", db}, {"status", "-o", "xml"}, {"status", "--source", "x", "-c", "testdata/two.yaml"}, {"status", "--source", "sho", "-c", "testdata/two.yaml"},
	} {
		got.WriteString(call(t, &fakeStore{}, args...))
	}
	golden(t, "usage", got.String())
}

func TestValidate(t *testing.T) {
	cleanEnvironment(t)
	var got strings.Builder
	for _, args := range [][]string{
		{"config", "validate", "-c", "testdata/two.yaml"}, {"config", "validate", "-c", "testdata/two.yaml", "-o", "json"},
		{"config", "validate", "-c", "testdata/wrong.yaml"}, {"config", "validate", "-c", "testdata/wrong.yaml", "-o", "json"},
		{"run", "-c", "testdata/wrong.yaml"},
		{"config", "validate", "-c", "testdata/routes.yaml"}, {"config", "validate", "-c", "testdata/routes.yaml", "-o", "json"},
	} {
		got.WriteString(call(t, nil, args...))
	}
	golden(t, "validate", got.String())
}

// --version is what people try first.
func TestVersion(t *testing.T) {
	cleanEnvironment(t)
	for _, args := range [][]string{{"--version"}, {"-o", "json", "--version"}} {
		flag, command := call(t, nil, args...), call(t, nil, append(args[:len(args)-1:len(args)-1], "version")...)
		_, flag, _ = strings.Cut(flag, "\n")
		_, command, _ = strings.Cut(command, "\n")
		if flag != command || !strings.Contains(flag, "go1.") || !strings.Contains(flag, "--- exit 0") {
			t.Errorf("%s\nand by the command\n%s", flag, command)
		}
	}
}

// sparse is a store in which one row of a thousand matches, up to some row.
func sparse(asked *[]store.ListParams, matching func(row int) bool, last int) func(store.ListParams) store.Page {
	return func(p store.ListParams) (page store.Page) {
		*asked = append(*asked, p)
		row, _ := strconv.Atoi(p.AfterRow)
		for range p.Limit {
			if row++; row > last {
				return page
			}
			if matching(row) {
				for _, d := range []string{"audit", "orders"} {
					page.Entries = append(page.Entries, store.Entry{Destination: d, Row: strconv.Itoa(row), Type: "T", Key: "k", State: store.Pending, CreatedAt: at})
				}
			}
		}
		page.Next = strconv.Itoa(row)
		return page
	}
}

// A list goes on behind what does not match, until it has what it was asked for.
func TestListGoesOn(t *testing.T) {
	cleanEnvironment(t)
	tenth := func(row int) bool { return row > 3000 && row%10 == 0 }
	for _, test := range []struct {
		args        string
		last, pages int
		want, not   []string
	}{
		{"--limit 3", 5000, 5, []string{"\n3010 ", "\n3030 ", "more: outrider list --state pending --limit 3 --after 3030 --db"}, []string{"\n3040 ", "so far"}},
		{"--limit 3 --after 3030", 5000, 2, []string{"\n3040 ", "\n3060 ", "--after 3060"}, []string{"\n3030 ", "so far"}},
		{"--limit 5", 3020, 5, []string{"\n3010 ", "\n3020 "}, []string{"more:", "so far"}},
		{"--limit 5", 2000, 3, []string{"no event matches\n"}, []string{"more:", "so far"}},
		{"--limit 5 --type Rare", 1e9, listPages, []string{"so far only up to row 999005 was looked at: events that do not match come in between\nnext: outrider list --state pending --type Rare --limit 5 --after 999005 --db"}, []string{"no event matches"}},
	} {
		t.Run(test.args, func(t *testing.T) {
			var asked []store.ListParams
			matching := tenth
			if strings.Contains(test.args, "Rare") {
				matching = func(int) bool { return false }
			}
			f := &fakeStore{page: sparse(&asked, matching, test.last)}
			got := call(t, f, append([]string{"list", "--state", "pending", "--db", db}, strings.Fields(test.args)...)...)
			got = strings.ReplaceAll(got, " --db postgres://app:xxxxx@db/shop", "")
			for _, w := range test.want {
				if !strings.Contains(got, strings.TrimSuffix(w, " --db")) {
					t.Errorf("no %q", w)
				}
			}
			for _, n := range test.not {
				if strings.Contains(got, n) {
					t.Errorf("%q is too much", n)
				}
			}
			if len(asked) != test.pages || t.Failed() {
				t.Errorf("%d pages were read, want %d\n%s", len(asked), test.pages, got)
			}
		})
	}
}

// failedStore has FAILED events of dev.
type failedStore struct{ fakeStore }

func (*failedStore) Status(context.Context) (store.Status, error) {
	return store.Status{Destinations: []store.DestinationStatus{{Name: "dev", Failed: store.Count{N: 3}}, {Name: "orders", Failed: store.Count{N: 9}}}}, nil
}

func TestDevTellsOfFailed(t *testing.T) {
	cleanEnvironment(t)
	for _, test := range []struct {
		st   store.Store
		want string
	}{
		{&failedStore{}, "earlier runs left FAILED events: 3. They are not sent again by themselves, wherever --to leads now, and hold back their keys; see: outrider list --state failed --db sqlite:x\n"},
		{&fakeStore{}, ""},
	} {
		var errs strings.Builder
		a := &app{ctx: t.Context(), err: &errs, redact: func(s string) string { return s },
			open: func(context.Context, config.Source, *slog.Logger) (store.Store, error) { return test.st, nil }}
		cfg, err := config.Adhoc("sqlite:x", "log:")
		if err != nil {
			t.Fatal(err)
		}
		if err := (&devCmd{DB: "sqlite:x"}).tellFailed(a, cfg, &selection{DB: "sqlite:x"}); err != nil || errs.String() != test.want {
			t.Errorf("%v, said %q", err, errs.String())
		}
	}
}

// What the statements are is the migrations' affair; here it counts that they
// can be piped into a client as they are, and show how to enqueue.
func TestMigrateSQL(t *testing.T) {
	for _, args := range [][]string{
		{"outbox_events", "--dialect", "postgres"}, {"outbox_events", "--dialect", "sqlite"}, {"outbox_events", "--dialect", "postgres", "--payload", "json"},
		{"outbox_rows", "--dialect", "sqlite", "--set", "rows"},
	} {
		table, args := args[0], args[1:]
		got := call(t, nil, append([]string{"migrate", "sql"}, args...)...)
		next := "-- next: outrider migrate status --db DSN\n"
		if table == "outbox_rows" {
			next = "-- next: outrider migrate status --db DSN --set rows\n"
		}
		if !strings.Contains(got, "create table "+table+" ") || !regexp.MustCompile(`(?i)insert into `+table+`\s+(--\s+)?\(aggregate_type, aggregate_id, event_type, payload, event_key\)`).MatchString(got) ||
			!strings.Contains(got, next) || !strings.Contains(got, "--- exit 0") {
			t.Errorf("%v:\n%s", args, got)
		}
	}
}

func TestMigrate(t *testing.T) {
	cleanEnvironment(t)
	t.Chdir(t.TempDir())
	if err := os.WriteFile("notes.txt", []byte(strings.Repeat("not a database\n", 100)), 0o600); err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	for _, args := range [][]string{
		{"migrate", "status", "--db", "sqlite:shop.db"}, {"migrate", "up", "--db", "sqlite:shop.db"},
		{"migrate", "status", "--db", "sqlite:shop.db"}, {"migrate", "up", "--db", "sqlite:shop.db", "-o", "json"},
		{"migrate", "status", "--db", "sqlite:shop.db"}, {"migrate", "status", "--db", "sqlite:shop.db", "-o", "json"},
		{"migrate", "up", "--db", "sqlite:shop.db", "--dialect", "postgres"}, {"migrate", "doorbell", "on", "--db", "sqlite:shop.db"}, {"migrate", "down", "--db", "sqlite:shop.db"},
		{"migrate", "up", "--db", "sqlite:rows.db", "--set", "rows"}, {"migrate", "status", "--db", "sqlite:rows.db", "--set", "rows"},
		{"migrate", "status", "--db", "sqlite:rows.db"}, {"migrate", "down", "--db", "sqlite:rows.db", "--set", "rows"},
		{"migrate", "status", "--db", "sqlite:absent.db", "--set", "rows"},
		{"status", "--db", "sqlite:other.db"}, {"migrate", "up", "--db", "sqlite:nowhere/shop.db"},
		{"migrate", "up", "--db", "sqlite:notes.txt"}, {"migrate", "status", "--db", "sqlite:notes.txt"}, {"status", "--db", "sqlite:notes.txt"},
	} {
		got.WriteString(call(t, nil, args...))
	}
	text := regexp.MustCompile(`\d{4}-\d\d-\d\dT[\d:.]+Z`).ReplaceAllString(got.String(), "TIME")
	if wd, err := os.Getwd(); err == nil {
		text = strings.ReplaceAll(text, wd, "DIR")
	}
	t.Chdir(startDir)
	golden(t, "migrate", text)
}

// startDir is where the package's files are.
var startDir, _ = os.Getwd()
