// Package config reads the configuration file: one strict YAML document.
//
// An unknown key, a wrong type, a missing or impossible value is an error that
// names the line and the key; all that is wrong is told at once. Each field's comment and
// tags are its reference: docs/CONFIG.md is generated from this file.
package config

import (
	"time"

	"github.com/outrider-dev/outrider/route"
)

// Config is the whole file.
//
// The tags of a field: yaml is its key; default what it is when left out, in
// the file's own spelling; means says so in words where it is computed; min and
// max bound it; enum lists the values; special gives words that stand for a
// value; needed says that there is no default.
type Config struct {
	// Address of the HTTP endpoint with /healthz, /readyz and /metrics. It
	// has no authentication, so an address that is not loopback is refused
	// unless allow_remote is set. Port 0 takes a free one.
	Listen string `yaml:"listen" default:"127.0.0.1:9477" special:"off: no endpoint"`

	// Lets listen be an address that others can reach. What stands in front
	// of it has to keep strangers out.
	AllowRemote bool `yaml:"allow_remote" default:"false"`

	// What /metrics shows.
	Metrics Metrics `yaml:"metrics"`

	// What is written to standard error.
	Log Log `yaml:"log"`

	// Bounds of the relays, one of which runs per source.
	Relay Relay `yaml:"relay"`

	// Databases that hold an outbox. At least one.
	Sources []Source `yaml:"sources" needed:"true"`

	// Places where events go. At least one per source.
	Destinations []Destination `yaml:"destinations" needed:"true"`

	file    string
	secrets []Secret
	at      map[string]position
}

// Metrics are for Prometheus, on /metrics.
type Metrics struct {
	// Event types that are a value of the label event_type; all others are
	// "other", so that nobody's events can make series without end.
	EventTypes []string `yaml:"event_types" means:"none"`

	// How often the database is asked for what waits and failed, over
	// connections of their own and whatever the scrapes do.
	DatabaseEvery time.Duration `yaml:"database_every" default:"15s" special:"off: never" min:"1s" max:"1h"`
}

// Log is how the relay's messages are written.
type Log struct {
	// The least important messages that are written.
	Level string `yaml:"level" default:"info" enum:"debug|info|warn|error"`

	// One line of key=value pairs, or one JSON object, per message.
	Format string `yaml:"format" default:"text" enum:"text|json"`
}

