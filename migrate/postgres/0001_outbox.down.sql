drop view outbox_state;
-- Partitions, indexes and owned sequences go with their tables.
drop table outbox_journal;
drop table outbox_held_keys;
drop table outbox_exceptions;
drop table outbox_relays;
drop table outbox_leases;
drop table outbox_source;
drop table outbox_events;
