package relayprom_test

import (
	"context"
	"go/parser"
	"go/token"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/memstore"
	"github.com/outrider-dev/outrider/relay"
	"github.com/outrider-dev/outrider/relayprom"
	"github.com/outrider-dev/outrider/sink"
)

// documented finds the metrics of the package comment's table, with their
// labels.
func documented(t *testing.T) map[string]string {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), "relayprom.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^\s*(outrider_\w+)(?:\{([\w,]+)\})?  +\S`).FindAllStringSubmatch(f.Doc.Text(), -1) {
		out[m[1]] = m[2]
	}
	return out
}

// Each metric is in the table of the package comment, and each of the table is
// a metric, with the labels that it says.
func TestEachMetricIsDocumented(t *testing.T) {
	ch := make(chan *prometheus.Desc, 100)
	relayprom.New(relayprom.Config{}).Describe(ch)
	close(ch)
	want := documented(t)
	desc := regexp.MustCompile(`fqName: "(\w+)".*constLabels: \{(.*)\}, variableLabels: \{(.*?)\}`)
	for d := range ch {
		m := desc.FindStringSubmatch(d.String())
		if m == nil {
			t.Fatalf("cannot read %s", d)
		}
		if m[2] != `source="outbox"` {
			t.Errorf("%s has the constant labels %s", m[1], m[2])
		}
		labels, ok := want[m[1]]
		if !ok {
			t.Errorf("%s is not documented", m[1])
		} else if labels != m[3] {
			t.Errorf("%s is documented with the labels %q and has %q", m[1], labels, m[3])
		}
		delete(want, m[1])
	}
	for name := range want {
		t.Errorf("%s is documented and does not exist", name)
	}
}

// A relay at work fills them.
func TestMetricsOfARelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memstore.New(memstore.Config{})
		s := memsink.New(memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
			if m.Type == "Bad" {
				return sink.Result{Status: sink.Reject, Class: sink.ClassInvalid}
			}
			return memsink.Deliver
		}})
		m := relayprom.New(relayprom.Config{EventTypes: []string{"Placed"}})
		reg := prometheus.NewPedanticRegistry()
		if err := reg.Register(m); err != nil {
			t.Fatal(err)
		}
		r, err := relay.New(relay.Config{Store: st, Hooks: m.Hooks(), Gate: relay.NewGate(),
			Destinations: []relay.Destination{{Name: "out", Sink: s, FromEarliest: true}}})
		if err != nil {
			t.Fatal(err)
		}
		m.Watch(r)
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- r.Run(ctx) }()
		time.Sleep(time.Second)
		tx := st.Begin()
		for _, typ := range []string{"Placed", "Placed", "Paid", "Bad"} {
			if _, err := tx.Add(outrider.Event{AggregateType: "order", AggregateID: typ, Type: typ}); err != nil {
				t.Fatal(err)
			}
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		got := gather(t, reg)
		for name, want := range map[string]float64{
			"outrider_events_total{out,Placed,published}": 2,
			"outrider_events_total{out,other,published}":  1,
			"outrider_events_total{out,other,failed}":     1,
			"outrider_publish_errors_total{out,invalid}":  1,
			"outrider_delivery_latency_seconds{out}":      3,
			"outrider_batch_size{out}":                    1,
			"outrider_publish_duration_seconds{out}":      1,
			"outrider_circuit_state{out}":                 0,
			"outrider_lanes{out}":                         outrider.Lanes,
			"outrider_leases{out}":                        1,
			"outrider_relays{}":                           1,
			"outrider_relay_ready{}":                      1,
			"outrider_in_flight_events{out}":              0,
		} {
			if v, ok := got[name]; !ok || v != want {
				t.Errorf("%s is %v, not %v", name, v, want)
			}
		}
		for _, name := range []string{"outrider_claim_duration_seconds{out}", "outrider_settle_duration_seconds{out}",
			"outrider_claimed_events{out}", "outrider_wakeups_total{watch}"} {
			if got[name] == 0 {
				t.Errorf("%s is empty", name)
			}
		}
		if at := got["outrider_last_success_timestamp_seconds{out}"]; at < float64(time.Now().Unix()-2) {
			t.Errorf("last success at %v", at)
		}
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// gather reads values, and the counts of histograms, by name and label values.
func gather(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			var by []string
			for _, l := range m.Label {
				if l.GetName() != "source" {
					by = append(by, l.GetValue())
				}
			}
			out[f.GetName()+"{"+strings.Join(by, ",")+"}"] = value(m)
		}
	}
	return out
}

func value(m *dto.Metric) float64 {
	switch {
	case m.Counter != nil:
		return m.Counter.GetValue()
	case m.Gauge != nil:
		return m.Gauge.GetValue()
	default:
		return float64(m.Histogram.GetSampleCount())
	}
}

func BenchmarkEventHook(b *testing.B) {
	h := relayprom.New(relayprom.Config{EventTypes: []string{"Placed"}}).Hooks()
	rec := &outrider.Record{Event: outrider.Event{Type: "Placed"}}
	for b.Loop() {
		h.Event("out", rec, relay.EventOutcome{Outcome: relay.Published, Latency: time.Millisecond})
	}
}
