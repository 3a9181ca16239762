package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/relay"
)

// Readiness is what /readyz answers. Durations are in seconds.
type Readiness struct {
	Ready   bool              `json:"ready"`
	Sources []SourceReadiness `json:"sources"`
}

// SourceReadiness is how one source's relay stands. Reasons say why it is not
// ready; Notes what else somebody should know. A destination that is down is a
// note: restarting the relay would not bring it back.
type SourceReadiness struct {
	Name         string                 `json:"name"`
	Ready        bool                   `json:"ready"`
	Reasons      []string               `json:"reasons,omitempty"`
	Notes        []string               `json:"notes,omitempty"`
	Relays       int                    `json:"relays"`
	Destinations []DestinationReadiness `json:"destinations"`
}

// DestinationReadiness is how one destination stands in this relay.
type DestinationReadiness struct {
	Name        string   `json:"name"`
	Circuit     string   `json:"circuit"`
	DownSeconds float64  `json:"down_seconds,omitempty"`
	Error       string   `json:"error,omitempty"`
	Lanes       int      `json:"lanes"`
	InFlight    int      `json:"in_flight"`
	Delivered   uint64   `json:"delivered"`
	LastSuccess *float64 `json:"last_success_seconds"` // ago; null: never
}

// Ready says whether all relays are at work.
func (d *Daemon) Ready() Readiness {
	out := Readiness{Ready: true}
	for _, s := range d.relays {
		r := d.sourceReadiness(s.name, s.relay.Health())
		out.Ready = out.Ready && r.Ready
		out.Sources = append(out.Sources, r)
	}
	return out
}

func (d *Daemon) sourceReadiness(name string, h relay.Health) SourceReadiness {
	r := SourceReadiness{Name: name, Ready: h.Ready(), Relays: h.Relays}
	if !h.Running {
		r.Reasons = append(r.Reasons, "the relay has not joined the database, or has left it")
	}
	if h.Starved {
		r.Reasons = append(r.Reasons, fmt.Sprintf("leases could not be renewed for %.1f s; nothing is sent until they are", h.Renewed.Seconds()))
	}
	switch {
	case h.Stuck:
		r.Reasons = append(r.Reasons, d.redact(fmt.Sprintf("the database cannot be asked for %.1f s: %s", h.StoreFailing.Seconds(), advised(h.StoreError, h.StoreHint))))
	case h.StoreError != "":
		r.Notes = append(r.Notes, d.redact("the database cannot be asked: "+advised(h.StoreError, h.StoreHint)))
	}
	if h.MaintainError != "" {
		r.Notes = append(r.Notes, d.redact("maintenance: "+advised(h.MaintainError, h.MaintainHint)))
	}
	for _, x := range h.Destinations {
		dr := DestinationReadiness{
			Name: x.Name, Circuit: x.Circuit, DownSeconds: x.Down.Seconds(), Error: d.redact(x.Error),
			Lanes: x.Lanes, InFlight: x.InFlight, Delivered: x.Delivered,
		}
		if x.LastSuccess >= 0 {
			ago := x.LastSuccess.Seconds()
			dr.LastSuccess = &ago
		}
		if x.Circuit == relay.CircuitOpen.String() {
			r.Notes = append(r.Notes, d.redact(fmt.Sprintf("destination %s has been down for %.1f s: %s", x.Name, x.Down.Seconds(), x.Error)))
		}
		r.Destinations = append(r.Destinations, dr)
	}
	return r
}

// advised is an error with what to do about it.
func advised(text, hint string) string {
	if hint == "" {
		return text
	}
	return text + " (" + hint + ")"
}

// handler serves the endpoint. It says nothing that has to be kept from who can
// reach it: no payloads, keys or secrets.
func (d *Daemon) handler(gatherer prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, map[string]string{"status": "live", "version": d.version})
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		ready := d.Ready()
		code := http.StatusOK
		if !ready.Ready {
			code = http.StatusServiceUnavailable
		}
		answer(w, code, ready)
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(gatherer, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "outrider\n\n/healthz  live\n/readyz   at work, and why not\n/metrics  for Prometheus\n")
	})
	return mux
}

func answer(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	_ = enc.Encode(v) // who asked has gone
}

// listen opens the endpoint, so that a port in use is an error at the start.
func (d *Daemon) listen(ctx context.Context, address string, gatherer prometheus.Gatherer) error {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return outrider.WithHint(fmt.Errorf("listen: %w", err), "choose another address by listen, or listen: off")
	}
	d.address = l.Addr().String()
	server := &http.Server{
		Handler:           d.handler(gatherer),
		ReadHeaderTimeout: 5 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	d.cleanups.add("the HTTP endpoint", func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if err := server.Shutdown(ctx); err != nil {
			_ = server.Close() // who still reads is cut off
		}
		if err := <-served; !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	return nil
}
