// Package relayprom gives a relay's figures to Prometheus.
//
//	m := relayprom.New(relayprom.Config{Source: "orders"})
//	prometheus.MustRegister(m)
//	r, err := relay.New(relay.Config{Hooks: m.Hooks(), ...})
//	m.Watch(r)
//
// All carry the label source. Ids, keys and error texts are in no label.
//
//	outrider_events_total{destination,event_type,outcome}    events that came to an end or were put back: published, skipped, retried, failed
//	outrider_publish_errors_total{destination,error_class}   the same, those that were retried or failed, by class
//	outrider_delivery_latency_seconds{destination}           from the event's row to the destination's answer; compares two hosts' clocks
//	outrider_publish_duration_seconds{destination}           one call of the sink
//	outrider_batch_size{destination}                         messages in one call of the sink
//	outrider_claim_duration_seconds{destination}             reading one claim
//	outrider_claimed_events{destination}                     events in one claim
//	outrider_settle_duration_seconds{destination}            one commit of outcomes and starts, with its repetitions
//	outrider_fenced_settles_total{destination}               claims and commits refused because the lease had gone
//	outrider_lease_expired_total{destination}                leases that a renewal found gone
//	outrider_sink_faults_total{destination}                  times a sink broke a promise of its interface
//	outrider_store_errors_total{destination,op}              errors of the store that were waited out
//	outrider_sweeps_total                                    looks for events that were passed over
//	outrider_sweep_found_total                               events that were passed over; must stay 0
//	outrider_wakeups_total{wakeup}                           what made the relay look for events: watch, wake, poll, due
//	outrider_circuit_state{destination}                      0 closed, 1 open, 2 ramping
//	outrider_last_success_timestamp_seconds{destination}     when the destination last confirmed an event; 0: never
//	outrider_in_flight_events{destination}                   events in hand
//	outrider_leases{destination}                             leases held
//	outrider_lanes{destination}                              lanes held
//	outrider_relays                                          relays that are alive, this one included
//	outrider_relay_ready                                     1 while the relay has joined and can renew its leases
package relayprom

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/relay"
)

// Config sets up Metrics.
type Config struct {
	// Source is the value of the label source: the outbox's name. Empty:
	// "outbox".
	Source string

	// EventTypes are the event types that the label event_type shows by name;
	// events of any other type are counted together, as "other". nil: all are.
	// Types come from applications, and a label must not grow with what they
	// invent.
	EventTypes []string

	// LatencyBuckets of the histograms of time, in seconds. nil: 1 ms to 2
	// min.
	LatencyBuckets []float64
}

// Metrics is what a relay's hooks write to, and a prometheus.Collector.
type Metrics struct {
	types map[string]string
	relay atomic.Pointer[relay.Relay]

	events, errors, fenced, expired, faults, storeErrors, wakeups, sweeps, found *prometheus.CounterVec
	latency, publish, batch, claim, claimed, settle                              *prometheus.HistogramVec

	circuit, success, inFlight, leases, lanes, relays, ready *prometheus.Desc

	// byDest caches what Event needs, so that an event costs two look-ups.
	mu     sync.Mutex
	byDest atomic.Pointer[map[string]*perDest]
}

// perDest is what one destination's events are counted with.
type perDest struct {
	latency prometheus.Observer
	events  sync.Map // of eventKey to prometheus.Counter
}

type eventKey struct {
	typ     string
	outcome relay.Outcome
}

// other is the event type of those that have no label of their own.
const other = "other"

// New makes Metrics. Register it once.
func New(cfg Config) *Metrics {
	if cfg.Source == "" {
		cfg.Source = "outbox"
	}
	if cfg.LatencyBuckets == nil {
		cfg.LatencyBuckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120}
	}
	sizes := []float64{1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000}
	labels := prometheus.Labels{"source": cfg.Source}
	counter := func(name, help string, by ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "outrider", Name: name, Help: help, ConstLabels: labels}, by)
	}
	histogram := func(name, help string, buckets []float64) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: "outrider", Name: name, Help: help,
			ConstLabels: labels, Buckets: buckets}, []string{"destination"})
	}
	gauge := func(name, help string, by ...string) *prometheus.Desc {
		return prometheus.NewDesc("outrider_"+name, help, by, labels)
	}
	m := &Metrics{
		types: map[string]string{},

		events:      counter("events_total", "Events that came to an end or were put back.", "destination", "event_type", "outcome"),
		errors:      counter("publish_errors_total", "Events that were retried or failed, by class.", "destination", "error_class"),
		fenced:      counter("fenced_settles_total", "Claims and commits refused because the lease had gone.", "destination"),
		expired:     counter("lease_expired_total", "Leases that a renewal found gone.", "destination"),
		faults:      counter("sink_faults_total", "Times a sink broke a promise of its interface.", "destination"),
		storeErrors: counter("store_errors_total", "Errors of the store that were waited out.", "destination", "op"),
		sweeps:      counter("sweeps_total", "Looks for events that were passed over."),
		found:       counter("sweep_found_total", "Events that were passed over; must stay 0."),
		wakeups:     counter("wakeups_total", "What made the relay look for events.", "wakeup"),

		latency: histogram("delivery_latency_seconds", "From the event's row to the destination's answer.", cfg.LatencyBuckets),
		publish: histogram("publish_duration_seconds", "One call of the sink.", cfg.LatencyBuckets),
		batch:   histogram("batch_size", "Messages in one call of the sink.", sizes),
		claim:   histogram("claim_duration_seconds", "Reading one claim.", cfg.LatencyBuckets),
		claimed: histogram("claimed_events", "Events in one claim.", append([]float64{0}, sizes...)),
		settle:  histogram("settle_duration_seconds", "One commit of outcomes and starts.", cfg.LatencyBuckets),

		circuit:  gauge("circuit_state", "0 closed, 1 open, 2 ramping.", "destination"),
		success:  gauge("last_success_timestamp_seconds", "When the destination last confirmed an event.", "destination"),
		inFlight: gauge("in_flight_events", "Events in hand.", "destination"),
		leases:   gauge("leases", "Leases held.", "destination"),
		lanes:    gauge("lanes", "Lanes held.", "destination"),
		relays:   gauge("relays", "Relays that are alive."),
		ready:    gauge("relay_ready", "1 while the relay has joined and can renew its leases."),
	}
	for _, t := range cfg.EventTypes {
		m.types[t] = t
	}
	m.byDest.Store(&map[string]*perDest{})
	m.sweeps.WithLabelValues() // there from the start, as 0
	m.found.WithLabelValues()
	return m
}

