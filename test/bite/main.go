// Bite shows that the tests bite: for each line of a table that something rests
// on, it takes the line away and sees that the test fails which is there for
// it, and fails for that reason. Nothing in the tree is changed: the compiler is
// given other files in place of some (go build -overlay).
//
// The tables are in table/*.txt. An entry looks like this, and is shown in
// docs/BITES.md:
//
//	== name
//	for: 2 LSE-01
//	gone: what is taken away, in a sentence without a capital and a full stop
//	test: pgstore TestStore/Lease/SettleAfterTakeOver
//	says: a regular expression that matches what the test then says
//	--- pgstore/writes.go
//	 a line that stays, to make the place clear
//	-a line that is taken away
//	+what stands there instead, if anything
//
// What it is for are invariants of docs/DESIGN.md and cases of docs/FAULTS.md.
// The lines have to be in the file exactly once. A test that fails by not
// coming to an end has "hangs: 20s" in place of says. "args" are for the test's
// binary and "env" for its environment; an entry can change several places.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	only := flag.String("only", "", "names, invariants, cases, files or folders, with commas between")
	part := flag.String("part", "1/1", "which part of how many, such as 2/5")
	list := flag.Bool("list", false, "show what there is and run nothing")
	quick := flag.Bool("quick", false, "do not see first that the tests pass as the code is")
	verbose := flag.Bool("v", false, "show what the tests say")
	flag.Parse()
	var k, n int
	if c, err := fmt.Sscanf(*part, "%d/%d", &k, &n); c != 2 || err != nil || k < 1 || k > n {
		fmt.Fprintln(os.Stderr, "-part is k/n")
		os.Exit(2)
	}
	entries, err := load(filepath.Join("test", "bite", "table"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	var asked []string
	if *only != "" {
		asked = strings.Split(*only, ",")
	}
	var chosen []*entry
	for _, e := range entries {
		if e.matches(asked) {
			chosen = append(chosen, e)
		}
	}
	chosen = chosen[len(chosen)*(k-1)/n : len(chosen)*k/n]
	if len(chosen) == 0 {
		fmt.Fprintln(os.Stderr, "nothing in the table is called so")
		os.Exit(2)
	}
	if *list {
		for _, e := range chosen {
			fmt.Printf("%-30s %-18s %s\n", e.name, strings.Join(e.tags, ", "), e.gone)
		}
		return
	}
	if !all(ctx, ".", chosen, !*quick, *verbose) {
		os.Exit(1)
	}
}

// all runs entries and prints what came of them. false: not everything bit.
func all(ctx context.Context, root string, entries []*entry, first, verbose bool) bool {
	began := time.Now()
	bad := map[*entry]string{}
	if first {
		bad = sound(ctx, root, entries)
		fmt.Printf("the tests as the code is: %d of %d do not pass, %.0f s\n\n", len(bad), len(entries), time.Since(began).Seconds())
	}
	count := map[verdict]int{}
	for _, e := range entries {
		if ctx.Err() != nil {
			return false
		}
		r := result{verdict: unfit, why: bad[e]}
		if r.why == "" {
			r = e.run(ctx, root)
		}
		count[r.verdict]++
		fmt.Printf("%-8s %5.1f s  %-18s %s: %s\n%20s %s %s\n", r.verdict, r.took.Seconds(), strings.Join(e.tags, ", "),
			e.name, e.gone, "", e.pkg, e.test)
		if r.why != "" {
			fmt.Printf("%20s %s\n", "", r.why)
		}
		if verbose || r.verdict == unfit {
			fmt.Println(indent(tail(r.said, 4000)))
		}
	}
	fmt.Printf("\n%d bitten, %d survived, %d errors, %.0f s\n", count[bitten], count[survived], count[unfit], time.Since(began).Seconds())
	return count[bitten] == len(entries)
}

func tail(s string, n int) string {
	if len(s) > n {
		return "[...]" + s[len(s)-n:]
	}
	return s
}

func indent(s string) string { return "\t" + strings.ReplaceAll(strings.TrimSpace(s), "\n", "\n\t") }