// Relay bounds what a relay takes in hand.
type Relay struct {
	// Shows this relay to people, as in status. Two relays of one name are
	// still two.
	Name string `yaml:"name" means:"host name and process id"`

	// How long a lease lives without renewal, which is when it is taken over
	// if nobody can tell whether its owner is alive.
	LeaseTTL time.Duration `yaml:"lease_ttl" default:"15s" min:"1s" max:"10m"`

	// How long after the end of its owner's connection a lease is taken over.
	// At most lease_ttl.
	Grace time.Duration `yaml:"grace" default:"1s" min:"100ms" max:"10m"`

	// Events in one claim at most.
	MaxRecords int `yaml:"max_records" default:"5000" min:"1" max:"100000"`

	// Bytes of payloads, and of texts and headers beyond 1 KiB an event, in one
	// claim at most. One event is sent however large it is.
	MaxBytes Size `yaml:"max_bytes" default:"16MiB" min:"1KiB" max:"1GiB"`

	// Events of one key in a claim at most. The rest of a key's burst is read
	// beside it, so that it delays no other key.
	KeyShare int `yaml:"key_share" means:"a fifth of max_records" special:"unlimited: no bound" min:"1"`

	// Claims of new events in hand per lease: one being read, the others
	// being sent and settled.
	InFlightClaims int `yaml:"in_flight_claims" default:"3" min:"2" max:"100"`

	// Events in hand over all destinations of a source. At least max_records.
	// This is also what can be sent twice after a crash.
	MaxRecordsInFlight int `yaml:"max_records_in_flight" default:"50000" min:"1" max:"10000000"`

	// The same in hand, over all destinations of a source. At least max_bytes.
	MaxBytesInFlight Size `yaml:"max_bytes_in_flight" default:"64MiB" min:"1KiB" max:"64GiB"`

	// Events per lease that wait for another try, and keys that are held, from
	// which on it takes no new ones. A store may bear a few times as many keys.
	// Failed events that hold no key do not count, nor do scheduled ones.
	MaxExceptions int `yaml:"max_exceptions" default:"10000" special:"unlimited: no bound" min:"1"`

	// Processes that may die with an event alone in hand before it is FAILED
	// as worker_died.
	MaxStarts int `yaml:"max_starts" default:"3" min:"1" max:"1000"`

	// How long after SIGTERM what was begun may go on.
	SoftTimeout time.Duration `yaml:"soft_timeout" default:"20s" special:"none: not at all" min:"1ms" max:"1h"`

	// How long after that, calls may take to return and what is known may
	// take to be written.
	SettleTimeout time.Duration `yaml:"settle_timeout" default:"5s" min:"10ms" max:"10m"`

	// Shortest delay between two looks for new events, where the database
	// cannot tell of them.
	PollMin time.Duration `yaml:"poll_min" default:"2ms" min:"100us" max:"1h"`

	// Longest delay between two looks, on an idle outbox. At least poll_min.
	PollMax time.Duration `yaml:"poll_max" default:"100ms" min:"100us" max:"1h"`

	// Delay between two looks where the database does tell.
	SafetyPoll time.Duration `yaml:"safety_poll" default:"1s" min:"10ms" max:"1h"`

	// How often waiting events are looked at though none is known to fall
	// due: operators may have freed some.
	DuePoll time.Duration `yaml:"due_poll" default:"500ms" min:"10ms" max:"1h"`

	// How often the database's maintenance is run, such as making partitions.
	MaintainEvery time.Duration `yaml:"maintain_every" default:"30s" min:"100ms" max:"24h"`

	// How often a bounded sample of what was read is looked at for events that
	// were passed over. outrider_sweep_found_total counts them and must stay 0.
	SweepEvery time.Duration `yaml:"sweep_every" default:"1m" min:"1s" max:"24h"`
}

// Source is a database with an outbox. Exactly one of the blocks says which
// kind it is.
type Source struct {
	// Identifies the source in metrics and on the command line. Small
	// letters, digits, - and _.
	Name string `yaml:"name" needed:"true"`

	// A PostgreSQL database.
	Postgres *Postgres `yaml:"postgres"`

	// A SQLite file.
	SQLite *SQLite `yaml:"sqlite"`
}

// Postgres is a PostgreSQL database, version 14 or newer.
type Postgres struct {
	// Where it is: postgres://user:password@host:5432/database, or key=value
	// pairs. It has to lead to PostgreSQL itself, not to a transaction
	// pooler. A secret: best given as {env: NAME} or {file: PATH}.
	DSN Secret `yaml:"dsn" needed:"true"`

	// Connections that carry claims and commits; there is one more for
	// renewals.
	MaxConns int `yaml:"max_conns" default:"6" min:"2" max:"1000"`

	// How often the database is asked for news while events are coming.
	BusyPoll time.Duration `yaml:"busy_poll" default:"2ms" min:"100us" max:"1m"`

	// How far that backs off when none come.
	IdlePoll time.Duration `yaml:"idle_poll" default:"25ms" min:"1ms" max:"10m"`

	// Listens for the trigger that migrations can install, and polls only as
	// a safety net while idle.
	Doorbell bool `yaml:"doorbell" default:"false"`

	// Ids in one partition of the events' table.
	PartitionSize int `yaml:"partition_size" default:"10000000" min:"1000"`
}

// SQLite is a SQLite file on a local disk.
type SQLite struct {
	// The database file. Relative to the configuration file.
	Path Path `yaml:"path" needed:"true"`

	// How long a statement waits for another writer.
	BusyTimeout time.Duration `yaml:"busy_timeout" default:"10s" min:"1ms" max:"10m"`

	// Connections that read.
	MaxReaders int `yaml:"max_readers" default:"4" min:"1" max:"1000"`

	// How often the file is looked at for news while events are coming.
	BusyPoll time.Duration `yaml:"busy_poll" default:"2ms" min:"100us" max:"1m"`

	// How far that backs off when none come.
	IdlePoll time.Duration `yaml:"idle_poll" default:"25ms" min:"1ms" max:"10m"`
}

