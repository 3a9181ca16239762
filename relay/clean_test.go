package relay

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// What is kept is valid, without NULs and bounded; what was so stays as it is.
func TestClean(t *testing.T) {
	for s, want := range map[string]string{
		"":               "",
		"as it was":      "as it was",
		"a\x00b":         "a\uFFFDb",
		"a\xFFb":         "a\uFFFDb",
		"123456789\xC3":  "123456789",
		"12345678é":      "12345678é",
		"123456789é":     "123456789",
		"1234567\x00890": "1234567\uFFFD",
		"12345678\x0090": "12345678",
	} {
		if got := clean(s, 10); got != want {
			t.Errorf("%q became %q, want %q", s, got, want)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		s := string(rapid.SliceOf(rapid.Byte()).Draw(t, "text"))
		limit := rapid.IntRange(0, 20).Draw(t, "limit")
		got := clean(s, limit)
		if !utf8.ValidString(got) || strings.Contains(got, "\x00") || len(got) > limit {
			t.Fatalf("%q became %q", s, got)
		}
	})
}

// A class that does not exist makes no figure of its own, reaches the store as
// "other", with what the sink said as evidence, and is counted against the sink.
func TestClassThatDoesNotExist(t *testing.T) {
	weird := sink.Class("a\x00b\xFF" + strings.Repeat("c", 5000))
	inWorld(t, memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
		switch m.Key {
		case "reject":
			return sink.Result{Status: sink.Reject, Class: weird, Err: errors.New("e\x00vidence\xFF")}
		case "bare":
			return sink.Result{Status: sink.Reject, Class: weird}
		case "retry":
			return sink.Result{Status: sink.Retry, Class: weird, Err: errors.New("evidence")}
		}
		return sink.Result{Status: sink.Delivered, Receipt: "re\x00ceipt@1"}
	}}, func(w *world) {
		told := map[sink.Class]bool{}
		r := w.start(func(c *Config) {
			event := c.Hooks.Event
			c.Hooks.Event = func(d string, rec *outrider.Record, o EventOutcome) {
				if o.Outcome != Published {
					told[o.Class] = true
				}
				event(d, rec, o)
			}
			c.Destinations[0].Retry.Immediate = -1
			c.Destinations[0].Retry.Base = time.Hour
		})
		ids := w.add("reject", "bare", "retry", "good")
		w.wait(1, time.Minute)
		time.Sleep(time.Second)
		w.mustBe(store.Published, ids[3])
		for i, s := range []store.State{store.Failed, store.Failed, store.Waiting} {
			e := w.entries()[ids[i]]
			if e.State != s || e.Class != string(sink.ClassOther) {
				t.Errorf("%s ended as %v of class %q", e.Key, e.State, e.Class)
			}
			if !strings.HasPrefix(e.Message, `of class "a�b�ccc`) || strings.HasSuffix(e.Message, "evidence") != (e.Key == "retry") {
				t.Errorf("%s: its evidence is %q", e.Key, e.Message)
			}
		}
		if len(told) != 1 || !told[sink.ClassOther] {
			t.Errorf("hooks were told of classes: %v", told)
		}
		if n := w.events.get(&w.events.broken); n != 3 {
			t.Errorf("%d broken promises were counted, not 3", n)
		}
		r.end()
	})
}
