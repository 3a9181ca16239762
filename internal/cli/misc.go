package cli

import (
	"database/sql"
	"errors"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"slices"

	"github.com/alecthomas/kong"

	"github.com/outrider-dev/outrider/internal/config"
	"github.com/outrider-dev/outrider/internal/daemon"
)

type migrateDB = *sql.DB

type versionCmd struct{}

// versionFlag is the same as a flag, as people try it.
type versionFlag bool

func (versionFlag) BeforeReset(k *kong.Kong, a *app) error {
	if err := (versionCmd{}).Run(a); err != nil {
		return err
	}
	k.Exit(exitOK)
	return nil
}

// version is the module's, with the revision it was built from.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := info.Main.Version
	if v == "" || v == "(devel)" {
		v = "devel"
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				v += "-" + s.Value[:min(12, len(s.Value))]
			}
		}
	}
	return v
}

func (versionCmd) Run(a *app) error {
	view := struct {
		Version string `json:"version"`
		Go      string `json:"go"`
		System  string `json:"system"`
	}{version(), runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH}
	return a.print(view, func(w io.Writer) {
		fmt.Fprintf(w, "outrider %s, %s, %s\n", view.Version, view.Go, view.System)
	}, "outrider demo")
}

type configCmd struct {
	Validate validateCmd `cmd:"" help:"Tell all that is wrong with a file, and what it says if nothing is."`
}

type validateCmd struct {
	File string `name:"config" short:"c" env:"OUTRIDER_CONFIG" required:"" placeholder:"FILE" help:"The configuration file."`
}

func (*validateCmd) Help() string {
	return "Environment variables and files that it names are read, and it is seen whether those to be written can be. " +
		"Nothing is connected to: whether databases and destinations are there, and take the log-in, the start of a relay finds out; migrate status -c FILE tells of the tables."
}

type validateView struct {
	OK       bool             `json:"ok"`
	Problems []config.Problem `json:"problems,omitempty"`
	Listen   string           `json:"listen,omitempty"`
	Sources  []sourcePlaces   `json:"sources,omitempty"`
}

type sourcePlaces struct {
	Name         string      `json:"name"`
	Kind         string      `json:"kind"`
	Destinations []placeView `json:"destinations"`
}

type placeView struct {
	Name  string `json:"name"`
	Place string `json:"place"`
	Match string `json:"match,omitempty"`
	// Routes are tried in order; an event that none matches is FAILED.
	Routes []routeView `json:"routes,omitempty"`
}

type routeView struct {
	Match string `json:"match,omitempty"`
	To    string `json:"to"`
}

func viewPlace(d config.Destination) placeView {
	v := placeView{Name: d.Name, Place: daemon.Place(d), Match: d.Match.String()}
	for _, r := range d.Routes {
		v.Routes = append(v.Routes, routeView{r.Match.String(), r.To.String()})
	}
	return v
}

// writeRoutes tells what goes where.
func writeRoutes(w io.Writer, routes []routeView) {
	for i, r := range routes {
		switch {
		case r.Match != "":
			fmt.Fprintf(w, "  %s -> %s\n", r.Match, r.To)
		case i == 0:
			fmt.Fprintf(w, "  every event -> %s\n", r.To)
		default:
			fmt.Fprintf(w, "  every other event -> %s\n", r.To)
		}
	}
	all := func(r routeView) bool { return r.Match == "" }
	if len(routes) > 0 && !slices.ContainsFunc(routes, all) {
		fmt.Fprintln(w, "  an event that none of these matches is FAILED")
	}
}

func (c *validateCmd) Run(a *app) error {
	cfg, err := config.Load(c.File)
	if err == nil {
		a.redact = cfg.Redact
		err = cfg.CheckHost(daemon.CheckDSN)
	}
	var invalid *config.Error
	if errors.As(err, &invalid) && a.json {
		if perr := a.print(validateView{Problems: invalid.Problems}, nil, ""); perr != nil {
			return perr
		}
	}
	if err != nil {
		return err
	}
	view := validateView{OK: true, Listen: cfg.Listen}
	for _, s := range cfg.Sources {
		sp := sourcePlaces{Name: s.Name, Kind: "postgres"}
		if s.SQLite != nil {
			sp.Kind = "sqlite"
		}
		for _, d := range cfg.Destinations {
			if d.Source == s.Name {
				sp.Destinations = append(sp.Destinations, viewPlace(d))
			}
		}
		view.Sources = append(view.Sources, sp)
	}
	return a.print(view, func(w io.Writer) {
		fmt.Fprintf(w, "%s is valid\n", c.File)
		for _, s := range view.Sources {
			for _, d := range s.Destinations {
				match := d.Match
				if match == "" {
					match = "every event"
				}
				fmt.Fprintf(w, "%s (%s) -> %s: %s, %s\n", s.Name, s.Kind, d.Name, d.Place, match)
				writeRoutes(w, d.Routes)
			}
		}
	}, "outrider run -c "+quote(c.File))
}
