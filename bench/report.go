package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"time"
)

// quantity names something that was measured; its unit is its last word.
type quantity string

const (
	perSecond  quantity = "per s" // events or commits
	p50        quantity = "p50 ms"
	p95        quantity = "p95 ms"
	p99        quantity = "p99 ms"
	longest    quantity = "max ms"
	cpuSeconds quantity = "CPU s" // of the relay or the bare loop
	peakMiB    quantity = "peak MiB"
	offered    quantity = "committed per s"

	// The longest from a commit to its delivery.
	waitKilled quantity = "its keys s"
	waitOthers quantity = "others s"
)

// order in which they are shown.
var quantities = []quantity{perSecond, p50, p95, p99, longest, waitKilled, waitOthers, offered, cpuSeconds, peakMiB}

func (q quantity) unit() string { return string(q)[strings.LastIndex(string(q), " ")+1:] }

// text is a value in a form that people can compare.
func (q quantity) text(v float64) string {
	switch {
	case q == perSecond || q == offered:
		return fmt.Sprintf("%.0f", v)
	case q == peakMiB:
		return fmt.Sprintf("%.0f", v)
	case q == waitKilled || q == waitOthers:
		return fmt.Sprintf("%.2f", v)
	default:
		return fmt.Sprintf("%.1f", v)
	}
}

// sample is one side of one pair.
type sample map[quantity]float64

// String has all that was measured.
func (s sample) String() string {
	var parts []string
	for _, q := range quantities {
		if v, ok := s[q]; ok {
			parts = append(parts, fmt.Sprintf("%s %s", q, q.text(v)))
		}
	}
	return strings.Join(parts, ", ")
}

// latencies puts percentiles into the sample.
func (s sample) latencies(lat []time.Duration) {
	for q, percent := range map[quantity]int{p50: 50, p95: 95, p99: 99, longest: 100} {
		s[q] = float64(percentile(lat, percent).Microseconds()) / 1000
	}
}

// percentile is the smallest value that so many per cent do not exceed.
func percentile(lat []time.Duration, percent int) time.Duration {
	if len(lat) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(lat))
	return sorted[max(0, (len(sorted)*percent+99)/100-1)]
}

// comparison is how two sides become a figure.
type comparison string

const (
	ratio comparison = "ratio" // a/b
	more  comparison = "more"  // a-b
	alone comparison = "alone" // a
)

// figure is what is held against a target.
type figure struct {
	of     quantity
	how    comparison
	target target
}

func (f figure) value(p pair) float64 {
	a, b := p.A[f.of], p.B[f.of]
	switch f.how {
	case more:
		return a - b
	case alone:
		return a
	default:
		return a / b
	}
}

func (f figure) text(v float64) string {
	switch f.how {
	case ratio:
		return fmt.Sprintf("%.2f", v)
	case more:
		return fmt.Sprintf("%+.2f %s", v, f.of.unit())
	default:
		return fmt.Sprintf("%.2f %s", v, f.of.unit())
	}
}

// target is what a figure should be. The zero value: it is only reported.
type target struct {
	least, most float64
	is          bool
	worst       bool // of all pairs, not the median
}

var reported target

func atLeast(v float64) target { return target{least: v, most: math.Inf(1), is: true} }
func atMost(v float64) target  { return target{least: math.Inf(-1), most: v, is: true} }
func never(v float64) target   { return target{least: math.Inf(-1), most: v, is: true, worst: true} }

// met judges by the median of the pairs, or by the worst of them.
func (t target) met(s spread) bool {
	if t.worst {
		return s.Min >= t.least && s.Max <= t.most
	}
	return s.Median >= t.least && s.Median <= t.most
}

func (t target) text(f figure) string {
	switch {
	case !t.is:
		return "reported"
	case t.worst:
		return "never > " + f.text(t.most)
	case math.IsInf(t.most, 1):
		return ">= " + f.text(t.least)
	default:
		return "<= " + f.text(t.most)
	}
}

