package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/testtls"
	"github.com/outrider-dev/outrider/sink"
)

// What the file says of encryption and log-in reaches Kafka and NATS, which
// both ask for a client's certificate and a password here.
func TestSecureDestinations(t *testing.T) {
	a := testtls.NewAuthority(t)
	cert, key := a.Issue("client")
	tls := fmt.Sprintf("tls: {ca_file: %q, cert_file: %q, key_file: %q, server_name: broker.test}", a.File, cert, key)
	withoutCert := fmt.Sprintf("tls: {ca_file: %q, server_name: broker.test}", a.File)
	otherName := strings.Replace(tls, "broker.test", "other.test", 1)

	kafka, nats := secureKafka(t, a), secureNATS(t, a)
	toKafka := func(tls, password string) string {
		return fmt.Sprintf("kafka: {brokers: [%q], delivery_timeout: 1s, %s, sasl: {mechanism: PLAIN, user: u, password: %s}}", kafka, tls, password)
	}
	toNATS := func(tls, password string) string {
		return fmt.Sprintf("nats: {urls: [%q], %s, user: u, password: %s}", nats, tls, password)
	}
	for what, c := range map[string]struct{ to, hint string }{
		"kafka":                     {toKafka(tls, "p"), ""},
		"kafka, wrong name":         {toKafka(otherName, "p"), "brokers"},
		"kafka, no certificate":     {toKafka(withoutCert, "p"), "brokers"},
		"nats":                      {toNATS(tls, "p"), ""},
		"nats, wrong name":          {toNATS(otherName, "p"), "URLs"},
		"nats, no certificate":      {toNATS(withoutCert, "p"), "URLs"},
		"nats, wrong password":      {toNATS(tls, "wrong"), "user, token"},
		"nats, missing credentials": {strings.Replace(toNATS(tls, "p"), "user: u, password: p", "creds_file: /no/such/file", 1), "new"},
	} {
		t.Run(what, func(t *testing.T) {
			file := load(t, "sources: [{name: s, sqlite: {path: x}}]\ndestinations:\n- name: d\n  to: \"{type}\"\n  "+c.to)
			k, err := newSink(file.Destinations[0], os.Stderr, slog.New(slog.DiscardHandler))
			if err != nil {
				if c.hint != "new" || !strings.Contains(err.Error(), "/no/such/file") {
					t.Fatal(err)
				}
				return
			}
			t.Cleanup(func() { _ = k.Close(context.Background()) })
			limit := 30 * time.Second
			if c.hint != "" {
				limit = time.Second // nothing better comes
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			err = k.(sink.Checker).Check(ctx)
			if c.hint == "" && err != nil || c.hint != "" && !strings.Contains(outrider.Hint(err), c.hint) {
				t.Errorf("%v, hint %q, want %q in it", err, outrider.Hint(err), c.hint)
			}
		})
	}
}

func secureKafka(t *testing.T, a *testtls.Authority) (broker string) {
	t.Helper()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "t"), kfake.TLS(a.Server("broker.test")),
		kfake.EnableSASL(), kfake.Superuser("PLAIN", "u", "p"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cluster.Close)
	_, port, err := net.SplitHostPort(cluster.ListenAddrs()[0])
	if err != nil {
		t.Fatal(err)
	}
	return "127.0.0.1:" + port
}

func secureNATS(t *testing.T, a *testtls.Authority) (url string) {
	t.Helper()
	srv, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(),
		NoLog: true, NoSigs: true, TLSConfig: a.Server("broker.test"), TLSVerify: true, TLSTimeout: 30, Username: "u", Password: "p"})
	if err != nil {
		t.Fatal(err)
	}
	srv.Start()
	t.Cleanup(func() { srv.Shutdown(); srv.WaitForShutdown() })
	if !srv.ReadyForConnections(30 * time.Second) {
		t.Fatal("the server is not ready")
	}
	return srv.ClientURL()
}
