package daemon

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/config"
)

// Rights is what a role of PostgreSQL has to be granted; docs/OPERATING.md has
// the statements. What a relay can do without is not in it: it says so when it
// comes to that.
type Rights []right

type right struct {
	privilege string
	object    string // as GRANT takes it: a table, or sequence and its name
}

func rights(privileges string, objects ...string) Rights {
	var out Rights
	for _, o := range objects {
		for p := range strings.SplitSeq(privileges, " ") {
			out = append(out, right{p, o})
		}
	}
	return out
}

func all(lists ...Rights) Rights {
	var out Rights
	for _, l := range lists {
		out = append(out, l...)
	}
	return out
}

const (
	idSequence   = "sequence outbox_events_id_seq"
	bellSequence = "sequence outbox_doorbell"
)

// The roles.
var (
	// ToLook is for status, list and show.
	ToLook = all(rights("select", "outbox_migrations", "outbox_events", "outbox_source", "outbox_leases", "outbox_relays",
		"outbox_exceptions", "outbox_held_keys", "outbox_journal", idSequence))
	// ToAct is for retry and skip as well.
	ToAct = all(ToLook, rights("update", "outbox_exceptions", "outbox_held_keys"))
	// ToRetire is for retire.
	ToRetire = all(ToLook, rights("update", "outbox_leases"),
		rights("delete", "outbox_leases", "outbox_exceptions", "outbox_held_keys", "outbox_journal"))
	// toRelay is for a relay.
	toRelay = all(ToLook, rights("insert update", "outbox_source"), rights("insert delete", "outbox_journal"),
		rights("insert update delete", "outbox_leases", "outbox_relays", "outbox_exceptions", "outbox_held_keys"))
)

const rightsDoc = `docs/OPERATING.md has all of them under "Rights on PostgreSQL"`

// checkRights names what the role of the connection lacks, and how it is
// granted. Without it the first statement would fail that happens to need it,
// and then the next. A table that is not there is somebody else's to tell.
func checkRights(ctx context.Context, db *sql.DB, want Rights) error {
	if err := checkSchemaUsage(ctx, db); err != nil {
		return err
	}
	role, lacks, err := missing(ctx, db, want)
	if err != nil || len(lacks) == 0 {
		return err
	}
	objects, of := byObject(lacks)
	names := make([]string, len(objects))
	granted := make([]string, len(objects))
	for i, o := range objects {
		names[i] = strings.ToUpper(strings.Join(of[o], ", ")) + " on " + o
		granted[i] = fmt.Sprintf("grant %s on %s to %s", strings.Join(of[o], ", "), o, role)
	}
	text := strings.Join(names[:min(3, len(names))], ", ")
	if len(names) > 3 {
		text += " and more"
	}
	return outrider.WithHint(fmt.Errorf("the role %s lacks rights: %s", role, text), strings.Join(granted, "; ")+"; "+rightsDoc)
}

// checkSchemaUsage: without USAGE on their schema, tables look as if they were
// not there.
func checkSchemaUsage(ctx context.Context, db *sql.DB) error {
	var role, schema string
	err := db.QueryRowContext(ctx, `
		select quote_ident(current_user), quote_ident(n.nspname)
		from pg_class c join pg_namespace n on n.oid = c.relnamespace
		where c.relname = 'outbox_events' and to_regclass('outbox_events') is null
		  and not has_schema_privilege(n.oid, 'USAGE')
		order by n.nspname <> 'public', n.nspname limit 1`).Scan(&role, &schema)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	return outrider.WithHint(fmt.Errorf("the role %s sees no table outbox_events: there is one in schema %s, on which it lacks USAGE", role, schema),
		fmt.Sprintf("grant usage on schema %s to %s; %s", schema, role, rightsDoc))
}

func missing(ctx context.Context, db *sql.DB, want Rights) (role string, lacks Rights, err error) {
	if err := db.QueryRowContext(ctx, "select quote_ident(current_user)").Scan(&role); err != nil {
		return "", nil, err
	}
	values := make([]string, len(want))
	for i, r := range want {
		name, isSequence := strings.CutPrefix(r.object, "sequence ")
		values[i] = fmt.Sprintf("(%d, %t, '%s', '%s')", i, isSequence, name, r.privilege)
	}
	rows, err := db.QueryContext(ctx, `
		select at from (values `+strings.Join(values, ", ")+`) w (at, seq, name, privilege)
		where not case when seq then has_sequence_privilege(to_regclass(name)::oid, privilege)
		               else has_table_privilege(to_regclass(name)::oid, privilege) end
		order by at`)
	if err != nil {
		return "", nil, err
	}
	defer rows.Close() // Err below tells
	for rows.Next() {
		var i int
		if err := rows.Scan(&i); err != nil {
			return "", nil, err
		}
		lacks = append(lacks, want[i])
	}
	return role, lacks, rows.Err()
}

// byObject gathers what is lacking on each object.
func byObject(lacks Rights) (objects []string, of map[string][]string) {
	of = map[string][]string{}
	for _, r := range lacks {
		if of[r.object] == nil {
			objects = append(objects, r.object)
		}
		of[r.object] = append(of[r.object], r.privilege)
	}
	return objects, of
}

// ExplainRights says which grant is missing, if that is what an error of the
// database speaks of; want is what the command needs.
func ExplainRights(ctx context.Context, s config.Source, want Rights, err error) error {
	var pg *pgconn.PgError
	if s.Postgres == nil || !errors.As(err, &pg) || pg.Code != codeRights {
		return err
	}
	db, _, oerr := OpenDB(s)
	if oerr != nil {
		return err
	}
	defer db.Close() // nothing was written
	if missing := checkRights(ctx, db, want); missing != nil && outrider.Hint(missing) != "" {
		return outrider.WithHint(err, outrider.Hint(missing))
	}
	return err
}

// codeRights is insufficient_privilege.
const codeRights = "42501"
