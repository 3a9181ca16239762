package relayprom_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/memstore"
	"github.com/outrider-dev/outrider/relay"
	"github.com/outrider-dev/outrider/relayprom"
	"github.com/outrider-dev/outrider/sink"
)

// What goes wrong is counted: alarms hang on these.
func TestMetricsOfTrouble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var away atomic.Bool
		st := memstore.New(memstore.Config{})
		st.SetFaults(func(_ context.Context, op memstore.Op) error {
			if op == memstore.OpCommit && away.Load() {
				return errors.New("no database")
			}
			return nil
		}, nil)
		s := memsink.New(memsink.Config{Decide: func(_ context.Context, m sink.Message) sink.Result {
			switch m.Type {
			case "Refused":
				return sink.Result{Status: sink.Retry, Class: sink.ClassRefused}
			case "Unreachable":
				return sink.Result{Status: sink.NotSent, Class: sink.ClassUnreachable}
			}
			return memsink.Deliver
		}})
		m := relayprom.New(relayprom.Config{})
		reg := prometheus.NewPedanticRegistry()
		if err := reg.Register(m); err != nil {
			t.Fatal(err)
		}
		r, err := relay.New(relay.Config{Store: st, Hooks: m.Hooks(), Gate: relay.NewGate(), SoftTimeout: -1,
			Destinations: []relay.Destination{{Name: "out", Sink: s, FromEarliest: true,
				Retry: relay.Retry{Immediate: -1, Base: time.Hour}}}})
		if err != nil {
			t.Fatal(err)
		}
		m.Watch(r)
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- r.Run(ctx) }()
		add := func(typ string) {
			t.Helper()
			tx := st.Begin()
			if _, err := tx.Add(outrider.Event{AggregateType: "order", AggregateID: typ, Type: typ}); err != nil {
				t.Fatal(err)
			}
			if err := tx.Commit(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(10 * time.Second)
		}
		time.Sleep(time.Second)
		add("Refused")
		away.Store(true)
		add("Placed")
		away.Store(false)
		time.Sleep(time.Minute)
		add("Unreachable")
		got := gather(t, reg)
		for name, want := range map[string]float64{
			"outrider_events_total{out,other,retried}":   1,
			"outrider_events_total{out,other,published}": 1,
			"outrider_publish_errors_total{out,refused}": 1,
			"outrider_circuit_state{out}":                1,
			"outrider_in_flight_events{out}":             1,
		} {
			if v, ok := got[name]; !ok || v != want {
				t.Errorf("%s is %v, not %v", name, v, want)
			}
		}
		if n := got["outrider_store_errors_total{out,settle}"]; n < 3 {
			t.Errorf("%v failed commits were counted in 10 s without a database", n)
		}
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// Each hook has its counter.
func TestHooksAreCounted(t *testing.T) {
	m := relayprom.New(relayprom.Config{})
	reg := prometheus.NewPedanticRegistry()
	if err := reg.Register(m); err != nil {
		t.Fatal(err)
	}
	h := m.Hooks()
	h.Fenced("a")
	h.LeaseLost("b")
	h.Broken("c")
	h.WakeUp("poll")
	h.StoreError("d", "claim")
	got := gather(t, reg)
	for _, name := range []string{"outrider_fenced_settles_total{a}", "outrider_lease_expired_total{b}", "outrider_sink_faults_total{c}",
		"outrider_wakeups_total{poll}", "outrider_store_errors_total{d,claim}"} {
		if got[name] != 1 {
			t.Errorf("%s is %v, not 1: %v", name, got[name], got)
		}
	}
}
