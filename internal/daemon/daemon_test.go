package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/config"
	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/memstore"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/relay"
)

func TestCleanupsRunInReverse(t *testing.T) {
	var c cleanups
	var order []string
	for _, name := range []string{"first", "second", "third"} {
		c.add(name, func(context.Context) error {
			order = append(order, name)
			if name != "first" {
				return errors.New("no")
			}
			return nil
		})
	}
	err := c.run(t.Context())
	if diff := cmp.Diff([]string{"third", "second", "first"}, order); diff != "" {
		t.Error(diff)
	}
	if err == nil || err.Error() != "close third: no\nclose second: no" {
		t.Errorf("%v", err)
	}
	if err := c.run(t.Context()); err != nil || len(order) != 3 {
		t.Errorf("a second time: %v, %v", err, order)
	}
}

func load(t *testing.T, text string) *config.Config {
	t.Helper()
	c, err := config.Parse("outrider.yaml", []byte(text), os.LookupEnv)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Each field of the engine's configuration is given, or the file's default
// would not be the one in force.
func TestRelayConfigIsWhole(t *testing.T) {
	c := load(t, "relay: {name: x, key_share: 7}\nsources: [{name: s, sqlite: {path: x}}]\ndestinations: [{name: d, log: {}, retry: {max_age: 1h}, order: skip, from: earliest, to: x}]")
	rc := relayConfig(c.Relay, memstore.New(memstore.Config{}), slog.Default())
	rd := relayDestination(c.Destinations[0], nil)
	given := func(v any, not ...string) {
		s := reflect.ValueOf(v)
		for i := range s.NumField() {
			name := s.Type().Field(i).Name
			if s.Field(i).IsZero() && !slices.Contains(not, name) {
				t.Errorf("%T.%s is not given", v, name)
			}
		}
	}
	given(rc, "Destinations", "Hooks", "Gate")
	given(rd, "Sink")
	given(rd.Retry)
	given(rd.Breaker)
	for _, test := range []struct {
		yaml string
		want func(relay.Retry) bool
	}{
		{"{immediate: 0}", func(r relay.Retry) bool { return r.Immediate < 0 }},
		{"{max_attempts: unlimited}", func(r relay.Retry) bool { return r.MaxAttempts < 0 }},
		{"{max_age: unlimited}", func(r relay.Retry) bool { return r.MaxAge == 0 }},
	} {
		c := load(t, "sources: [{name: s, sqlite: {path: x}}]\ndestinations: [{name: d, log: {}, retry: "+test.yaml+"}]")
		if r := relayDestination(c.Destinations[0], nil).Retry; !test.want(r) {
			t.Errorf("%s: %+v", test.yaml, r)
		}
	}
}

// What the file takes, the engine takes: bounds agree.
func TestRelayTakesDefaults(t *testing.T) {
	c := load(t, "sources: [{name: s, sqlite: {path: x}}]\ndestinations: [{name: d, log: {}}]")
	k, err := newSink(c.Destinations[0], os.Stderr, slog.Default())
	if err != nil {
		t.Fatal(err)
	}
	rc := relayConfig(c.Relay, memstore.New(memstore.Config{}), slog.Default())
	rc.Destinations = []relay.Destination{relayDestination(c.Destinations[0], k)}
	if _, err := relay.New(rc); err != nil {
		t.Error(err)
	}
}

// startError is what New says, with its hint.
func startError(t *testing.T, yaml string) string {
	t.Helper()
	d, err := New(t.Context(), Options{Config: load(t, yaml), Logger: slog.New(slog.DiscardHandler), Stdout: os.Stderr})
	if err == nil {
		_ = d.close(t.Context())
		return "started"
	}
	return strings.Join(strings.Fields(err.Error()+" | "+outrider.Hint(err)), " ")
}

const toLog = "\ndestinations: [{name: d, log: {}}]"

func TestStartErrors(t *testing.T) {
	dir := t.TempDir()
	unmigrated := filepath.Join(dir, "empty.db")
	if err := os.WriteFile(unmigrated, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	good := filepath.Join(dir, "good.db")
	up(t, "sqlite:"+good)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for name, test := range map[string]struct{ yaml, want string }{
		"no file":                          {fmt.Sprintf("sources: [{name: s, sqlite: {path: %q}}]", filepath.Join(dir, "x.db")) + toLog, "no such file or directory | make the database with: outrider migrate up"},
		"no tables":                        {fmt.Sprintf("sources: [{name: s, sqlite: {path: %q}}]", unmigrated) + toLog, "the outbox has not been migrated"},
		"no server":                        {"sources: [{name: s, postgres: {dsn: 'postgres://u@127.0.0.1:1/x'}}]" + toLog, "connection refused | look at host, port and database of the DSN"},
		"no DSN":                           {"sources: [{name: s, postgres: {dsn: 'postgres://u@[x/y'}}]" + toLog, "| write postgres://"},
		"port taken":                       {fmt.Sprintf("listen: %s\nsources: [{name: s, sqlite: {path: %q}}]", taken.Addr(), good) + toLog, "address already in use | choose another address by listen"},
		"broker away, which is waited for": {fmt.Sprintf("listen: off\nsources: [{name: s, sqlite: {path: %q}}]\ndestinations: [{name: d, kafka: {brokers: ['127.0.0.1:1']}, to: x}]", good), "started"},
		"log into nowhere":                 {fmt.Sprintf("listen: off\nsources: [{name: s, sqlite: {path: %q}}]\ndestinations: [{name: d, log: {file: %q}}]", good, filepath.Join(dir, "no", "log")), "no such file or directory | look at the path: the folder has to exist"},
		"CA missing":                       {fmt.Sprintf("listen: off\nsources: [{name: s, sqlite: {path: %q}}]\ndestinations: [{name: d, nats: {urls: ['nats://127.0.0.1:1'], tls: {ca_file: nowhere}}, to: x}]", good), "nowhere: no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := startError(t, test.yaml); !strings.Contains(got, test.want) {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
		})
	}
}

// up migrates a database.
func up(t *testing.T, dsn string) {
	t.Helper()
	c, err := config.Adhoc(dsn, "")
	if err != nil {
		t.Fatal(err)
	}
	db, dialect, err := OpenDB(c.Sources[0])
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := migrate.Up(t.Context(), db, migrate.Options{Dialect: dialect}); err != nil {
		t.Fatal(err)
	}
}

func TestStartErrorsOfPostgres(t *testing.T) {
	dsn := testdb.Postgres(t)
	source := func(dsn string) string {
		return fmt.Sprintf("listen: off\nsources: [{name: s, postgres: {dsn: %q}}]", dsn)
	}
	check := func(name, yaml, want string) {
		t.Helper()
		if got := startError(t, yaml); !strings.Contains(got, want) {
			t.Errorf("%s:\ngot  %s\nwant %s", name, got, want)
		}
	}
	check("no tables", source(dsn)+toLog, "the outbox has not been migrated")
	check("no database", source(strings.Replace(dsn, testdb.DatabaseName(t, dsn), "nowhere", 1))+toLog, "there is no such database")
	up(t, dsn)
	check("all well", source(dsn)+toLog, "started")
	check("pooler", source(testdb.Pooler(t, testdb.DatabaseName(t, dsn)))+toLog, "pooler")
	check("no topic", source(dsn)+fmt.Sprintf("\ndestinations: [{name: d, kafka: {brokers: [%q]}, to: daemon-no-such-topic}]", testdb.Kafka(t)),
		`destination d: kafka: topic "daemon-no-such-topic"`)
	check("no stream", source(dsn)+fmt.Sprintf("\ndestinations: [{name: d, nats: {urls: [%q]}, to: daemon.no.such.subject}]", testdb.NATS(t)), "daemon.no.such.subject")

	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	role := testdb.DatabaseName(t, dsn) + "_weak"
	if _, err := conn.Exec(t.Context(), fmt.Sprintf("create role %q login", role)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = conn.Exec(context.Background(), fmt.Sprintf("drop role %q", role)) })
	check("no rights", source(strings.Replace(dsn, "postgres@", role+"@", 1))+toLog, "lacks rights: SELECT on outbox_migrations, SELECT on outbox_events, SELECT, INSERT, UPDATE on outbox_source and more | grant select on outbox_migrations to "+role+"; grant select on outbox_events to ")

	if _, err := conn.Exec(t.Context(), "alter table outbox_events drop column headers"); err != nil {
		t.Fatal(err)
	}
	check("changed tables", source(dsn)+toLog, "changed by something else")
	if _, err := conn.Exec(t.Context(), "update outbox_migrations set version = version + 1"); err != nil {
		t.Fatal(err)
	}
	check("newer schema", source(dsn)+toLog, "newer than this program")
}

