package migrate

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"strconv"
	"strings"

	"github.com/outrider-dev/outrider"
)

//go:embed postgres/*.sql sqlite/*.sql sqlite_rows/*.sql
var embedded embed.FS

// file is one migration as it is embedded.
type file struct {
	version  int
	name     string
	up, down string
	// checksum is that of the up file as it is embedded, whatever payload it
	// is rendered with: the column's type is compared by itself.
	checksum string
	tables   []string // and views, that the migrations up to this one make
}

// migrator is a table set of a dialect.
type migrator struct {
	Options
	dialect
	files  []file
	events string // the table that applications insert into
}

var (
	fileName    = regexp.MustCompile(`^(\d{4})_(\w+)\.up\.sql$`)
	createTable = regexp.MustCompile(`(?mi)^create (?:table (\w+) \(|view (\w+) as$)`)
)

func newMigrator(o Options) (*migrator, error) {
	if o.Set == "" {
		o.Set = Stream
	}
	m := &migrator{Options: o, events: "outbox_events"}
	dir := o.Dialect.String()
	switch {
	case o.To < 0:
		return nil, fmt.Errorf("migrate: Options.To: %d is not a version", o.To)
	case o.Set != Stream && o.Set != Rows:
		return nil, fmt.Errorf("migrate: Options.Set: %q is unknown; there are %q and %q", o.Set, Stream, Rows)
	case o.Dialect == outrider.Postgres && o.Set == Stream:
		m.dialect = postgres{}
	case o.Dialect == outrider.SQLite && o.Payload == outrider.PayloadJSON:
		return nil, fmt.Errorf("migrate: Options.Payload: %s exists on PostgreSQL only", o.Payload)
	case o.Dialect == outrider.SQLite:
		m.dialect = sqlite{}
		if o.Set == Rows {
			m.events, dir = "outbox_rows", "sqlite_rows"
		}
	default:
		return nil, fmt.Errorf("migrate: Options.Dialect: %s with Options.Set %q is not supported", o.Dialect, o.Set)
	}
	if o.Payload > outrider.PayloadJSON {
		return nil, fmt.Errorf("migrate: Options.Payload: %s is unknown", o.Payload)
	}
	files, err := readFiles(embedded, dir)
	if err != nil {
		return nil, err
	}
	m.files = files
	return m, nil
}

// readFiles reads a folder of migrations: numbered from 1 without gaps, each
// with a way back.
func readFiles(fsys fs.FS, dir string) ([]file, error) {
	names, err := fs.Glob(fsys, dir+"/*.up.sql")
	if err != nil {
		return nil, err
	}
	var files []file
	var tables []string
	for i, name := range names {
		match := fileName.FindStringSubmatch(path.Base(name))
		if match == nil {
			return nil, fmt.Errorf("migrate: %s is not named NNNN_name.up.sql", name)
		}
		if v, _ := strconv.Atoi(match[1]); v != i+1 {
			return nil, fmt.Errorf("migrate: %s should have number %04d", name, i+1)
		}
		up, err := fs.ReadFile(fsys, name)
		if err != nil {
			return nil, err
		}
		down, err := fs.ReadFile(fsys, strings.TrimSuffix(name, ".up.sql")+".down.sql")
		if err != nil {
			return nil, err
		}
		for _, t := range createTable.FindAllSubmatch(up, -1) {
			tables = append(tables, string(t[1])+string(t[2]))
		}
		sum := sha256.Sum256(up)
		files = append(files, file{
			version: i + 1, name: match[2], up: string(up), down: string(down),
			checksum: hex.EncodeToString(sum[:]), tables: tables[:len(tables):len(tables)],
		})
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("migrate: no migrations in %s", dir)
	}
	return files, nil
}

// upSQL is what applies a migration: its file, then the row that tells of it,
// with the schema as it is right then.
func (m *migrator) upSQL(f file) string {
	return fmt.Sprintf("%s\n-- Tells of it, with the schema as it is now.\ninsert into outbox_migrations (set_name, version, name, checksum, fingerprint)\nselect '%s', %d, '%s', '%s',\n%s;\n",
		strings.TrimSpace(m.render(f.up)), m.Set, f.version, f.name, f.checksum, indent(m.fingerprintSQL(f.tables)))
}

func (m *migrator) render(text string) string {
	return strings.ReplaceAll(text, "{{payload}}", m.Payload.String())
}

func indent(s string) string {
	return "    " + strings.ReplaceAll(strings.TrimSpace(s), "\n", "\n    ")
}

// SQL is all that Up would run on an empty database, for people who apply
// statements with a tool of their own: run it in one transaction. It ends with
// the INSERT of PlainInsert in a comment.
func SQL(o Options) (string, error) {
	m, err := newMigrator(o)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "-- The outbox's tables (%s, %s). To be run in one transaction.\n%s;\n", m.Dialect, m.Set, m.createMigrations())
	for _, f := range m.files {
		fmt.Fprintf(&b, "\n-- Version %d: %s\n%s", f.version, f.name, m.upSQL(f))
	}
	b.WriteString("\n-- What an application has to insert at least, in its own transaction:\n")
	for line := range strings.Lines(m.plainInsert()) {
		b.WriteString("--   " + line)
	}
	b.WriteString(";\n")
	return b.String(), nil
}

// PlainInsert is the INSERT that is enough to enqueue an event from any
// language, with the dialect's parameters: aggregate type, aggregate id, event
// type, payload, key. A key of NULL means the aggregate id, an empty one that
// the event waits for no other.
func PlainInsert(o Options) (string, error) {
	m, err := newMigrator(o)
	if err != nil {
		return "", err
	}
	return m.plainInsert(), nil
}

func (m *migrator) plainInsert() string {
	return fmt.Sprintf("insert into %s\n    (aggregate_type, aggregate_id, event_type, payload, event_key)\nvalues (%s)",
		m.events, m.placeholders())
}
