package pgstore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider/store"
)

// oldTransaction is from which age on a transaction is warned of.
const oldTransaction = 5 * time.Minute

// oldestTransaction finds what has kept vacuum from this database's tables for
// longest: a session with a snapshot or a transaction id, or a prepared
// transaction. Vacuum holds itself back from nothing. What a replication slot or
// a standby's feedback holds back has no time of its own, and the age of other
// roles' transactions is hidden from a role without pg_read_all_stats.
func (v view) oldestTransaction(ctx context.Context, out *store.Status) error {
	var pid int
	var name string
	var age float64
	err := v.q.QueryRow(ctx, `
		select pid, name, extract(epoch from clock_timestamp() - since)::float8 from (
			select pid, coalesce(application_name, '') as name, xact_start as since from pg_stat_activity
			where datname = current_database() and pid <> pg_backend_pid()
			  and (backend_xmin is not null or backend_xid is not null)
			  and backend_type <> 'autovacuum worker' and xact_start is not null
			union all
			select 0, gid, prepared from pg_prepared_xacts where database = current_database()) x
		order by since limit 1`).Scan(&pid, &name, &age)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	out.OldestTransaction = max(1, time.Duration(age*float64(time.Second)))
	if out.OldestTransaction < v.oldTx {
		return nil
	}
	what := fmt.Sprintf("the session with pid %d (application_name %q)", pid, name)
	fix := fmt.Sprintf("end its transaction, or the session: select pg_terminate_backend(%d)", pid)
	if pid == 0 {
		what = fmt.Sprintf("the prepared transaction %q", name)
		fix = "commit or roll back what was prepared"
	}
	out.Warnings = append(out.Warnings, fmt.Sprintf("%s has been open for %s and keeps vacuum from what is dead by now, so that the tables grow; %s",
		what, out.OldestTransaction.Round(time.Second), fix))
	return nil
}
