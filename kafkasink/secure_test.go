package kafkasink

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/internal/testtls"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/sinktest"
)

func TestConfig(t *testing.T) {
	good := Config{Brokers: []string{"127.0.0.1:9092"}}
	for field, change := range map[string]func(*Config){
		"Brokers is missing": func(c *Config) { c.Brokers = nil },
		"Brokers[0]":         func(c *Config) { c.Brokers = []string{"localhost"} },
		"Compression":        func(c *Config) { c.Compression = "brotli" },
		"Partitioner":        func(c *Config) { c.Partitioner = "murmur3" },
		"Linger":             func(c *Config) { c.Linger = -1 },
		"DeliveryTimeout":    func(c *Config) { c.DeliveryTimeout = 1 },
		"TopicRefresh":       func(c *Config) { c.TopicRefresh = -1 },
		"MaxMessageBytes":    func(c *Config) { c.MaxMessageBytes = 1 },
		"TLS":                func(c *Config) { c.TLS = &TLS{KeyFile: "x"} },
		"TLS.CAFile":         func(c *Config) { c.TLS = &TLS{CAFile: "/no/such/file"} },
		"SASL.Mechanism":     func(c *Config) { c.SASL = &SASL{Mechanism: "GSSAPI", User: "u", Password: "p"} },
		"SASL needs":         func(c *Config) { c.SASL = &SASL{Mechanism: "PLAIN", User: "u"} },
	} {
		c := good
		change(&c)
		if s, err := New(c); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: got %v", field, err)
			if s != nil {
				closeLater(t, s)
			}
		}
	}
	closeLater(t, open(t, good))
}

func TestLogins(t *testing.T) {
	test := func(t *testing.T, broker, user, password, topic string) {
		for _, mechanism := range []string{"PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"} {
			ctx, cancel := context.WithTimeout(t.Context(), sinktest.Patience)
			defer cancel()
			cfg := Config{Brokers: []string{broker}, SASL: &SASL{Mechanism: mechanism, User: user, Password: password}}
			s := closeLater(t, open(t, cfg))
			if err := s.Check(ctx); err != nil {
				t.Errorf("%s: %v", mechanism, err)
			}
			want(t, mechanism, publish(s, message(topic, "1", "k"))[0], sink.Delivered, sink.ClassNone)
			if topic == "t" {
				continue // the fake closes the connection on a wrong password and says nothing
			}
			cfg.SASL = &SASL{Mechanism: mechanism, User: user, Password: "wrong"}
			bad := closeLater(t, open(t, cfg))
			if err := bad.Check(ctx); outrider.Hint(err) != hintAuth || strings.Contains(err.Error(), "wrong") {
				t.Errorf("%s: Check with a wrong password: %v, hint %q", mechanism, err, outrider.Hint(err))
			}
			want(t, mechanism+" with a wrong password", publish(bad, message("t", "1", "k"))[0], sink.NotSent, sink.ClassAuth)
		}
	}
	t.Run("fake", func(t *testing.T) {
		cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.EnableSASL(), kfake.SeedTopics(1, "t"),
			kfake.Superuser("PLAIN", "u", "p"), kfake.Superuser("SCRAM-SHA-256", "u", "p"), kfake.Superuser("SCRAM-SHA-512", "u", "p"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(cluster.Close)
		test(t, cluster.ListenAddrs()[0], "u", "p", "t")
	})
	t.Run("real", func(t *testing.T) {
		broker, user, password := testdb.KafkaSASL(t)
		topic := newTopic(t, []string{testdb.Kafka(t)}, 1, nil)
		test(t, broker, user, password, topic)
	})
}

func TestTLS(t *testing.T) {
	a, stranger := testtls.NewAuthority(t), testtls.NewAuthority(t)
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "t"), kfake.TLS(a.Server("kafka.test")))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cluster.Close)
	cert, key := a.Issue("client")
	_, port, _ := net.SplitHostPort(cluster.ListenAddrs()[0])
	brokers := []string{"127.0.0.1:" + port}
	for what, c := range map[string]struct {
		tls *TLS
		ok  bool
	}{
		"all right":           {&TLS{CAFile: a.File, CertFile: cert, KeyFile: key, ServerName: "kafka.test"}, true},
		"not verified":        {&TLS{CertFile: cert, KeyFile: key, InsecureSkipVerify: true}, true},
		"the dialled name":    {&TLS{CAFile: a.File, CertFile: cert, KeyFile: key}, true},
		"wrong server name":   {&TLS{CAFile: a.File, CertFile: cert, KeyFile: key, ServerName: "other.test"}, false},
		"unknown authority":   {&TLS{CAFile: stranger.File, CertFile: cert, KeyFile: key, ServerName: "kafka.test"}, false},
		"without certificate": {&TLS{CAFile: a.File, ServerName: "kafka.test"}, false},
		"not encrypted":       {nil, false},
	} {
		s := closeLater(t, open(t, Config{Brokers: brokers, TLS: c.tls, DeliveryTimeout: 500 * time.Millisecond}))
		switch r := publish(s, message("t", "1", "k"))[0]; {
		case c.ok:
			want(t, what, r, sink.Delivered, sink.ClassNone)
		default:
			want(t, what, r, sink.NotSent, sink.ClassUnreachable)
		}
	}
}

