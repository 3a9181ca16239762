package main

import (
	"bytes"
	"fmt"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// entry is one line of the code that something rests on, and the test that
// fails without it.
type entry struct {
	name  string
	tags  []string // invariants by their number, cases by their id
	gone  string   // what is taken away, in a sentence
	edits []edit
	pkg   string // of the test, from the project's folder
	test  string // its name, with subtests
	says  *regexp.Regexp
	hangs time.Duration // not 0: it fails by not coming to an end in this time
	args  []string      // for the test's binary
	env   []string
	at    string // file and line of the table
}

// edit is a change of one file: old lines that are there exactly once, and what
// stands in their place.
type edit struct {
	file     string
	old, new string
}

// load reads all tables of a folder.
func load(dir string) ([]*entry, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.txt"))
	if err != nil {
		return nil, err
	}
	var all []*entry
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		es, err := parse(filepath.Base(f), string(b))
		if err != nil {
			return nil, err
		}
		all = append(all, es...)
	}
	seen := map[string]string{}
	for _, e := range all {
		if at, ok := seen[e.name]; ok {
			return nil, fmt.Errorf("%s: the name %s is used at %s as well", e.at, e.name, at)
		}
		seen[e.name] = e.at
	}
	return all, nil
}

// parse reads a table; the package's comment has its form.
func parse(file, text string) ([]*entry, error) {
	var all []*entry
	var e *entry
	var old, neu []string
	inEdit := false
	flush := func() error {
		if !inEdit {
			return nil
		}
		inEdit = false
		d := &e.edits[len(e.edits)-1]
		d.old, d.new = strings.Join(old, "\n"), strings.Join(neu, "\n")
		old, neu = nil, nil
		if d.old == "" || d.old == d.new {
			return fmt.Errorf("%s: the change of %s changes nothing", e.at, d.file)
		}
		return nil
	}
	for i, line := range strings.Split(text, "\n") {
		at := fmt.Sprintf("%s:%d", file, i+1)
		switch {
		case strings.HasPrefix(line, "== "):
			if err := flush(); err != nil {
				return nil, err
			}
			e = &entry{name: strings.TrimPrefix(line, "== "), at: at}
			all = append(all, e)
		case line == "" || strings.HasPrefix(line, "#"):
		case e == nil:
			return nil, fmt.Errorf("%s: no entry has begun", at)
		case strings.HasPrefix(line, "--- "):
			if err := flush(); err != nil {
				return nil, err
			}
			inEdit = true
			e.edits = append(e.edits, edit{file: strings.TrimPrefix(line, "--- ")})
		case !inEdit:
			if err := e.set(line); err != nil {
				return nil, fmt.Errorf("%s: %w", at, err)
			}
		case line[0] == '-':
			old = append(old, line[1:])
		case line[0] == '+':
			neu = append(neu, line[1:])
		case line[0] == ' ':
			old, neu = append(old, line[1:]), append(neu, line[1:])
		default:
			return nil, fmt.Errorf("%s: a line of a change begins with -, + or a space", at)
		}
	}
	if err := flush(); err != nil {
		return nil, err
	}
	for _, e := range all {
		if err := e.complete(); err != nil {
			return nil, fmt.Errorf("%s: %s: %w", e.at, e.name, err)
		}
	}
	return all, nil
}

// set takes one of an entry's fields.
func (e *entry) set(line string) (err error) {
	name, value, _ := strings.Cut(line, ": ")
	switch name {
	case "for":
		e.tags = strings.Fields(value)
	case "gone":
		e.gone = value
	case "test":
		e.pkg, e.test, _ = strings.Cut(value, " ")
	case "says":
		e.says, err = regexp.Compile(value)
	case "hangs":
		e.hangs, err = time.ParseDuration(value)
	case "args":
		e.args = strings.Fields(value)
	case "env":
		e.env = strings.Fields(value)
	default:
		err = fmt.Errorf("there is no field %q", name)
	}
	return err
}

