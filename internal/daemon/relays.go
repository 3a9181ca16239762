package daemon

import (
	"log/slog"
	"time"

	"github.com/outrider-dev/outrider/internal/config"
	"github.com/outrider-dev/outrider/relay"
	"github.com/outrider-dev/outrider/route"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// relayConfig says in the engine's terms what the file says. All values are
// given, so that the file's defaults hold and not the engine's.
func relayConfig(c config.Relay, st store.Store, log *slog.Logger) relay.Config {
	return relay.Config{
		Store:              st,
		Name:               c.Name,
		Logger:             log,
		LeaseTTL:           c.LeaseTTL,
		Grace:              c.Grace,
		MaxRecords:         c.MaxRecords,
		MaxBytes:           int(c.MaxBytes),
		KeyShare:           c.KeyShare,
		InFlightClaims:     c.InFlightClaims,
		MaxBytesInFlight:   int(c.MaxBytesInFlight),
		MaxRecordsInFlight: c.MaxRecordsInFlight,
		MaxExceptions:      c.MaxExceptions,
		MaxStarts:          c.MaxStarts,
		SoftTimeout:        c.SoftTimeout,
		SettleTimeout:      c.SettleTimeout,
		PollMin:            c.PollMin,
		PollMax:            c.PollMax,
		SafetyPoll:         c.SafetyPoll,
		DuePoll:            c.DuePoll,
		MaintainEvery:      c.MaintainEvery,
		SweepEvery:         c.SweepEvery,
	}
}

func relayDestination(d config.Destination, s sink.Sink) relay.Destination {
	out := relay.Destination{
		Name:         d.Name,
		Sink:         s,
		Match:        d.Match.Match,
		FromEarliest: d.From == "earliest",
		Retry: relay.Retry{
			Immediate:   orNever(d.Retry.Immediate),
			Base:        d.Retry.Base,
			Cap:         d.Retry.Cap,
			MaxAttempts: d.Retry.MaxAttempts,
			MaxAge:      max(0, d.Retry.MaxAge),
		},
		Breaker: relay.Breaker{
			Unknowns: d.Breaker.Unknowns, Base: d.Breaker.Base, Cap: d.Breaker.Cap,
		},
		PublishTimeout: d.PublishTimeout,
		SlowAfter:      d.SlowAfter,
	}
	if d.Order == "skip" {
		out.Order = relay.Skip
	}
	if rules := routes(d); len(rules) > 0 {
		out.To = rules.To
	}
	return out
}

// orNever spells 0 as the engine wants it, where its zero means the default.
func orNever(n int) int {
	if n == 0 {
		return -1
	}
	return n
}

// routes are a destination's rules; to is one that matches everything.
func routes(d config.Destination) route.Rules {
	var rules route.Rules
	if d.To != nil {
		rules = append(rules, route.Rule{To: *d.To})
	}
	for _, r := range d.Routes {
		rules = append(rules, route.Rule{Match: r.Match, To: r.To})
	}
	return rules
}

// stopBudget is how long a relay's stop may take.
func stopBudget(c config.Relay) time.Duration {
	return max(0, c.SoftTimeout) + c.SettleTimeout
}
