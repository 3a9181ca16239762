package migrate

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
)

type sqlite struct{}

// busyTimeout is how long a runner waits for another writer, in milliseconds.
// SQLite's own default is not to wait at all.
const busyTimeout = 30_000

// lock begins as a writer: a transaction that reads first and writes later fails
// at once when somebody else has written in between.
func (sqlite) lock(ctx context.Context, c *sql.Conn) (func(), error) {
	none := func() {}
	var before int
	if err := c.QueryRowContext(ctx, "pragma busy_timeout").Scan(&before); err != nil {
		return none, err
	}
	unlock := none
	if before < busyTimeout {
		if err := setBusyTimeout(ctx, c, busyTimeout); err != nil {
			return none, err
		}
		unlock = func() { _ = setBusyTimeout(context.WithoutCancel(ctx), c, before) }
	}
	if _, err := c.ExecContext(ctx, "begin immediate"); err != nil {
		unlock()
		return none, err
	}
	return unlock, nil
}

// setBusyTimeout reads the row that the pragma answers with.
func setBusyTimeout(ctx context.Context, c *sql.Conn, ms int) error {
	return c.QueryRowContext(ctx, fmt.Sprintf("pragma busy_timeout = %d", ms)).Scan(&ms)
}

func (sqlite) exists(tables ...string) string {
	return "select count(*) from sqlite_master where type = 'table' and name in " + inList(tables)
}

func inList(tables []string) string { return "('" + strings.Join(tables, "', '") + "')" }

func (sqlite) createMigrations() string {
	return `create table if not exists outbox_migrations (
    set_name    text    not null,
    version     integer not null,
    name        text    not null,
    checksum    text    not null,
    fingerprint text    not null,
    applied_at  integer not null default (cast(round((julianday('now') - 2440587.5) * 86400000.0) as integer) * 1000),
    primary key (set_name, version)
)`
}

func (sqlite) appliedMicros() string { return "applied_at" }

func (sqlite) lockTable(string) string { return "" }

func (sqlite) placeholders() string { return "?, ?, ?, ?, ?" }

// fingerprintSQL describes columns by SQLite's own account and indexes by their
// text, since SQLite keeps nothing else of an expression.
func (sqlite) fingerprintSQL(tables []string) string {
	return strings.Replace(sqliteFingerprint, "{{tables}}", inList(tables), 1)
}

const sqliteFingerprint = `(with t as (
    select name, lower(sql) as sql from sqlite_master where type = 'table' and name in {{tables}}
), line (what, def, expr) as (
    select 'table ' || name, case when instr(sql, 'autoincrement') then 'autoincrement' else 'plain' end, ''
      from t
    union all
    select 'column ' || t.name || '.' || c.name,
           lower(c.type) || case when c."notnull" then ' not null' else '' end || case when c.pk then ' key ' || c.pk else '' end,
           coalesce(c.dflt_value, '')
      from t join pragma_table_xinfo(t.name) c
    union all
    select 'index ' || i.name, case when i."unique" then 'unique' else 'plain' end, coalesce(m.sql, '')
      from t join pragma_index_list(t.name) i
      left join sqlite_master m on m.type = 'index' and m.name = i.name
    union all
    select 'trigger ' || t.name || '.' || m.name, '', m.sql
      from t join sqlite_master m on m.type = 'trigger' and m.tbl_name = t.name
)
select group_concat(text, char(10))
  from (select what || char(9) || def || char(9) || replace(replace(replace(expr, char(10), ' '), char(13), ' '), char(9), ' ') as text
          from line order by 1))`
