package demo

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files")

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// play tells a ledger a story: "a1+" commits a's first event, "a1-" rolls it
// back, "a1!" commits poison, "a1" delivers it, "a1~" skips it.
func play(story string) *ledger {
	l := newLedger()
	for word := range strings.FieldsSeq(story) {
		id := strings.TrimRight(word, "+-!~")
		var n int
		_, _ = fmt.Sscanf(id[1:], "%d", &n)
		switch word[len(word)-1] {
		case '+':
			l.place(id, id[:1], n, false, now)
			l.commit(id)
		case '-':
			l.place(id, id[:1], n, false, now)
			l.rollBack(id)
		case '!':
			l.place(id, id[:1], n, true, now)
			l.commit(id)
		case '~':
			l.skip(id)
		default:
			l.deliver(id, now.Add(time.Duration(n)*time.Millisecond))
		}
	}
	return l
}

// The judge sees each kind of broken promise, and none where there is none.
func TestLedger(t *testing.T) {
	for _, test := range []struct {
		name, story string
		want        Report
		ok          bool
	}{
		{"all well", "a1+ b1+ a1 b1 a2+ a2", Report{Committed: 3, Delivered: 3}, true},
		{"on their way", "a1+ b1+ a1", Report{Committed: 2, Delivered: 1, Waiting: 1}, false},
		{"duplicates", "a1+ a2+ a1 a2 a1 a2", Report{Committed: 2, Delivered: 2, Duplicates: 2}, true},
		{"lost", "a1+ a2+ a2", Report{Committed: 2, Delivered: 1, Waiting: 1, Lost: 1}, false},
		{"out of order", "a1+ a2+ a2 a1", Report{Committed: 2, Delivered: 2, Breaks: 1}, false},
		{"other keys have no order", "a1+ b1+ b1 a1", Report{Committed: 2, Delivered: 2}, true},
		{"rolled back", "a1- a1+", Report{Committed: 1, RolledBack: 1, Waiting: 1}, false},
		{"sent though rolled back", "a1- a1", Report{RolledBack: 1, Ghosts: 1}, false},
		{"never placed", "x1", Report{Ghosts: 1}, false},
		{"poison holds its key", "a1! a2+ b1+ b1", Report{Committed: 3, Delivered: 1, Waiting: 2}, false},
		{"poison is given up", "a1! a2+ a1~ a2", Report{Committed: 2, Delivered: 1, Skipped: 1}, true},
		{"poison is overtaken", "a1! a2+ a2", Report{Committed: 2, Delivered: 1, Waiting: 1}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := play(test.story).report()
			r.P50, r.P95, r.P99 = 0, 0, 0
			if diff := cmp.Diff(test.want, r); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
			if err := r.Verdict(); (err == nil) != test.ok || err != nil && !errors.Is(err, errLost) {
				t.Errorf("verdict %v", err)
			}
		})
	}
}

// The first event has to come in time, unless somebody was in its way.
func TestFirstDeliveryInTime(t *testing.T) {
	at := func(d time.Duration) *demo {
		l := play("a1+")
		l.deliver("a1", now.Add(d))
		return &demo{ledger: l, began: now}
	}
	for _, test := range []struct {
		first time.Duration
		kills int
		ok    bool
	}{{time.Second, 0, true}, {firstWithin, 0, true}, {firstWithin + 1, 0, false}, {firstWithin + 1, 1, true}} {
		r := at(test.first).report()
		r.Kills = test.kills
		if err := r.Verdict(); r.First != test.first || (err == nil) != test.ok {
			t.Errorf("first after %v, kills %d: reported %v, verdict %v", test.first, test.kills, r.First, err)
		}
	}
	if r := (&demo{ledger: play("a1+"), began: now}).report(); r.First != 0 {
		t.Errorf("none came: reported %v", r.First)
	}
	d := at(time.Second)
	d.ledger.deliver("a1", now.Add(time.Hour))
	if r := d.report(); r.First != time.Second {
		t.Errorf("a repetition counts: %v", r.First)
	}
}

