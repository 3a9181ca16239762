package natssink

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/route"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/sinktest"
)

func message(to, id, key string) sink.Message {
	return sink.Message{To: to, Record: &outrider.Record{Event: outrider.Event{
		ID: id, Key: key, Type: "OrderPlaced", AggregateType: "order", AggregateID: "42",
		ContentType: "application/json", Payload: []byte("{}"),
	}}}
}

func publish(s sink.Sink, ms ...sink.Message) []sink.Result {
	rs := make([]sink.Result, len(ms))
	s.Publish(context.Background(), sink.Batch{Messages: ms, Report: func(i int, r sink.Result) { rs[i] = r }})
	return rs
}

func want(t *testing.T, what string, r sink.Result, status sink.Status, class sink.Class) {
	t.Helper()
	if r.Status != status || r.Class != class {
		t.Errorf("%s: got %v %q (%v), want %v %q", what, r.Status, r.Class, r.Err, status, class)
	}
}

func closeLater(t *testing.T, s *Sink) *Sink {
	t.Helper()
	t.Cleanup(func() { _ = s.Close(context.Background()) })
	return s
}

func TestReceipt(t *testing.T) {
	url := embedded(t)
	name := newStream(t, jetStream(t, url))
	s := closeLater(t, open(t, Config{URLs: []string{url}}))
	rs := publish(s, message(name+".a", "1", "k"), message(name+".a", "2", "k"), message(name+".a", "2", "k"))
	for i, want := range []string{name + "@1", name + "@2", name + "@2"} { // the third is a copy
		if rs[i].Receipt != want {
			t.Errorf("message %d: receipt %q, want %q", i, rs[i].Receipt, want)
		}
	}
}

func TestHeadersThatNATSWouldChange(t *testing.T) {
	url := embedded(t)
	js := jetStream(t, url)
	name := newStream(t, js)
	s := closeLater(t, open(t, Config{URLs: []string{url}}))
	for _, h := range []map[string]string{
		{"a": "two\r\nlines: x"}, {"a": " space"}, {"a": "space "}, {"a b": "x"}, {"a:b": "x"}, {"": "x"}, {"ä": "x"},
	} {
		m := message(name+".a", "1", "k")
		m.Headers = h
		want(t, strings.Join(keys(h), ""), publish(s, m)[0], sink.Reject, sink.ClassInvalid)
	}
	if as := read(t, js, name+".a", 0); len(as) != 0 {
		t.Errorf("%d messages arrived changed", len(as))
	}
}

func keys(m map[string]string) []string {
	var ks []string
	for k, v := range m {
		ks = append(ks, k+"="+v)
	}
	return ks
}

// An event's header must not command the server: this one would empty the
// stream.
func TestHeadersThatCommand(t *testing.T) {
	url := embedded(t)
	js := jetStream(t, url)
	name := newStream(t, js, func(c *jetstream.StreamConfig) { c.AllowRollup = true })
	s := closeLater(t, open(t, Config{URLs: []string{url}}))
	m := message(name+".a", "2", "k")
	m.Headers = map[string]string{"Nats-Rollup": "all", "nats-msg-id": "1"}
	rs := publish(s, message(name+".a", "1", "k"), m)
	want(t, "with Nats-Rollup", rs[1], sink.Delivered, sink.ClassNone)
	as := read(t, js, name+".a", 2)
	if len(as) != 2 || as[1].Headers["header.Nats-Rollup"] != "all" || as[1].Headers["header.nats-msg-id"] != "1" {
		t.Errorf("got %d messages, %v", len(as), as)
	}
}

func TestBadSubjects(t *testing.T) {
	s := closeLater(t, open(t, Config{URLs: []string{embedded(t)}}))
	for _, to := range []string{"", ".a", "a.", "a..b", "a b", "a.*", "a.>", "$JS.API.STREAM.DELETE.x", "_INBOX.x", "a\n"} {
		want(t, to, publish(s, message(to, "1", "k"))[0], sink.Reject, sink.ClassNoTarget)
	}
}

