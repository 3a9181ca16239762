package cli

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/nats-io/nats.go/jetstream"
)

// Add refuses headers that bear the names of ours; a plain INSERT does not. They
// arrive beside ours, neither in their place nor as a second value of theirs.
func TestHeadersOfAPlainInsert(t *testing.T) {
	url, stream := jetStream(t)
	file := filepath.Join(t.TempDir(), "shop.db")
	mustRun(t, "migrate", "up", "--db", "sqlite:"+file)
	db, err := sql.Open("sqlite", file)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	const id = "0190a6e2-0000-7000-8000-000000000017"
	if _, err := db.ExecContext(t.Context(), `insert into outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, headers)
		values (?, 'order', '42', 'OrderPlaced', '{}', '{"id": "mine", "type": "mine", "aggregate_type": "mine", "aggregate_id": "mine",
			"content_type": "mine", "sequence": "mine", "key": "mine", "Nats-Msg-Id": "mine", "tenant": "acme"}')`, id); err != nil {
		t.Fatal(err)
	}
	conf := writeConfig(t, fmt.Sprintf(`
listen: "off"
sources: [{name: shop, sqlite: {path: %q}}]
destinations: [{name: orders, nats: {urls: [%q]}, to: shop.order, from: earliest}]
`, file, url))
	p := start(t, "run", "-c", conf)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	c, err := stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := c.Messages()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Stop()
	msg, err := m.Next(jetstream.NextContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	h := msg.Headers()
	for name, want := range map[string]string{
		"id": id, "type": "OrderPlaced", "aggregate_type": "order", "aggregate_id": "42", "content_type": "application/json",
		"key": "42", "Nats-Msg-Id": id, "tenant": "acme",
		"header.id": "mine", "header.type": "mine", "header.aggregate_type": "mine", "header.aggregate_id": "mine",
		"header.content_type": "mine", "header.sequence": "mine", "header.key": "mine", "header.Nats-Msg-Id": "mine",
	} {
		if got := h[name]; !slices.Equal(got, []string{want}) {
			t.Errorf("%s is %q, want %q alone", name, got, want)
		}
	}
	if got := h["sequence"]; len(got) != 1 || len(got[0]) != 32 {
		t.Errorf("sequence is %q", got)
	}
	p.signal(t, os.Interrupt)
	if code := p.end(t); code != 0 {
		t.Errorf("exit %d:\n%s", code, p.said())
	}
}
