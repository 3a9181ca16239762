package cli

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/config"
	"github.com/outrider-dev/outrider/internal/daemon"
)

// selection says which database a command means.
type selection struct {
	DB     string `name:"db" env:"OUTRIDER_DB" placeholder:"DSN" help:"The database: postgres://user@host:5432/name or sqlite:path/to/file.db."`
	File   string `name:"config" short:"c" env:"OUTRIDER_CONFIG" placeholder:"FILE" help:"Or the configuration file that names it."`
	Source string `name:"source" placeholder:"NAME" help:"Which source of the file, if it has several."`
}

// flags give the same selection to another command, without a password.
func (s *selection) flags() string {
	var b strings.Builder
	db, file := os.Getenv("OUTRIDER_DB"), os.Getenv("OUTRIDER_CONFIG")
	// With both in the environment, a flag has to say which is meant.
	if s.DB != "" && (s.DB != db || file != "") {
		b.WriteString(" --db " + quote(config.RedactDSN(s.DB)))
	}
	if s.File != "" && (s.File != file || db != "") {
		b.WriteString(" -c " + quote(s.File))
	}
	if s.Source != "" {
		b.WriteString(" --source " + quote(s.Source))
	}
	return b.String()
}

// quote makes a word for a shell, if it needs to.
func quote(s string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_./:@=,+%", r)
	}
	if s != "" && strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// config is the file, or one made up for --db.
func (s *selection) config(a *app) (*config.Config, error) {
	if s.DB != "" && s.File != "" && a.given["db"] != a.given["config"] {
		// One was given, the other is the environment's: what was given counts.
		if a.given["db"] {
			s.File = ""
		} else {
			s.DB = ""
		}
	}
	switch {
	case s.DB != "" && s.File != "" && !a.given["db"]:
		return nil, usagef("OUTRIDER_DB and OUTRIDER_CONFIG are both set: choose by --db or --config")
	case s.DB != "" && s.File != "":
		return nil, usagef("--db and --config exclude each other")
	case s.DB != "" && s.Source != "":
		return nil, usagef("--source is for --config")
	case s.DB == "" && s.File == "":
		return nil, usagef("which database? give --db DSN or --config FILE")
	}
	var c *config.Config
	var err error
	if s.DB != "" {
		if c, err = config.Adhoc(s.DB, ""); err != nil {
			return nil, usageOf(err)
		}
	} else if c, err = config.Load(s.File); err != nil {
		return nil, err
	}
	a.redact, a.config = c.Redact, c
	return c, nil
}

// sources are those that the command means; all of the file's if none is named.
func (s *selection) sources(a *app) ([]config.Source, error) {
	c, err := s.config(a)
	if err != nil {
		return nil, err
	}
	if s.Source == "" {
		return c.Sources, nil
	}
	for _, src := range c.Sources {
		if src.Name == s.Source {
			return []config.Source{src}, nil
		}
	}
	hint := "there are " + strings.Join(c.SourceNames(), ", ")
	if near := config.Nearest(s.Source, c.SourceNames()); near != "" {
		hint = "did you mean " + near + "?"
	}
	return nil, outrider.WithHint(usagef("there is no source %q in %s", s.Source, s.File), hint)
}

// one is the source of a command that works on one.
func (s *selection) one(a *app) (config.Source, error) {
	all, err := s.sources(a)
	if err != nil {
		return config.Source{}, err
	}
	if len(all) > 1 {
		var names []string
		for _, src := range all {
			names = append(names, src.Name)
		}
		return config.Source{}, usagef("%s has several sources: choose one by --source (%s)", s.File, strings.Join(names, ", "))
	}
	return all[0], nil
}

// openTimeout bounds what an operator waits for a database that is away.
const openTimeout = 30 * time.Second

// with opens the store of the one source and calls f with what of it is asked
// for.
func with[T any](a *app, s *selection, what string, f func(T) error) error {
	src, err := s.one(a)
	if err != nil {
		return err
	}
	return withSource(a, src, what, f)
}

func withSource[T any](a *app, src config.Source, what string, f func(T) error) error {
	st, err := a.open(a.ctx, src, a.logger(config.Log{Level: "warn"}))
	if err != nil {
		return err
	}
	defer st.Close() //nolint:errcheck // what was asked for is done
	t, ok := st.(T)
	switch {
	case !ok && what == "be rebased":
		return outrider.WithHint(errors.New("this kind of database cannot be rebased"),
			"rebase is for PostgreSQL alone, whose positions belong to one cluster; SQLite has its position in the file itself, and needs nothing after a restore")
	case !ok:
		return fmt.Errorf("this kind of database cannot %s", what)
	}
	return daemon.ExplainRights(a.ctx, src, rightsTo(what), f(t))
}

// rightsTo are those of the database that a command needs.
func rightsTo(what string) daemon.Rights {
	switch what {
	case "be operated on":
		return daemon.ToAct
	case "retire a destination":
		return daemon.ToRetire
	default:
		return daemon.ToLook
	}
}
