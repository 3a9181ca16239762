drop table outbox_row_relays;
drop table outbox_row_leases;
drop table outbox_row_keys;
drop table outbox_rows;
