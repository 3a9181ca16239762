package config

import (
	"fmt"
	"net/url"
	"reflect"
	"strings"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/route"
)

// defaults is a block with nothing given. It does not look for what is needed.
func defaults[T any]() T {
	var v T
	d := &decoder{dir: ".", at: map[string]position{}}
	d.structure(&node{kind: null}, reflect.ValueOf(&v).Elem(), "")
	return v
}

// The forms of the command line, as errors show them.
const (
	databaseForms = "give it as postgres://user@host:5432/database or sqlite:path/to/file.db"
	targetForms   = "give it as kafka://host:9092/topic, nats://host:4222/subject, log: (standard output) or log:FILE (topic and subject may have fields: {aggregate_type}-events)"
)

// Adhoc is a configuration without a file: one database, and one destination
// that starts from the earliest event. to == "" means none, for commands that
// only look at the database.
func Adhoc(db, to string) (*Config, error) {
	c := defaults[Config]()
	c.Listen = Off
	s, err := adhocSource(db)
	if err != nil {
		return nil, err
	}
	c.Sources = []Source{s}
	// The DSN itself may be shown without its password.
	for _, secret := range dsnSecrets(db)[1:] {
		c.secrets = append(c.secrets, NewSecret(secret))
	}
	if to == "" {
		return &c, nil
	}
	d, err := adhocDestination(to)
	if err != nil {
		return nil, err
	}
	d.Source, d.From = s.Name, "earliest"
	c.Destinations = []Destination{d}
	if d.NATS != nil {
		c.secrets = append(c.secrets, d.NATS.Password)
	}
	for _, p := range c.check(nil) {
		return nil, outrider.WithHint(fmt.Errorf("%s: %s", p.Path, p.Message), targetForms)
	}
	return &c, nil
}

func adhocSource(db string) (Source, error) {
	s := Source{Name: "db"}
	scheme, rest, _ := strings.Cut(db, ":")
	switch {
	case scheme == "postgres", scheme == "postgresql", strings.Contains(db, "dbname="), strings.HasPrefix(db, "host="):
		pg := defaults[Postgres]()
		pg.DSN = NewSecret(db)
		s.Postgres = &pg
	case scheme == "sqlite" && rest != "":
		lite := defaults[SQLite]()
		// sqlite:///a/b as URLs have it, sqlite:a/b as people write it.
		lite.Path = Path(strings.TrimPrefix(rest, "//"))
		s.SQLite = &lite
	default:
		return s, outrider.WithHint(fmt.Errorf("the database %q is of no kind that is known", RedactDSN(db)), databaseForms)
	}
	return s, nil
}

func adhocDestination(to string) (Destination, error) {
	d := defaults[Destination]()
	d.Name = "dev"
	scheme, rest, ok := strings.Cut(to, ":")
	if !ok {
		return d, outrider.WithHint(fmt.Errorf("the destination %q is of no kind that is known", to), targetForms)
	}
	if scheme == "log" {
		l := LogSink{File: Path(strings.TrimPrefix(rest, "//"))}
		d.Log = &l
		return d, nil
	}
	// Not url.Parse: a template has characters that no URL has.
	hosts, place, _ := strings.Cut(strings.TrimPrefix(rest, "//"), "/")
	if hosts == "" || place == "" {
		return d, outrider.WithHint(fmt.Errorf("the destination %q lacks an address or a place", to), targetForms)
	}
	t, err := route.ParseTemplate(place)
	if err != nil {
		return d, err
	}
	d.To = &t
	switch scheme {
	case "kafka":
		k := defaults[Kafka]()
		k.Brokers = strings.Split(hosts, ",")
		d.Kafka = &k
	case "nats":
		n := defaults[NATS]()
		if err := natsHosts(&n, hosts); err != nil {
			return d, err
		}
		d.NATS = &n
	default:
		return d, outrider.WithHint(fmt.Errorf("the destination %q is of no kind that is known", to), targetForms)
	}
	return d, nil
}

// natsHosts takes user:password@ off the addresses.
func natsHosts(n *NATS, hosts string) error {
	login, rest, ok := strings.Cut(hosts, "@")
	if ok {
		u, err := url.Parse("nats://" + login + "@h")
		if err != nil {
			return outrider.WithHint(fmt.Errorf("the log-in before @ cannot be read"), targetForms)
		}
		n.User = u.User.Username()
		password, _ := u.User.Password()
		n.Password = NewSecret(password)
		hosts = rest
	}
	for h := range strings.SplitSeq(hosts, ",") {
		n.URLs = append(n.URLs, "nats://"+h)
	}
	return nil
}

// SourceNames are the names of the sources, in the file's order.
func (c *Config) SourceNames() []string {
	var names []string
	for _, s := range c.Sources {
		names = append(names, s.Name)
	}
	return names
}

// Nearest is the name closest to a mistyped one, or "".
func Nearest(s string, names []string) string { return nearest(s, names) }
