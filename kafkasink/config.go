package kafkasink

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"hash/crc32"
	"hash/fnv"
	"log/slog"
	"math"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"

	"github.com/outrider-dev/outrider/route"
)

// Config sets up a Sink.
type Config struct {
	// Brokers are addresses, host:port, from which the cluster is found.
	// Needed.
	Brokers []string

	// ClientID names this client to the brokers. Default "outrider".
	ClientID string

	// Topics make the topic of a message that comes without one, and are
	// looked up by Check where they do not depend on the event.
	Topics route.Rules

	// Compression is none, gzip, snappy, lz4 or zstd. Default "none".
	Compression string

	// Linger is how long a batch waits for company. Default 0: none waits;
	// what arrives while a request is under way goes with the next one.
	Linger time.Duration

	// DeliveryTimeout is how long a message may take from the client's hands
	// to its acknowledgement. What has no answer by then is reported Unknown,
	// or NotSent if nothing was sent at all. Default 30s.
	DeliveryTimeout time.Duration

	// MaxMessageBytes is the largest record, with its key and headers and the
	// overhead of its batch, before compression. Default 0: what the topic's
	// max.message.bytes and segment.bytes allow, or 1,000,012 where they may
	// not be read; those two hold in any case.
	MaxMessageBytes int

	// TopicRefresh is how old what is known of a topic may become before it
	// is looked up again, beside the sending. Default 1m.
	TopicRefresh time.Duration

	// Partitioner says how a key chooses its partition:
	//
	//	java   murmur2, as the Java client, Kafka Connect and Debezium do
	//	       (librdkafka's murmur2_random)
	//	fnv    FNV-1a, as Sarama does by default
	//	crc32  CRC-32, as librdkafka does by default (consistent_random)
	//
	// Default "java". A message without a key, of an unordered event, goes to
	// one partition until a batch is full and then to another, in all three.
	Partitioner string

	// TLS is how connections are encrypted. nil: they are not.
	TLS *TLS

	// SASL is how the client logs in. nil: it does not.
	SASL *SASL

	// Logger takes what the client library has to say, from warnings up.
	// nil: nobody.
	Logger *slog.Logger

	// dial replaces the plain connection in tests.
	dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// TLS is how connections are encrypted. The zero value trusts the host's
// authorities and checks the name of every broker.
type TLS struct {
	// CAFile holds the authorities to trust, in PEM. "": the host's.
	CAFile string

	// CertFile and KeyFile hold the client's certificate and key, in PEM.
	// "": none is shown. Both or neither.
	CertFile, KeyFile string

	// ServerName is the name to find in the brokers' certificates. "": the
	// one that was dialled.
	ServerName string

	// InsecureSkipVerify takes any certificate from anybody.
	InsecureSkipVerify bool
}

// SASL is a login.
type SASL struct {
	// Mechanism is PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512. Needed.
	Mechanism string

	// User and Password are needed.
	User, Password string
}

func (c Config) withDefaults() Config {
	c.Brokers = slices.Clone(c.Brokers)
	c.Topics = slices.Clone(c.Topics)
	if c.ClientID == "" {
		c.ClientID = "outrider"
	}
	if c.Compression == "" {
		c.Compression = "none"
	}
	if c.DeliveryTimeout == 0 {
		c.DeliveryTimeout = 30 * time.Second
	}
	if c.TopicRefresh == 0 {
		c.TopicRefresh = time.Minute
	}
	if c.Partitioner == "" {
		c.Partitioner = "java"
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.dial == nil {
		c.dial = (&net.Dialer{Timeout: min(10*time.Second, c.DeliveryTimeout)}).DialContext
	}
	return c
}

func (c Config) validate() error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s %s", field, fmt.Sprintf(format, args...)))
	}
	if len(c.Brokers) == 0 {
		bad("Brokers", "is missing")
	}
	for i, b := range c.Brokers {
		if _, _, err := net.SplitHostPort(b); err != nil {
			bad(fmt.Sprintf("Brokers[%d]", i), "is %q, want host:port", b)
		}
	}
	if _, ok := codecs[c.Compression]; !ok {
		bad("Compression", "is %q, want none, gzip, snappy, lz4 or zstd", c.Compression)
	}
	if _, ok := partitioners[c.Partitioner]; !ok {
		bad("Partitioner", "is %q, want java, fnv or crc32", c.Partitioner)
	}
	if c.Linger < 0 || c.Linger > time.Minute {
		bad("Linger", "is %v, want 0 to 1m", c.Linger)
	}
	if c.DeliveryTimeout < 100*time.Millisecond {
		bad("DeliveryTimeout", "is %v, want at least 100ms", c.DeliveryTimeout)
	}
	if c.TopicRefresh < 0 {
		bad("TopicRefresh", "is %v, want a positive duration", c.TopicRefresh)
	}
	if c.MaxMessageBytes != 0 && (c.MaxMessageBytes < 512 || c.MaxMessageBytes > 1<<30) {
		bad("MaxMessageBytes", "is %d, want 0 or 512 to 1073741824", c.MaxMessageBytes)
	}
	if t := c.TLS; t != nil && (t.CertFile == "") != (t.KeyFile == "") {
		bad("TLS", "has one of CertFile and KeyFile, want both or neither")
	}
	if s := c.SASL; s != nil {
		switch s.Mechanism {
		case "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512":
		default:
			bad("SASL.Mechanism", "is %q, want PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512", s.Mechanism)
		}
		if s.User == "" || s.Password == "" {
			bad("SASL", "needs User and Password")
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("kafkasink: config: %s", strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return nil
}

var codecs = map[string]kgo.CompressionCodec{
	"none":   kgo.NoCompression(),
	"gzip":   kgo.GzipCompression(),
	"snappy": kgo.SnappyCompression(),
	"lz4":    kgo.Lz4Compression(),
	"zstd":   kgo.ZstdCompression(),
}

// partitioners all send records without a key to one partition per batch.
var partitioners = map[string]func() kgo.Partitioner{
	"java": func() kgo.Partitioner { return kgo.StickyKeyPartitioner(nil) },
	"fnv":  func() kgo.Partitioner { return kgo.StickyKeyPartitioner(kgo.SaramaCompatHasher(fnv32a)) },
	"crc32": func() kgo.Partitioner {
		return kgo.StickyKeyPartitioner(func(key []byte, n int) int {
			return int(crc32.ChecksumIEEE(key) % uint32(n))
		})
	},
}

func fnv32a(b []byte) uint32 {
	h := fnv.New32a()
	_, _ = h.Write(b)
	return h.Sum32()
}

// tlsConfig reads the files. It is nil if connections are not encrypted.
func (t *TLS) tlsConfig() (*tls.Config, error) {
	if t == nil {
		return nil, nil
	}
	tc := &tls.Config{
		MinVersion: tls.VersionTLS12, ServerName: t.ServerName, InsecureSkipVerify: t.InsecureSkipVerify,
	}
	if t.CAFile != "" {
		pem, err := os.ReadFile(t.CAFile)
		if err != nil {
			return nil, fmt.Errorf("kafkasink: config: TLS.CAFile: %w", err)
		}
		tc.RootCAs = x509.NewCertPool()
		if !tc.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("kafkasink: config: TLS.CAFile: no certificate in %s", t.CAFile)
		}
	}
	if t.CertFile != "" {
		pair, err := tls.LoadX509KeyPair(t.CertFile, t.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("kafkasink: config: TLS.CertFile, TLS.KeyFile: %w", err)
		}
		tc.Certificates = []tls.Certificate{pair}
	}
	return tc, nil
}

// options are the client library's, all but those that belong to one client.
func (c Config) options() []kgo.Opt {
	opts := []kgo.Opt{
		kgo.SeedBrokers(c.Brokers...),
		kgo.ClientID(c.ClientID),
		kgo.DisableClientMetrics(),
		kgo.RequiredAcks(kgo.AllISRAcks()),
		kgo.ProducerBatchCompression(codecs[c.Compression]),
		kgo.ProducerLinger(c.Linger),
		kgo.RecordPartitioner(partitioners[c.Partitioner]()),
		// The relay bounds what is in flight; a client that blocks in the
		// middle of a call would hold up what it has nothing to do with.
		kgo.MaxBufferedRecords(math.MaxInt32),
		kgo.ProduceRequestTimeout(min(10*time.Second, max(c.DeliveryTimeout, 100*time.Millisecond))),
		// No record retries limit and no RecordDeliveryTimeout: the library
		// counts the latter from the record's timestamp, which is the
		// event's and may lie hours back. Calls have a timer of their own.
		kgo.UnknownTopicRetries(3),
		kgo.MetadataMinAge(250 * time.Millisecond),
		kgo.RetryBackoffFn(func(try int) time.Duration {
			return min(time.Second, 25*time.Millisecond<<min(try, 10))
		}),
	}
	if s := c.SASL; s != nil {
		switch s.Mechanism {
		case "PLAIN":
			opts = append(opts, kgo.SASL(plain.Auth{User: s.User, Pass: s.Password}.AsMechanism()))
		case "SCRAM-SHA-256":
			opts = append(opts, kgo.SASL(scram.Auth{User: s.User, Pass: s.Password}.AsSha256Mechanism()))
		case "SCRAM-SHA-512":
			opts = append(opts, kgo.SASL(scram.Auth{User: s.User, Pass: s.Password}.AsSha512Mechanism()))
		}
	}
	return opts
}
