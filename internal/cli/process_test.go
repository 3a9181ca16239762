package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/config"
	"github.com/outrider-dev/outrider/internal/daemon"
	"github.com/outrider-dev/outrider/internal/testdb"
)

// limit is when a test has hung. It measures nothing.
const limit = 2 * time.Minute

// process is the program, running.
type process struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lines chan string

	mu  sync.Mutex
	log strings.Builder
}

// start runs the program; what it writes to standard error can be waited for.
func start(t *testing.T, args ...string) *process {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: exec.CommandContext(ctx, self, args...), lines: make(chan string, 1000)}
	p.cmd.Env = append(os.Environ(), asProgram+"=1")
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	errs, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.lines)
		for s := bufio.NewScanner(errs); s.Scan(); {
			p.mu.Lock()
			p.log.WriteString(s.Text() + "\n")
			p.mu.Unlock()
			select {
			case p.lines <- s.Text():
			default: // nobody waits any more
			}
		}
	}()
	return p
}

// wait waits for a line and gives what the pattern's group matches.
func (p *process) wait(t *testing.T, pattern string) string {
	t.Helper()
	re := regexp.MustCompile(pattern)
	for line := range p.lines {
		if m := re.FindStringSubmatch(line); m != nil {
			return m[len(m)-1]
		}
	}
	t.Fatalf("the program ended without %q:\n%s", pattern, p.said())
	return ""
}

func (p *process) said() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.String()
}

// end waits for the end and gives the exit code.
func (p *process) end(t *testing.T) int {
	t.Helper()
	for range p.lines { // up to the end
	}
	_ = p.cmd.Wait() // the code tells
	return p.cmd.ProcessState.ExitCode()
}

func (p *process) signal(t *testing.T, s os.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// signalUntil signals until the program has said something: signals that follow
// each other closely are taken for one.
func (p *process) signalUntil(t *testing.T, s os.Signal, text string) {
	t.Helper()
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	for {
		select {
		case line, ok := <-p.lines:
			if !ok {
				t.Fatalf("the program ended without %q:\n%s", text, p.said())
			}
			if strings.Contains(line, text) {
				return
			}
		case <-again.C:
			p.signal(t, s)
		}
	}
}

// enqueue adds events of a few keys to an outbox.
func enqueue(t *testing.T, dsn string, count int) {
	t.Helper()
	c, err := config.Adhoc(dsn, "")
	if err != nil {
		t.Fatal(err)
	}
	db, dialect, err := daemon.OpenDB(c.Sources[0])
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	o, err := outrider.New(outrider.Config{Dialect: dialect})
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < count; {
		tx, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		var events []outrider.Event
		for ; i < count && len(events) < perTransaction; i++ {
			events = append(events, outrider.Event{
				AggregateType: "order", AggregateID: fmt.Sprintf("key-%d", i%5), Type: "OrderPlaced",
				Payload: fmt.Appendf(nil, `{"n":%d}`, i),
			})
		}
		if err := o.Add(t.Context(), tx, events...); err != nil {
			t.Fatal(err)
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
	}
}

// perTransaction is how many events a transaction of enqueue has.
const perTransaction = 20

// judge looks at payloads in the order of their arrival, by key: each is there,
// and first deliveries are in order.
func judge(t *testing.T, got map[string][]int, count int) {
	t.Helper()
	seen := map[int]bool{}
	for key, ns := range got {
		high := -1
		for _, n := range ns {
			if !seen[n] && n < high {
				t.Errorf("%s: %d came behind %d", key, n, high)
			}
			seen[n] = true
			high = max(high, n)
		}
	}
	if len(seen) != count {
		t.Errorf("%d of %d events came", len(seen), count)
	}
}

func writeConfig(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "outrider.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// mustRun runs a command to its end in this process.
func mustRun(t *testing.T, args ...string) string {
	t.Helper()
	var out, errs strings.Builder
	if code := Run(t.Context(), args, strings.NewReader(""), &out, &errs); code != 0 {
		t.Fatalf("outrider %s: %d\n%s%s", strings.Join(args, " "), code, out.String(), errs.String())
	}
	return out.String()
}

// jetStream starts a broker with a stream, and gives its address.
func jetStream(t *testing.T) (string, jetstream.Stream) {
	t.Helper()
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoLog: true, NoSigs: true})
	if err != nil {
		t.Fatal(err)
	}
	go s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(limit) {
		t.Fatal("the broker does not start")
	}
	nc, err := nats.Connect(s.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	st, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "SHOP", Subjects: []string{"shop.>"}})
	if err != nil {
		t.Fatal(err)
	}
	return s.ClientURL(), st
}

