package relay

import "time"

// Health is a snapshot of a running relay, for status pages and probes.
type Health struct {
	Name    string `json:"name"`
	Running bool   `json:"running"` // Run has joined the store and not left it
	Relays  int    `json:"relays"`  // alive, this one included

	// Renewed is how long ago leases were last renewed; sending stops when it
	// comes near Config.Grace (Starved).
	Renewed time.Duration `json:"renewed_ns"`
	Starved bool          `json:"starved"`

	// StoreError is why the database cannot be asked at the moment, StoreHint
	// what to do about it, and StoreFailing for how long that has been so;
	// MaintainError is what its maintenance complains of. Empty: nothing.
	StoreError    string        `json:"store_error,omitempty"`
	StoreHint     string        `json:"store_hint,omitempty"`
	StoreFailing  time.Duration `json:"store_failing_ns,omitempty"`
	MaintainError string        `json:"maintain_error,omitempty"`
	MaintainHint  string        `json:"maintain_hint,omitempty"`
	// Stuck: something without which nothing is sent, as to claim events of a
	// destination, has been impossible for 0.6 of Config.Grace.
	Stuck bool `json:"stuck"`

	Destinations []DestinationHealth `json:"destinations"`
}

// DestinationHealth is how one destination stands in this relay.
type DestinationHealth struct {
	Name     string        `json:"name"`
	Leases   int           `json:"leases"`
	Lanes    int           `json:"lanes"`
	InFlight int           `json:"in_flight"`         // events in hand
	Circuit  string        `json:"circuit"`           // closed, open, ramping
	Down     time.Duration `json:"down_ns,omitempty"` // how long the breaker has been open
	Error    string        `json:"error,omitempty"`   // the latest that opened it
	// Delivered since the start, and how long ago the last one was;
	// negative: never.
	Delivered   uint64        `json:"delivered"`
	LastSuccess time.Duration `json:"last_success_ns"`
}

// Ready reports whether the relay is at work: joined, able to renew, and able
// to ask for events and to write down what became of them.
func (h Health) Ready() bool { return h.Running && !h.Starved && !h.Stuck }
