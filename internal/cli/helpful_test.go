package cli

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outrider-dev/outrider/internal/config"
	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/store"
)

// expect runs command lines and looks for what has to be, and must not be, in
// what they print.
type expectation struct {
	name string
	st   store.Store
	args []string
	want []string
	not  []string
}

func (x expectation) check(t *testing.T) {
	t.Helper()
	got := call(t, x.st, x.args...)
	for _, w := range x.want {
		if !strings.Contains(got, w) {
			t.Errorf("%s: no %q in\n%s", x.name, w, got)
		}
	}
	for _, n := range x.not {
		if strings.Contains(got, n) {
			t.Errorf("%s: %q is too much in\n%s", x.name, n, got)
		}
	}
}

// severalStore shows one event as it stands with several destinations, none of
// which has anything to decide.
type severalStore struct {
	fakeStore
	stand []store.Entry
}

func (s *severalStore) Show(ctx context.Context, _ string) ([]store.Detail, error) {
	d, err := s.fakeStore.Show(ctx, "18")
	d[0].Entries = s.stand
	return d, err
}

func (*severalStore) Skip(context.Context, store.Target) (int, error)  { return 0, nil }
func (*severalStore) Retry(context.Context, store.Target) (int, error) { return 0, nil }

// What still waits with one destination is told, not what is over with another,
// in whichever order they come.
func TestHintOfSeveralDestinations(t *testing.T) {
	cleanEnvironment(t)
	published := store.Entry{Destination: "b", State: store.Published}
	held := store.Entry{Destination: "a", State: store.Pending, Reason: "held behind 17"}
	isNew := store.Entry{Destination: "n", State: store.Pending, Reason: "new"}
	gone := store.Entry{Destination: "d", State: store.Discarded}
	other := store.Entry{Destination: "orders", State: store.Published} // not matched, by the file
	file, dsn := []string{"-c", "testdata/matched.yaml", "--source", "shop"}, []string{"--db", db}
	for _, test := range []struct {
		name       string
		x, y       store.Entry
		with       []string
		hint, says string
	}{
		{"held and done", held, published, dsn, "outrider show 17", "it is done"},
		{"held and new", held, isNew, dsn, "outrider show 17", "as soon as its turn comes"},
		{"new and done", isNew, published, dsn, "as soon as its turn comes", "it is done"},
		{"held and not matched", held, other, file, "outrider show 17", "match does not want it"},
		{"skipped and not matched", gone, other, file, "it was skipped before", "match does not want it"},
		{"skipped and done", gone, published, dsn, "it was skipped before", "it is done"},
		{"done and not matched", published, other, file, "it is done", "match does not want it"},
	} {
		for _, stand := range [][]store.Entry{{test.x, test.y}, {test.y, test.x}} {
			for _, command := range []string{"retry", "skip"} {
				expectation{test.name, &severalStore{stand: stand}, append([]string{command, "18"}, test.with...), []string{"hint: ", test.hint}, []string{test.says}}.check(t)
			}
		}
	}
}

// What is said after a deed is true of that event and now.
func TestSaidAfterwards(t *testing.T) {
	cleanEnvironment(t)
	single := entries[0]
	single.Key, single.Unordered = "", true
	for _, x := range []expectation{
		{"retry, a relay runs", &fakeStore{relays: true}, []string{"retry", "17", "--db", db}, []string{"1 event: due now; a relay sends it\n"}, nil},
		{"retry, none runs", &fakeStore{}, []string{"retry", "17", "--db", db}, []string{"1 event: due now; no relay is running, and the next that does sends it\n"}, nil},
		{"skip", &fakeStore{}, []string{"skip", "17", "--db", db}, []string{"1 event: discarded; the key goes on\n"}, nil},
		{"skip of a key", &fakeStore{}, []string{"skip", "--key", "customer-7", "--db", db}, []string{"1 event: discarded; the key goes on\n"}, nil},
		{"skip of an unordered one", &fakeStore{entries: []store.Entry{single}}, []string{"skip", "17", "--db", db}, []string{"1 event: discarded\n"}, nil},
	} {
		x.check(t)
	}
}

