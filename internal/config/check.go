package config

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"reflect"
	"regexp"
	"strings"

	"github.com/outrider-dev/outrider/route"
)

var nameForm = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,62}$`)

// checker looks at what fields have to do with each other.
type checker struct {
	*Config
	problems []Problem
	// broken are the paths of what could not be read: what is compared with
	// them would be found wrong for no reason of its own.
	broken []string
}

// check compares what was read, but for what has problems already.
func (c *Config) check(known []Problem) []Problem {
	k := &checker{Config: c}
	for _, p := range known {
		k.broken = append(k.broken, p.Path)
	}
	k.listen()
	k.relay()
	k.sources()
	k.destinations()
	return k.problems
}

// bad notes a problem at the line of the path, or of the nearest one around it
// that is in the file.
func (k *checker) bad(path, format string, args ...any) {
	at, ok := k.at[path]
	for p := path; !ok && p != ""; {
		p = p[:max(0, strings.LastIndexAny(p, ".["))]
		at, ok = k.at[p]
	}
	k.problems = append(k.problems, Problem{
		Line: max(1, at.line), Column: at.column, Path: path, Message: fmt.Sprintf(format, args...),
	})
}

// sound reports whether all of some blocks or values could be read.
func (k *checker) sound(paths ...string) bool {
	for _, p := range paths {
		for _, b := range k.broken {
			if within(b, p) || within(p, b) {
				return false
			}
		}
	}
	return true
}

// within reports whether a path is that of a block or of something in it.
func within(path, block string) bool {
	rest, ok := strings.CutPrefix(path, block)
	return ok && (rest == "" || rest[0] == '.' || rest[0] == '[')
}

// keysSound reports whether some keys of a block are what they should be: one
// that is misspelt is not missing as well.
func (k *checker) keysSound(path string, block any, keys ...string) bool {
	known := keysOf(reflect.TypeOf(block))
	for _, b := range k.broken {
		key, ok := strings.CutPrefix(b, path+".")
		switch {
		case within(path, b):
			return false
		case !ok || strings.ContainsAny(key, ".["):
		case contains(keys, key) || !contains(known, key):
			return false
		}
	}
	return true
}

// Off is what listen is when there is to be no endpoint.
const Off = "off"

func (k *checker) listen() {
	if k.Listen == Off || !k.sound("listen", "allow_remote") {
		return
	}
	host, p, err := net.SplitHostPort(k.Listen)
	if err != nil {
		k.bad("listen", "is %q, want host:port, or off", k.Listen)
		return
	}
	if wrong := port(p); wrong != "" {
		k.bad("listen", "%s, or 0 for a free one", wrong)
	}
	if !k.AllowRemote && !isLoopback(host) {
		k.bad("listen", "%s can be reached by others, and the endpoint has no authentication; listen on 127.0.0.1, or set allow_remote: true if something in front of it keeps strangers out", k.Listen)
	}
}

func isLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.IsLoopback()
}

func (k *checker) relay() {
	r := k.Relay
	if !k.sound("relay") {
		return
	}
	if r.Grace > r.LeaseTTL {
		k.bad("relay.grace", "is %v, more than lease_ttl (%v)", r.Grace, r.LeaseTTL)
	}
	if r.MaxBytesInFlight < r.MaxBytes {
		k.bad("relay.max_bytes_in_flight", "is %v, less than max_bytes (%v)", r.MaxBytesInFlight, r.MaxBytes)
	}
	if r.MaxRecordsInFlight < r.MaxRecords {
		k.bad("relay.max_records_in_flight", "is %d, less than max_records (%d)", r.MaxRecordsInFlight, r.MaxRecords)
	}
	if r.PollMax < r.PollMin {
		k.bad("relay.poll_max", "is %v, less than poll_min (%v)", r.PollMax, r.PollMin)
	}
}

func (k *checker) name(path, name string, seen map[string]bool) {
	switch {
	case !k.sound(path):
		return
	case !nameForm.MatchString(name):
		k.bad(path, "is %q, want up to 63 small letters, digits, - and _, the first no sign", name)
	case seen[name]:
		k.bad(path, "%q is used twice", name)
	}
	seen[name] = true
}

func (k *checker) sources() {
	seen := map[string]bool{}
	for i, s := range k.Sources {
		path := fmt.Sprintf("sources[%d]", i)
		k.name(path+".name", s.Name, seen)
		k.oneOf(path, s, kinds{{"postgres", s.Postgres != nil}, {"sqlite", s.SQLite != nil}})
		if s.SQLite != nil && s.SQLite.Path == "" && k.sound(path+".sqlite") {
			k.bad(path+".sqlite.path", "is empty")
		}
		if s.SQLite != nil && k.sound(path+".sqlite") {
			k.sqlitePath(path+".sqlite.path", string(s.SQLite.Path))
		}
		if s.Postgres != nil && k.sound(path+".postgres.dsn") {
			k.dsn(path+".postgres.dsn", s.Postgres.DSN.Reveal())
		}
	}
}

// kinds are blocks of which there has to be exactly one.
type kinds []struct {
	name  string
	given bool
}

func (k *checker) oneOf(path string, block any, blocks kinds) {
	var names, given []string
	for _, b := range blocks {
		names = append(names, b.name)
		if b.given {
			given = append(given, b.name)
		}
	}
	if !k.keysSound(path, block, names...) {
		return
	}
	switch len(given) {
	case 1:
	case 0:
		k.bad(path, "says nothing of its kind: one of %s is needed", strings.Join(names, ", "))
	default:
		k.bad(path, "has %s; exactly one of them can be", strings.Join(given, " and "))
	}
}

func (k *checker) destinations() {
	seen := map[string]bool{}
	used := map[string]bool{}
	for i := range k.Destinations {
		d := &k.Destinations[i]
		path := fmt.Sprintf("destinations[%d]", i)
		k.name(path+".name", d.Name, seen)
		k.source(path+".source", d)
		used[d.Source] = true
		k.oneOf(path, *d, kinds{{"kafka", d.Kafka != nil}, {"nats", d.NATS != nil}, {"log", d.Log != nil}})
		k.routes(path, d)
		k.retry(path, d)
		if d.Kafka != nil {
			k.kafka(path+".kafka", d.Kafka)
		}
		if d.NATS != nil {
			k.nats(path+".nats", d.NATS)
		}
	}
	for i, s := range k.Sources {
		if !used[s.Name] && nameForm.MatchString(s.Name) && k.sound("sources", "destinations") {
			k.bad(fmt.Sprintf("sources[%d].name", i), "no destination takes its events: name the source %q in one, or remove it", s.Name)
		}
	}
}

func (k *checker) source(path string, d *Destination) {
	var names []string
	for _, s := range k.Sources {
		names = append(names, s.Name)
	}
	switch {
	case !k.sound("sources", path):
	case d.Source == "" && len(names) == 1:
		d.Source = names[0]
	case d.Source == "":
		k.bad(path, "is missing; there are %s", strings.Join(names, ", "))
	case !contains(names, d.Source):
		hint := "there are " + strings.Join(names, ", ")
		if near := nearest(d.Source, names); near != "" {
			hint = fmt.Sprintf("did you mean %q?", near)
		}
		k.bad(path, "there is no source %q; %s", d.Source, hint)
	}
}

func (k *checker) routes(path string, d *Destination) {
	switch {
	case !k.keysSound(path, *d, "to", "routes", "kafka", "nats", "log"):
	case d.To != nil && len(d.Routes) > 0:
		k.bad(path+".to", "stands beside routes; take one of them")
	case d.To == nil && len(d.Routes) == 0 && d.Log == nil:
		k.bad(path, "says nothing of where events go: to or routes is needed")
	default:
		k.places(path, d)
	}
}

// places looks at what a template has of its own.
func (k *checker) places(path string, d *Destination) {
	wrong := func(route.Template) string { return "" }
	switch {
	case d.Kafka != nil:
		wrong = topic
	case d.NATS != nil:
		wrong = subject
	}
	if d.To != nil && k.sound(path+".to") && wrong(*d.To) != "" {
		k.bad(path+".to", "is %q: %s", d.To, wrong(*d.To))
	}
	for i, r := range d.Routes {
		at := fmt.Sprintf("%s.routes[%d].to", path, i)
		if k.sound(at) && wrong(r.To) != "" {
			k.bad(at, "is %q: %s", r.To, wrong(r.To))
		}
	}
}

func (k *checker) retry(path string, d *Destination) {
	if d.Retry.Cap < d.Retry.Base && k.sound(path+".retry") {
		k.bad(path+".retry.cap", "is %v, less than base (%v)", d.Retry.Cap, d.Retry.Base)
	}
	if d.Breaker.Cap < d.Breaker.Base && k.sound(path+".breaker") {
		k.bad(path+".breaker.cap", "is %v, less than base (%v)", d.Breaker.Cap, d.Breaker.Base)
	}
}

func (k *checker) kafka(path string, c *Kafka) {
	for i, b := range c.Brokers {
		if !k.sound(fmt.Sprintf("%s.brokers[%d]", path, i)) {
			continue
		}
		at := fmt.Sprintf("%s.brokers[%d]", path, i)
		host, p, err := net.SplitHostPort(b)
		switch {
		case strings.Contains(b, "@"):
			k.bad(at, "has a user or password in it; they belong under sasl, in a configuration file")
		case err != nil || host == "" || p == "":
			k.bad(at, "is %q, want host:port", b)
		case port(p) != "":
			k.bad(at, "%s", port(p))
		}
	}
	k.tls(path+".tls", c.TLS)
}

func (k *checker) nats(path string, c *NATS) {
	if !k.sound(path) {
		return
	}
	for i, s := range c.URLs {
		u, err := url.Parse(s)
		switch {
		case err != nil || u.Host == "":
			k.bad(fmt.Sprintf("%s.urls[%d]", path, i), "is no address, want nats://host:4222")
		case u.User != nil:
			k.bad(fmt.Sprintf("%s.urls[%d]", path, i), "holds a login, which would be shown; use user and password, token, nkey_file or creds_file")
		case !contains([]string{"nats", "tls"}, u.Scheme):
			k.bad(fmt.Sprintf("%s.urls[%d]", path, i), "is %q, want nats:// or tls://", s)
		case natsPort(u) != "":
			k.bad(fmt.Sprintf("%s.urls[%d]", path, i), "%s", natsPort(u))
		}
	}
	logins := 0
	for _, given := range []bool{c.User != "" || !c.Password.IsZero(), !c.Token.IsZero(), c.NKeyFile != "", c.CredsFile != ""} {
		if given {
			logins++
		}
	}
	if logins > 1 {
		k.bad(path, "logs in twice: take one of user and password, token, nkey_file, creds_file")
	}
	if (c.User == "") != c.Password.IsZero() {
		k.bad(path, "has one of user and password; both or neither")
	}
	k.tls(path+".tls", c.TLS)
}

func (k *checker) tls(path string, t *TLS) {
	if t != nil && k.sound(path) && (t.CertFile == "") != (t.KeyFile == "") {
		k.bad(path, "has one of cert_file and key_file; both or neither")
	}
}
