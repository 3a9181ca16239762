// Package layout holds the project's structure: which package may import which,
// and that every driver runs the conformance suite of its seam.
package layout

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/outrider-dev/outrider"

// allowed says what of ours a package may import. A new package needs a line.
var allowed = map[string][]string{
	".":           {},
	"outriderpgx": {"."},
	"migrate":     {"."},
	"route":       {"."},

	// The seams know the event and nothing else, and so do their suites.
	"store":     {"."},
	"sink":      {"."},
	"storetest": {".", "store"},
	"sinktest":  {".", "sink"},

	// A driver knows its seam, and for its start-up checks the migrations.
	"memstore":    {".", "store"},
	"pgstore":     {".", "store", "migrate"},
	"sqlitestore": {".", "store", "migrate"},
	"memsink":     {".", "sink"},
	"logsink":     {".", "sink", "route"},
	"kafkasink":   {".", "sink", "route"},
	"natssink":    {".", "sink", "route"},

	// The engine knows the seams and no driver; telemetry hangs on it.
	"relay":     {".", "store", "sink"},
	"relayprom": {".", "relay"},

	// Only the daemon knows all drivers.
	"internal/config": {".", "route"},
	"internal/daemon": {".", "store", "sink", "route", "relay", "relayprom", "migrate", "internal/config",
		"pgstore", "sqlitestore", "kafkasink", "natssink", "logsink"},
	"internal/demo": {".", "migrate", "internal/config", "internal/daemon"},
	"internal/cli":  {".", "store", "migrate", "internal/config", "internal/daemon", "internal/demo"},
	"cmd/outrider":  {"internal/cli"},

	"internal/testdb":  {},
	"internal/testtls": {},
	"internal/faults":  {},
	"internal/layout":  {},
}

// free are programs beside the product, which may use any part of it.
var free = []string{"bench", "examples/", "test/"}

// families are the client libraries of which a package may link at most one.
var families = []string{"github.com/jackc/pgx", "modernc.org/sqlite", "github.com/twmb/franz-go", "github.com/nats-io/",
	"github.com/prometheus/"}

type pkg struct {
	ImportPath string
	Imports    []string
	Deps       []string
}

func packages(t *testing.T) map[string]pkg {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Imports,Deps", "./...")
	cmd.Dir = filepath.Join("..", "..")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	all := map[string]pkg{}
	for d := json.NewDecoder(out); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		all[short(p.ImportPath)] = p
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	return all
}

// short is a package's path inside the module, "." for the root.
func short(path string) string {
	if path == module {
		return "."
	}
	return strings.TrimPrefix(path, module+"/")
}

func isFree(name string) bool {
	return slices.ContainsFunc(free, func(f string) bool { return strings.HasPrefix(name+"/", strings.TrimSuffix(f, "/")+"/") })
}

func TestImportDirection(t *testing.T) {
	for name, p := range packages(t) {
		if isFree(name) {
			continue
		}
		may, ok := allowed[name]
		if !ok {
			t.Errorf("package %s is not in the table of who may import what", name)
			continue
		}
		for _, i := range p.Imports {
			if s := short(i); (s != i || i == module) && !slices.Contains(may, s) {
				t.Errorf("%s must not import %s", name, s)
			}
		}
	}
}

func TestOneClientFamilyPerPackage(t *testing.T) {
	for name, p := range packages(t) {
		if isFree(name) || slices.Contains([]string{"internal/daemon", "internal/demo", "internal/cli", "cmd/outrider"}, name) {
			continue
		}
		var found []string
		for _, f := range families {
			if slices.ContainsFunc(p.Deps, func(d string) bool { return strings.HasPrefix(d, f) }) {
				found = append(found, f)
			}
		}
		if len(found) > 1 {
			t.Errorf("%s links %v, at most one client library is allowed", name, found)
		}
		if slices.Contains([]string{".", "store", "sink", "route", "relay", "migrate", "memstore", "memsink", "logsink"}, name) && len(found) > 0 {
			t.Errorf("%s links %v, none is allowed", name, found)
		}
	}
}

func TestBinaryHasNoTestHelpers(t *testing.T) {
	for _, d := range packages(t)["cmd/outrider"].Deps {
		if s := short(d); slices.Contains([]string{"storetest", "sinktest", "memstore", "memsink", "internal/testdb", "internal/testtls", "internal/faults", "testing"}, s) {
			t.Errorf("the binary links %s", s)
		}
	}
}

// Every package with a driver calls its seam's conformance suite.
func TestDriversRunTheirSuite(t *testing.T) {
	entries, err := os.ReadDir(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, e := range entries {
		for suffix, call := range map[string]string{"store": "storetest.Run(", "sink": "sinktest.Run("} {
			if !e.IsDir() || !strings.HasSuffix(e.Name(), suffix) || e.Name() == suffix {
				continue
			}
			found++
			files, err := filepath.Glob(filepath.Join("..", "..", e.Name(), "*_test.go"))
			if err != nil {
				t.Fatal(err)
			}
			if !slices.ContainsFunc(files, func(f string) bool {
				b, err := os.ReadFile(f)
				return err == nil && strings.Contains(string(b), call)
			}) {
				t.Errorf("%s has no test that calls %s...)", e.Name(), call)
			}
		}
	}
	if found < 7 {
		t.Errorf("only %d drivers were found", found)
	}
}

// main is an entry point and nothing else.
func TestMainIsShort(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "..", "cmd", "outrider", "main.go"))
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(b), "\n"); n > 40 {
		t.Errorf("cmd/outrider/main.go has %d lines, at most 40 are allowed", n)
	}
}
