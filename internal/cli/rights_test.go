package cli

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/pgstore"
)

// rightsDB is a database in which PUBLIC may do nothing, with a role of its own
// for each of those that docs/OPERATING.md speaks of.
type rightsDB struct {
	*pgx.Conn // as a superuser
	dsn, name string
	roles     []string
	blocks    []string // the SQL of the document
}

var documentRoles = []string{"shop_owner", "shop_app", "shop_relay", "shop_operator"}

func newRightsDB(t *testing.T) *rightsDB {
	t.Helper()
	dsn := testdb.Postgres(t)
	r := &rightsDB{dsn: dsn, name: testdb.DatabaseName(t, dsn)}
	server, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	r.Conn = server
	t.Cleanup(func() { _ = server.Close(context.Background()) })
	for _, name := range documentRoles {
		r.roles = append(r.roles, r.name+strings.TrimPrefix(name, "shop"))
	}
	t.Cleanup(func() {
		for _, role := range r.roles {
			for _, sql := range []string{"drop owned by %s cascade", "drop role %s"} {
				if _, err := server.Exec(context.Background(), fmt.Sprintf(sql, role)); err != nil {
					t.Error(err)
				}
			}
		}
	})
	for _, role := range r.roles {
		r.exec(t, "create role "+role+" login")
	}
	r.exec(t, "revoke all on database "+r.name+" from public; revoke all on schema public from public")
	text, err := os.ReadFile("../../docs/OPERATING.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "\n## Rights on PostgreSQL\n")
	section, _, _ = strings.Cut(section, "\n## ")
	for _, m := range regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(section, -1) {
		r.blocks = append(r.blocks, m[1])
	}
	if len(r.blocks) != 8 {
		t.Fatalf("the document has %d blocks of GRANTs", len(r.blocks))
	}
	return r
}

func (r *rightsDB) exec(t *testing.T, sql string) {
	t.Helper()
	if _, err := r.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// statements are those of a block, with the names of this database.
func (r *rightsDB) statements(block string) []string {
	for i, name := range documentRoles {
		block = strings.ReplaceAll(block, name, r.roles[i])
	}
	block = strings.ReplaceAll(block, "database shop ", "database "+r.name+" ")
	return strings.Split(strings.TrimSuffix(strings.TrimSpace(block), ";"), ";")
}

// grant runs the document's blocks, counted from 0.
func (r *rightsDB) grant(t *testing.T, blocks ...int) {
	t.Helper()
	for _, i := range blocks {
		for _, sql := range r.statements(r.blocks[i]) {
			r.exec(t, sql)
		}
	}
}

// as is the database's DSN for one of the document's roles.
func (r *rightsDB) as(role string) string {
	i := slices.Index(documentRoles, "shop_"+role)
	return strings.Replace(r.dsn, "postgres@", r.roles[i]+"@", 1)
}

// The blocks of the document, in its order.
const (
	ownerBlock = iota
	appBlock
	relayBlock
	bellBlock
	partitionsBlock
	lookBlock
	actBlock
	retireBlock
)

func (r *rightsDB) refused(t *testing.T, want []string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit/4) // a relay that starts goes on
	defer cancel()
	got := callWithin(ctx, nil, args...)
	for _, w := range append(want, "--- exit 1") {
		if !strings.Contains(got, w) {
			t.Errorf("want %q in\n%s", w, got)
		}
	}
}

// With exactly the document's grants, each role does what it is for.
func TestRights(t *testing.T) {
	cleanEnvironment(t)
	r := newRightsDB(t)
	owner, app, operator := r.as("owner"), r.as("app"), r.as("operator")

	r.exec(t, "grant connect on database "+r.name+" to "+r.roles[0])
	r.refused(t, []string{"no schema has been selected to create in", "hint: the search_path names no schema that the role may use: grant usage, create on schema public to"}, "migrate", "up", "--db", owner)
	r.exec(t, "grant usage on schema public to "+r.roles[0])
	r.refused(t, []string{"permission denied for schema public", "hint: grant usage, create on schema public to"}, "migrate", "up", "--db", owner)
	r.grant(t, ownerBlock)
	mustRun(t, "migrate", "up", "--db", owner)
	mustRun(t, "migrate", "doorbell", "on", "--db", owner)

	r.grant(t, appBlock)
	enqueue(t, app, 50)

	r.grant(t, relayBlock, bellBlock)
	file := filepath.Join(t.TempDir(), "events")
	conf := writeConfig(t, fmt.Sprintf(`
listen: 127.0.0.1:0
metrics: {database_every: 1s}
relay: {maintain_every: 100ms}
sources: [{name: shop, postgres: {dsn: %q, doorbell: true}}]
destinations:
- {name: orders, log: {file: %q}, routes: [{match: "aggregate_id:key-0", to: x}, {match: "aggregate_id:key-1", to: x}], from: earliest, order: skip}
`, r.as("relay"), file))
	p := start(t, "run", "-c", conf)
	p.wait(t, "msg=(relaying)")
	r.grant(t, lookBlock)
	// 20 of the 50 have a place to go, the others fail.
	waitUntil(t, func() bool {
		return strings.Count(mustRun(t, "list", "--db", operator, "--state", "failed"), "no_target") == 30
	})
	waitUntil(t, func() bool { return len(lines(t, file)) == 20 })
	for _, args := range [][]string{{"status"}, {"list"}, {"show", "3"}, {"migrate", "status"}} {
		mustRun(t, append(args, "--db", operator)...)
	}

	r.refused(t, []string{"permission denied for table outbox_exceptions",
		"hint: grant update on outbox_exceptions to " + r.roles[3] + "; grant update on outbox_held_keys to " + r.roles[3]}, "retry", "3", "--db", operator)
	r.grant(t, actBlock)
	mustRun(t, "skip", "4", "--db", operator)
	mustRun(t, "retry", "3", "--db", operator)
	if out := p.said(); strings.Contains(out, "permission denied") || strings.Contains(out, "level=ERROR") {
		t.Errorf("the relay lacked something:\n%s", out)
	}
	p.signal(t, os.Interrupt)
	if code := p.end(t); code != 0 {
		t.Errorf("exit %d:\n%s", code, p.said())
	}

	r.refused(t, []string{"permission denied for table", "hint: grant update, delete on outbox_leases to " + r.roles[3]}, "retire", "orders", "--yes", "--db", operator)
	r.grant(t, retireBlock)
	mustRun(t, "retire", "orders", "--yes", "--db", operator)
}

// A relay gives tables new files by TRUNCATE, and makes partitions as a member of
// their owner.
func TestRightsOfMaintenance(t *testing.T) {
	cleanEnvironment(t)
	r := newRightsDB(t)
	r.grant(t, ownerBlock)
	mustRun(t, "migrate", "up", "--db", r.as("owner"))
	r.grant(t, relayBlock)
	st, err := pgstore.Open(t.Context(), pgstore.Config{DSN: r.as("relay"), PartitionSize: 1000})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()

	// Dead rows, of a table that statistics call small.
	r.exec(t, `insert into outbox_source (system_identifier, seen_xid, seen_id) select system_identifier::text, '3', 1 from pg_control_system()`)
	r.exec(t, `alter table outbox_relays set (autovacuum_enabled = off)`)
	r.exec(t, `insert into outbox_relays (lock, relay, destinations, grace, expires_at)
		select n, repeat('x', 400), '{}', '1s', 'infinity' from generate_series(1, 6000) n`)
	r.exec(t, `delete from outbox_relays`)
	size := func() (n int64) {
		if err := r.QueryRow(t.Context(), `select pg_relation_size('outbox_relays')`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	if size() <= 1<<20 {
		t.Fatal("the table is small already")
	}
	waitUntil(t, func() bool {
		if err := st.Maintain(t.Context()); err != nil {
			t.Fatal(err)
		}
		return size() < 1<<20
	})

	r.exec(t, `select setval('outbox_events_id_seq', 5000)`)
	if err := st.Maintain(t.Context()); err == nil || !strings.Contains(err.Error(), "must be owner") {
		t.Errorf("a partition made by somebody else than the owner: %v", err)
	}
	r.grant(t, partitionsBlock)
	for _, id := range []int{5000, 12000} {
		r.exec(t, fmt.Sprintf(`select setval('outbox_events_id_seq', %d)`, id))
		if err := st.Maintain(t.Context()); err != nil {
			t.Error(err)
		}
	}
	var n int
	if err := r.QueryRow(t.Context(), `select count(*) from pg_inherits where inhparent = 'outbox_events'::regclass`).Scan(&n); err != nil || n != 3 {
		t.Errorf("%d partitions, %v", n, err)
	}
}

// Each of a relay's grants that it cannot do without is missed at its start, by
// its name.
func TestRightsThatAreMissing(t *testing.T) {
	cleanEnvironment(t)
	r := newRightsDB(t)
	r.grant(t, ownerBlock)
	mustRun(t, "migrate", "up", "--db", r.as("owner"))
	mustRun(t, "migrate", "doorbell", "on", "--db", r.as("owner"))
	relay := r.roles[2]
	conf := writeConfig(t, fmt.Sprintf(`
listen: "off"
sources: [{name: shop, postgres: {dsn: %q, doorbell: true}}]
destinations: [{name: orders, log: {}}]
`, r.as("relay")))
	r.exec(t, "grant connect on database "+r.name+" to "+relay)
	r.refused(t, []string{"there is one in schema public, on which it lacks USAGE", "hint: grant usage on schema public to " + relay + "; "}, "run", "-c", conf)
	r.grant(t, relayBlock, bellBlock)
	form := regexp.MustCompile(`(?s)grant (.*?)\s+on (.*?)\s+to `)
	tried := 0
	for _, sql := range append(r.statements(r.blocks[relayBlock]), r.statements(r.blocks[bellBlock])...) {
		m := form.FindStringSubmatch(sql)
		if strings.HasPrefix(m[2], "database") || strings.HasPrefix(m[2], "schema") {
			continue
		}
		for object := range strings.SplitSeq(m[2], ", ") {
			for privilege := range strings.SplitSeq(m[1], ", ") {
				if privilege == "truncate" {
					continue
				}
				tried++
				r.exec(t, fmt.Sprintf("revoke %s on %s from %s", privilege, object, relay))
				grant := fmt.Sprintf("grant %s on %s to %s", privilege, object, relay)
				r.refused(t, []string{"lacks rights: " + strings.ToUpper(privilege) + " on " + object + "\n", "hint: " + grant + "; "}, "run", "-c", conf)
				r.exec(t, grant)
			}
		}
	}
	if tried != 26 {
		t.Errorf("%d grants were tried", tried)
	}
}

// waitUntil asks again and again.
func waitUntil(t *testing.T, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !done(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it does not come")
		}
	}
}

func lines(t *testing.T, file string) []string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSuffix(string(data), "\n"), "\n")
}
