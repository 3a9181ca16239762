-- An outbox whose rows carry their state: one destination, and the row is
-- marked when its event is done. For the columns of the event and for instants
-- see the stream's tables.
create table outbox_rows (
    id             integer not null primary key autoincrement,
    event_id       text    not null default (lower(
        hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4' || substr(hex(randomblob(2)), 2) || '-' ||
        substr('89ab', 1 + (random() & 3), 1) || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6)))),
    aggregate_type text    not null,
    aggregate_id   text    not null,
    event_type     text    not null,
    event_key      text,
    payload        blob,
    content_type   text    not null default 'application/json',
    headers        text,
    available_at   integer,
    created_at     integer not null default (cast(round((julianday('now') - 2440587.5) * 86400000.0) as integer) * 1000),
    lane           integer,              -- null until a reader has computed it
    state          text    not null default 'PENDING'
        check (state in ('PENDING', 'WAITING', 'SCHEDULED', 'PUBLISHING', 'PUBLISHED', 'FAILED', 'DISCARDED')),
    attempts       integer not null default 0,
    starts         integer not null default 0,
    due_at         integer,
    class          text    not null default '',
    message        text    not null default '',
    lease          integer,              -- under which it is in hand
    token          text,                 -- of the claim that has it in hand
    first_failed   integer,
    last_failed    integer,
    done_at        integer
);
create index outbox_rows_todo_idx on outbox_rows (id) where state not in ('PUBLISHED', 'DISCARDED');
create index outbox_rows_due_idx on outbox_rows (due_at) where state in ('WAITING', 'SCHEDULED', 'PUBLISHING');
create index outbox_rows_key_idx on outbox_rows (coalesce(event_key, aggregate_id), id);
create index outbox_rows_event_id_idx on outbox_rows (event_id);

-- Who may claim which lanes.
create table outbox_row_leases (
    lease      integer not null primary key autoincrement,
    lanes      integer not null,         -- a bit per lane
    owner      text,                     -- the relay's name; null: free
    epoch      integer not null default 0,
    expires_at integer,
    writes     integer not null default 0
);
