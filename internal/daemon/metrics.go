package daemon

import (
	"runtime"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/outrider-dev/outrider/relay"
	"github.com/outrider-dev/outrider/store"
)

// metrics are what /metrics shows.
type metrics struct {
	registry *prometheus.Registry
}

func newMetrics(version string) *metrics {
	m := &metrics{registry: prometheus.NewRegistry()}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "outrider_build_info", Help: "1, with the version of the program.",
		ConstLabels: prometheus.Labels{"version": version, "goversion": runtime.Version()},
	})
	build.Set(1)
	m.registry.MustRegister(build, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *metrics) hooks(source string) relay.Hooks { return relay.Hooks{} }

func (m *metrics) watch(source string, r *relay.Relay, st store.Store) {}
