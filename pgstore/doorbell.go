package pgstore

import (
	"context"
	"fmt"
)

// InstallDoorbell makes the trigger that rings while a relay sleeps, for relays
// that must be silent when idle (Config.Doorbell). The flag lives in a sequence:
// raising it leaves no dead rows, and writers read it without a lock. It cannot
// be used by applications that prepare transactions (two-phase commit), since
// PostgreSQL refuses a notification there. Needs the table's owner. Idempotent.
func (s *Store) InstallDoorbell(ctx context.Context) error {
	_, err := s.pool.Exec(ctx, doorbellSQL)
	if err != nil {
		return privilegeError(fmt.Errorf("pgstore: install the doorbell: %w", err))
	}
	return nil
}

// RemoveDoorbell takes the trigger away; relays poll then. Idempotent.
func (s *Store) RemoveDoorbell(ctx context.Context) error {
	_, err := s.pool.Exec(ctx, `
		do $$ begin
			drop trigger if exists outbox_ring on outbox_events;
			drop function if exists outbox_ring();
			drop sequence if exists outbox_doorbell;
		end $$`)
	if err != nil {
		return privilegeError(fmt.Errorf("pgstore: remove the doorbell: %w", err))
	}
	return nil
}

// doorbellSQL: the function runs with its owner's rights, so that applications
// need none on the sequence.
const doorbellSQL = `
do $do$ begin
	create sequence if not exists outbox_doorbell;
	create or replace function outbox_ring() returns trigger
	language plpgsql security definer set search_path from current as $$
	begin
		if (select last_value from outbox_doorbell) = 2 then
			notify outrider_events;
		end if;
		return null;
	end $$;
	create or replace trigger outbox_ring after insert on outbox_events
		for each statement execute function outbox_ring();
end $do$`
