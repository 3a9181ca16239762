package layout

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/format"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
)

// root is the project's folder.
var root = filepath.Join("..", "..")

// files are the project's, by their path in it, that a pattern matches.
func files(t *testing.T, match func(name string) bool) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist): // somebody's, and gone
			return nil
		case err != nil:
			return err
		case d.IsDir() && slices.Contains([]string{".git", ".servers"}, d.Name()):
			return filepath.SkipDir
		case d.Name() == ".git": // in a linked worktree it is a file
			return nil
		}
		name, err := filepath.Rel(root, path)
		if err != nil || !d.Type().IsRegular() || !match(name) {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		out[filepath.ToSlash(name)] = string(b)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func isDocument(name string) bool { return filepath.Ext(name) == ".md" }

func documents(t *testing.T) map[string]string {
	t.Helper()
	docs := files(t, isDocument)
	for _, name := range []string{"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/DEPENDENCIES.md"} {
		if docs[name] == "" {
			t.Errorf("%s is missing", name)
		}
	}
	return docs
}

var (
	testName = regexp.MustCompile(`\b((?:Test|Fuzz|Example|Benchmark)[A-Z_][A-Za-z0-9_]*)((?:/[A-Za-z0-9_]+)*)`)
	testFunc = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Example|Benchmark)[A-Za-z0-9_]*)\(`)
)

// A test that a document names is there, and so are the subtests.
func TestNamedTestsExist(t *testing.T) {
	code := files(t, func(name string) bool { return filepath.Ext(name) == ".go" })
	all, have := strings.Builder{}, map[string]bool{}
	for name, text := range code {
		all.WriteString(text)
		if !strings.HasSuffix(name, "_test.go") {
			continue
		}
		for _, m := range testFunc.FindAllStringSubmatch(text, -1) {
			have[m[1]] = true
		}
	}
	named := 0
	for doc, text := range documents(t) {
		for _, m := range testName.FindAllStringSubmatch(text, -1) {
			named++
			if !have[m[1]] {
				t.Errorf("%s names %s, which does not exist", doc, m[1])
			}
			for _, sub := range strings.Split(m[2], "/")[1:] {
				if !strings.Contains(all.String(), `"`+sub+`"`) {
					t.Errorf("%s names %s, of which no code has the part %q", doc, m[0], sub)
				}
			}
		}
	}
	if named < 20 {
		t.Errorf("only %d tests were found in the documents", named)
	}
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#+ +(.+)$`)
	notSlug = regexp.MustCompile("[^a-z0-9 _-]")
)

