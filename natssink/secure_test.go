package natssink

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/testtls"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/sinktest"
)

// checked is what Check says within some time. A server that refuses answers
// nothing else, so a Check that is to fail waits for all of it.
func checked(t *testing.T, s *Sink, limit time.Duration) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	return s.Check(ctx)
}

func TestTLS(t *testing.T) {
	a, stranger := testtls.NewAuthority(t), testtls.NewAuthority(t)
	cert, key := a.Issue("client")
	strangersCert, strangersKey := stranger.Issue("client")
	url := embedded(t, func(o *server.Options) {
		o.TLSConfig, o.TLSVerify, o.TLSTimeout = a.Server("nats.test"), true, sinktest.Patience.Seconds()
	})
	plain := embedded(t)
	name := newStream(t, jetStream(t, url, nats.RootCAs(a.File), nats.ClientCert(cert, key)))
	newStream(t, jetStream(t, plain))
	for what, c := range map[string]struct {
		url string
		tls *TLS
		bad string // a part of the error; "": all is well
	}{
		"all right":          {url, &TLS{CAFile: a.File, CertFile: cert, KeyFile: key, ServerName: "nats.test"}, ""},
		"tls in the URL":     {strings.Replace(url, "nats:", "tls:", 1), &TLS{CAFile: a.File, CertFile: cert, KeyFile: key}, ""},
		"not verified":       {url, &TLS{CertFile: cert, KeyFile: key, InsecureSkipVerify: true}, ""},
		"wrong server name":  {url, &TLS{CAFile: a.File, CertFile: cert, KeyFile: key, ServerName: "other.test"}, "other.test"},
		"unknown authority":  {url, &TLS{CAFile: stranger.File, CertFile: cert, KeyFile: key}, "unknown authority"},
		"host's authorities": {url, nil, "unknown authority"},
		// A server refuses the client's certificate after the handshake: whether its
		// word or the end of the connection is read first is chance.
		"without certificate": {url, &TLS{CAFile: a.File}, "tls"},
		"wrong certificate":   {url, &TLS{CAFile: a.File, CertFile: strangersCert, KeyFile: strangersKey}, "tls"},
		"server without TLS":  {plain, &TLS{CAFile: a.File}, "secure connection not available"},
	} {
		t.Run(what, func(t *testing.T) {
			s := closeLater(t, open(t, Config{URLs: []string{c.url}, TLS: c.tls}))
			if c.bad == "" {
				if err := checked(t, s, sinktest.Patience); err != nil {
					t.Errorf("Check: %v", err)
				}
				want(t, what, publish(s, message(name+".a", "1", "k"))[0], sink.Delivered, sink.ClassNone)
				return
			}
			check := checked(t, s, 300*time.Millisecond)
			r := publish(s, message(name+".a", "1", "k"))[0]
			want(t, what, r, sink.NotSent, sink.ClassUnreachable)
			for by, err := range map[string]error{"Publish": r.Err, "Check": check} {
				if err == nil || !strings.Contains(err.Error(), c.bad) || outrider.Hint(err) != hintReach {
					t.Errorf("%s: %v, hint %q, want %q in it", by, err, outrider.Hint(err), c.bad)
				}
			}
		})
	}
}

// operator is who signs accounts, which sign users.
type operator struct {
	t        *testing.T
	key      nkeys.KeyPair
	claims   *jwt.OperatorClaims
	resolver *server.MemAccResolver
	system   string
}

// account signs users.
type account struct {
	t   *testing.T
	key nkeys.KeyPair
}

func newOperator(t *testing.T) *operator {
	t.Helper()
	o := &operator{t: t, key: pair(t, nkeys.CreateOperator), resolver: &server.MemAccResolver{}}
	o.claims = jwt.NewOperatorClaims(public(t, o.key))
	o.system = public(t, o.account(false).key)
	return o
}

