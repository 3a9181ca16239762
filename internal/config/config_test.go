package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
)

// environment is what the files of the tests refer to.
func environment(name string) (string, bool) {
	v, ok := map[string]string{
		"DSN": "postgres://app:s3cr3t@db:5432/shop", "TOPIC": "orders", "PORT": "9000", "EMPTY": "",
		"INJECT": "x}\nallow_remote: true", "PASSWORD": "hunter22",
	}[name]
	return v, ok
}

// minimal is a file without what is in the replaced parts.
func minimal(destination string) string {
	return "sources:\n- name: shop\n  postgres: {dsn: {env: DSN}}\ndestinations:\n- name: out\n" + destination
}

func TestFull(t *testing.T) {
	data, err := os.ReadFile("testdata/full.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c, err := Parse("testdata/full.yaml", data, environment)
	if err != nil {
		t.Fatal(err)
	}
	for _, check := range []struct {
		name      string
		got, want any
	}{
		{"listen", c.Listen, "127.0.0.1:9000"},
		{"level", c.Log.Level, "debug"},
		{"max_bytes", c.Relay.MaxBytes, Size(4 << 20)},
		{"key_share", c.Relay.KeyShare, -1},
		{"lease_ttl by default", c.Relay.LeaseTTL, 15 * time.Second},
		{"soft_timeout none", c.Relay.SoftTimeout, time.Duration(-1)},
		{"dsn", c.Sources[0].Postgres.DSN.Reveal(), "postgres://app:s3cr3t@db:5432/shop"},
		{"sqlite path", c.Sources[1].SQLite.Path, Path(filepath.Join("testdata", "local.db"))},
		{"kafka password", c.Destinations[0].Kafka.SASL.Password.Reveal(), "from a file"},
		{"tls", c.Destinations[0].Kafka.TLS != nil, true},
		{"routes", len(c.Destinations[0].Routes), 2},
		{"match", c.Destinations[0].Match.Match(&outrider.Record{Event: outrider.Event{Type: "OrderPlaced"}}), true},
		{"to, interpolated", c.Destinations[1].To.String(), "orders.{type|dot}"},
		{"from", c.Destinations[1].From, "earliest"},
		{"max_attempts unlimited", c.Destinations[1].Retry.MaxAttempts, -1},
		{"max_age by default", c.Destinations[1].Retry.MaxAge, time.Duration(-1)},
		{"immediate 0", c.Destinations[1].Retry.Immediate, 0},
		{"log", c.Destinations[2].Log != nil && c.Destinations[2].Log.File == "", true},
	} {
		if !reflect.DeepEqual(check.got, check.want) {
			t.Errorf("%s: %#v, want %#v", check.name, check.got, check.want)
		}
	}
}

func TestProblems(t *testing.T) {
	const kafka = "  kafka: {brokers: ['k:9092']}\n"
	for _, test := range []struct{ name, file, want string }{
		{"empty", "", "f:1: sources: is missing\nf:1: destinations: is missing"},
		{"too large", strings.Repeat("#\n", maxFile), "f:1: has more than 262144 bytes"},
		{"not a map", "- a", "f:1: the file has to be a map of keys to values"},
		{"not YAML", "a: [1,\nb: {", "f:2: is not valid YAML"},
		{"template without quotes", minimal(kafka + "  to: {aggregate_type}-events\n"), `f:7: is not valid YAML: a value that begins with { has to be put in quotes, or it is read as a map: to: "{aggregate_type}-events"`},
		{"two fields without quotes", minimal(kafka + "  to: {type|kebab}{key}\n"), `quotes, or it is read as a map: to: "{type|kebab}{key}"`},
		{"template in a map without quotes", minimal(kafka + "  routes: [{to: {type}-x}]\n"), `quotes, or it is read as a map: to: "{type}-x"`},
		{"field without quotes", minimal(kafka + "  to: {type}\n"), `f:7: destinations[0].to: is a map, want a value; a value that begins with { has to be put in quotes`},
		{"scheme of another database", strings.Replace(minimal(kafka+"  to: a\n"), "{env: DSN}", "'mysql://app:s3cr3t@h/x'", 1), "f:3: sources[0].postgres.dsn: has the scheme mysql, want postgres://USER"},
		{"password before a scheme", strings.Replace(minimal(kafka+"  to: a\n"), "{env: DSN}", "'S3cr3t!://h/x'", 1), "f:3: sources[0].postgres.dsn: has the scheme another, want postgres://USER"},
		{"SQLite's file as a DSN", strings.Replace(minimal(kafka+"  to: a\n"), "{env: DSN}", "'sqlite:shop.db'", 1), "f:3: sources[0].postgres.dsn: is a file of SQLite; write sqlite: {path: ...}"},
		{"DSN without form", strings.Replace(minimal(kafka+"  to: a\n"), "{env: DSN}", "'localhost'", 1), "f:3: sources[0].postgres.dsn: is neither a URL nor key=value pairs"},
		{"DSN as a path", strings.Replace(minimal(kafka+"  to: a\n"), "postgres: {dsn: {env: DSN}}", "sqlite: {path: 'postgres://h/x'}", 1), "f:3: sources[0].sqlite.path: is an address, want the path of a file"},
		{"path with a scheme", strings.Replace(minimal(kafka+"  to: a\n"), "postgres: {dsn: {env: DSN}}", "sqlite: {path: 'sqlite:x.db'}", 1), "f:3: sources[0].sqlite.path: begins with sqlite:, want the path alone"},
		{"port of listen", "listen: 127.0.0.1:99999\n" + minimal(kafka+"  to: a\n"), `f:1: listen: has the port "99999", want 1 to 65535, or 0 for a free one`},
		{"port of a broker", minimal("  kafka: {brokers: ['k:90922']}\n  to: a\n"), `f:6: destinations[0].kafka.brokers[0]: has the port "90922"`},
		{"port of a server", minimal("  nats: {urls: ['nats://h:70000']}\n  to: a\n"), `f:6: destinations[0].nats.urls[0]: has the port "70000"`},
		{"topic", minimal(kafka + "  to: 'order events'\n"), `f:7: destinations[0].to: is "order events": has other characters`},
		{"subject for many", minimal("  nats: {urls: ['nats://h']}\n  routes: [{to: 'shop.>'}]\n"), `f:7: destinations[0].routes[0].to: is "shop.>": has * or >`},
		{"subject with a hole", minimal("  nats: {urls: ['nats://h']}\n  to: 'shop..{type}'\n"), `has nothing between two dots`},
		{"unknown key", minimal(kafka + "  to: a\n  ordr: skip\n"), `f:8: destinations[0].ordr: unknown key; did you mean "order"?`},
		{"unknown key, none near", minimal(kafka + "  to: a\n  xyzzyplugh: 1\n"), "f:8: destinations[0].xyzzyplugh: unknown key; there are name, source, kafka"},
		{"unknown key at the top", "lisen: off\n" + minimal(kafka+"  to: a\n"), `f:1: lisen: unknown key; did you mean "listen"?`},
		{"twice", minimal(kafka + "  to: a\n  to: b\n"), `f:8: is not valid YAML: mapping key "to" already defined`},
		{"twice, once in quotes", minimal(kafka + "  to: a\n  \"to\": b\n"), "f:8: "},
		{"wrong kind", minimal("  kafka: {brokers: 'k:9092'}\n  to: a\n"), "f:6: destinations[0].kafka.brokers: is a value, want a list; write it as [...]"},
		{"braces without quotes", minimal(kafka + "  to: {type}\n"), "f:7: destinations[0].to: is a map, want a value; a value that begins with { has to be put in quotes"},
		{"number", "relay: {max_records: many}\n" + minimal(kafka+"  to: a\n"), `f:1: relay.max_records: is "many": want a whole number`},
		{"special", "relay: {key_share: many}\n" + minimal(kafka+"  to: a\n"), `f:1: relay.key_share: is "many": want a whole number, or unlimited`},
		{"range", "relay:\n  max_records: 0\n" + minimal(kafka+"  to: a\n"), "f:2: relay.max_records: is 0, want 1 to 100000"},
		{"duration without unit", "relay:\n  grace: 5\n" + minimal(kafka+"  to: a\n"), `f:2: relay.grace: is "5": want a duration with its unit`},
		{"negative duration", "relay:\n  grace: -5s\n" + minimal(kafka+"  to: a\n"), `f:2: relay.grace: is "-5s": want a duration that is not negative`},
		{"size", "relay:\n  max_bytes: 5MB\n" + minimal(kafka+"  to: a\n"), `f:2: relay.max_bytes: is "5MB": want a number of bytes`},
		{"size range", "relay:\n  max_bytes: 5\n" + minimal(kafka+"  to: a\n"), "f:2: relay.max_bytes: is 5, want 1KiB to 1GiB"},
		{"bool", "allow_remote: yes\n" + minimal(kafka+"  to: a\n"), `f:1: allow_remote: is "yes": want true or false`},
		{"enum", minimal(kafka + "  to: a\n  order: blok\n"), `f:8: destinations[0].order: is "blok", want block, skip; did you mean "block"?`},
		{"no value", minimal(kafka + "  to:\n"), "f:7: destinations[0].to: has no value"},
		{"missing in a block", minimal("  kafka:\n    client_id: x\n  to: a\n"), "f:7: destinations[0].kafka.brokers: is missing"},
		{"no kind", minimal("  to: a\n"), "f:5: destinations[0]: says nothing of its kind: one of kafka, nats, log is needed"},
		{"no kind, and something else", minimal("  to: a\n  publish_timeout: 5\n"), "f:5: destinations[0]: says nothing of its kind: one of kafka, nats, log is needed\nf:7: destinations[0].publish_timeout: "},
		{"no place, and something else", minimal(kafka + "  order: blok\n"), "f:5: destinations[0]: says nothing of where events go: to or routes is needed\nf:7: destinations[0].order: "},
		{"two kinds", minimal(kafka + "  log: {}\n  to: a\n"), "f:5: destinations[0]: has kafka and log; exactly one of them can be"},
		{"no place", minimal(kafka), "f:5: destinations[0]: says nothing of where events go: to or routes is needed"},
		{"two places", minimal(kafka + "  to: a\n  routes: [{to: b}]\n"), "f:7: destinations[0].to: stands beside routes"},
		{"match", minimal(kafka + "  to: a\n  match: typ:x\n"), `f:8: destinations[0].match: "typ:x", column 1: unknown field "typ"; did you mean "type"?`},
		{"template", minimal(kafka + "  to: 'a-{tipe}'\n"), `f:7: destinations[0].to: "a-{tipe}", column 4: unknown field "tipe"; did you mean "type"?`},
		{"source", minimal(kafka + "  to: a\n  source: shp\n"), `f:8: destinations[0].source: there is no source "shp"; did you mean "shop"?`},
		{"name", strings.Replace(minimal(kafka+"  to: a\n"), "name: out", "name: Out!", 1), `f:5: destinations[0].name: is "Out!", want up to 63 small letters`},
		{"unused source", "sources: [{name: a, sqlite: {path: a}}, {name: b, sqlite: {path: b}}]\ndestinations: [{name: d, source: a, log: {}}]", "f:1: sources[1].name: no destination takes its events"},
		{"same name", "sources: [{name: a, sqlite: {path: a}}]\ndestinations:\n- {name: d, log: {}}\n- {name: d, log: {}}", `f:4: destinations[1].name: "d" is used twice`},
		{"broker", minimal("  kafka: {brokers: [k]}\n  to: a\n"), `f:6: destinations[0].kafka.brokers[0]: is "k", want host:port`},
		{"nats login", minimal("  nats: {urls: ['nats://me:you@n:4222']}\n  to: a\n"), "f:6: destinations[0].nats.urls[0]: holds a login"},
		{"half a login", minimal("  nats: {urls: ['nats://n:4222'], user: me}\n  to: a\n"), "f:6: destinations[0].nats: has one of user and password"},
		{"half a certificate", minimal("  nats: {urls: ['nats://n:4222'], tls: {cert_file: x}}\n  to: a\n"), "f:6: destinations[0].nats.tls: has one of cert_file and key_file"},
		{"remote", "listen: ':9477'\n" + minimal(kafka+"  to: a\n"), "f:1: listen: :9477 can be reached by others"},
		{"remote by name", "listen: 'example.org:9477'\n" + minimal(kafka+"  to: a\n"), "f:1: listen: example.org:9477 can be reached"},
		{"listen", "listen: '9477'\n" + minimal(kafka+"  to: a\n"), `f:1: listen: is "9477", want host:port, or off`},
		{"grace", "relay:\n  grace: 20s\n" + minimal(kafka+"  to: a\n"), "f:2: relay.grace: is 20s, more than lease_ttl (15s)"},
		{"caps", minimal(kafka + "  to: a\n  retry: {base: 1h}\n"), "f:8: destinations[0].retry.cap: is 5m0s, less than base (1h0m0s)"},
		{"environment", minimal(kafka + "  to: ${NOWHERE}\n"), "f:7: destinations[0].to: the environment variable NOWHERE is not set; set it, or write ${NOWHERE:-default}"},
		{"environment, not closed", minimal(kafka + "  to: ${NOWHERE\n"), "f:7: destinations[0].to: ${ is not closed"},
		{"secret's environment", "sources: [{name: s, postgres: {dsn: {env: NOWHERE}}}]\ndestinations: [{name: d, log: {}}]", "f:1: sources[0].postgres.dsn: the environment variable NOWHERE is not set"},
		{"secret's file", "sources: [{name: s, postgres: {dsn: {file: nowhere}}}]\ndestinations: [{name: d, log: {}}]", "f:1: sources[0].postgres.dsn: open nowhere: no such file"},
		{"secret's reference", "sources: [{name: s, postgres: {dsn: {vault: x}}}]\ndestinations: [{name: d, log: {}}]", `f:1: sources[0].postgres.dsn: unknown key "vault"; want exactly one of {env: NAME} and {file: PATH}`},
		{"anchor", minimal("  kafka: &k {brokers: ['k:9092']}\n  to: a\n"), "f:6: anchors and aliases are not supported"},
		{"tag", minimal("  to: !!str a\n"), "f:6: tags such as !!str are not supported"},
		{"two documents", "a: 1\n---\nb: 2\n", "f:3: the file holds more than one document"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := Parse("f", []byte(test.file), environment)
			var e *Error
			if !errors.As(err, &e) {
				t.Fatalf("%v, want an *Error with %q", err, test.want)
			}
			if !strings.Contains(err.Error(), test.want) {
				t.Errorf("got\n%v\nwant\n%s", err, test.want)
			}
		})
	}
}

