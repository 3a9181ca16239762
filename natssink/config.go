package natssink

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outrider-dev/outrider/route"
)

// Config sets up a Sink.
type Config struct {
	// URLs are the servers, nats://host:port or tls://host:port. Needed.
	URLs []string

	// Name names this client to the servers. Default "outrider".
	Name string

	// Subjects make the subject of a message that comes without one, and are
	// looked up by Check where they do not depend on the event.
	Subjects route.Rules

	// AckTimeout is how long a message may take to its acknowledgement. What
	// has none by then is reported Unknown. Default 5s.
	AckTimeout time.Duration

	// MaxInFlight is how many messages of one call are on their way at once,
	// each of another key. Default 512.
	MaxInFlight int

	// At most one way to log in: User with Password, Token, the seed file of
	// an nkey, or a credentials file (JWT and seed).
	User, Password string
	Token          string
	NKeyFile       string
	CredsFile      string

	// TLS is how connections are encrypted. nil: as the server asks for,
	// with the host's authorities.
	TLS *TLS

	// Logger is told if no server answers at first. nil: nobody is.
	Logger *slog.Logger

	// dial replaces the plain connection in tests.
	dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// TLS is how connections are encrypted. The zero value trusts the host's
// authorities and checks the server's name.
type TLS struct {
	// CAFile holds the authorities to trust, in PEM. "": the host's.
	CAFile string

	// CertFile and KeyFile hold the client's certificate and key, in PEM.
	// "": none is shown. Both or neither.
	CertFile, KeyFile string

	// ServerName is the name to find in the server's certificate. "": the
	// one that was dialled.
	ServerName string

	// InsecureSkipVerify takes any certificate from anybody.
	InsecureSkipVerify bool
}

func (c Config) withDefaults() Config {
	c.URLs = slices.Clone(c.URLs)
	c.Subjects = slices.Clone(c.Subjects)
	if c.Name == "" {
		c.Name = "outrider"
	}
	if c.AckTimeout == 0 {
		c.AckTimeout = 5 * time.Second
	}
	if c.MaxInFlight == 0 {
		c.MaxInFlight = 512
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.dial == nil {
		c.dial = (&net.Dialer{Timeout: 5 * time.Second}).DialContext
	}
	return c
}

func (c Config) validate() error {
	var errs []string
	bad := func(format string, args ...any) { errs = append(errs, fmt.Sprintf(format, args...)) }
	if len(c.URLs) == 0 {
		bad("URLs is missing")
	}
	for i, u := range c.URLs {
		if p, err := url.Parse(u); err != nil || p.Host == "" {
			bad("URLs[%d] is %q, want nats://host:port", i, u)
		}
	}
	if c.AckTimeout < 10*time.Millisecond {
		bad("AckTimeout is %v, want at least 10ms", c.AckTimeout)
	}
	if c.MaxInFlight < 1 {
		bad("MaxInFlight is %d, want at least 1", c.MaxInFlight)
	}
	ways := 0
	for _, given := range []bool{c.User != "", c.Token != "", c.NKeyFile != "", c.CredsFile != ""} {
		if given {
			ways++
		}
	}
	if ways > 1 {
		bad("User, Token, NKeyFile and CredsFile exclude each other, and %d are given", ways)
	}
	if c.Password != "" && c.User == "" {
		bad("Password is given without User")
	}
	if t := c.TLS; t != nil && (t.CertFile == "") != (t.KeyFile == "") {
		bad("TLS has one of CertFile and KeyFile, want both or neither")
	}
	if len(errs) > 0 {
		return errors.New("natssink: config: " + strings.Join(errs, "; "))
	}
	return nil
}

// dialer is what the client library takes for one.
type dialer func(ctx context.Context, network, address string) (net.Conn, error)

// Dial implements nats.CustomDialer.
func (d dialer) Dial(network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return d(ctx, network, address)
}

// options are the client library's, all but the handlers.
func (c Config) options() ([]nats.Option, error) {
	opts := []nats.Option{
		nats.Name(c.Name),
		nats.SetCustomDialer(dialer(c.dial)),
		nats.MaxReconnects(-1),
		nats.RetryOnFailedConnect(true),
		nats.IgnoreAuthErrorAbort(),
		nats.ReconnectWait(100 * time.Millisecond),
		nats.ReconnectJitter(50*time.Millisecond, 50*time.Millisecond),
		// What cannot be sent now is not kept to be sent later: the relay
		// would have to take it for sent.
		nats.ReconnectBufSize(-1),
	}
	switch {
	case c.User != "":
		opts = append(opts, nats.UserInfo(c.User, c.Password))
	case c.Token != "":
		opts = append(opts, nats.Token(c.Token))
	case c.NKeyFile != "":
		opt, err := nats.NkeyOptionFromSeed(c.NKeyFile)
		if err != nil {
			return nil, fmt.Errorf("natssink: config: NKeyFile: %w", err)
		}
		opts = append(opts, opt)
	case c.CredsFile != "":
		if _, err := os.Stat(c.CredsFile); err != nil {
			return nil, fmt.Errorf("natssink: config: CredsFile: %w", err)
		}
		opts = append(opts, nats.UserCredentials(c.CredsFile))
	}
	if c.TLS != nil {
		tc, err := c.TLS.tlsConfig()
		if err != nil {
			return nil, err
		}
		opts = append(opts, nats.Secure(tc))
	}
	return opts, nil
}

func (t *TLS) tlsConfig() (*tls.Config, error) {
	tc := &tls.Config{
		MinVersion: tls.VersionTLS12, ServerName: t.ServerName, InsecureSkipVerify: t.InsecureSkipVerify,
	}
	if t.CAFile != "" {
		pem, err := os.ReadFile(t.CAFile)
		if err != nil {
			return nil, fmt.Errorf("natssink: config: TLS.CAFile: %w", err)
		}
		tc.RootCAs = x509.NewCertPool()
		if !tc.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("natssink: config: TLS.CAFile: no certificate in %s", t.CAFile)
		}
	}
	if t.CertFile != "" {
		pair, err := tls.LoadX509KeyPair(t.CertFile, t.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("natssink: config: TLS.CertFile, TLS.KeyFile: %w", err)
		}
		tc.Certificates = []tls.Certificate{pair}
	}
	return tc, nil
}
