package pgstore

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider"
)

// hot are the small tables whose rows are written again and again, and the size
// up to which each may grow. While somebody holds an old snapshot no version of
// a row can be vacuumed away, so they grow, and with them what it costs to read
// them.
var hot = []struct {
	table string
	bytes int64
}{
	{"outbox_leases", 1 << 20},
	{"outbox_relays", 1 << 20},
	{"outbox_exceptions", 16 << 20},
	{"outbox_held_keys", 16 << 20},
}

// compactRows is how many rows a table that is compacted may have.
const compactRows = 50_000

// compact gives tables that consist of dead versions new files: that, unlike
// vacuuming, works whatever snapshot is held somewhere. Whoever reads the table
// in a transaction that goes on, as a dump does, is in the way; then it is left
// for the next round.
func (s *Store) compact(ctx context.Context) error {
	for _, h := range hot {
		var size, rows int64
		err := s.pool.QueryRow(ctx, `select pg_relation_size(c.oid), pg_stat_get_live_tuples(c.oid)
			from pg_class c where c.oid = $1::text::regclass`, h.table).Scan(&size, &rows)
		if err != nil {
			return fmt.Errorf("pgstore: size of %s: %w", h.table, err)
		}
		if size <= h.bytes || rows > compactRows || size < 4*rows*averageRow {
			continue
		}
		err = s.rewrite(ctx, h.table)
		switch {
		case err == nil:
			s.cfg.Logger.Info("dead versions were cut off; something holds an old snapshot", "table", h.table, "bytes", size)
		case isCode(err, "55P03"), errors.Is(err, errFull): // a lock could not be had; or it has that many rows
		case isCode(err, "42501"):
			return outrider.WithHint(fmt.Errorf("pgstore: %s has grown to %d bytes: %w", h.table, size, err),
				"end the old transaction that keeps dead rows from being vacuumed away (`outrider status` names it); granting TRUNCATE on the table to the relay's role lets relays help themselves")
		default:
			return fmt.Errorf("pgstore: compact %s: %w", h.table, err)
		}
	}
	return nil
}

// averageRow is about what a row takes up, in bytes.
const averageRow = 500

// rewrite moves a table's rows to a new file.
func (s *Store) rewrite(ctx context.Context, table string) error {
	return s.inTx(ctx, func(tx pgx.Tx) error {
		name := pgx.Identifier{table}.Sanitize()
		if _, err := tx.Exec(ctx, `set local lock_timeout = '20ms'`); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `lock table `+name+` in access exclusive mode`); err != nil {
			return err
		}
		var full bool
		if err := tx.QueryRow(ctx, `select count(*) > $1 from (select from `+name+` limit $1 + 1) r`, compactRows).Scan(&full); err != nil {
			return err
		}
		if full { // statistics can be old
			return errFull
		}
		var columns string
		err := tx.QueryRow(ctx, `select string_agg(quote_ident(attname), ', ' order by attnum) from pg_attribute
			where attrelid = $1::text::regclass and attnum > 0 and not attisdropped and attgenerated = ''`, table).Scan(&columns)
		if err != nil {
			return err
		}
		for _, sql := range []string{
			`create temp table outbox_kept on commit drop as select ` + columns + ` from ` + name,
			`truncate ` + name,
			`insert into ` + name + ` (` + columns + `) overriding system value select ` + columns + ` from outbox_kept`,
		} {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
		}
		return nil
	})
}

var errFull = errors.New("the table has too many rows to be rewritten")
