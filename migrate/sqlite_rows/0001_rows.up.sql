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
    available_at   integer constraint available_at_is_microseconds_since_1970
        check (typeof(available_at) in ('integer', 'null')),
    created_at     integer not null default (cast(round((julianday('now') - 2440587.5) * 86400000.0) as integer) * 1000)
        constraint created_at_is_microseconds_since_1970 check (typeof(created_at) = 'integer'),
    lane           integer,              -- null until it has been in hand
    state          text    not null default 'PENDING'
        check (state in ('PENDING', 'WAITING', 'SCHEDULED', 'PUBLISHING', 'PUBLISHED', 'FAILED', 'DISCARDED')),
    due_at         integer,              -- of what waits, and null of what does not
    attempts       integer not null default 0,
    -- How many processes died with it alone in hand; of how many it may be one
    -- in hand until it is known to be innocent (0: any number); whether it was
    -- in hand at a death, and whether it is alone in hand now.
    starts         integer not null default 0,
    together       integer not null default 0,
    again          integer not null default 0,
    alone          integer not null default 0,
    free           integer not null default 0, -- it failed and its key went on
    class          text    not null default '',
    message        text    not null default '',
    token          text,                 -- of the claim that has it in hand
    first_failed   integer,
    last_failed    integer,
    done_at        integer
);
create index outbox_rows_state_idx on outbox_rows (state, id) where state <> 'PUBLISHED';
create index outbox_rows_due_idx on outbox_rows (due_at) where state in ('WAITING', 'SCHEDULED');
create index outbox_rows_token_idx on outbox_rows (token) where state = 'PUBLISHING';
create index outbox_rows_key_idx on outbox_rows (coalesce(event_key, aggregate_id), id);
create index outbox_rows_event_id_idx on outbox_rows (event_id);

-- Keys that are held back: their head, and the id up to which all is done.
create table outbox_row_keys (
    event_key text    not null primary key,
    lane      integer not null,
    head      integer,                   -- null: free, being drained
    at        integer not null,
    freed     integer not null default 0 -- a head that an operator took away
);
create index outbox_row_keys_freed_idx on outbox_row_keys (event_key) where freed > 0;

-- Who may claim which lanes.
create table outbox_row_leases (
    lease       integer not null primary key autoincrement,
    destination text    not null,
    lanes       integer not null,        -- a bit per lane
    owner       text,                    -- the relay's name; null: free
    owner_lock  integer,                 -- names the file that the owner keeps locked
    epoch       integer not null default 0,
    expires_at  integer,
    writes      integer not null default 0
);

-- Relays that have joined.
create table outbox_row_relays (
    lock       integer not null primary key, -- names the file that it keeps locked
    relay      text    not null,
    -- That it serves, a JSON array: a destination's lanes are shared out among those that do.
    destinations text  not null,
    seen_at    integer not null,
    expires_at integer not null,
    grace      integer not null          -- how long it may go on after its lock is free
);
