package main

import (
	"errors"
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/outrider-dev/outrider/internal/testdb"
)

// TestMain makes a measured process of the test's binary when it is started as
// one.
func TestMain(m *testing.M) {
	if text := os.Getenv(envChild); text != "" {
		os.Exit(childMain(text))
	}
	os.Exit(m.Run())
}

// TestScenarios runs each through, with numbers that say nothing.
func TestScenarios(t *testing.T) {
	e := &env{postgres: testdb.Postgres(t), kafka: testdb.Kafka(t), events: 200, scale: 0.001}
	t.Cleanup(e.close)
	if err := e.check(t.Context(), scenarios); err != nil {
		t.Fatal(err)
	}
	for _, s := range scenarios {
		t.Run(s.name, func(t *testing.T) {
			r, err := compare(t.Context(), e, s, 1)
			if err != nil {
				t.Fatal(err)
			}
			for i, f := range s.figures {
				v := r.Figures[i].Median
				if math.IsNaN(v) || math.IsInf(v, 0) || f.how != more && v <= 0 {
					t.Errorf("%s: %v", f.of, v)
				}
			}
			if _, ok := r.over(cpuSeconds, sideA); !ok {
				t.Error("the relay's CPU seconds were not measured")
			}
			if _, ok := r.over(peakMiB, sideA); !ok {
				t.Error("the relay's memory was not measured")
			}
			var out strings.Builder
			(&report{Results: []result{r}}).print(&out)
			if got := strings.Count(out.String(), "\n| "+s.name+" "); got != len(s.figures) {
				t.Errorf("the table has %d lines, want %d:\n%s", got, len(s.figures), out.String())
			}
		})
	}
}

func TestAudit(t *testing.T) {
	id := func(n string) string { return "00000000-0000-0000-0000-00000000000" + n }
	for _, tt := range []struct {
		name string
		got  string // key and number
		want string // of the error
	}{
		{"in order", "a1 b2 a3", ""},
		{"keys apart", "b2 a1 a3", ""},
		{"a run again", "a1 a3 b2 a1 a3", ""},
		{"swapped", "a3 a1 b2", "order"},
		{"made up", "a1 b2 a3 a4", "not written"},
	} {
		a := newAudit(3)
		for _, d := range strings.Fields(tt.got) {
			a.note(d[:1], id(d[1:]))
		}
		err := a.complete(t.Context())
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
}

// What is confirmed never goes past an event without an answer.
func TestTracker(t *testing.T) {
	var tr tracker
	confirmed := func(want, events int) {
		t.Helper()
		at, n, err := tr.done()
		if err != nil || int(at) != want || n != events {
			t.Errorf("confirmed up to %d (%d events, %v), want %d (%d)", at, n, err, want, events)
		}
	}
	a := tr.begin()
	tr.add(a)
	tr.add(a)
	tr.end(a, 10)
	b := tr.begin()
	tr.add(b)
	tr.ack(b, nil)
	confirmed(0, 0)
	tr.ack(a, nil)
	confirmed(0, 0)
	tr.ack(a, nil)
	confirmed(10, 2) // all of b has an answer, and its commit is to come
	tr.end(b, 20)
	confirmed(20, 1)
	c := tr.begin()
	tr.add(c)
	tr.ack(c, errors.New("refused"))
	if _, _, err := tr.done(); err == nil {
		t.Error("an event that was refused is not noticed")
	}
}

func TestVerdicts(t *testing.T) {
	pairs := []pair{
		{sample{perSecond: 100, p99: 20, waitKilled: 1}, sample{perSecond: 50, p99: 10}},
		{sample{perSecond: 80, p99: 14, waitKilled: 1}, sample{perSecond: 50, p99: 10}},
		{sample{perSecond: 60, p99: 12, waitKilled: 3}, sample{perSecond: 50, p99: 10}},
	}
	for _, tt := range []struct {
		f    figure
		want spread
		text string
		met  string
	}{
		{figure{perSecond, ratio, atLeast(1.6)}, spread{1.6, 1.2, 2}, ">= 1.60", "met"},
		{figure{perSecond, ratio, atLeast(1.7)}, spread{1.6, 1.2, 2}, ">= 1.70", "missed"},
		{figure{perSecond, ratio, reported}, spread{1.6, 1.2, 2}, "reported", ""},
		{figure{p99, more, atMost(4)}, spread{4, 2, 10}, "<= +4.00 ms", "met"},
		{figure{p99, more, atMost(3)}, spread{4, 2, 10}, "<= +3.00 ms", "missed"},
		{figure{waitKilled, alone, never(2)}, spread{1, 1, 3}, "never > 2.00 s", "missed"},
		{figure{waitKilled, alone, never(3)}, spread{1, 1, 3}, "never > 3.00 s", "met"},
	} {
		r := result{scenario: scenario{figures: []figure{tt.f}}, Pairs: pairs}
		r.judge()
		if got := r.Figures[0]; got.spread != tt.want || got.Verdict != tt.met || got.Target != tt.text {
			t.Errorf("%s %s: %+v, want %v, %q, %q", tt.f.of, tt.f.how, got, tt.want, tt.text, tt.met)
		}
	}
	if got := spreadOf([]float64{4, 1, 2, 3}); got != (spread{2.5, 1, 4}) {
		t.Errorf("the spread of 1 to 4 is %v", got)
	}
}

func TestPercentile(t *testing.T) {
	var lat []time.Duration
	for i := 200; i > 0; i-- {
		lat = append(lat, time.Duration(i))
	}
	for percent, want := range map[int]time.Duration{50: 100, 95: 190, 99: 198, 100: 200} {
		if got := percentile(lat, percent); got != want {
			t.Errorf("p%d of 1 to 200 is %d, want %d", percent, got, want)
		}
	}
	if got := percentile(lat[:1], 50); got != 200 {
		t.Errorf("p50 of one value is %d", got)
	}
	if got := percentile(lat[:3], 50); got != 199 {
		t.Errorf("p50 of 198 to 200 is %d", got)
	}
}