// All that is wrong is told at once, in the file's order.
func TestProblemsInOrder(t *testing.T) {
	_, err := Parse("f", []byte("relay: {grace: x}\nlistn: off\n"+minimal("  bus: {}\n")), environment)
	var lines []int
	var e *Error
	if errors.As(err, &e) {
		for _, p := range e.Problems {
			lines = append(lines, p.Line)
		}
	}
	if !reflect.DeepEqual(lines, []int{1, 2, 8}) {
		t.Errorf("lines %v of\n%v", lines, err)
	}
}

// What keys have to do with each other is told beside what is wrong with
// others, and nothing is told that only follows from it.
func TestProblemsOfAllStages(t *testing.T) {
	for _, test := range []struct{ name, file, want string }{
		{"apart", "listen: 0.0.0.0:1\nrelay: {grace: 20s}\n" + minimal("  kafka: {brokers: [k]}\n  to: a\n  ordr: x\n"),
			"f:1: listen f:2: relay.grace f:8: destinations[0].kafka.brokers[0] f:10: destinations[0].ordr"},
		{"a block that is misspelt", "listen: 0.0.0.0:1\nsources:\n- {name: shop, postgress: {}}\ndestinations:\n- {name: out, kafka: {broker: [k]}}",
			"f:1: listen f:3: sources[0].postgress f:5: destinations[0] f:5: destinations[0].kafka.broker f:5: destinations[0].kafka.brokers"},
		{"what is compared with it", "relay: {lease_ttl: x}\nallow_remote: x\nlisten: 0.0.0.0:1\n" + minimal("  nats: {urls: [], user: me}\n  to: x\n  retry: {cap: x}\n"),
			"f:1: relay.lease_ttl f:2: allow_remote f:9: destinations[0].nats.urls f:11: destinations[0].retry.cap"},
		{"no sources", "destinations:\n- {source: shop, log: {}}\n- {name: Out, source: shop, log: {}}", "f:1: sources f:2: destinations[0].name f:3: destinations[1].name"},
		{"a source without a name", "sources: [{sqlite: {path: a}}]\ndestinations: [{name: d, log: {}, from: x}]", "f:1: sources[0].name f:2: destinations[0].from"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := Parse("f", []byte(test.file), environment)
			var e *Error
			if !errors.As(err, &e) {
				t.Fatalf("%v, want an *Error", err)
			}
			var got []string
			for _, p := range e.Problems {
				got = append(got, fmt.Sprintf("f:%d: %s", p.Line, p.Path))
			}
			if got := strings.Join(got, " "); got != test.want {
				t.Errorf("got\n%s\nwant\n%s\nof\n%v", got, test.want, err)
			}
		})
	}
}