// An event may arrive before the commit has returned, and before a roll-back
// has, which would be a broken promise.
func TestLedgerBeforeTheCommitReturns(t *testing.T) {
	l := newLedger()
	l.place("a1", "a", 1, false, now)
	l.deliver("a1", now)
	l.commit("a1")
	if r := l.report(); r.Committed != 1 || r.Delivered != 1 || r.Waiting != 0 {
		t.Errorf("%+v", r)
	}
	l.place("a2", "a", 2, false, now)
	l.deliver("a2", now)
	l.rollBack("a2")
	if r := l.report(); r.Ghosts != 1 || r.Delivered != 1 {
		t.Errorf("%+v", r)
	}
}

func TestPercentiles(t *testing.T) {
	l := newLedger()
	for i := range 3 * latencyWindow {
		l.latency(time.Duration(i%100) * time.Millisecond)
	}
	r := l.report()
	if r.P50 != 50*time.Millisecond || r.P95 != 95*time.Millisecond || r.P99 != 99*time.Millisecond || len(l.latencies) != latencyWindow {
		t.Errorf("%v %v %v of %d", r.P50, r.P95, r.P99, len(l.latencies))
	}
}

func TestParseScript(t *testing.T) {
	got, err := ParseScript(" 4s stop-broker, 2s kill,6500ms start-broker, ")
	want := []Step{{2 * time.Second, Kill}, {4 * time.Second, StopBroker}, {6500 * time.Millisecond, StartBroker}}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	for _, bad := range []string{"kill", "2 kill", "-1s kill", "2s dance", "2s kill now"} {
		if _, err := ParseScript(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

// A step that the shop does not live to see is refused before anything runs.
func TestScriptWithinTheTime(t *testing.T) {
	steps := []Step{{time.Second, Poison}, {9 * time.Second, Kill}}
	_, err := Run(t.Context(), Config{For: 2 * time.Second, Script: steps})
	if !errors.Is(err, ErrScript) || !strings.Contains(err.Error(), "9s kill") || !strings.Contains(err.Error(), "2s") {
		t.Errorf("got %v", err)
	}
	for _, c := range []Config{
		{For: 2 * time.Second, Script: steps[:1]},
		{Script: steps},
		{For: time.Second, Script: []Step{{time.Second, Kill}}}, // a tie: may be done or not
	} {
		if err := checkScript(c.For, c.Script); (err == nil) != (c.For != time.Second) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// Without keys and without a time it is said how it ends.
func TestHowItEnds(t *testing.T) {
	keys := make(chan byte)
	for _, test := range []struct {
		name string
		c    Config
		said bool
	}{
		{"nothing ends it", Config{}, true},
		{"keys", Config{Keys: keys}, false},
		{"a time", Config{For: time.Second}, false},
	} {
		var out strings.Builder
		d := &demo{Config: test.c, board: &board{out: &out, begun: time.Now()}}
		d.sayHowItEnds()
		if got := strings.Contains(out.String(), "SIGTERM"); got != test.said {
			t.Errorf("%s: said %v: %q", test.name, got, out.String())
		}
	}
}

// A relay that was asked to stop has not failed.
func TestHowTheRelayEnded(t *testing.T) {
	if got := ending(nil); strings.Contains(got, "nil") || !strings.Contains(got, "was asked to stop") {
		t.Errorf("asked to stop: %q", got)
	}
	if got := ending(errors.New("signal: killed")); got != "the relay has ended (signal: killed)" {
		t.Errorf("killed: %q", got)
	}
}

func TestBoard(t *testing.T) {
	b := &board{live: true, latest: []string{"   2.0s  kill -9 of the relay, pid 4711", "   4.0s  the broker is stopped"}}
	r := Report{Committed: 1234, Delivered: 1200, Waiting: 33, Skipped: 1, Duplicates: 12, RolledBack: 137,
		P50: 2400 * time.Microsecond, P95: 31 * time.Millisecond, P99: 1200 * time.Millisecond}
	got := b.picture(62*time.Second, situation{Report: r, relay: 4712, broker: true, slow: true, rate: 100, phase: "open"})
	r.Lost, r.Breaks, r.Ghosts = 2, 1, 3
	got += "----\n" + b.picture(63*time.Second, situation{Report: r, rate: 100, phase: "closed"})
	got += "----\n" + summaryLine(situation{Report: r}) + "\n"
	got = strings.ReplaceAll(got, "\x1b", "^")
	if *update {
		if err := os.WriteFile("testdata/board.golden", []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile("testdata/board.golden")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}