func TestSubjectsByRules(t *testing.T) {
	url := embedded(t)
	js := jetStream(t, url)
	name := newStream(t, js)
	rule, err := route.ParseRule("type:Order*", name+".{type|dot}")
	if err != nil {
		t.Fatal(err)
	}
	s := closeLater(t, open(t, Config{URLs: []string{url}, Subjects: route.Rules{rule}}))
	other := message("", "2", "k2")
	other.Type = "Refund"
	rs := publish(s, message("", "1", "k"), other)
	want(t, "with a rule", rs[0], sink.Delivered, sink.ClassNone)
	want(t, "without a rule", rs[1], sink.Reject, sink.ClassNoTarget)
	if !errors.Is(rs[1].Err, route.ErrNoRule) {
		t.Errorf("got %v, want ErrNoRule", rs[1].Err)
	}
	if as := read(t, js, name+".order.placed", 1); len(as) != 1 {
		t.Errorf("%d arrived", len(as))
	}
}

func TestFullStream(t *testing.T) {
	url := embedded(t)
	name := newStream(t, jetStream(t, url), func(c *jetstream.StreamConfig) {
		c.MaxMsgs, c.Discard = 1, jetstream.DiscardNew
	})
	s := closeLater(t, open(t, Config{URLs: []string{url}}))
	rs := publish(s, message(name+".a", "1", "k"), message(name+".a", "2", "k"), message(name+".a", "3", "k"))
	want(t, "the first", rs[0], sink.Delivered, sink.ClassNone)
	want(t, "into the full stream", rs[1], sink.Retry, sink.ClassThrottled)
	want(t, "behind it", rs[2], sink.NotSent, sink.ClassHeld)
}

func TestOverTheStreamsLimit(t *testing.T) {
	url := embedded(t)
	name := newStream(t, jetStream(t, url), func(c *jetstream.StreamConfig) { c.MaxMsgSize = 1000 })
	s := closeLater(t, open(t, Config{URLs: []string{url}}))
	m := message(name+".a", "1", "k")
	m.Payload = make([]byte, 1000)
	want(t, "over max_msg_size", publish(s, m)[0], sink.Reject, sink.ClassOversize)
}