func TestInterpolation(t *testing.T) {
	for in, want := range map[string]string{
		"plain": "plain", "${TOPIC}": "orders", "a-${TOPIC}-${PORT}": "a-orders-9000", "${NOWHERE:-x}": "x",
		"${EMPTY}": "", "${EMPTY:-x}": "x", "${NOWHERE:-}": "", "$${TOPIC}": "${TOPIC}", "$5": "$5", "$$": "$$",
	} {
		if got, err := interpolate(in, environment); err != nil || got != want {
			t.Errorf("%s: %q, %v, want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"${", "${}", "${A B}", "${1A}", "${NOWHERE}", "${A-b}"} {
		if got, err := interpolate(in, environment); err == nil {
			t.Errorf("%s: %q, want an error", in, got)
		}
	}
}

// What is in the environment is a value and never a part of the file.
func TestInterpolationKeepsStructure(t *testing.T) {
	c, err := Parse("f", []byte(minimal("  log: {}\n  to: 'a'\n  match: 'header.x:\"${INJECT}\"'\n")), environment)
	if err != nil {
		t.Fatal(err)
	}
	if c.AllowRemote || !strings.Contains(c.Destinations[0].Match.String(), "allow_remote: true") {
		t.Errorf("%v, %v", c.AllowRemote, c.Destinations[0].Match)
	}
}

func TestSecretsAreNotShown(t *testing.T) {
	c, err := Parse("f", []byte(minimal("  kafka: {brokers: ['k:9092'], sasl: {mechanism: PLAIN, user: u, password: '${PASSWORD}'}}\n  to: a\n")), environment)
	if err != nil {
		t.Fatal(err)
	}
	asJSON, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	var logged strings.Builder
	slog.New(slog.NewTextHandler(&logged, nil)).Info("x", "config", *c, "secret", c.Sources[0].Postgres.DSN)
	s := c.Destinations[0].Kafka.SASL
	shown := fmt.Sprintf("%v %+v %#v %s %q %x %s %s", *s, *s, *s, s.Password, s.Password, s.Password, asJSON, logged.String()) +
		c.Redact("cannot connect to postgres://app:s3cr3t@db:5432/shop: password s3cr3t and hunter22 are wrong")
	for _, secret := range []string{"s3cr3t", "hunter22", "68756e"} {
		if strings.Contains(shown, secret) {
			t.Errorf("%q is shown in\n%s", secret, shown)
		}
	}
	if !strings.Contains(shown, Redacted) {
		t.Errorf("nothing is redacted in\n%s", shown)
	}
	for dsn, want := range map[string]string{
		"postgres://a:b@c/d":                  "postgres://a:xxxxx@c/d",
		"postgres://a@c/d?password=b":         "postgres://a@c/d?password=xxxxx",
		"host=c user=a password='b c' port=1": "host=c user=a password=xxxxx port=1",
		"sqlite:shop.db":                      "sqlite:shop.db",
	} {
		if got := RedactDSN(dsn); got != want {
			t.Errorf("%s: %s, want %s", dsn, got, want)
		}
	}
}

// An error about a value does not show a secret either.
func TestProblemsAreRedacted(t *testing.T) {
	_, err := Parse("f", []byte(minimal("  log: {}\n  order: '${DSN}'\n")), environment)
	if err == nil || strings.Contains(err.Error(), "s3cr3t") {
		t.Errorf("%v", err)
	}
}

// Each field has a comment, and its default lies within its bounds.
func TestTags(t *testing.T) {
	walk(reflect.TypeFor[Config](), func(owner reflect.Type, f reflect.StructField) {
		tag := f.Tag
		for _, b := range []string{tag.Get("min"), tag.Get("max")} {
			if b != "" {
				bound(b, f.Type)
			}
		}
		d := &decoder{dir: ".", at: map[string]position{}}
		if def := tag.Get("default"); def != "" {
			d.scalar(&node{text: def}, reflect.New(f.Type).Elem(), tag, f.Name)
		}
		for _, p := range d.problems {
			t.Errorf("%s.%s: default %s", owner.Name(), f.Name, p.Message)
		}
	})
}

func FuzzParse(f *testing.F) {
	full, err := os.ReadFile("testdata/full.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(full))
	f.Add(minimal("  kafka: {brokers: ['k:9092']}\n  to: '{type}'\n"))
	f.Add("a: &x [*x]\n<<: *x\n? {}\n: !!binary |\n  x\n---\n")
	f.Fuzz(func(t *testing.T, s string) {
		if len(s) > 4000 {
			t.Skip("the library takes the square of the depth of a nest")
		}
		c, err := Parse("testdata/f", []byte(s), environment)
		var e *Error
		switch {
		case err == nil:
			if len(c.Sources) == 0 || len(c.Destinations) == 0 {
				t.Errorf("taken without sources or destinations: %q", s)
			}
		case !errors.As(err, &e) || len(e.Problems) == 0:
			t.Errorf("%q: %v is no *Error", s, err)
		default:
			for _, p := range e.Problems {
				if p.Line < 1 || p.Line > strings.Count(s, "\n")+strings.Count(s, "\r")+2 || p.Message == "" {
					t.Errorf("%q: %+v", s, p)
				}
			}
		}
	})
}

// What is in front of an @ is a secret, and is not shown.
func TestBrokerWithPassword(t *testing.T) {
	_, err := Parse("f", []byte(minimal("  kafka: {brokers: ['u:sekret@127.0.0.1:9092']}\n  to: a\n")), func(string) (string, bool) { return "", false })
	if err == nil || strings.Contains(err.Error(), "sekret") || !strings.Contains(err.Error(), "sasl") {
		t.Errorf("a broker's address with a password: %v", err)
	}
}

// What the host has to have is looked at for whoever asks, and all at once.
func TestCheckHost(t *testing.T) {
	dir := t.TempDir()
	pem := filepath.Join(dir, "not.pem")
	if err := os.WriteFile(pem, []byte("no certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf(`
sources:
- name: shop
  postgres: {dsn: "postgres://app:s3cr3t@db:bad/shop"}
- name: local
  sqlite: {path: %[1]s/no/shop.db}
destinations:
- {name: a, source: shop, log: {file: %[1]s/no/events}}
- {name: b, source: shop, log: {file: %[1]s}}
- {name: c, source: shop, log: {file: %[2]s/events}}
- {name: d, source: local, log: {file: %[1]s/events}}
- name: e
  source: local
  to: x
  nats: {urls: ["nats://h"], creds_file: %[1]s/creds, tls: {ca_file: %[2]s, cert_file: %[2]s, key_file: %[2]s}}
- {name: f, source: local, log: {file: %[2]s}}
`, dir, pem)
	c, err := Parse("f", []byte(text), environment)
	if err != nil {
		t.Fatal(err)
	}
	bad := errors.New("cannot parse s3cr3t")
	err = c.CheckHost(func(dsn string) error {
		if strings.Contains(dsn, ":bad") {
			return bad
		}
		return nil
	})
	if err == nil {
		t.Fatal("nothing was found")
	}
	want := []string{
		"f:4: sources[0].postgres.dsn: cannot be understood: write postgres://USER",
		"f:6: sources[1].sqlite.path: cannot be made: stat DIR/no: no such file",
		"f:8: destinations[0].log.file: cannot be made: stat DIR/no: no such file",
		"f:9: destinations[1].log.file: DIR is a folder",
		"f:10: destinations[2].log.file: cannot be written: stat DIR/not.pem/events: not a directory",
		"f:15: destinations[4].nats.creds_file: open DIR/creds: no such file",
		"f:15: destinations[4].nats.tls.ca_file: DIR/not.pem has no certificate in PEM",
		"f:15: destinations[4].nats.tls.cert_file: does not go with key_file: ",
	}
	got := strings.Split(strings.ReplaceAll(err.Error(), dir, "DIR"), "\n")
	if len(got) != len(want) {
		t.Errorf("%d problems, want %d", len(got), len(want))
	}
	for i := range min(len(got), len(want)) {
		if !strings.HasPrefix(got[i], want[i]) {
			t.Errorf("got  %s\nwant %s", got[i], want[i])
		}
	}
	if strings.Contains(err.Error(), "s3cr3t") {
		t.Error("a password is shown")
	}
	// Nothing was made.
	if files, _ := os.ReadDir(dir); len(files) != 1 {
		t.Errorf("%d files", len(files))
	}
}
