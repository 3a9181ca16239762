package relay

import (
	"strings"
	"testing"
	"time"

	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/memstore"
)

// validate names the field that cannot be used.
func TestConfigIsValidated(t *testing.T) {
	ok := func() Config {
		return Config{Store: newMemStore(), Destinations: []Destination{{Name: "a", Sink: memsink.New(memsink.Config{})}}}
	}
	if _, err := New(ok()); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*Config){
		"Config.Store":                       func(c *Config) { c.Store = nil },
		"Config.Destinations is empty":       func(c *Config) { c.Destinations = nil },
		"Config.Destinations[0].Name":        func(c *Config) { c.Destinations[0].Name = "" },
		"Config.Destinations[0].Sink":        func(c *Config) { c.Destinations[0].Sink = nil },
		"Config.Destinations[1].Name":        func(c *Config) { c.Destinations = append(c.Destinations, c.Destinations[0]) },
		"Config.Destinations[0].Order":       func(c *Config) { c.Destinations[0].Order = 7 },
		"Config.Destinations[0].Retry.Base":  func(c *Config) { c.Destinations[0].Retry.Base = -1 },
		"Config.Destinations[0].Breaker.Cap": func(c *Config) { c.Destinations[0].Breaker.Cap = 1 },
		"Config.Destinations[0].SlowAfter":   func(c *Config) { c.Destinations[0].SlowAfter = -1 },
		"Config.Grace":                       func(c *Config) { c.Grace = time.Hour },
		"Config.MaxBytesInFlight":            func(c *Config) { c.MaxBytesInFlight = 1 },
		"Config.InFlightClaims":              func(c *Config) { c.InFlightClaims = 1 },
		"this store serves one destination": func(c *Config) {
			c.Store = memstore.New(memstore.Config{NoFanOut: true})
			c.Destinations = append(c.Destinations, Destination{Name: "b", Sink: c.Destinations[0].Sink})
		},
	} {
		c := ok()
		change(&c)
		if _, err := New(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want an error that names %q, got %v", want, err)
		}
	}
	c := ok()
	if _ = c.withDefaults(); c.MaxRecords != 0 || c.Destinations[0].Retry.Base != 0 {
		t.Error("withDefaults has written to what it was given")
	}
}
