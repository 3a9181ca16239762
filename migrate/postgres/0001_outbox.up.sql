-- The outbox: rows are inserted by applications and never updated.
create sequence outbox_events_id_seq as bigint cache 1;

create table outbox_events (
    -- The writing transaction. It says which rows a position has seen: ids
    -- alone cannot, since they commit out of order.
    tx_id          xid8        not null default pg_current_xact_id(),
    -- Orders the events of a key. To be left to the sequence.
    id             bigint      not null default nextval('outbox_events_id_seq')
        constraint id_is_positive check (id > 0),
    -- Identifies the event for consumers. Not unique on purpose.
    event_id       uuid        not null default gen_random_uuid(),
    aggregate_type text        not null,
    aggregate_id   text        not null,
    event_type     text        not null,
    -- NULL: the aggregate id. Empty: unordered.
    event_key      text,
    payload        {{payload}},
    content_type   text        not null default 'application/json',
    headers        json,
    available_at   timestamptz check (isfinite(available_at)),
    created_at     timestamptz not null default clock_timestamp() check (isfinite(created_at)),
    lane           smallint    not null generated always as (
        case when event_key = '' then (id & 63)::smallint
             else (('x' || left(md5(coalesce(event_key, aggregate_id)), 8))::bit(32)::bigint & 63)::smallint
        end) stored,
    primary key (id)
) partition by range (id);

alter sequence outbox_events_id_seq owned by outbox_events.id;

-- The last partition reaches to the end, so an insert never lacks one. Relays
-- split it ahead of the sequence. Insert-only tables are vacuumed for freezing
-- and for the visibility map alone.
create table outbox_events_p0 partition of outbox_events
    for values from (minvalue) to (maxvalue)
    with (autovacuum_vacuum_insert_scale_factor = 0.05, vacuum_truncate = off);

create index outbox_events_tx_id_idx on outbox_events (tx_id, id);
create index outbox_events_key_idx on outbox_events ((coalesce(event_key, aggregate_id)), id);
create index outbox_events_event_id_idx on outbox_events (event_id);

-- One row, about the whole.
create table outbox_source (
    only_row          boolean primary key default true check (only_row),
    system_identifier text        not null,
    -- A number that has been seen, below which the cluster's transaction ids
    -- and the sequence never fall again unless it was restored.
    seen_xid          xid8        not null,
    seen_id           bigint      not null,
    -- Events with lower ids may be gone with their partitions: no destination
    -- needs them. A partition that is missing from here on stops the relays.
    first_id          bigint      not null default 1,
    created_at        timestamptz not null default clock_timestamp()
);

-- Where each lease stands: the lanes of one destination that progress together.
-- The rows of a destination share out all lanes among them.
create table outbox_leases (
    lease       bigint generated always as identity,
    destination text        not null,
    lanes       bigint      not null,
    owner       text,                 -- the relay's name; null: free
    owner_lock  bigint,               -- advisory lock held by the owner's connection
    epoch       bigint      not null default 0,
    expires_at  timestamptz,
    -- Grows with each write of the owner, to recognise one whose answer was lost.
    writes      bigint      not null default 0,
    -- Part of the key, so that a write finds its row among the last few versions.
    -- While an old snapshot is held somewhere none of them can be removed.
    gen         bigint      generated always as (writes >> 5) stored,
    -- All that is visible in base is done, but for the exceptions.
    base        pg_snapshot not null,
    -- While a large window is paged: its snapshot, the id reached, its highest.
    target      pg_snapshot,
    at          bigint      not null default 0,
    top         bigint      not null default 0,
    -- The highest id ever read.
    hi          bigint      not null default 0,
    -- Numbers the pages, for sequences.
    page        bigint      not null default 0,
    -- What is in hand, and what is to be read again: pages.
    open        json        not null default '{"open":[]}',
    primary key (lease, gen)
) with (fillfactor = 40, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0);
create index outbox_leases_destination_idx on outbox_leases (destination);

-- Relays that have joined.
create table outbox_relays (
    lock       bigint primary key,    -- advisory lock held by its connection
    relay      text        not null,
    -- That it serves: a destination's lanes are shared out among those that do.
    destinations text[]    not null,
    grace      interval    not null,  -- how long after its connection ended it may still send
    seen_at    timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null
) with (fillfactor = 40);