// A subscriber that answers is no stream, whatever it says.
func TestPlainSubscriberIsNoStream(t *testing.T) {
	url := embedded(t)
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	for i, reply := range []string{"OK", "{}", ""} {
		subject := []string{"plain.a", "plain.b", "plain.c"}[i]
		if _, err := nc.Subscribe(subject, func(m *nats.Msg) { _ = m.Respond([]byte(reply)) }); err != nil {
			t.Fatal(err)
		}
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	s := closeLater(t, open(t, Config{URLs: []string{url}}))
	for _, to := range []string{"plain.a", "plain.b", "plain.c"} {
		want(t, to, publish(s, message(to, "1", "k"))[0], sink.Unknown, sink.ClassOther)
	}
}

func TestNoAcknowledgementInTime(t *testing.T) {
	url := embedded(t)
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if _, err := nc.Subscribe("silent", func(*nats.Msg) {}); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	s := closeLater(t, open(t, Config{URLs: []string{url}, AckTimeout: 50 * time.Millisecond}))
	rs := publish(s, message("silent", "1", "k"), message("silent", "2", "k"), message("silent", "3", "other"))
	want(t, "without an answer", rs[0], sink.Unknown, sink.ClassTimeout)
	want(t, "behind it", rs[1], sink.NotSent, sink.ClassHeld)
	want(t, "of another key", rs[2], sink.Unknown, sink.ClassTimeout)
}

func TestLostConnectionIsUnknown(t *testing.T) {
	url := embedded(t)
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	arrived := make(chan struct{}, 1)
	if _, err := nc.Subscribe("silent", func(*nats.Msg) { arrived <- struct{}{} }); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	network := sinktest.NewNetwork()
	s := closeLater(t, open(t, Config{URLs: []string{url}, AckTimeout: time.Hour, dial: network.Dial}))
	mend := func() {}
	go func() {
		<-arrived
		mend = network.Break(t)
		close(arrived)
	}()
	rs := publish(s, message("silent", "1", "k"), message("silent", "2", "k"))
	want(t, "on its way", rs[0], sink.Unknown, sink.ClassUnreachable)
	want(t, "behind it", rs[1], sink.NotSent, sink.ClassHeld)
	<-arrived
	want(t, "without a connection", publish(s, message("silent", "3", "k"))[0], sink.NotSent, sink.ClassUnreachable)
	mend()
}

func TestNoPermissionToPublish(t *testing.T) {
	url := embedded(t, func(o *server.Options) {
		o.Users = []*server.User{{Username: "u", Password: "p", Permissions: &server.Permissions{
			Publish: &server.SubjectPermission{Deny: []string{"denied.>"}},
		}}}
	})
	js := jetStream(t, url, nats.UserInfo("u", "p"))
	name := newStream(t, js)
	s := closeLater(t, open(t, Config{URLs: []string{url}, User: "u", Password: "p", AckTimeout: time.Hour}))
	rs := publish(s, message("denied.a", "1", "k"), message(name+".a", "2", "other"))
	want(t, "to a denied subject", rs[0], sink.Retry, sink.ClassAuth)
	want(t, "to another", rs[1], sink.Delivered, sink.ClassNone)
	if outrider.Hint(rs[0].Err) == "" {
		t.Error("no hint")
	}
}

func TestLogins(t *testing.T) {
	user, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	public, _ := user.PublicKey()
	seed, _ := user.Seed()
	seedFile := filepath.Join(t.TempDir(), "user.nk")
	if err := os.WriteFile(seedFile, seed, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		server    func(*server.Options)
		good, bad Config
	}{
		"password": {func(o *server.Options) { o.Username, o.Password = "u", "p" },
			Config{User: "u", Password: "p"}, Config{User: "u", Password: "wrong"}},
		"token": {func(o *server.Options) { o.Authorization = "secret" }, Config{Token: "secret"}, Config{Token: "wrong"}},
		"nkey": {func(o *server.Options) { o.Nkeys = []*server.NkeyUser{{Nkey: public}} },
			Config{NKeyFile: seedFile}, Config{}},
	} {
		t.Run(name, func(t *testing.T) {
			url := embedded(t, c.server)
			ctx, cancel := context.WithTimeout(t.Context(), sinktest.Patience)
			defer cancel()
			c.good.URLs, c.bad.URLs = []string{url}, []string{url}
			if err := closeLater(t, open(t, c.good)).Check(ctx); err != nil {
				t.Errorf("good login: %v", err)
			}
			s := closeLater(t, open(t, c.bad))
			want(t, "bad login", publish(s, message("a", "1", "k"))[0], sink.NotSent, sink.ClassAuth)
			short, stop := context.WithTimeout(ctx, 100*time.Millisecond)
			defer stop()
			if err := s.Check(short); outrider.Hint(err) != hintAuth {
				t.Errorf("Check with a bad login: %v, hint %q", err, outrider.Hint(err))
			}
		})
	}
}

// Who waits for a server that is not there is told so at once, not when a look
// at it has taken its time; and where it is there, nothing is said.
func TestNoServerAtFirstIsSaid(t *testing.T) {
	refused := errors.New("played: refused")
	for _, test := range []struct {
		name string
		c    Config
		said bool
	}{
		{"not there", Config{URLs: []string{"nats://u:hidden@127.0.0.1:4222"}, dial: func(context.Context, string, string) (net.Conn, error) { return nil, refused }}, true},
		{"there", Config{URLs: []string{embedded(t)}}, false},
	} {
		var out strings.Builder
		test.c.Logger = slog.New(slog.NewTextHandler(&out, nil))
		s, err := New(test.c)
		if err != nil {
			t.Fatal(err)
		}
		closeLater(t, s)
		got := out.String() // New alone writes to it
		if !test.said && got != "" || test.said && (strings.Count(got, "\n") != 1 || !strings.Contains(got, "no server answers yet") || !strings.Contains(got, "error=") || strings.Contains(got, `error=""`)) {
			t.Errorf("%s: %q", test.name, got)
		}
		if strings.Contains(got, "hidden") {
			t.Errorf("%s: a password is shown: %q", test.name, got)
		}
	}
}

// What is published before any server was there has not been sent: it costs no
// attempt, and goes out once there is one.
func TestNoServerAtFirstCostsNothing(t *testing.T) {
	url := embedded(t)
	stream := newStream(t, jetStream(t, url))
	var there atomic.Bool
	s, err := New(Config{URLs: []string{url}, AckTimeout: sinktest.Patience, Logger: slog.New(slog.DiscardHandler),
		dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			if !there.Load() {
				return nil, errors.New("played: refused")
			}
			return new(net.Dialer).DialContext(ctx, network, address)
		}})
	if err != nil {
		t.Fatal(err)
	}
	closeLater(t, s)
	publish := func() sink.Result {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), sinktest.Patience)
		defer cancel()
		got := make(chan sink.Result, 1)
		s.Publish(ctx, sink.Batch{
			Messages: []sink.Message{{To: stream + ".a", Record: &outrider.Record{Event: outrider.Event{ID: "1", Type: "T", Key: "a", Payload: []byte("x")}}}},
			Report:   func(_ int, r sink.Result) { got <- r },
		})
		return <-got
	}
	if r := publish(); r.Status != sink.NotSent || r.Class != sink.ClassUnreachable || r.Err == nil || outrider.Hint(r.Err) == "" {
		t.Errorf("with no server: %+v", r)
	}
	there.Store(true)
	for end := time.Now().Add(sinktest.Patience); ; time.Sleep(10 * time.Millisecond) {
		r := publish()
		if r.Status == sink.Delivered {
			return
		}
		if r.Status == sink.Reject || time.Now().After(end) {
			t.Fatalf("once there is one: %+v", r)
		}
	}
}

