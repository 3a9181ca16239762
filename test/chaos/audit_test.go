//go:build linux

package chaos_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
)

// delivery is a message as it lies in the broker's log.
type delivery struct {
	id, key, sequence string
	partition         int32
	payload           event
}

// findings are what is wrong with what arrived.
type findings struct {
	delivered, duplicates int
	faults                map[string]int // how often
	examples              []string
}

func (f *findings) add(kind, format string, args ...any) {
	if f.faults[kind]++; f.faults[kind] <= 5 {
		f.examples = append(f.examples, kind+": "+fmt.Sprintf(format, args...))
	}
}

func (f *findings) String() string {
	var b strings.Builder
	for _, kind := range slices.Sorted(maps.Keys(f.faults)) {
		fmt.Fprintf(&b, "%d x %s\n", f.faults[kind], kind)
	}
	return b.String() + strings.Join(f.examples, "\n")
}

// audit holds what arrived, in the order of each partition, against what was
// committed and what was rolled back.
func audit(want map[string]event, rolled map[string]bool, got []delivery) *findings {
	f := &findings{faults: map[string]int{}}
	seen := map[string]bool{}
	first := map[string]int{}      // per key, the last number among first deliveries
	kept := map[string]int{}       // the same of a consumer that drops by sequence
	highest := map[string]string{} // its highest sequence
	place := map[string]int32{}
	for _, d := range got {
		f.delivered++
		e, committed := want[d.id]
		switch {
		case rolled[d.id]:
			f.add("rolled back", "%+v", d)
			continue
		case !committed:
			f.add("never committed", "%+v", d)
			continue
		case e != d.payload || e.Key != d.key:
			f.add("altered", "%+v is %+v in the database", d, e)
			continue
		}
		again := seen[d.id]
		seen[d.id] = true
		if again {
			f.duplicates++
		}
		if d.key == "" {
			continue
		}
		if p, ok := place[d.key]; ok && p != d.partition {
			f.add("on two partitions", "%+v, before on %d", d, p)
		}
		place[d.key] = d.partition
		if !again {
			if e.N != first[d.key]+1 {
				f.add("out of order", "%s: %d comes first behind %d", d.key, e.N, first[d.key])
			}
			first[d.key] = max(first[d.key], e.N)
		}
		switch {
		case d.sequence == "":
			f.add("without a sequence", "%+v", d)
		case d.sequence <= highest[d.key]: // dropped
		default:
			if e.N > kept[d.key]+1 {
				f.add("gap by sequence", "%s: %d behind %d, sequence %s behind %s", d.key, e.N, kept[d.key], d.sequence, highest[d.key])
			}
			highest[d.key] = d.sequence
			kept[d.key] = max(kept[d.key], e.N)
		}
	}
	last := map[string]int{}
	for id, e := range want {
		if !seen[id] {
			f.add("lost", "%s: %+v", id, e)
		}
		last[e.Key] = max(last[e.Key], e.N)
	}
	for key, n := range last {
		if kept[key] < n {
			f.add("gap by sequence", "%s: ends at %d of %d", key, kept[key], n)
		}
	}
	return f
}

// TestAudit shows that audit finds what it is for.
func TestAudit(t *testing.T) {
	want := map[string]event{"a": {"k", 1}, "b": {"k", 2}, "c": {"k", 3}, "u": {}}
	at := func(id string, n int, sequence string) delivery {
		return delivery{id: id, key: "k", sequence: sequence, payload: event{"k", n}}
	}
	a, b, c := at("a", 1, "1"), at("b", 2, "2"), at("c", 3, "3")
	u := delivery{id: "u"}
	elsewhere := b
	elsewhere.partition = 1
	for _, tt := range []struct {
		name string
		got  []delivery
		want string // kinds
	}{
		{"as it should be", []delivery{u, a, b, c}, ""},
		{"a run again", []delivery{a, b, a, b, c, u}, ""},
		{"a run again, late", []delivery{a, b, c, u, b, c}, ""},
		{"lost", []delivery{a, b, c}, "lost"},
		{"lost at the end", []delivery{a, b, u}, "gap by sequence lost"},
		{"lost in between", []delivery{a, c, u}, "gap by sequence lost out of order"},
		{"swapped", []delivery{a, c, b, u}, "gap by sequence out of order"},
		{"swapped, repeated", []delivery{b, a, b, c, u}, "gap by sequence out of order"},
		{"sequence falls", []delivery{a, at("b", 2, "0"), c, u}, "gap by sequence"},
		{"no sequence", []delivery{a, at("b", 2, ""), c, u}, "gap by sequence without a sequence"},
		{"rolled back", []delivery{a, b, c, u, at("r", 3, "9")}, "rolled back"},
		{"made up", []delivery{a, b, c, u, at("x", 4, "9")}, "never committed"},
		{"altered", []delivery{a, b, at("c", 4, "3"), u}, "altered gap by sequence lost"},
		{"moved", []delivery{a, elsewhere, c, u}, "on two partitions"},
	} {
		f := audit(want, map[string]bool{"r": true}, tt.got)
		if got := strings.Join(slices.Sorted(maps.Keys(f.faults)), " "); got != tt.want {
			t.Errorf("%s: found %q, want %q", tt.name, got, tt.want)
		}
	}
	if f := audit(want, nil, []delivery{a, b, a, b, a, c, u, u}); f.duplicates != 4 {
		t.Errorf("%d duplicates, want 4", f.duplicates)
	}
}

// cutLast is strings.Cut at the last separator.
func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}