func TestReadinessTellsReasons(t *testing.T) {
	d := &Daemon{redact: func(s string) string { return strings.ReplaceAll(s, "s3cr3t", "***") }}
	for _, test := range []struct {
		name    string
		h       relay.Health
		ready   bool
		reasons string
	}{
		{"at work", relay.Health{Running: true, Relays: 1}, true, ""},
		{"not joined", relay.Health{}, false, "the relay has not joined the database, or has left it"},
		{"starved", relay.Health{Running: true, Starved: true, Renewed: 1500 * time.Millisecond}, false, "leases could not be renewed for 1.5 s; nothing is sent until they are"},
		{"store away", relay.Health{Running: true, StoreError: "s3cr3t"}, true, "the database cannot be asked: ***"},
		{"store away, and what to do", relay.Health{Running: true, StoreError: "full", StoreHint: "make room", StoreFailing: time.Second}, true,
			"the database cannot be asked: full (make room)"},
		{"stuck", relay.Health{Running: true, Stuck: true, StoreError: "s3cr3t", StoreHint: "grant it", StoreFailing: 2500 * time.Millisecond}, false,
			"the database cannot be asked for 2.5 s: *** (grant it)"},
		{"maintenance", relay.Health{Running: true, MaintainError: "no partitions", MaintainHint: "make some"}, true, "maintenance: no partitions (make some)"},
		{"destination down", relay.Health{Running: true, Destinations: []relay.DestinationHealth{{Name: "k", Circuit: "open", Down: 2 * time.Second, Error: "refused"}}}, true,
			"destination k has been down for 2.0 s: refused"},
	} {
		r := d.sourceReadiness("s", test.h)
		if got := strings.Join(append(r.Reasons, r.Notes...), "; "); r.Ready != test.ready || r.Ready != (len(r.Reasons) == 0) || got != test.reasons {
			t.Errorf("%s: ready %v, %q", test.name, r.Ready, got)
		}
	}
}
