package relay

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// logLines keeps what is logged.
type logLines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logLines) logger() *slog.Logger { return slog.New(slog.NewJSONHandler(l, nil)) }

// take gives the lines since the last call that tell of a class.
func (l *logLines) take(t *testing.T, class sink.Class) []map[string]any {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []map[string]any
	for _, line := range bytes.Split(bytes.TrimSpace(l.buf.Bytes()), []byte("\n")) {
		var m map[string]any
		if len(line) > 0 {
			if err := json.Unmarshal(line, &m); err != nil {
				t.Fatal(err)
			}
		}
		if m["class"] == string(class) {
			out = append(out, m)
		}
	}
	return out
}

// Each event that is given up is named in the log, up to a number per class and
// minute; of what is beyond it the number is told, at the latest at the stop.
func TestFailuresAreNamed(t *testing.T) {
	const many = failuresShown + 12
	inWorld(t, memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
		if m.Key == "odd" {
			return answer(sink.Reject, sink.ClassOversize)
		}
		return answer(sink.Reject, sink.ClassInvalid)
	}}, func(w *world) {
		lines := &logLines{}
		r := w.start(func(c *Config) { c.Logger = lines.logger() })
		w.add("odd", "odd")
		for i := range many {
			w.add(fmt.Sprint("key-", i))
		}
		synctest.Wait()
		time.Sleep(time.Second)
		synctest.Wait()
		named := lines.take(t, sink.ClassInvalid)
		if len(named) != failuresShown {
			t.Errorf("%d lines name events, want %d", len(named), failuresShown)
		}
		ids := map[any]bool{}
		for _, m := range named {
			ids[m["event"]] = true
			if m["destination"] != "out" || m["event"] == "" || m["key"] == "" || m["error"] != "as scripted" || m["attempts"] != 1.0 {
				t.Errorf("a line says %v", m)
			}
		}
		if len(ids) != failuresShown {
			t.Errorf("%d events are named, want %d", len(ids), failuresShown)
		}
		if odd := lines.take(t, sink.ClassOversize); len(odd) != 1 {
			t.Errorf("of another class: %v", odd)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if all := lines.take(t, sink.ClassInvalid); len(all) != failuresShown+1 || all[failuresShown]["events"] != float64(many-failuresShown) {
			t.Errorf("after a minute: %v", all[failuresShown:])
		}
		for i := range many {
			w.add(fmt.Sprint("other-", i))
		}
		time.Sleep(time.Second)
		r.end()
		if all := lines.take(t, sink.ClassInvalid); len(all) != 2*failuresShown+2 || all[2*failuresShown+1]["events"] != float64(many-failuresShown) {
			t.Errorf("at the stop: %d lines, want %d", len(all), 2*failuresShown+2)
		}
	})
}

// Unordered events that are refused for good, however many, stop nobody, nor do
// those that are scheduled: nothing but a person or time would make them fewer.
// Those that wait for another try do bound the lease.
func TestWhatHoldsNoKeyDoesNotStopTheLease(t *testing.T) {
	inWorld(t, memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
		switch {
		case strings.HasPrefix(m.Key, "good"):
			return memsink.Deliver
		case m.Key == "":
			return answer(sink.Reject, sink.ClassNoTarget)
		}
		return answer(sink.Retry, sink.ClassRefused)
	}}, func(w *world) {
		r := w.start(func(c *Config) {
			c.MaxExceptions, c.MaxRecords = 10, 5
			c.Destinations[0].Retry = Retry{Base: time.Hour, Cap: time.Hour}
		})
		bad := w.add(make([]string, 100)...)
		tx := w.store.Begin()
		for range 100 {
			e := outrider.Event{AggregateType: "order", AggregateID: "1", Type: "OrderPlaced", Unordered: true, Delay: time.Hour, Payload: []byte("{}")}
			if _, err := tx.Add(e); err != nil {
				t.Fatal(err)
			}
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		w.add("good")
		w.wait(1, time.Minute)
		w.mustBe(store.Failed, bad...)
		var keys []string
		for i := range 100 {
			keys = append(keys, fmt.Sprint("bad", i))
		}
		w.add(append(keys, "good-behind")...)
		time.Sleep(10 * time.Minute)
		waiting := 0
		for _, e := range w.entries() {
			if e.State == store.Waiting {
				waiting++
			}
		}
		if waiting < 10 || waiting > 10+6*5 { // claims that have been read ahead
			t.Errorf("%d wait, of 10 and what was in hand", waiting)
		}
		if n := w.sink.Len(); n != 1 {
			t.Errorf("%d arrived, though the lease is full", n)
		}
		r.end()
	})
}
