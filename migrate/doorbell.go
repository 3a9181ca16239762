package migrate

import (
	"context"
	"database/sql"
	"fmt"
)

// Doorbell makes, or with on false removes, the trigger that rings while a relay
// sleeps, for relays on PostgreSQL that must be silent when idle. Idempotent;
// needs the owner of the tables.
//
// The flag lives in a sequence: raising it leaves no dead rows, and writers read
// it without a lock. Applications that prepare transactions (two-phase commit)
// cannot have it, since PostgreSQL refuses a notification there.
func Doorbell(ctx context.Context, db *sql.DB, on bool) error {
	query := doorbellOff
	if on {
		query = doorbellOn
	}
	if _, err := db.ExecContext(ctx, query); err != nil {
		return explainRights(fmt.Errorf("migrate doorbell: %w", err))
	}
	return nil
}

// HasDoorbell reports whether Doorbell has made the trigger and nobody has
// removed or disabled it.
func HasDoorbell(ctx context.Context, db *sql.DB) (bool, error) {
	var on bool
	err := db.QueryRowContext(ctx, `
		select to_regclass('outbox_doorbell') is not null and exists (
			select from pg_trigger where tgrelid = to_regclass('outbox_events') and tgname = 'outbox_ring' and tgenabled <> 'D')`).Scan(&on)
	if err != nil {
		return false, fmt.Errorf("migrate doorbell: %w", err)
	}
	return on, nil
}

// The function runs with its owner's rights, so that applications need none on
// the sequence. It does not ring when somebody else has half filled the queue of
// notifications: once that is full, whoever notifies cannot commit. The relay
// finds the event all the same, some seconds later.
const doorbellOn = `
do $do$ begin
	create sequence if not exists outbox_doorbell;
	create or replace function outbox_ring() returns trigger
	language plpgsql security definer set search_path from current as $$
	begin
		if (select last_value from outbox_doorbell) = 2 and pg_notification_queue_usage() < 0.5 then
			notify outrider_events;
		end if;
		return null;
	end $$;
	create or replace trigger outbox_ring after insert on outbox_events
		for each statement execute function outbox_ring();
end $do$`

// The trigger as a fingerprint has it. Another one of its name is a difference.
const (
	ringName = "trigger outbox_events.outbox_ring"
	ringMade = "CREATE TRIGGER outbox_ring AFTER INSERT ON outbox_events FOR EACH STATEMENT EXECUTE FUNCTION outbox_ring()"
)

const doorbellOff = `
do $$ begin
	drop trigger if exists outbox_ring on outbox_events;
	drop function if exists outbox_ring();
	drop sequence if exists outbox_doorbell;
end $$`
