package migrate

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
)

type postgres struct{}

// lockKey is the advisory lock that migrations hold: "outrider" in ASCII.
const lockKey = 0x6f75747269646572

// lock takes an advisory lock of the transaction: one of the session would stay
// on some other client's connection behind a transaction pooler. What has been
// committed under the lock must be seen once it is taken, so the isolation is
// named, whatever the session's default.
func (postgres) lock(ctx context.Context, c *sql.Conn) (func(), error) {
	if _, err := c.ExecContext(ctx, "begin isolation level read committed read write"); err != nil {
		return nil, err
	}
	_, err := c.ExecContext(ctx, fmt.Sprintf("select pg_advisory_xact_lock(%d)", lockKey))
	return func() {}, err
}

// exists reads pg_class, though to_regclass alone would do: only with the lock of
// a relation does the server take in what others have created in the meantime.
// Without, a runner that waited for the lock went by a stale cache.
func (postgres) exists(tables ...string) string {
	return "select count(*) from " + unnest(tables) + " name join pg_class c on c.oid = to_regclass(name)"
}

func unnest(tables []string) string {
	return "unnest(array['" + strings.Join(tables, "', '") + "'])"
}

func (postgres) createMigrations() string {
	return `create table if not exists outbox_migrations (
    set_name    text        not null,
    version     int         not null,
    name        text        not null,
    checksum    text        not null,
    fingerprint text        not null,
    applied_at  timestamptz not null default clock_timestamp(),
    primary key (set_name, version)
)`
}

func (postgres) appliedMicros() string {
	return "(extract(epoch from applied_at) * 1000000)::bigint"
}

func (postgres) lockTable(table string) string {
	return "lock table " + table + " in access exclusive mode"
}

func (postgres) placeholders() string { return "$1, $2, $3, $4, $5" }

// fingerprintSQL leaves out partitions (relays make and drop them) and what
// operators may tune, such as storage parameters.
func (postgres) fingerprintSQL(tables []string) string {
	return strings.Replace(pgFingerprint, "{{tables}}", unnest(tables), 1)
}

const pgFingerprint = `(with t as (
    select c.oid, c.relname, c.relkind
      from {{tables}} name
      join pg_class c on c.oid = to_regclass(name)
), line (what, def, expr) as (
    select 'server', (current_setting('server_version_num')::int / 10000)::text, ''
    union all
    select 'table ' || relname, case relkind when 'p' then 'partitioned ' || pg_get_partkeydef(oid) else 'plain' end, ''
      from t where relkind <> 'v'
    union all
    select 'view ' || relname, '', pg_get_viewdef(oid, true)
      from t where relkind = 'v'
    union all
    select 'column ' || t.relname || '.' || a.attname,
           format_type(a.atttypid, a.atttypmod) || case when a.attnotnull then ' not null' else '' end
               || case a.attidentity when '' then '' else ' identity' end
               || case a.attgenerated when '' then '' else ' generated' end,
           coalesce(pg_get_expr(d.adbin, d.adrelid), '')
      from t
      join pg_attribute a on a.attrelid = t.oid and a.attnum > 0 and not a.attisdropped and t.relkind <> 'v'
      left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
    union all
    select 'index ' || i.relname,
           case when x.indisunique then 'unique' else 'plain' end || case when x.indisvalid then '' else ' invalid' end,
           pg_get_indexdef(x.indexrelid, 0, true)
      from t
      join pg_index x on x.indrelid = t.oid
      join pg_class i on i.oid = x.indexrelid
    union all
    select 'constraint ' || t.relname || '.' || k.conname, k.contype::text, pg_get_constraintdef(k.oid, true)
      from t
      join pg_constraint k on k.conrelid = t.oid and k.contype in ('c', 'f', 'p', 'u', 'x')
    union all
    select 'sequence ' || c.relname,
           format('%s cache %s increment %s%s', s.seqtypid::regtype, s.seqcache, s.seqincrement, case when s.seqcycle then ' cycle' else '' end), ''
      from t
      join pg_depend p on p.refobjid = t.oid and p.refclassid = 'pg_class'::regclass and p.deptype in ('a', 'i')
      join pg_sequence s on s.seqrelid = p.objid and p.classid = 'pg_class'::regclass
      join pg_class c on c.oid = s.seqrelid
    union all
    select 'trigger ' || t.relname || '.' || g.tgname, '', pg_get_triggerdef(g.oid, true)
      from t
      join pg_trigger g on g.tgrelid = t.oid and not g.tgisinternal
)
select string_agg(what || chr(9) || def || chr(9) || replace(replace(expr, chr(10), ' '), chr(9), ' '), chr(10) order by what, def, expr)
  from line)`
