package relay

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"slices"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// Config sets up a Relay. Store and Destinations are needed; everything else
// has a default that is safe in production.
type Config struct {
	// Store is the outbox. It stays the caller's: Run joins and leaves, but
	// does not close it.
	Store store.Store

	// Destinations are served side by side; none holds up another. At least
	// one. A store without FanOut takes exactly one.
	Destinations []Destination

	// Name shows this relay to people. Empty: host name and process id.
	// Identity does not rest on it.
	Name string

	// Logger gets what people should know. nil: slog.Default().
	Logger *slog.Logger

	// Hooks are told what happens, for metrics. See Hooks.
	Hooks Hooks

	// Gate is shared by relays that would die together: while one of them
	// sends an event that is suspected of killing processes, the others send
	// nothing. nil: the gate of this process. Only tests that play several
	// processes in one have a use for another.
	Gate *Gate

	// LeaseTTL is how long a lease lives without renewal, which is when it is
	// taken over if nobody can tell whether its owner is alive. 0: 15 s.
	LeaseTTL time.Duration

	// Grace is how long after the end of its owner's connection a lease is
	// taken over. Leases are renewed four times as often; a relay that could
	// not renew for 0.6 of it stops sending until it can. 0: 1 s. At most
	// LeaseTTL.
	Grace time.Duration

	// MaxRecords and MaxBytes (of payload) bound one claim. 0: 5,000 and
	// 16 MiB. One event is sent however large it is.
	MaxRecords int
	MaxBytes   int

	// KeyShare is how many events of one key a claim takes at most; the rest
	// of a burst is read beside it, so that it delays no other key. 0: a
	// fifth of MaxRecords; negative: no limit.
	KeyShare int

	// InFlightClaims is how many claims of new events a lease has in hand at
	// most, besides one that is only being settled: one read ahead, the
	// others being sent. 0: 3; at least 2.
	InFlightClaims int

	// MaxBytesInFlight and MaxRecordsInFlight bound what the whole relay has
	// in hand. Destinations have equal parts, so that what an outage of one
	// keeps in hand leaves the others theirs; claims are made smaller where a
	// part is small. 0: 64 MiB and 50,000.
	MaxBytesInFlight   int
	MaxRecordsInFlight int

	// MaxExceptions is how many events of a lease may wait for another try, and
	// keys be held, before it takes no new ones; a store may bear a few times
	// as many keys. It bounds memory, and what the database is asked again and
	// again. Failed events that hold no key (unordered ones, those let go by
	// Skip) and scheduled ones do not count: they hold up nobody. 0: 10,000;
	// negative: no limit.
	MaxExceptions int

	// MaxStarts is how many processes may die with an event alone in hand
	// before it is FAILED as worker_died. 0: 3.
	MaxStarts int

	// SoftTimeout is how long after the end of Run's context what was begun
	// may go on. 0: 20 s; negative: not at all.
	SoftTimeout time.Duration

	// SettleTimeout is how long, after that, calls may take to return and
	// what is known may take to be written. 0: 5 s. Run returns within the
	// sum of both, whatever sinks and database do.
	SettleTimeout time.Duration

	// PollMin and PollMax are between which delays an idle lease looks for
	// new events where the store cannot tell of them. 0: 2 ms and 100 ms.
	PollMin, PollMax time.Duration

	// SafetyPoll is the same where the store can. 0: 1 s.
	SafetyPoll time.Duration

	// DuePoll is how often waiting events are looked at even if none is
	// known to fall due: operators and other relays may have freed some.
	// 0: 500 ms.
	DuePoll time.Duration

	// MaintainEvery is how often the store's maintenance is run. 0: 30 s.
	MaintainEvery time.Duration
	// SweepEvery is how often the store is asked to look for events that were
	// passed over. 0: a minute; negative: never.
	SweepEvery time.Duration
}

// Order says what becomes of a key whose event is FAILED.
type Order uint8

const (
	// Block holds the key's later events back until somebody has decided.
	Block Order = iota
	// Skip lets them go on without it.
	Skip
)