// anchors are what a document's headings can be linked by.
func anchors(text string) []string {
	var out []string
	for _, m := range heading.FindAllStringSubmatch(text, -1) {
		out = append(out, strings.ReplaceAll(notSlug.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-"))
	}
	return out
}

// Links between the documents lead somewhere.
func TestLinks(t *testing.T) {
	docs := documents(t)
	for doc, text := range docs {
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			path, anchor, _ := strings.Cut(m[1], "#")
			to := doc
			if path != "" {
				to = filepath.ToSlash(filepath.Join(filepath.Dir(doc), path))
			}
			if _, err := os.Stat(filepath.Join(root, to)); err != nil {
				t.Errorf("%s has a link to %s: %v", doc, m[1], err)
			}
			if anchor != "" && !slices.Contains(anchors(docs[to]), anchor) {
				t.Errorf("%s has a link to %s, and %s no such heading", doc, m[1], to)
			}
		}
	}
}

// foreign is what says more of the machine it was written on than of the
// project. The texts are cut in two so as not to be found here.
var foreign = regexp.MustCompile(`(?i)(^|[^a-z0-9_./-])/` + `(work|root|home)/` +
	`|proxy\.golang` + `\.org|sum\.golang` + `\.org|repo1?\.maven` + `\.|registry\.npm` + `js|pypi\.` + `org|deb\.debian` + `\.org`)

func TestNothingOfOneMachine(t *testing.T) {
	for name, text := range files(t, func(string) bool { return true }) {
		if bytes.IndexByte([]byte(text), 0) >= 0 {
			continue // not text
		}
		for i, line := range strings.Split(text, "\n") {
			if found := foreign.FindString(line); found != "" {
				t.Errorf("%s:%d names %q", name, i+1, found)
			}
		}
	}
}

var dependency = regexp.MustCompile("(?m)^\\| `([^`]+)` \\|")

// Each module that the code imports has a line that says why, and none has one
// that is not imported.
func TestDependenciesAreExplained(t *testing.T) {
	imported := imports(t)
	var explained []string
	for _, m := range dependency.FindAllStringSubmatch(documents(t)["docs/DEPENDENCIES.md"], -1) {
		explained = append(explained, m[1])
	}
	for _, m := range requirements(t) {
		direct := slices.ContainsFunc(imported, func(p string) bool { return moduleOf(t, p) == m })
		if has := slices.Contains(explained, m); direct != has {
			t.Errorf("%s: imported: %v, has a line in docs/DEPENDENCIES.md: %v", m, direct, has)
		}
	}
	for _, m := range explained {
		if !slices.Contains(requirements(t), m) {
			t.Errorf("%s has a line in docs/DEPENDENCIES.md and is not in go.mod", m)
		}
	}
}

// imports are the packages of others that ours import, tests included.
func imports(t *testing.T) []string {
	t.Helper()
	out := goCommand(t, "list", "-f", `{{range .Imports}}{{println .}}{{end}}{{range .TestImports}}{{println .}}{{end}}{{range .XTestImports}}{{println .}}{{end}}`, "./...")
	var all []string
	for p := range strings.Lines(out) {
		p = strings.TrimSpace(p)
		if first, _, _ := strings.Cut(p, "/"); strings.Contains(first, ".") && p != module && !strings.HasPrefix(p, module+"/") {
			all = append(all, p)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// requirements are the modules in go.mod.
func requirements(t *testing.T) []string {
	t.Helper()
	var mod struct{ Require []struct{ Path string } }
	if err := json.Unmarshal([]byte(goCommand(t, "mod", "edit", "-json")), &mod); err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, r := range mod.Require {
		out = append(out, r.Path)
	}
	return out
}

// moduleOf is the requirement that a package belongs to: the longest that fits.
func moduleOf(t *testing.T, pkg string) (best string) {
	t.Helper()
	for _, m := range requirements(t) {
		if (pkg == m || strings.HasPrefix(pkg, m+"/")) && len(m) > len(best) {
			best = m
		}
	}
	return best
}

func goCommand(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Dir = root
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, errs.String())
	}
	return string(out)
}

// blocks are a document's code blocks of a language.
func blocks(text, language string) []string {
	var out []string
	for _, part := range strings.Split(text, "\n```"+language+"\n")[1:] {
		code, _, _ := strings.Cut(part, "\n```")
		out = append(out, code+"\n")
	}
	return out
}

// What README shows compiles, and is formatted.
func TestReadmeCompiles(t *testing.T) {
	readme := documents(t)["README.md"]
	code := blocks(readme, "go")
	if len(code) != 2 {
		t.Fatalf("README.md has %d blocks of Go, want 2", len(code))
	}
	for _, b := range code {
		if nice, err := format.Source([]byte(b)); err != nil || string(nice) != b {
			t.Errorf("not formatted (%v):\n%s", err, b)
		}
	}
	names := []string{"context", "database/sql", "fmt"}
	for _, p := range []string{"", "/kafkasink", "/pgstore", "/relay"} {
		names = append(names, module+p)
	}
	src := "package readme\n\nimport (\n"
	for _, n := range names {
		src += fmt.Sprintf("\t%q\n", n)
	}
	src += ")\n\nvar _ = []any{placeOrder, runRelay}\n\n" + strings.Join(code, "\n")

	// A package that is only seen through the overlay, so that nothing is
	// written into the project.
	dir := t.TempDir()
	file := filepath.Join(dir, "readme.go")
	abs, err := filepath.Abs(filepath.Join(root, "internal", "layout", "readme", "readme.go"))
	if err != nil {
		t.Fatal(err)
	}
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {abs: file}})
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{file: []byte(src), filepath.Join(dir, "overlay.json"): overlay} {
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	goCommand(t, "build", "-overlay", filepath.Join(dir, "overlay.json"), "-o", os.DevNull, "./internal/layout/readme")
}

// The INSERT in README is the one that the tables are made for.
func TestReadmeInsert(t *testing.T) {
	want, err := migrate.PlainInsert(migrate.Options{Dialect: outrider.Postgres})
	if err != nil {
		t.Fatal(err)
	}
	if got := blocks(documents(t)["README.md"], "sql"); len(got) != 1 || strings.TrimSpace(got[0]) != strings.TrimSpace(want) {
		t.Errorf("README.md has %q, want %q", got, want)
	}
}

var (
	command     = regexp.MustCompile("(?m)(?:^|`)outrider ([a-z]+)(?: ([a-z]+)\\b)?")
	target      = regexp.MustCompile("(?m)(?:^|`)make ([a-z-]+)")
	helpOf      = regexp.MustCompile(`(?m)^\$ outrider ([a-z]+)(?: ([a-z]+))? --help$`)
	metric      = regexp.MustCompile(`\boutrider_[a-z_]+\b`)
	notMetrics  = []string{"outrider_events"} // a channel of PostgreSQL
	metricFiles = []string{"relayprom/relayprom.go", "internal/daemon/gauges.go", "internal/daemon/metrics.go"}
)

// Commands that the documents name exist.
func TestNamedCommandsExist(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(root, "internal", "cli", "testdata", "help.golden"))
	if err != nil {
		t.Fatal(err)
	}
	have := map[string][]string{}
	for _, m := range helpOf.FindAllStringSubmatch(string(b), -1) {
		have[m[1]] = append(have[m[1]], m[2])
	}
	for doc, text := range documents(t) {
		for _, m := range command.FindAllStringSubmatch(text, -1) {
			sub, ok := have[m[1]]
			if !ok || len(sub) > 1 && m[2] != "" && !slices.Contains(sub, m[2]) {
				t.Errorf("%s names the command %q, which does not exist", doc, strings.Trim(m[0], "`\n"))
			}
		}
	}
}

// Targets of make that the documents name exist.
func TestNamedTargetsExist(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	for doc, text := range documents(t) {
		for _, m := range target.FindAllStringSubmatch(text, -1) {
			if !strings.Contains(string(b), "\n"+m[1]+":") {
				t.Errorf("%s names make %s, which does not exist", doc, m[1])
			}
		}
	}
}

// Metrics that the documents name exist.
func TestNamedMetricsExist(t *testing.T) {
	code := files(t, func(name string) bool { return slices.Contains(metricFiles, filepath.ToSlash(name)) })
	have := strings.Builder{}
	for _, text := range code {
		have.WriteString(text)
	}
	for doc, text := range documents(t) {
		for _, name := range metric.FindAllString(text, -1) {
			if slices.Contains(notMetrics, name) {
				continue
			}
			if !regexp.MustCompile(`\b` + name + `\b`).MatchString(have.String()) {
				t.Errorf("%s names the metric %s, which does not exist", doc, name)
			}
		}
	}
}