func TestSQLiteToNATS(t *testing.T) {
	url, stream := jetStream(t)
	dsn := "sqlite:" + filepath.Join(t.TempDir(), "shop.db")
	mustRun(t, "migrate", "up", "--db", dsn)
	const count = 200
	enqueue(t, dsn, count)
	file := writeConfig(t, fmt.Sprintf(`
listen: 127.0.0.1:0
sources: [{name: shop, sqlite: {path: %q}}]
destinations:
- name: orders
  nats: {urls: [%q]}
  to: "shop.{aggregate_type}.{type|kebab}"
  from: earliest
`, strings.TrimPrefix(dsn, "sqlite:"), url))
	p := start(t, "run", "-c", file)
	address := p.wait(t, `msg=relaying .*address=(\S+)`)
	judge(t, consumeNATS(t, stream, count), count)
	checkEndpoint(t, address)

	status := mustRun(t, "status", "-c", file)
	if !strings.Contains(status, "orders") {
		t.Errorf("status:\n%s", status)
	}
	// Twice, as timeout(1) does: to the process and to its group.
	p.signal(t, syscall.SIGTERM)
	p.signal(t, syscall.SIGTERM)
	if code := p.end(t); code != 0 || strings.Contains(p.said(), "cutting off") {
		t.Errorf("exit %d after SIGTERM:\n%s", code, p.said())
	}
}

// checkEndpoint looks at a relay that has delivered.
func checkEndpoint(t *testing.T, address string) {
	t.Helper()
	if code, body := get(t, "http://"+address+"/healthz"); code != 200 || !strings.Contains(body, `"live"`) {
		t.Errorf("/healthz: %d %s", code, body)
	}
	code, body := get(t, "http://"+address+"/readyz")
	var ready daemon.Readiness
	if err := json.Unmarshal([]byte(body), &ready); err != nil || code != 200 || !ready.Ready || len(ready.Sources) != 1 ||
		len(ready.Sources[0].Destinations) != 1 || ready.Sources[0].Destinations[0].Delivered == 0 {
		t.Errorf("/readyz: %d %s", code, body)
	}
	_, body = get(t, "http://"+address+"/metrics")
	for _, name := range []string{
		"outrider_build_info", "outrider_events_total", "outrider_delivery_latency_seconds_bucket", "outrider_circuit_state", "go_goroutines",
	} {
		if !strings.Contains(body, "\n"+name) {
			t.Errorf("/metrics has no %s", name)
		}
	}
}

func consumeNATS(t *testing.T, s jetstream.Stream, count int) map[string][]int {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	c, err := s.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := c.Messages()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Stop()
	got, seen := map[string][]int{}, map[string]bool{}
	for len(seen) < count {
		msg, err := m.Next(jetstream.NextContext(ctx))
		if err != nil {
			t.Fatalf("%d of %d: %v", len(seen), count, err)
		}
		add(t, got, msg.Headers().Get("key"), msg.Data())
		seen[msg.Headers().Get("id")] = true
	}
	return got
}

func add(t *testing.T, got map[string][]int, key string, payload []byte) {
	t.Helper()
	var v struct{ N int }
	if err := json.Unmarshal(payload, &v); err != nil {
		t.Fatalf("payload %q: %v", payload, err)
	}
	got[key] = append(got[key], v.N)
}

func TestPostgresToKafka(t *testing.T) {
	dsn, broker := testdb.Postgres(t), testdb.Kafka(t)
	topic := "cli-" + testdb.DatabaseName(t, dsn)
	kc, err := kgo.NewClient(kgo.SeedBrokers(broker), kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if err != nil {
		t.Fatal(err)
	}
	defer kc.Close()
	adm := kadm.NewClient(kc)
	if _, err := adm.CreateTopic(t.Context(), 3, 1, nil, topic); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = kadm.NewClient(kc).DeleteTopics(context.Background(), topic) })
	mustRun(t, "migrate", "up", "--db", dsn)
	const count = 3000
	enqueue(t, dsn, count)
	t.Setenv("SHOP_DSN", dsn)
	// Small claims, so that the signal comes while events are on their way.
	file := writeConfig(t, fmt.Sprintf(`
listen: 127.0.0.1:0
relay: {max_records: 10, in_flight_claims: 2}
sources: [{name: shop, postgres: {dsn: {env: SHOP_DSN}}}]
destinations:
- name: orders
  kafka: {brokers: [%q]}
  to: %q
  from: earliest
`, broker, topic))
	got := newArrivals()
	for _, until := range []int{1, count} {
		p := start(t, "run", "-c", file)
		address := p.wait(t, `msg=relaying .*address=(\S+)`)
		got.consumeKafka(t, kc, until)
		if until == count {
			checkEndpoint(t, address)
		}
		p.signal(t, syscall.SIGTERM)
		if code := p.end(t); code != 0 {
			t.Fatalf("exit %d after SIGTERM:\n%s", code, p.said())
		}
	}
	judge(t, got.byKey, count)
	// A soft stop leaves nothing delivered and not settled, so nothing came
	// twice.
	ends, err := adm.ListEndOffsets(t.Context(), topic)
	if err != nil {
		t.Fatal(err)
	}
	total := int64(0)
	ends.Each(func(o kadm.ListedOffset) { total += o.Offset })
	if total != count {
		t.Errorf("the topic has %d records of %d events", total, count)
	}
	// What was delivered was settled: a second relay has nothing to do.
	status := mustRun(t, "status", "-c", file, "-o", "json")
	var v statusView
	if err := json.Unmarshal([]byte(status), &v); err != nil {
		t.Fatal(err)
	}
	if d := v.Sources[0].Destinations[0]; d.Pending.N+d.Publishing.N+d.Waiting.N+d.Failed.N != 0 {
		t.Errorf("after the end: %+v", d)
	}
}