// Destination is one place where events go.
type Destination struct {
	// Name identifies it in the store for good. Needed.
	Name string

	// Sink carries the messages. Needed. It stays the caller's: close it
	// when Run has returned.
	//
	// A panic in it, as in Match and To, ends the process: nobody knows what
	// state it has left behind. If one event is the cause, it is found by the
	// deaths, and FAILED as worker_died after MaxStarts of them.
	Sink sink.Sink

	// Match says whether an event is for this destination; one that is not
	// counts as published. nil: every event. Called from several goroutines.
	Match func(*outrider.Record) bool

	// To makes the place inside the destination: topic, subject, URL. An
	// error makes the event FAILED as no_target. nil: "". Called from several
	// goroutines.
	To func(*outrider.Record) (string, error)

	// FromEarliest makes a new destination begin with the oldest event kept
	// instead of the next one.
	FromEarliest bool

	// Retry says how often and when a message is tried again.
	Retry Retry

	// Order says what becomes of a key whose event is FAILED.
	Order Order

	// Breaker says when the destination counts as down.
	Breaker Breaker

	// PublishTimeout bounds one call of Publish. 0: 30 s.
	PublishTimeout time.Duration

	// SlowAfter is how long a message may take before its batch is settled
	// without it. Its key waits, others do not. 0: 1 s.
	SlowAfter time.Duration
}

// Retry is a destination's retry policy. Failed attempts are counted with the
// event, over all relays and restarts.
type Retry struct {
	// Immediate is how many times a message is tried again at once, while it
	// is in hand. 0: 3; negative: never.
	Immediate int

	// Base is the delay after that; it doubles with each further failure, up
	// to Cap. A tenth to a half of it is added by chance, so that what failed
	// together does not return together. 0: 1 s and 5 min. A Cap below Base
	// counts as Base.
	Base, Cap time.Duration

	// MaxAttempts is after how many failed attempts an event is FAILED.
	// 0: 20; negative: no limit.
	MaxAttempts int

	// MaxAge is for how long after its first failure an event is tried at
	// most; time in which the breaker was open does not count. 0: no limit.
	MaxAge time.Duration
}

// Breaker is a destination's circuit breaker.
type Breaker struct {
	// Unknowns is how many messages in a row may end without a clear answer,
	// with none delivered in between, before the destination counts as down.
	// Unreachable ones open the breaker at once. 0: 5.
	Unknowns int

	// Base and Cap are between which delays a single message is sent to see
	// whether the destination is back; it doubles each time. 0: 250 ms and
	// 15 s.
	Base, Cap time.Duration
}

