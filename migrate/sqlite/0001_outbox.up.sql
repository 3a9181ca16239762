-- The outbox: rows are inserted by applications and never updated. SQLite has
-- one writer at a time, so ids are in the order of commits.
--
-- Instants are whole microseconds since 1970-01-01 00:00 UTC, by SQLite's own
-- clock, which ticks in milliseconds. The expression needs no SQLite newer than
-- what clients of any language come with: unixepoch('subsec') has 3.42 on.
create table outbox_events (
    -- Orders the events. AUTOINCREMENT: without it the ids of deleted rows
    -- come again.
    id             integer not null primary key autoincrement constraint id_is_positive check (id > 0),
    -- Identifies the event for consumers. Not unique on purpose. The default is
    -- a random UUID (version 4).
    event_id       text    not null default (lower(
        hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4' || substr(hex(randomblob(2)), 2) || '-' ||
        substr('89ab', 1 + (random() & 3), 1) || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6)))),
    aggregate_type text    not null,
    aggregate_id   text    not null,
    event_type     text    not null,
    -- NULL: the aggregate id. Empty: unordered. There is no column for the
    -- lane, as SQLite has no md5(): readers compute it.
    event_key      text,
    payload        blob,
    content_type   text    not null default 'application/json',
    headers        text,                 -- a JSON object
    available_at   integer constraint available_at_is_microseconds_since_1970
        check (typeof(available_at) in ('integer', 'null')),
    created_at     integer not null default (cast(round((julianday('now') - 2440587.5) * 86400000.0) as integer) * 1000)
        constraint created_at_is_microseconds_since_1970 check (typeof(created_at) = 'integer')
);
-- Readers have passed all ids up to the highest.
create trigger outbox_events_id_ascends after insert on outbox_events
when new.id < (select seq from sqlite_sequence where name = 'outbox_events')
begin
    select raise(abort, 'outbox_events.id has to be left to the database: an id below the highest would never be read');
end;
create index outbox_events_key_idx on outbox_events (coalesce(event_key, aggregate_id), id);
create index outbox_events_event_id_idx on outbox_events (event_id);

-- One row, about the whole.
create table outbox_source (
    only_row   integer not null primary key default 1 check (only_row = 1),
    -- An id that has been seen: the sequence never falls below it, unless it
    -- was set back.
    seen_id    integer not null,
    created_at integer not null default (cast(round((julianday('now') - 2440587.5) * 86400000.0) as integer) * 1000)
);

-- Where each lease stands: the lanes of one destination that progress together.
-- The rows of a destination share out all lanes among them.
create table outbox_leases (
    lease       integer not null primary key autoincrement,
    destination text    not null,
    lanes       integer not null,        -- a bit per lane
    owner       text,                    -- the relay's name; null: free
    owner_lock  integer,                 -- names the file that the owner keeps locked
    epoch       integer not null default 0,
    expires_at  integer,
    -- Grows with each write of the owner, to recognise one whose answer was lost.
    writes      integer not null default 0,
    -- All up to this id is done, but for the exceptions.
    base        integer not null default 0,
    -- Numbers the pages, for sequences.
    page        integer not null default 0,
    -- What is in hand, and what is to be read again: pages.
    open        text    not null default '{"open":[]}'
);
create index outbox_leases_destination_idx on outbox_leases (destination);

-- Relays that have joined.
create table outbox_relays (
    lock       integer not null primary key, -- names the file that it keeps locked
    relay      text    not null,
    -- That it serves, a JSON array: a destination's lanes are shared out among those that do.
    destinations text  not null,
    seen_at    integer not null,
    expires_at integer not null,
    grace      integer not null          -- how long it may go on after its lock is free
);

-- Events that are not simply pending or published.
create table outbox_exceptions (
    destination  text    not null,
    id           integer not null,
    lane         integer not null,
    event_key    text    not null,       -- empty: unordered
    event_id     text    not null,
    event_type   text    not null,
    state        text    not null
        check (state in ('WAITING', 'SCHEDULED', 'PUBLISHING', 'FAILED', 'DISCARDED')),
    due_at       integer,                -- null: when the head of its key is out of the way
    attempts     integer not null default 0,
    -- How many processes died with it alone in hand, and of how many it may be
    -- one in hand until it is known to be innocent (0: any number).
    starts       integer not null default 0,
    together     integer not null default 0,
    alone        integer not null default 0,
    page         integer not null default 0, -- of its sequence; 0: none yet
    class        text    not null default '',
    message      text    not null default '',
    created_at   integer not null,       -- the event's
    first_failed integer,
    last_failed  integer,
    primary key (destination, id)
);
create index outbox_exceptions_due_idx on outbox_exceptions (destination, due_at)
    where state in ('WAITING', 'SCHEDULED', 'PUBLISHING');
create index outbox_exceptions_state_idx on outbox_exceptions (destination, state, id);
create index outbox_exceptions_key_idx on outbox_exceptions (destination, event_key, id);

-- Keys that are held back: the head of each, and the id up to which its
-- successors are done. A key stays here until it stands where its lease stands.
create table outbox_held_keys (
    destination text    not null,
    event_key   text    not null,
    lane        integer not null,
    head        integer,                 -- id of its exception; null: free, being drained
    at          integer not null,
    -- Successors in hand: how many, the last one's id, and whether the one was
    -- alone.
    in_hand     integer not null default 0,
    in_hand_to  integer not null default 0,
    alone       integer not null default 0,
    -- Up to this id they were in hand at a death: as of an exception.
    again       integer not null default 0,
    starts      integer not null default 0,
    together    integer not null default 0,
    page        integer not null default 0, -- of those in hand
    -- It moves with its lease again beyond this id; 0: not yet.
    joined      integer not null default 0,
    freed       integer not null default 0, -- a head that an operator took away
    since       integer not null default (cast(round((julianday('now') - 2440587.5) * 86400000.0) as integer) * 1000),
    primary key (destination, event_key)
);
create index outbox_held_keys_freed_idx on outbox_held_keys (destination) where freed > 0;

-- One row per settled claim.
create table outbox_journal (
    entry       integer not null primary key autoincrement,
    destination text    not null,
    lease       integer not null,
    epoch       integer not null,
    relay       text    not null,
    kind        text    not null,
    from_id     integer not null,
    to_id       integer not null,
    records     integer not null,
    published   integer not null,
    receipts    text    not null default '[]',
    settled_at  integer not null default (cast(round((julianday('now') - 2440587.5) * 86400000.0) as integer) * 1000)
);