// Destination is one place where events go. Exactly one of kafka, nats and log
// says of which kind it is.
type Destination struct {
	// Identifies the destination in the database for good: under another name
	// it is another destination and starts anew. Small letters, digits, - and
	// _.
	Name string `yaml:"name" needed:"true"`

	// The source whose events it gets.
	Source string `yaml:"source" means:"the source, if there is only one"`

	// An Apache Kafka cluster.
	Kafka *Kafka `yaml:"kafka"`

	// A NATS server with JetStream.
	NATS *NATS `yaml:"nats"`

	// Lines of JSON on standard output or in a file.
	Log *LogSink `yaml:"log"`

	// Picks the events that are for this destination; the others count as
	// published. Terms like type:Order* or !header.tenant:acme, all of which
	// must hold.
	Match route.Match `yaml:"match" means:"every event"`

	// Makes the topic or subject of an event, such as
	// "{aggregate_type|kebab}-events". Put it in quotes: YAML reads { as the
	// begin of a map. Needed for kafka and nats, unless routes is given.
	To *route.Template `yaml:"to"`

	// Instead of to: rules that are tried in order. An event that none of
	// them matches is FAILED as no_target.
	Routes []Route `yaml:"routes"`

	// Where a destination that is new to the database begins: with the oldest
	// event kept, or with the next one. No effect on one that is known.
	From string `yaml:"from" default:"now" enum:"earliest|now"`

	// What becomes of a key whose event is FAILED: block holds its later
	// events back until somebody has decided (outrider retry, outrider skip);
	// skip lets them go on without it.
	Order string `yaml:"order" default:"block" enum:"block|skip"`

	// How often and when a message is tried again.
	Retry Retry `yaml:"retry"`

	// When the destination counts as down. Nothing is then sent to it but
	// single probes, and an outage costs no attempts.
	Breaker Breaker `yaml:"breaker"`

	// Bounds one call to the destination.
	PublishTimeout time.Duration `yaml:"publish_timeout" default:"30s" min:"10ms" max:"1h"`

	// How long a message may take before its batch is settled without it. Its
	// key waits, others do not.
	SlowAfter time.Duration `yaml:"slow_after" default:"1s" min:"1ms" max:"1h"`
}

// Route sends the events that match to one place.
type Route struct {
	// Picks events, as the destination's match does.
	Match route.Match `yaml:"match" means:"every event"`

	// Makes the topic or subject, as the destination's to does.
	To route.Template `yaml:"to" needed:"true"`
}

// Retry is a destination's retry policy. Attempts are counted with the event,
// over all relays and restarts.
type Retry struct {
	// How many times a message is tried again at once.
	Immediate int `yaml:"immediate" default:"3" special:"0: never" min:"0" max:"100"`

	// The delay after that; it doubles with each failure, and some of it is
	// added by chance.
	Base time.Duration `yaml:"base" default:"1s" min:"1ms" max:"24h"`

	// The longest delay. At least base.
	Cap time.Duration `yaml:"cap" default:"5m" min:"1ms" max:"240h"`

	// After how many failed attempts an event is FAILED.
	MaxAttempts int `yaml:"max_attempts" default:"20" special:"unlimited: never" min:"1"`

	// For how long after its first failure an event is tried. Time in which
	// the destination was down does not count.
	MaxAge time.Duration `yaml:"max_age" default:"unlimited" special:"unlimited: no bound" min:"1s"`
}

// Breaker is a destination's circuit breaker.
type Breaker struct {
	// How many messages in a row may end without a clear answer before the
	// destination counts as down. A lost connection counts at once.
	Unknowns int `yaml:"unknowns" default:"5" min:"1" max:"1000000"`

	// The first delay between probes; it doubles each time.
	Base time.Duration `yaml:"base" default:"250ms" min:"1ms" max:"1h"`

	// The longest delay between probes. At least base.
	Cap time.Duration `yaml:"cap" default:"15s" min:"1ms" max:"24h"`
}