func pair(t *testing.T, create func() (nkeys.KeyPair, error)) nkeys.KeyPair {
	t.Helper()
	k, err := create()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func public(t *testing.T, k nkeys.KeyPair) string {
	t.Helper()
	p, err := k.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// account makes one that the server knows.
func (o *operator) account(jetStream bool) *account {
	o.t.Helper()
	a := &account{o.t, pair(o.t, nkeys.CreateAccount)}
	c := jwt.NewAccountClaims(public(o.t, a.key))
	if jetStream {
		c.Limits.JetStreamLimits = jwt.JetStreamLimits{MemoryStorage: -1, DiskStorage: -1, Streams: -1, Consumer: -1}
	}
	text, err := c.Encode(o.key)
	if err != nil {
		o.t.Fatal(err)
	}
	if err := o.resolver.Store(c.Subject, text); err != nil {
		o.t.Fatal(err)
	}
	return a
}

// serve has a server trust the operator.
func (o *operator) serve(opts *server.Options) {
	opts.TrustedOperators = []*jwt.OperatorClaims{o.claims}
	opts.AccountResolver, opts.SystemAccount = o.resolver, o.system
}

// credentials make a user's credentials file, of a JWT and a seed.
func (a *account) credentials(change ...func(*jwt.UserClaims)) string {
	a.t.Helper()
	user := pair(a.t, nkeys.CreateUser)
	c := jwt.NewUserClaims(public(a.t, user))
	for _, f := range change {
		f(c)
	}
	text, err := c.Encode(a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	seed, err := user.Seed()
	if err != nil {
		a.t.Fatal(err)
	}
	file, err := jwt.FormatUserConfig(text, seed)
	if err != nil {
		a.t.Fatal(err)
	}
	name := filepath.Join(a.t.TempDir(), "user.creds")
	if err := os.WriteFile(name, file, 0o600); err != nil {
		a.t.Fatal(err)
	}
	return name
}

func TestCredentials(t *testing.T) {
	o := newOperator(t)
	app := o.account(true)
	url := embedded(t, o.serve)
	good := app.credentials()
	name := newStream(t, jetStream(t, url, nats.UserCredentials(good)))
	s := closeLater(t, open(t, Config{URLs: []string{url}, CredsFile: good}))
	if err := checked(t, s, sinktest.Patience); err != nil {
		t.Errorf("Check: %v", err)
	}
	want(t, "good credentials", publish(s, message(name+".a", "1", "k"))[0], sink.Delivered, sink.ClassNone)

	for what, file := range map[string]string{
		"none":                "",
		"of another operator": newOperator(t).account(true).credentials(),
		"expired": app.credentials(func(c *jwt.UserClaims) {
			c.Expires = time.Now().Add(-time.Hour).Unix()
		}),
		"for other addresses": app.credentials(func(c *jwt.UserClaims) { c.Src = jwt.CIDRList{"192.0.2.0/24"} }),
		"with another's seed": mixed(t, app.credentials(), app.credentials()),
	} {
		t.Run(what, func(t *testing.T) {
			s := closeLater(t, open(t, Config{URLs: []string{url}, CredsFile: file}))
			r := publish(s, message(name+".a", "2", "k"))[0]
			want(t, what, r, sink.NotSent, sink.ClassAuth)
			for by, err := range map[string]error{"Publish": r.Err, "Check": checked(t, s, 300*time.Millisecond)} {
				if outrider.Hint(err) != hintAuth || strings.Contains(err.Error(), "eyJ") {
					t.Errorf("%s: %v, hint %q", by, err, outrider.Hint(err))
				}
			}
		})
	}
	t.Run("not allowed to publish", func(t *testing.T) {
		s := closeLater(t, open(t, Config{URLs: []string{url}, CredsFile: app.credentials(func(c *jwt.UserClaims) {
			c.Pub.Deny.Add("denied.>")
		})}))
		r := publish(s, message("denied.a", "1", "k"))[0]
		want(t, "to a denied subject", r, sink.Retry, sink.ClassAuth)
		if outrider.Hint(r.Err) != hintRights {
			t.Errorf("%v, hint %q", r.Err, outrider.Hint(r.Err))
		}
		want(t, "to another", publish(s, message(name+".a", "3", "k"))[0], sink.Delivered, sink.ClassNone)
	})
	t.Run("account without JetStream", func(t *testing.T) {
		s := closeLater(t, open(t, Config{URLs: []string{url}, CredsFile: o.account(false).credentials()}))
		if err := checked(t, s, sinktest.Patience); err == nil || outrider.Hint(err) != hintReach {
			t.Errorf("Check: %v, hint %q", err, outrider.Hint(err))
		}
	})
}

// mixed makes credentials of one's JWT and another's seed.
func mixed(t *testing.T, one, another string) string {
	t.Helper()
	var parts [2][]byte
	for i, name := range []string{one, another} {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		parts[i] = b
	}
	token, err := jwt.ParseDecoratedJWT(parts[0])
	if err != nil {
		t.Fatal(err)
	}
	k, err := jwt.ParseDecoratedUserNKey(parts[1])
	if err != nil {
		t.Fatal(err)
	}
	seed, err := k.Seed()
	if err != nil {
		t.Fatal(err)
	}
	// Not FormatUserConfig, which looks whether they fit.
	text := "-----BEGIN NATS USER JWT-----\n" + token + "\n------END NATS USER JWT------\n\n" +
		"-----BEGIN USER NKEY SEED-----\n" + string(seed) + "\n------END USER NKEY SEED------\n"
	name := filepath.Join(t.TempDir(), "mixed.creds")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// A credentials file is read again with each try, so that one that was put
// right, or renewed, is used without a restart.
func TestRenewedCredentials(t *testing.T) {
	o := newOperator(t)
	app := o.account(true)
	a := testtls.NewAuthority(t)
	cert, key := a.Issue("client")
	url := embedded(t, o.serve, func(opts *server.Options) {
		opts.TLSConfig, opts.TLSVerify, opts.TLSTimeout = a.Server("nats.test"), true, sinktest.Patience.Seconds()
	})
	good, file := app.credentials(), newOperator(t).account(true).credentials()
	name := newStream(t, jetStream(t, url, nats.UserCredentials(good), nats.RootCAs(a.File), nats.ClientCert(cert, key)))
	s := closeLater(t, open(t, Config{URLs: []string{url}, CredsFile: file, TLS: &TLS{CAFile: a.File, CertFile: cert, KeyFile: key}}))
	want(t, "with the wrong ones", publish(s, message(name+".a", "1", "k"))[0], sink.NotSent, sink.ClassAuth)
	b, err := os.ReadFile(good)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := checked(t, s, sinktest.Patience); err != nil {
		t.Fatalf("Check with new ones: %v", err)
	}
	want(t, "with the right ones", publish(s, message(name+".a", "2", "k"))[0], sink.Delivered, sink.ClassNone)
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	want(t, "while connected", publish(s, message(name+".a", "3", "k"))[0], sink.Delivered, sink.ClassNone)
}
