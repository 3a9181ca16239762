package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// limit is how long a test may take that is not expected to hang.
const limit = 3 * time.Minute

// buildLimit is how long the building around it may take.
const buildLimit = 10 * time.Minute

// verdict is what came of an entry.
type verdict string

const (
	bitten   verdict = "bitten"
	survived verdict = "SURVIVED"
	unfit    verdict = "ERROR" // the entry says something that is not so
)

// result of running an entry.
type result struct {
	verdict verdict
	why     string // for all but bitten
	said    string
	took    time.Duration
}

// event is a line of go test -json.
type event struct {
	Action string
	Test   string
	Output string
}

// testRun is what became of some tests.
type testRun struct {
	built  bool
	failed bool              // the command
	ended  map[string]string // action by test: pass, fail, skip; run: it never ended
	output strings.Builder
}

// pattern makes -run's argument of names that have the same number of parts.
func pattern(names ...string) string {
	var levels [][]string
	for _, n := range names {
		for i, p := range strings.Split(n, "/") {
			if i == len(levels) {
				levels = append(levels, nil)
			}
			if p = regexp.QuoteMeta(p); !slices.Contains(levels[i], p) {
				levels[i] = append(levels[i], p)
			}
		}
	}
	var out []string
	for _, l := range levels {
		out = append(out, "^("+strings.Join(l, "|")+")$")
	}
	return strings.Join(out, "/")
}

// goTest runs tests of the entry's package, with files replaced.
func goTest(ctx context.Context, root, overlay string, e *entry, timeout time.Duration, names ...string) (*testRun, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout+buildLimit)
	defer cancel()
	args := []string{"test", "-json", "-vet=off", "-count=1", "-timeout=" + timeout.String(), "-run=" + pattern(names...)}
	if overlay != "" {
		args = append(args, "-overlay="+overlay)
	}
	args = append(args, "./"+e.pkg)
	if len(e.args) > 0 {
		args = append(append(args, "-args"), e.args...)
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), append([]string{"OUTRIDER_TEST_REQUIRE=1"}, e.env...)...)
	cmd.WaitDelay = 10 * time.Second
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		return nil, errors.Join(err, ctx.Err())
	}
	r := &testRun{built: true, failed: err != nil, ended: map[string]string{}}
	for line := range bytes.Lines(out) {
		var ev event
		if json.Unmarshal(line, &ev) != nil {
			continue // of the building
		}
		switch ev.Action {
		case "build-fail":
			r.built = false
		case "run", "pass", "fail", "skip":
			r.ended[ev.Test] = ev.Action
		case "output", "build-output":
			r.output.WriteString(ev.Output)
		}
	}
	if len(r.ended) == 0 {
		r.built = false
		r.output.WriteString(errs.String())
	}
	return r, nil
}

const timedOut = "panic: test timed out after"

// run takes away what the entry says and looks whether its test fails as it
// says.
func (e *entry) run(ctx context.Context, root string) (res result) {
	began := time.Now()
	defer func() { res.took = time.Since(began) }()
	fail := func(format string, args ...any) result {
		return result{verdict: unfit, why: fmt.Sprintf(format, args...), said: res.said}
	}
	dir, err := os.MkdirTemp("", "bite")
	if err != nil {
		return fail("%v", err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a leftover in the temporary folder
	overlay, err := e.overlay(root, dir)
	if err != nil {
		return fail("%v", err)
	}
	timeout := limit
	if e.hangs != 0 {
		timeout = e.hangs
	}
	r, err := goTest(ctx, root, overlay, e, timeout, e.test)
	if err != nil {
		return fail("%v", err)
	}
	res.said = r.output.String()
	hung := strings.Contains(res.said, timedOut)
	switch end := r.ended[e.test]; {
	case !r.built:
		return fail("it does not build without the line")
	case end == "":
		return fail("%s was not run", e.test)
	case end == "skip":
		return fail("%s was skipped", e.test)
	case end == "pass" && !r.failed:
		return result{verdict: survived, why: "the test passes without the line", said: res.said}
	case end == "pass":
		return fail("the test passed, and something else failed")
	case hung && e.hangs == 0:
		return fail("the test hung, which the entry does not say")
	case e.hangs != 0 && !hung:
		return fail("the test failed, and did not hang as the entry says")
	case e.hangs != 0 && !regexp.MustCompile(`running tests:\s+`+regexp.QuoteMeta(e.test)+`\b`).MatchString(res.said):
		return fail("something else than the test hung")
	case e.hangs == 0 && !e.says.MatchString(res.said):
		return fail("the test failed, and not for the reason that the entry says: %s", e.says)
	}
	return result{verdict: bitten, said: res.said}
}

// overlay writes what stands in place of the files, for go test -overlay.
func (e *entry) overlay(root, dir string) (string, error) {
	changed, err := e.mutate(root)
	if err != nil {
		return "", err
	}
	replace := map[string]string{}
	n := 0
	for name, text := range changed {
		abs, err := filepath.Abs(filepath.Join(root, name))
		if err != nil {
			return "", err
		}
		n++
		to := filepath.Join(dir, fmt.Sprintf("%d%s", n, filepath.Ext(name)))
		replace[abs] = to
		if err := os.WriteFile(to, []byte(text), 0o600); err != nil {
			return "", err
		}
	}
	doc, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	file := filepath.Join(dir, "overlay.json")
	return file, os.WriteFile(file, doc, 0o600)
}

// sound finds tests of entries that do not pass as the code is: a failure of
// theirs would say nothing.
func sound(ctx context.Context, root string, entries []*entry) map[*entry]string {
	groups := map[string][]*entry{}
	var order []string
	for _, e := range entries {
		id := fmt.Sprint(e.pkg, e.args, e.env, strings.Count(e.test, "/"))
		if groups[id] == nil {
			order = append(order, id)
		}
		groups[id] = append(groups[id], e)
	}
	bad := map[*entry]string{}
	for _, id := range order {
		es := groups[id]
		var names []string
		for _, e := range es {
			names = append(names, e.test)
		}
		r, err := goTest(ctx, root, "", es[0], 4*limit, names...)
		for _, e := range es {
			switch {
			case err != nil:
				bad[e] = err.Error()
			case r.ended[e.test] != "pass":
				bad[e] = fmt.Sprintf("%s does not pass as the code is (%s)", e.test, r.ended[e.test])
			}
		}
		if err == nil && r.failed {
			fmt.Fprintln(os.Stderr, r.output.String()) // whoever runs the table sees why
		}
	}
	return bad
}