// spread is what came of several pairs.
type spread struct{ Median, Min, Max float64 }

func spreadOf(v []float64) spread {
	v = slices.Sorted(slices.Values(v))
	n := len(v)
	return spread{Median: (v[(n-1)/2] + v[n/2]) / 2, Min: v[0], Max: v[n-1]}
}

// pair is one run of both sides.
type pair struct{ A, B sample }

// judged is a figure over all pairs.
type judged struct {
	Quantity   quantity
	Comparison comparison
	Target     string
	Verdict    string // met, missed, or empty
	spread
}

// result is what came of a scenario.
type result struct {
	scenario scenario

	Name, What, A, B string
	Figures          []judged
	Pairs            []pair
}

// over is a quantity of one side over all pairs. false: it was not measured.
func (r *result) over(q quantity, of func(pair) sample) (spread, bool) {
	var v []float64
	for _, p := range r.Pairs {
		if x, ok := of(p)[q]; ok {
			v = append(v, x)
		}
	}
	if len(v) == 0 {
		return spread{}, false
	}
	return spreadOf(v), true
}

func sideA(p pair) sample { return p.A }
func sideB(p pair) sample { return p.B }

// judge works out the figures.
func (r *result) judge() {
	for _, f := range r.scenario.figures {
		var v []float64
		for _, p := range r.Pairs {
			v = append(v, f.value(p))
		}
		j := judged{Quantity: f.of, Comparison: f.how, Target: f.target.text(f), spread: spreadOf(v)}
		switch {
		case !f.target.is:
		case f.target.met(j.spread):
			j.Verdict = "met"
		default:
			j.Verdict = "missed"
		}
		r.Figures = append(r.Figures, j)
	}
}

// report is a whole run.
type report struct {
	Machine string
	Events  int // of a drain
	Pairs   int
	Scale   float64
	Results []result
}

// print writes a table in Markdown, a line for each figure.
func (r *report) print(w io.Writer) {
	if len(r.Results) == 0 {
		return
	}
	rows := [][]string{{"scenario", "what", "A / B", "figure", "median", "spread", "A", "B", "CPU s", "peak MiB", "target", ""}}
	for i := range r.Results {
		res := &r.Results[i]
		for k, f := range res.scenario.figures {
			j := res.Figures[k]
			row := []string{res.Name, res.What, res.A + " / " + res.B, string(f.of),
				f.text(j.Median), f.text(j.Min) + " to " + f.text(j.Max)}
			row = append(row, res.median(f.of, sideA), res.median(f.of, sideB))
			for _, q := range []quantity{cpuSeconds, peakMiB} {
				row = append(row, res.median(q, sideA)+" / "+res.median(q, sideB))
			}
			rows = append(rows, append(row, j.Target, j.Verdict))
		}
	}
	fmt.Fprintf(w, "\n%s; %d pairs, drains of %d events, scale %g\n\n", r.Machine, r.Pairs, r.Events, r.Scale)
	for i, line := range align(rows) {
		fmt.Fprintln(w, line)
		if i == 0 {
			fmt.Fprintln(w, "|"+strings.Repeat("---|", len(rows[0])))
		}
	}
}

// median of a quantity of one side, as text.
func (r *result) median(q quantity, of func(pair) sample) string {
	s, ok := r.over(q, of)
	if !ok {
		return "-"
	}
	return q.text(s.Median)
}

// align makes lines of cells whose columns stand below each other.
func align(rows [][]string) []string {
	width := make([]int, len(rows[0]))
	for _, r := range rows {
		for i, c := range r {
			width[i] = max(width[i], len(c))
		}
	}
	var out []string
	for _, r := range rows {
		var b strings.Builder
		for i, c := range r {
			fmt.Fprintf(&b, "| %-*s ", width[i], c)
		}
		out = append(out, b.String()+"|")
	}
	return out
}

// save writes all samples as JSON.
func (r *report) save(file string) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(b, '\n'), 0o644)
}