func TestCheck(t *testing.T) {
	cluster, brokers := fake(t)
	topic := newTopic(t, brokers, 1, nil)
	ctx, cancel := context.WithTimeout(t.Context(), sinktest.Patience)
	defer cancel()
	check := func(what string, cfg Config, hint string, parts ...string) {
		t.Helper()
		err := closeLater(t, open(t, cfg)).Check(ctx)
		if hint == "" {
			if err != nil {
				t.Errorf("%s: %v", what, err)
			}
			return
		}
		if err == nil || outrider.Hint(err) != hint {
			t.Errorf("%s: got %v, hint %q, want hint %q", what, err, outrider.Hint(err), hint)
			return
		}
		for _, p := range parts {
			if !strings.Contains(err.Error(), p) {
				t.Errorf("%s: %q is not in %v", what, p, err)
			}
		}
	}
	check("all is there", Config{Brokers: brokers, Topics: rules(t, "type:A", topic, "", "{type}")}, "")
	check("a missing topic", Config{Brokers: brokers, Topics: rules(t, "", topic, "", "missing")}, hintTopic, "missing")
	check("no topic's name", Config{Brokers: brokers, Topics: rules(t, "", "no topic")}, hintTopic, "no topic")
	check("no broker", Config{Brokers: []string{"127.0.0.1:1"}}, hintUnreachable, "refused")
	cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.InitProducerID}, Err: kerr.ClusterAuthorizationFailed, Count: 1})
	check("no idempotent write", Config{Brokers: brokers}, hintAuth, "CLUSTER_AUTHORIZATION_FAILED")
}

// A user who may see a topic and not write to it hears of it at the start.
func TestCheckRights(t *testing.T) {
	reader := func(op kmsg.ACLOperation) kfake.ACL {
		return kfake.ACL{Principal: "User:reader", Resource: kmsg.ACLResourceTypeTopic, Name: "t",
			Pattern: kmsg.ACLResourcePatternTypeLiteral, Operation: op, Allow: true}
	}
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.EnableSASL(), kfake.EnableACLs(), kfake.SeedTopics(1, "t"),
		kfake.User("PLAIN", "reader", "p", reader(kmsg.ACLOperationRead), reader(kmsg.ACLOperationDescribe)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cluster.Close)
	s := closeLater(t, open(t, Config{Brokers: cluster.ListenAddrs(), Topics: rules(t, "", "t"),
		SASL: &SASL{Mechanism: "PLAIN", User: "reader", Password: "p"}}))
	ctx, cancel := context.WithTimeout(t.Context(), sinktest.Patience)
	defer cancel()
	if err := s.checkWrite(ctx, s.client, []string{"t"}); len(err) != 1 || outrider.Hint(err[0]) != hintTopicAuth {
		t.Errorf("got %v, want that t may not be written to", err)
	}
}