// arrivals are what a consumer got.
type arrivals struct {
	byKey map[string][]int
	ids   map[string]bool
}

func newArrivals() *arrivals { return &arrivals{map[string][]int{}, map[string]bool{}} }

// consumeKafka goes on until so many events have come in all.
func (a *arrivals) consumeKafka(t *testing.T, kc *kgo.Client, count int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	for len(a.ids) < count {
		f := kc.PollFetches(ctx)
		if ctx.Err() != nil {
			t.Fatalf("%d of %d came", len(a.ids), count)
		}
		f.EachRecord(func(r *kgo.Record) {
			add(t, a.byKey, string(r.Key), r.Value)
			for _, h := range r.Headers {
				if h.Key == "id" {
					a.ids[string(h.Value)] = true
				}
			}
		})
	}
}

// A second signal cuts off what the first one lets end: a message in the hands
// of a broker that never answers.
func TestSecondSignalCuts(t *testing.T) {
	url, silent := silentNATS(t)
	dsn := "sqlite:" + filepath.Join(t.TempDir(), "shop.db")
	mustRun(t, "migrate", "up", "--db", dsn)
	enqueue(t, dsn, 1)
	file := writeConfig(t, fmt.Sprintf(`
listen: "off"
relay: {soft_timeout: 1h, settle_timeout: 500ms}
sources: [{name: shop, sqlite: {path: %q}}]
destinations:
- {name: orders, nats: {urls: [%q], ack_timeout: 1h}, publish_timeout: 1h, to: shop.order, from: earliest}
`, strings.TrimPrefix(dsn, "sqlite:"), url))
	p := start(t, "run", "-c", file)
	p.wait(t, "msg=(relaying)")
	select {
	case <-silent:
	case <-time.After(limit):
		t.Fatal("nothing was sent")
	}
	p.signal(t, syscall.SIGTERM)
	p.wait(t, "msg=(\"stopping)")
	p.signalUntil(t, syscall.SIGTERM, "cutting off")
	// By itself, within the hour of the soft limit; killed it would be -1.
	if code := p.end(t); code != exitOK && code != exitFailed {
		t.Errorf("exit %d:\n%s", code, p.said())
	}
}

// silentNATS is a broker that takes messages on shop.order and acknowledges
// none; sent tells that one has come.
func silentNATS(t *testing.T) (url string, sent <-chan *nats.Msg) {
	t.Helper()
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoLog: true, NoSigs: true})
	if err != nil {
		t.Fatal(err)
	}
	go s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(limit) {
		t.Fatal("the broker does not start")
	}
	nc, err := nats.Connect(s.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	// A stream that does not acknowledge.
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "SHOP", Subjects: []string{"shop.>"}, NoAck: true}); err != nil {
		t.Fatal(err)
	}
	got := make(chan *nats.Msg, 10)
	if _, err := nc.ChanSubscribe("shop.order", got); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	return s.ClientURL(), got
}

// The relay of a demonstration ends with the demonstration.
func TestUntilEOF(t *testing.T) {
	dsn := "sqlite:" + filepath.Join(t.TempDir(), "shop.db")
	mustRun(t, "migrate", "up", "--db", dsn)
	file := writeConfig(t, fmt.Sprintf("listen: \"off\"\nsources: [{name: s, sqlite: {path: %q}}]\ndestinations: [{name: d, log: {}}]\n", strings.TrimPrefix(dsn, "sqlite:")))
	p := start(t, "run", "-c", file, "--until-eof")
	p.wait(t, "msg=(relaying)")
	if err := p.stdin.Close(); err != nil {
		t.Fatal(err)
	}
	if code := p.end(t); code != 0 {
		t.Errorf("exit %d:\n%s", code, p.said())
	}
}