// def replaces a zero value.
func def[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// withDefaults is a copy with the defaults filled in and "no limit" spelled as
// the layers below expect it.
func (c Config) withDefaults() Config {
	def(&c.Name, processName())
	def(&c.Logger, slog.Default())
	def(&c.Gate, processGate)
	def(&c.LeaseTTL, 15*time.Second)
	def(&c.Grace, min(time.Second, c.LeaseTTL))
	def(&c.MaxRecords, 5000)
	def(&c.MaxBytes, 16<<20)
	def(&c.KeyShare, max(1, c.MaxRecords/5))
	def(&c.InFlightClaims, 3)
	def(&c.MaxBytesInFlight, max(64<<20, c.MaxBytes))
	def(&c.MaxRecordsInFlight, max(50000, c.MaxRecords))
	def(&c.MaxExceptions, 10000)
	def(&c.MaxStarts, 3)
	def(&c.SoftTimeout, 20*time.Second)
	def(&c.SettleTimeout, 5*time.Second)
	def(&c.PollMin, 2*time.Millisecond)
	def(&c.PollMax, max(100*time.Millisecond, c.PollMin))
	def(&c.SafetyPoll, time.Second)
	def(&c.DuePoll, 500*time.Millisecond)
	def(&c.MaintainEvery, 30*time.Second)
	def(&c.SweepEvery, time.Minute)
	c.KeyShare = max(0, c.KeyShare)
	c.MaxExceptions = max(0, c.MaxExceptions)
	c.Destinations = slices.Clone(c.Destinations)
	for i := range c.Destinations {
		d := &c.Destinations[i]
		d.Retry = d.Retry.withDefaults()
		def(&d.Breaker.Unknowns, 5)
		def(&d.Breaker.Base, 250*time.Millisecond)
		def(&d.Breaker.Cap, max(15*time.Second, d.Breaker.Base))
		def(&d.PublishTimeout, 30*time.Second)
		def(&d.SlowAfter, time.Second)
	}
	return c
}

func (r Retry) withDefaults() Retry {
	def(&r.Immediate, 3)
	def(&r.Base, time.Second)
	def(&r.Cap, 5*time.Minute)
	def(&r.MaxAttempts, 20)
	if r.MaxAttempts < 0 {
		r.MaxAttempts = math.MaxInt
	}
	r.Immediate = max(0, r.Immediate)
	r.Cap = max(r.Cap, r.Base)
	return r
}

func processName() string {
	host, err := os.Hostname()
	if err != nil {
		host = "relay"
	}
	return fmt.Sprintf("%s/%d", host, os.Getpid())
}

// field is one value and what is wrong with it, if anything.
type field struct {
	name string
	ok   bool
	want string
}

// validate names the first field that cannot be used. It sees the
// configuration with its defaults.
func (c Config) validate() error {
	if c.Store == nil {
		return errors.New("relay: Config.Store is needed")
	}
	if len(c.Destinations) == 0 {
		return errors.New("relay: Config.Destinations is empty")
	}
	if len(c.Destinations) > 1 && !c.Store.Capabilities().FanOut {
		return outrider.WithHint(errors.New("relay: Config.Destinations: this store serves one destination"),
			"run one relay per table, or use a native stream, which serves any number")
	}
	for _, f := range []field{
		{"LeaseTTL", c.LeaseTTL > 0, "must be positive"},
		{"Grace", c.Grace > 0 && c.Grace <= c.LeaseTTL, "must be positive and at most LeaseTTL"},
		{"MaxRecords", c.MaxRecords > 0, "must be positive"},
		{"MaxBytes", c.MaxBytes > 0, "must be positive"},
		{"InFlightClaims", c.InFlightClaims >= 2, "must be at least 2"},
		{"MaxBytesInFlight", c.MaxBytesInFlight >= c.MaxBytes, "must be at least MaxBytes"},
		{"MaxRecordsInFlight", c.MaxRecordsInFlight >= c.MaxRecords, "must be at least MaxRecords"},
		{"MaxStarts", c.MaxStarts > 0, "must be positive"},
		{"SettleTimeout", c.SettleTimeout > 0, "must be positive"},
		{"PollMin", c.PollMin > 0, "must be positive"},
		{"PollMax", c.PollMax >= c.PollMin, "must be at least PollMin"},
		{"SafetyPoll", c.SafetyPoll > 0, "must be positive"},
		{"DuePoll", c.DuePoll > 0, "must be positive"},
		{"MaintainEvery", c.MaintainEvery > 0, "must be positive"},
	} {
		if !f.ok {
			return fmt.Errorf("relay: Config.%s %s", f.name, f.want)
		}
	}
	return c.validateDestinations()
}

func (c Config) validateDestinations() error {
	seen := map[string]bool{}
	for i, d := range c.Destinations {
		for _, f := range []field{
			{"Name", d.Name != "", "is needed"},
			{"Name", !seen[d.Name], fmt.Sprintf("%q is used twice", d.Name)},
			{"Sink", d.Sink != nil, "is needed"},
			{"Order", d.Order <= Skip, "must be Block or Skip"},
			{"Retry.Base", d.Retry.Base >= 0, "must not be negative"},
			{"Retry.Cap", d.Retry.Cap >= 0, "must not be negative"},
			{"Retry.MaxAge", d.Retry.MaxAge >= 0, "must not be negative"},
			{"Breaker.Unknowns", d.Breaker.Unknowns > 0, "must be positive"},
			{"Breaker.Base", d.Breaker.Base > 0, "must be positive"},
			{"Breaker.Cap", d.Breaker.Cap >= d.Breaker.Base, "must be at least Base"},
			{"PublishTimeout", d.PublishTimeout > 0, "must be positive"},
			{"SlowAfter", d.SlowAfter > 0, "must be positive"},
		} {
			if !f.ok {
				return fmt.Errorf("relay: Config.Destinations[%d].%s %s", i, f.name, f.want)
			}
		}
		seen[d.Name] = true
	}
	return nil
}
