package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// topic is an invariant or a case.
type topic struct{ id, text string }

var (
	invariantRow = regexp.MustCompile(`(?m)^\| (\d+)\. (.+?) \|`)
	caseRow      = regexp.MustCompile(`(?m)^\| ([A-Z]{3}-\d+) \| (.+?) \|`)
)

// topics reads the invariants and cases from the documents that have them.
func topics(root string) ([]topic, error) {
	var all []topic
	for _, d := range []struct {
		file string
		row  *regexp.Regexp
	}{{"DESIGN.md", invariantRow}, {"FAULTS.md", caseRow}} {
		b, err := os.ReadFile(filepath.Join(root, "docs", d.file))
		if err != nil {
			return nil, err
		}
		for _, m := range d.row.FindAllSubmatch(b, -1) {
			all = append(all, topic{string(m[1]), string(m[2])})
		}
	}
	return all, nil
}

const head = `# What the tests have been seen to catch

Each row is something that an invariant or a known fault rests on. It was taken out of the code, and the test beside it
failed, for the reason that the table gives. ` + "`make bite`" + ` does all of it again, ` + "`make bite ARGS='-only 5'`" + ` one
invariant, case, file or entry; nothing in the tree is changed by it. What survives is a missing test.

This page is made from ` + "`test/bite/table`" + ` (` + "`go test ./test/bite -update`" + `). An ordinary test run holds that every line
is still in its place and every test still there. An entry that serves several stands under each of them.
`

// document is docs/BITES.md.
func document(ts []topic, entries []*entry) string {
	var b strings.Builder
	b.WriteString(head)
	b.WriteString("\n## Invariants\n")
	for i, t := range ts {
		title := t.id + ". " + t.text
		if strings.Contains(t.id, "-") {
			if !strings.Contains(ts[i-1].id, "-") {
				b.WriteString("\n## Known faults\n")
			}
			title = t.id + ": " + t.text
		}
		fmt.Fprintf(&b, "\n### %s\n\n| taken away | in | the test that failed |\n|---|---|---|\n", strings.TrimSuffix(title, "."))
		for _, e := range entries {
			if slices.Contains(e.tags, t.id) {
				fmt.Fprintf(&b, "| %s (`%s`) | `%s` | `%s` in `%s` |\n", e.gone, e.name, strings.Join(e.files(), "`, `"), e.test, e.pkg)
			}
		}
	}
	return b.String()
}
