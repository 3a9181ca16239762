package main

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write docs/BITES.md anew")

var root = filepath.Join("..", "..")

func table(t *testing.T) []*entry {
	t.Helper()
	entries, err := load("table")
	if err != nil {
		t.Fatal(err)
	}
	return entries
}

// texts are all of the project's code, to look for names of subtests in.
func texts(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	for _, pattern := range []string{"*.go", "*/*.go", "*/*/*.go"} {
		files, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			all.Write(b)
		}
	}
	return all.String()
}

// The table fits the code as it is: lines that are not there any more, or a test
// that has another name, would make it a list of what was once so.
func TestTableFitsTheCode(t *testing.T) {
	code := texts(t)
	subtest := func(name string) bool {
		return strings.Contains(code, `"`+name+`"`) || strings.Contains(code, `"`+strings.ReplaceAll(name, "_", " ")+`"`)
	}
	for _, e := range table(t) {
		if err := e.check(root, subtest); err != nil {
			t.Errorf("%s: %s: %v", e.at, e.name, err)
		}
	}
}

// Nothing is left out: each invariant and each known fault has something that
// was taken away, and there are no others.
func TestTableIsWhole(t *testing.T) {
	ts, err := topics(root)
	if err != nil {
		t.Fatal(err)
	}
	if len(ts) < 30 || ts[0].id != "1" || ts[9].id != "10" {
		t.Fatalf("invariants and cases were not found in the documents: %v", ts)
	}
	entries := table(t)
	for _, x := range ts {
		if !slices.ContainsFunc(entries, func(e *entry) bool { return slices.Contains(e.tags, x.id) }) {
			t.Errorf("nothing in the table is for %s: %s", x.id, x.text)
		}
	}
	for _, e := range entries {
		for _, tag := range e.tags {
			if !slices.ContainsFunc(ts, func(x topic) bool { return x.id == tag }) {
				t.Errorf("%s: %s is for %q, which is neither an invariant nor a case", e.at, e.name, tag)
			}
		}
	}
}

func TestDocument(t *testing.T) {
	ts, err := topics(root)
	if err != nil {
		t.Fatal(err)
	}
	want := document(ts, table(t))
	file := filepath.Join(root, "docs", "BITES.md")
	if *update {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != want {
		t.Errorf("docs/BITES.md is not what the table says (%v): go test ./test/bite -update", err)
	}
}

// The runner tells apart what it is there to tell apart, on a module of its own.
func TestRunner(t *testing.T) {
	toy := filepath.Join("testdata", "toy")
	b, err := os.ReadFile(filepath.Join(toy, "toy.txt"))
	if err != nil {
		t.Fatal(err)
	}
	entries, err := parse("toy.txt", string(b))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]result{
		"caught":                     {verdict: bitten},
		"panics":                     {verdict: bitten},
		"hangs":                      {verdict: bitten},
		"survives":                   {verdict: survived, why: "passes without the line"},
		"for-another-reason":         {verdict: unfit, why: "not for the reason"},
		"does-not-build":             {verdict: unfit, why: "does not build"},
		"is-skipped":                 {verdict: unfit, why: "was skipped"},
		"is-not-there":               {verdict: unfit, why: "was not run"},
		"does-not-hang":              {verdict: unfit, why: "did not hang"},
		"hangs-and-does-not-say-so":  {verdict: unfit, why: "hung, which the entry does not say"},
		"something-else-hangs":       {verdict: unfit, why: "something else than the test hung"},
		"passes-in-a-failing-binary": {verdict: unfit, why: "something else failed"},
		"fails-as-the-code-is":       {verdict: bitten}, // but for what sound finds
		"is-not-in-the-code":         {verdict: unfit, why: "no such lines any more"},
		"is-there-twice":             {verdict: unfit, why: "more than once"},
	}
	for _, e := range entries {
		r, w := e.run(t.Context(), toy), want[e.name]
		if r.verdict != w.verdict || !strings.Contains(r.why, w.why) {
			t.Errorf("%s: %s %q, want %s %q:\n%s", e.name, r.verdict, r.why, w.verdict, w.why, r.said)
		}
		delete(want, e.name)
	}
	if len(want) > 0 {
		t.Errorf("not run: %v", want)
	}
	var bad []string
	for e := range sound(t.Context(), toy, entries) {
		bad = append(bad, e.name)
	}
	slices.Sort(bad)
	if got := strings.Join(bad, " "); got != "fails-as-the-code-is is-not-there is-skipped something-else-hangs" {
		t.Errorf("tests that do not pass as the code is: %s", got)
	}
}

// A table that is not well formed is refused, in the words that say where.
func TestParseRefuses(t *testing.T) {
	const good = "== a\nfor: 1\ngone: x\ntest: p TestX\nsays: y\n--- f.go\n-old\n+new\n"
	if _, err := parse("f.txt", good); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ from, to, want string }{
		{"for: 1\n", "", "needs for"},
		{"gone: x\n", "", "needs gone"},
		{"says: y\n", "", "needs says or hangs"},
		{"says: y\n", "says: y\nhangs: 2s\n", "needs says or hangs"},
		{"says: y\n", "says: (\n", "f.txt:5"},
		{"says: y\n", "hangs: soon\n", "f.txt:5"},
		{"says: y\n", "sais: y\n", `no field "sais"`},
		{"--- f.go\n-old\n+new\n", "", "needs a change"},
		{"-old\n+new\n", "-old\n+old\n", "changes nothing"},
		{"-old\n+new\n", "+new\n", "changes nothing"},
		{"+new\n", "new\n", "f.txt:8"},
		{"== a\n", "", "f.txt:1: no entry has begun"},
	} {
		_, err := parse("f.txt", strings.Replace(good, c.from, c.to, 1))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q in place of %q: %v, want %q", c.to, c.from, err, c.want)
		}
	}
}