func (e *entry) complete() error {
	for _, f := range []struct {
		name string
		ok   bool
	}{
		{"for", len(e.tags) > 0}, {"gone", e.gone != ""}, {"test", e.pkg != "" && e.test != ""},
		{"says or hangs", (e.says != nil) != (e.hangs != 0)}, {"a change", len(e.edits) > 0},
	} {
		if !f.ok {
			return fmt.Errorf("needs %s", f.name)
		}
	}
	return nil
}

// apply is a file's text with the change made.
func (d *edit) apply(text string) (string, error) {
	whole, old := "\n"+text, "\n"+d.old+"\n"
	at := strings.Index(whole, old)
	switch {
	case at < 0:
		return "", fmt.Errorf("%s has no such lines any more:\n%s", d.file, d.old)
	case strings.Contains(whole[at+1:], old):
		return "", fmt.Errorf("%s has these lines more than once:\n%s", d.file, d.old)
	}
	neu := "\n" + d.new + "\n"
	if d.new == "" {
		neu = "\n"
	}
	return (whole[:at] + neu + whole[at+len(old):])[1:], nil
}

// impatience has tests give up sooner on what never comes: without a line that
// something rests on, that is how many of them fail.
var impatience = map[string][]edit{
	"pgstore": {suiteLimit, {file: "pgstore/watch_test.go",
		old: "	deadline := time.Now().Add(time.Minute)", new: "	deadline := time.Now().Add(15 * time.Second)"}},
	"sqlitestore": {suiteLimit},
	"memstore":    {suiteLimit},
}

var suiteLimit = edit{file: "storetest/storetest.go", old: "const limit = time.Minute", new: "const limit = 15 * time.Second"}

// mutate gives the changed files, by their name.
func (e *entry) mutate(root string) (map[string]string, error) {
	out := map[string]string{}
	edits := slices.Concat(impatience[e.pkg], e.edits)
	for i := range edits {
		d := &edits[i]
		text, ok := out[d.file]
		if !ok {
			b, err := os.ReadFile(filepath.Join(root, d.file))
			if err != nil {
				return nil, err
			}
			text = string(b)
		}
		text, err := d.apply(text)
		if err != nil {
			return nil, err
		}
		out[d.file] = text
	}
	return out, nil
}

var testFunc = regexp.MustCompile(`(?m)^func (Test[A-Za-z0-9_]*)\(`)

// check finds out without running anything whether an entry still fits the
// code: its lines are there, once, what it makes of them is Go, and its test
// is there. names are all texts that subtests can have as a name.
func (e *entry) check(root string, names func(string) bool) error {
	changed, err := e.mutate(root)
	if err != nil {
		return err
	}
	for name, text := range changed {
		if filepath.Ext(name) != ".go" {
			continue
		}
		if _, err := parser.ParseFile(token.NewFileSet(), name, text, parser.SkipObjectResolution); err != nil {
			return fmt.Errorf("what the change makes is no Go: %w", err)
		}
	}
	files, err := filepath.Glob(filepath.Join(root, e.pkg, "*_test.go"))
	if err != nil {
		return err
	}
	parts := strings.Split(e.test, "/")
	found := false
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		found = found || slices.ContainsFunc(testFunc.FindAllSubmatch(b, -1), func(m [][]byte) bool {
			return bytes.Equal(m[1], []byte(parts[0]))
		})
	}
	if !found {
		return fmt.Errorf("package %s has no %s", e.pkg, parts[0])
	}
	for _, p := range parts[1:] {
		if !names(p) {
			return fmt.Errorf("no test has the part %q of %s", p, e.test)
		}
	}
	return nil
}

// files are those that an entry changes.
func (e *entry) files() []string {
	var out []string
	for _, d := range e.edits {
		if !slices.Contains(out, d.file) {
			out = append(out, d.file)
		}
	}
	return out
}

// matches reports whether an entry is asked for: by its name, an invariant, a
// case, a file that it changes or that file's folder.
func (e *entry) matches(only []string) bool {
	return len(only) == 0 || slices.ContainsFunc(only, func(o string) bool {
		return e.name == o || slices.Contains(e.tags, o) || slices.ContainsFunc(e.files(), func(f string) bool {
			return f == o || strings.HasPrefix(f, strings.TrimSuffix(o, "/")+"/")
		})
	})
}