-- Events that are not simply pending or published.
create table outbox_exceptions (
    destination  text        not null,
    id           bigint      not null,
    lane         smallint    not null,
    event_key    text        not null, -- empty: unordered
    event_id     uuid        not null,
    event_type   text        not null,
    state        text        not null
        check (state in ('WAITING', 'SCHEDULED', 'PUBLISHING', 'PUBLISHED', 'FAILED', 'DISCARDED')),
    due_at       timestamptz,
    attempts     int         not null default 0,
    -- How many processes died with it alone in hand, and of how many it may be
    -- one in hand until it is known to be innocent (0: any number).
    starts       int         not null default 0,
    together     int         not null default 0,
    alone        boolean     not null default false,
    -- A rebase put the event in front of the lease again, which is to pass over
    -- it.
    pass         boolean     not null default false,
    class        text        not null default '',
    message      text        not null default '',
    created_at   timestamptz not null, -- the event's
    first_failed timestamptz,
    last_failed  timestamptz,
    primary key (destination, id)
) with (fillfactor = 70);
create index outbox_exceptions_due_idx on outbox_exceptions (destination, due_at)
    where state in ('WAITING', 'SCHEDULED', 'PUBLISHING');
create index outbox_exceptions_pass_idx on outbox_exceptions (destination) where pass;
create index outbox_exceptions_state_idx on outbox_exceptions (destination, state, created_at);

-- Keys that are held back: the failed head of each, and where its successors
-- are to be read from. A key stays here until it stands where its lease stands.
create table outbox_held_keys (
    destination text        not null,
    event_key   text        not null,
    lane        smallint    not null,
    head        bigint,                -- id of its exception; null: free, being drained
    base        pg_snapshot not null,
    target      pg_snapshot,
    at          bigint      not null,
    low         bigint,                -- no successor beyond target is below this id; null: none seen
    in_hand     int         not null default 0, -- successors in hand
    starts      int         not null default 0, -- as of an exception, of the next successor
    together    int         not null default 0,
    suspects    int         not null default 0,
    alone       boolean     not null default false,
    freed       boolean     not null default false, -- by an operator; the owner takes note
    since       timestamptz not null default clock_timestamp(),
    primary key (destination, event_key)
) with (fillfactor = 70);
create index outbox_held_keys_freed_idx on outbox_held_keys (destination) where freed;

-- One row per settled claim.
create table outbox_journal (
    entry       bigint generated always as identity primary key,
    destination text        not null,
    lease       bigint      not null,
    epoch       bigint      not null,
    relay       text        not null,
    kind        text        not null,
    from_id     bigint      not null,
    to_id       bigint      not null,
    records     int         not null,
    published   int         not null,
    receipts    json        not null default '[]',
    settled_at  timestamptz not null default clock_timestamp()
);

-- How each event stands with each destination, for people. Ask it by id, or by
-- key as (event_key): it is a join of all of the above, not a table.
create view outbox_state as
select l.destination, e.id, e.event_id, e.event_type, e.aggregate_type, e.aggregate_id,
    coalesce(e.event_key, e.aggregate_id) as event_key,
    case when x.state in ('WAITING', 'SCHEDULED') then 'PENDING'
         when x.state is not null then x.state
         when held.yes or not done.yes and not hand.yes then 'PENDING'
         when not done.yes then 'PUBLISHING'
         else 'PUBLISHED' end as state,
    case when x.state = 'WAITING' then 'retry'
         when x.state = 'SCHEDULED' then 'due later'
         when x.state is not null then ''
         when held.yes and h.head is null then 'held behind earlier ones of its key'
         when held.yes then 'held behind ' || h.head
         when done.yes or hand.yes then ''
         when e.available_at > clock_timestamp() then 'due later'
         else 'new' end as reason,
    coalesce(x.attempts, 0) as attempts, coalesce(x.class, '') as class, coalesce(x.message, '') as message,
    e.created_at, x.last_failed, coalesce(x.due_at, e.available_at) as due_at
from outbox_events e
join outbox_leases l on ((l.lanes >> e.lane::int) & 1) = 1
left join outbox_exceptions x on x.destination = l.destination and x.id = e.id
left join outbox_held_keys h on h.destination = l.destination
    and h.event_key = coalesce(e.event_key, e.aggregate_id) and h.event_key <> ''
cross join lateral (select pg_visible_in_snapshot(e.tx_id, l.base)
    or coalesce(e.id <= l.at and pg_visible_in_snapshot(e.tx_id, l.target), false) as yes) done
cross join lateral (select h.event_key is not null and not pg_visible_in_snapshot(e.tx_id, h.base)
    and not coalesce(e.id <= h.at and pg_visible_in_snapshot(e.tx_id, h.target), false) as yes) held
cross join lateral (select exists (select from json_array_elements(l.open->'open') p
    where e.id > (p->>'from')::bigint and e.id <= (p->>'to')::bigint
      and pg_visible_in_snapshot(e.tx_id, (p->>'snap')::pg_snapshot)) as yes) hand;