// A next page is offered if there is one.
func TestListOffersMore(t *testing.T) {
	cleanEnvironment(t)
	for _, test := range []struct {
		name string
		last int
		more bool
	}{{"nothing behind", 3015, false}, {"one behind", 3020, true}, {"far behind", 9000, true}} {
		var asked []store.ListParams
		f := &fakeStore{page: sparse(&asked, func(row int) bool { return row == 3010 || row == test.last && test.more }, test.last)}
		x := expectation{name: test.name, st: f, args: []string{"list", "--limit", "1", "--after", "3009", "--db", db}, want: []string{"\n3010 "}}
		if test.more {
			x.want = append(x.want, "more: outrider list --db postgres://app:xxxxx@db/shop --limit 1 --after ")
		} else {
			x.not = []string{"more:"}
		}
		x.check(t)
	}
}

// A flag counts more than the environment.
func TestFlagOverEnvironment(t *testing.T) {
	cleanEnvironment(t)
	const both, either = "--db and --config exclude each other", "OUTRIDER_DB and OUTRIDER_CONFIG are both set: choose by --db or --config"
	for _, test := range []struct {
		name, db, file string
		args           []string
		want, not      string
	}{
		{"-c over OUTRIDER_DB", "sqlite:other.db", "", []string{"status", "-c", "testdata/matched.yaml", "--source", "shop"}, "next: outrider list --state failed -c testdata/matched.yaml --source shop\n", "sqlite:"},
		{"--db over OUTRIDER_CONFIG", "", "testdata/matched.yaml", []string{"status", "--db", "sqlite:other.db"}, "next: outrider list --state failed --db sqlite:other.db\n", "-c "},
		{"--db over both", "sqlite:other.db", "testdata/matched.yaml", []string{"status", "--db", "sqlite:other.db"}, "next: outrider list --state failed --db sqlite:other.db\n", "-c "},
		{"both flags", "", "", []string{"status", "--db", "sqlite:x", "-c", "y"}, both, either},
		{"both in the environment", "sqlite:x", "y", []string{"status"}, either, both},
		{"one in the environment", "sqlite:x", "", []string{"status"}, "next: outrider list --state failed\n", "--db"},
	} {
		t.Setenv("OUTRIDER_DB", test.db)
		t.Setenv("OUTRIDER_CONFIG", test.file)
		expectation{test.name, &fakeStore{relays: true}, test.args, []string{test.want}, []string{test.not + "\n"}}.check(t)
		got := call(t, &fakeStore{relays: true}, test.args...)
		if _, said, _ := strings.Cut(got, "\n"); strings.Contains(said, test.not) {
			t.Errorf("%s: %q is too much in\n%s", test.name, test.not, got)
		}
	}
}

func TestUnknownCommand(t *testing.T) {
	cleanEnvironment(t)
	for _, x := range []expectation{
		{"foo", nil, []string{"foo"}, []string{"error: unknown command foo\n", "hint: there are demo, dev, run, migrate, ", ", rebase, version: outrider --help\n--- exit 2"}, nil},
		{"below", nil, []string{"migrate", "foo"}, []string{"error: unknown command foo\n", "hint: there are up, status, down, doorbell, sql: outrider migrate --help\n"}, nil},
		{"near", nil, []string{"lst"}, []string{`error: unknown command lst, did you mean "list"?`}, nil},
		{"an argument too many", nil, []string{"show", "1", "2"}, []string{"unexpected argument 2\nhint: outrider show --help"}, nil},
	} {
		x.check(t)
	}
}

func TestMigrateToVersion(t *testing.T) {
	cleanEnvironment(t)
	t.Chdir(t.TempDir())
	file := []string{"--db", "sqlite:shop.db"}
	if got := call(t, nil, append([]string{"migrate", "up"}, file...)...); !strings.Contains(got, "--- exit 0") {
		t.Fatal(got)
	}
	for _, x := range []expectation{
		{"there already", nil, append([]string{"migrate", "down", "--to", "1"}, file...), []string{"nothing to do: the tables are at version 1 already\n", "--- exit 0"}, []string{"no tables"}},
		{"down to none such", nil, append([]string{"migrate", "down", "--to", "5"}, file...), []string{"error: migrate down: there is no such version: 5, the newest is 1\nhint: outrider migrate down --help\n--- exit 2"}, nil},
		{"up to none such", nil, append([]string{"migrate", "up", "--to", "99"}, file...), []string{"error: migrate up: there is no such version: 99, the newest is 1\nhint: outrider migrate up --help\n--- exit 2"}, nil},
		{"down", nil, append([]string{"migrate", "down"}, file...), []string{"removed 0001"}, nil},
		{"nothing there", nil, append([]string{"migrate", "down"}, file...), []string{"nothing to do: there are no tables\n"}, nil},
	} {
		x.check(t)
	}
}