// Kafka is how an Apache Kafka cluster is reached.
type Kafka struct {
	// Addresses, host:port, from which the cluster is found.
	Brokers []string `yaml:"brokers" needed:"true"`

	// Names this client to the brokers.
	ClientID string `yaml:"client_id" default:"outrider"`

	// How batches are compressed.
	Compression string `yaml:"compression" default:"none" enum:"none|gzip|snappy|lz4|zstd"`

	// How long a batch waits for company.
	Linger time.Duration `yaml:"linger" default:"0s" max:"1m"`

	// How long a message may take from the client's hands to its
	// acknowledgement.
	DeliveryTimeout time.Duration `yaml:"delivery_timeout" default:"30s" min:"100ms" max:"1h"`

	// The largest record, with its key and headers, before compression.
	MaxMessageBytes Size `yaml:"max_message_bytes" means:"what the topic allows" min:"512" max:"1GiB"`

	// How old what is known of a topic may become before it is looked up
	// again.
	TopicRefresh time.Duration `yaml:"topic_refresh" default:"1m" min:"1s" max:"24h"`

	// How a key chooses its partition: java as the Java client and Debezium
	// do (murmur2), fnv as Sarama does, crc32 as librdkafka does by default.
	Partitioner string `yaml:"partitioner" default:"java" enum:"java|fnv|crc32"`

	// Encrypts connections. An empty block (tls: {}) trusts the host's
	// authorities.
	TLS *TLS `yaml:"tls" means:"no encryption"`

	// Logs in.
	SASL *SASL `yaml:"sasl" means:"no log-in"`
}

// TLS is how connections are encrypted.
type TLS struct {
	// The authorities to trust, in PEM.
	CAFile Path `yaml:"ca_file" means:"the host's"`

	// The client's certificate, in PEM. Together with key_file.
	CertFile Path `yaml:"cert_file" means:"none is shown"`

	// The client's key, in PEM.
	KeyFile Path `yaml:"key_file" means:"none"`

	// The name to find in the server's certificate.
	ServerName string `yaml:"server_name" means:"the one that was dialled"`

	// Takes any certificate from anybody. For tests.
	InsecureSkipVerify bool `yaml:"insecure_skip_verify" default:"false"`
}

// SASL is a log-in to Kafka.
type SASL struct {
	// How the password is shown to the broker.
	Mechanism string `yaml:"mechanism" needed:"true" enum:"PLAIN|SCRAM-SHA-256|SCRAM-SHA-512"`

	// Who logs in.
	User string `yaml:"user" needed:"true"`

	// A secret: best given as {env: NAME} or {file: PATH}.
	Password Secret `yaml:"password" needed:"true"`
}

// NATS is how a NATS server is reached. The stream that takes the subjects has
// to exist.
type NATS struct {
	// Addresses of the servers, nats://host:4222 or tls://host:4222.
	URLs []string `yaml:"urls" needed:"true"`

	// Names this client to the server.
	Name string `yaml:"client_name" default:"outrider"`

	// Who logs in, with password.
	User string `yaml:"user" means:"nobody"`

	// A secret: best given as {env: NAME} or {file: PATH}.
	Password Secret `yaml:"password" means:"none"`

	// Instead of user and password. A secret.
	Token Secret `yaml:"token" means:"none"`

	// Instead: a file with the seed of an nkey.
	NKeyFile Path `yaml:"nkey_file" means:"none"`

	// Instead: a file with a JWT and its seed.
	CredsFile Path `yaml:"creds_file" means:"none"`

	// Encrypts connections. An empty block (tls: {}) trusts the host's
	// authorities.
	TLS *TLS `yaml:"tls" means:"as the server asks for"`

	// How long a message may take from the client's hands to its
	// acknowledgement.
	AckTimeout time.Duration `yaml:"ack_timeout" default:"5s" min:"10ms" max:"1h"`

	// Messages of one call that are on their way at once, each of another
	// key.
	MaxInFlight int `yaml:"max_in_flight" default:"512" min:"1" max:"100000"`
}

// LogSink writes events as lines of JSON.
type LogSink struct {
	// A file to append to. Relative to the configuration file.
	File Path `yaml:"file" means:"standard output"`
}