func TestCheck(t *testing.T) {
	url := embedded(t)
	name := newStream(t, jetStream(t, url))
	rules := func(subjects ...string) (rs route.Rules) {
		for _, s := range subjects {
			r, err := route.ParseRule("", s)
			if err != nil {
				t.Fatal(err)
			}
			rs = append(rs, r)
		}
		return rs
	}
	ctx, cancel := context.WithTimeout(t.Context(), sinktest.Patience)
	defer cancel()
	if err := closeLater(t, open(t, Config{URLs: []string{url}, Subjects: rules(name+".a", "{type}")})).Check(ctx); err != nil {
		t.Errorf("all is there: %v", err)
	}
	err := closeLater(t, open(t, Config{URLs: []string{url}, Subjects: rules(name+".a", "nobody.here")})).Check(ctx)
	if err == nil || !strings.Contains(err.Error(), "nobody.here") || outrider.Hint(err) == "" {
		t.Errorf("a subject without a stream: %v", err)
	}
	bare := embedded(t, func(o *server.Options) { o.JetStream = false })
	if err := closeLater(t, open(t, Config{URLs: []string{bare}})).Check(ctx); err == nil || outrider.Hint(err) == "" {
		t.Errorf("without JetStream: %v", err)
	}
	want(t, "without JetStream", publish(closeLater(t, open(t, Config{URLs: []string{bare}, AckTimeout: 200 * time.Millisecond})),
		message("a", "1", "k"))[0], sink.Retry, sink.ClassOther)
}

func TestConfig(t *testing.T) {
	good := Config{URLs: []string{"nats://127.0.0.1:4222"}}
	for field, change := range map[string]func(*Config){
		"URLs is missing": func(c *Config) { c.URLs = nil },
		"URLs[0]":         func(c *Config) { c.URLs = []string{"localhost"} },
		"AckTimeout":      func(c *Config) { c.AckTimeout = -1 },
		"MaxInFlight":     func(c *Config) { c.MaxInFlight = -1 },
		"exclude":         func(c *Config) { c.User, c.Token = "u", "t" },
		"Password":        func(c *Config) { c.Password = "p" },
		"TLS":             func(c *Config) { c.TLS = &TLS{CertFile: "x"} },
		"TLS.CAFile":      func(c *Config) { c.TLS = &TLS{CAFile: "/no/such/file"} },
		"NKeyFile":        func(c *Config) { c.NKeyFile = "/no/such/file" },
		"CredsFile":       func(c *Config) { c.CredsFile = "/no/such/file" },
	} {
		c := good
		change(&c)
		if _, err := New(c); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: got %v", field, err)
		}
	}
}