// Ids are what operators copy.
func TestListShowsIDs(t *testing.T) {
	cleanEnvironment(t)
	expectation{"list", &fakeStore{}, []string{"list", "--db", db}, []string{"ROW", "EVENT", "\n17 ", "0190a6e2-0000-7000-8000-000000000017  2026-"}, nil}.check(t)
	expectation{"hint", &fakeStore{}, []string{"show", "1", "--db", db}, []string{" shows both"}, nil}.check(t)
}

// countStore has what waits, by destination, and no relay.
type countStore struct {
	fakeStore
	destinations []store.DestinationStatus
}

func (s *countStore) Status(context.Context) (store.Status, error) {
	return store.Status{Destinations: s.destinations}, nil
}

// What waits is counted by destination, and what is due later does not wait for
// a relay.
func TestStatusCountsWaiting(t *testing.T) {
	cleanEnvironment(t)
	one := store.Count{N: 1}
	for _, x := range []expectation{
		{"two destinations", &countStore{destinations: []store.DestinationStatus{{Name: "a", Pending: one, Waiting: one, Scheduled: one}, {Name: "b", Publishing: one}, {Name: "c", Scheduled: one}}},
			[]string{"status", "--db", db}, []string{"warning: no relay is running, and events wait to be sent: 2 to a, 1 to b; start one: outrider run"}, nil},
		{"due later only", &countStore{destinations: []store.DestinationStatus{{Name: "a", Scheduled: one}}},
			[]string{"status", "--db", db}, []string{"no relay is running\n"}, []string{"warning:"}},
	} {
		x.check(t)
	}
}

// After a restore into another cluster, what helps is rebase, and a relay that
// cannot join does not say that it is at work.
func TestRestoredDatabase(t *testing.T) {
	cleanEnvironment(t)
	dsn := testdb.Postgres(t)
	mustRun(t, "migrate", "up", "--db", dsn)
	file := writeConfig(t, fmt.Sprintf(`
listen: "off"
sources: [{name: shop, postgres: {dsn: %q}}]
destinations: [{name: orders, log: {}}]
`, dsn))
	p := start(t, "run", "-c", file)
	p.wait(t, "msg=(relaying)")
	p.signal(t, syscall.SIGTERM)
	if code := p.end(t); code != exitOK {
		t.Fatalf("exit %d:\n%s", code, p.said())
	}
	if said := p.said(); strings.Contains(said, `=""`) || !strings.Contains(said, "outrider status -c ") {
		t.Errorf("an attribute without a value, or no word of what is next:\n%s", said)
	}
	database, err := sql.Open("pgx", dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer database.Close()
	moved, err := database.ExecContext(t.Context(), "update outbox_source set system_identifier = '7'")
	if err != nil {
		t.Fatal(err)
	}
	if n, err := moved.RowsAffected(); err != nil || n != 1 {
		t.Fatalf("%d rows, %v: the relay that said it was at work had not joined", n, err)
	}
	enqueue(t, dsn, 1)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	got := callWithin(ctx, nil, "status", "-c", file)
	if !strings.Contains(got, "events wait to be sent: 1 to orders\n") || !strings.Contains(got, "next: outrider rebase --dry-run -c "+file+"\n") {
		t.Errorf("rebase is not what is next:\n%s", got)
	}
	got = callWithin(ctx, nil, "run", "-c", file)
	if strings.Contains(got, "relaying") || strings.Contains(got, "started") || !strings.Contains(got, "this is another cluster") {
		t.Errorf("a relay that could not join says:\n%s", got)
	}
}

// An attribute without a value says nothing.
func TestLogLeavesOutEmptyAttributes(t *testing.T) {
	for _, format := range []string{"text", "json"} {
		var errs strings.Builder
		a := &app{err: &errs, redact: func(s string) string { return s }}
		a.logger(config.Log{Level: "info", Format: format}).Warn("it is so", "hint", "", "destination", "", "address", "", "event", "17", "n", 0)
		got := errs.String()
		for _, key := range []string{"hint", "destination", "address"} {
			if strings.Contains(got, key) {
				t.Errorf("%s: %s stands in %s", format, key, got)
			}
		}
		for _, kept := range []string{"it is so", "17", "event", "n", "WARN", time.Now().Format("2006")} {
			if !strings.Contains(got, kept) {
				t.Errorf("%s: no %s in %s", format, kept, got)
			}
		}
	}
}