// Watch has the gauges show a relay's health. Without it there are none.
func (m *Metrics) Watch(r *relay.Relay) { m.relay.Store(r) }

// Hooks are for relay.Config.
func (m *Metrics) Hooks() relay.Hooks {
	return relay.Hooks{
		Event: m.event,
		Publish: func(d string, messages int, took time.Duration) {
			m.publish.WithLabelValues(d).Observe(took.Seconds())
			m.batch.WithLabelValues(d).Observe(float64(messages))
		},
		Claim: func(d string, events int, took time.Duration) {
			m.claim.WithLabelValues(d).Observe(took.Seconds())
			m.claimed.WithLabelValues(d).Observe(float64(events))
		},
		Settle: func(d string, _ int, took time.Duration) {
			m.settle.WithLabelValues(d).Observe(took.Seconds())
		},
		Fenced:    func(d string) { m.fenced.WithLabelValues(d).Inc() },
		LeaseLost: func(d string) { m.expired.WithLabelValues(d).Inc() },
		Broken:    func(d string) { m.faults.WithLabelValues(d).Inc() },
		WakeUp:    func(source string) { m.wakeups.WithLabelValues(source).Inc() },
		Swept: func(found int) {
			m.sweeps.WithLabelValues().Inc()
			m.found.WithLabelValues().Add(float64(found))
		},
		StoreError: func(d, op string) { m.storeErrors.WithLabelValues(d, op).Inc() },
	}
}

// event counts one event. It is the only hook that is called for each.
func (m *Metrics) event(dest string, rec *outrider.Record, o relay.EventOutcome) {
	d := (*m.byDest.Load())[dest]
	if d == nil {
		d = m.addDest(dest)
	}
	typ, ok := m.types[rec.Type]
	if !ok {
		typ = other
	}
	key := eventKey{typ, o.Outcome}
	c, ok := d.events.Load(key)
	if !ok {
		c, _ = d.events.LoadOrStore(key, m.events.WithLabelValues(dest, typ, string(o.Outcome)))
	}
	c.(prometheus.Counter).Inc() //nolint:errcheck // nothing else is stored
	switch o.Outcome {
	case relay.Published:
		d.latency.Observe(max(0, o.Latency.Seconds()))
	case relay.Retried, relay.Failed:
		m.errors.WithLabelValues(dest, string(o.Class)).Inc()
	}
}

func (m *Metrics) addDest(dest string) *perDest {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := *m.byDest.Load()
	if d := all[dest]; d != nil {
		return d
	}
	d := &perDest{latency: m.latency.WithLabelValues(dest)}
	all = maps.Clone(all)
	all[dest] = d
	m.byDest.Store(&all)
	return d
}

// vectors are the collectors that it is made of.
func (m *Metrics) vectors() []prometheus.Collector {
	return []prometheus.Collector{m.events, m.errors, m.fenced, m.expired, m.faults, m.storeErrors, m.wakeups, m.sweeps, m.found,
		m.latency, m.publish, m.batch, m.claim, m.claimed, m.settle}
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, v := range m.vectors() {
		v.Describe(ch)
	}
	for _, d := range []*prometheus.Desc{m.circuit, m.success, m.inFlight, m.leases, m.lanes, m.relays, m.ready} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. It asks no database.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	for _, v := range m.vectors() {
		v.Collect(ch)
	}
	r := m.relay.Load()
	if r == nil {
		return
	}
	gauge := func(d *prometheus.Desc, v float64, by ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, by...)
	}
	h := r.Health()
	gauge(m.relays, float64(h.Relays))
	gauge(m.ready, oneIf(h.Ready()))
	for _, d := range h.Destinations {
		gauge(m.circuit, circuit(d.Circuit), d.Name)
		gauge(m.inFlight, float64(d.InFlight), d.Name)
		gauge(m.leases, float64(d.Leases), d.Name)
		gauge(m.lanes, float64(d.Lanes), d.Name)
		at := 0.0
		if d.LastSuccess >= 0 {
			at = float64(time.Now().Add(-d.LastSuccess).UnixMilli()) / 1000
		}
		gauge(m.success, at, d.Name)
	}
}

func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// circuit is a state's number.
func circuit(name string) float64 {
	for _, s := range []relay.CircuitState{relay.CircuitClosed, relay.CircuitOpen, relay.CircuitRamping} {
		if s.String() == name {
			return float64(s)
		}
	}
	return -1
}
