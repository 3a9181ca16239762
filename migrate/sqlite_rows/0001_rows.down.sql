drop table outbox_row_leases;
drop table outbox_rows;
