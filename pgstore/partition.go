package pgstore

import (
	"context"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider"
)

// Rows of a partition that is detached are seen by no query. A position that
// moved on meanwhile would have passed them for good, so every read of events
// is followed by a look at which partitions there are (readEvents): by itself it
// only compares a number, and the ranges are compared when that has changed.

// partition is a range of ids of outbox_events.
type partition struct {
	name string // as SQL has it
	from int64  // math.MinInt64: without beginning
	to   int64  // the first beyond it; noEnd: without end
}

const noEnd = math.MaxInt64

// setSQL is a number that changes with every partition that is attached or
// detached, be it the same one again. What a statement has read was all there
// if the number is, after it, what it was when the ranges were looked at. One
// that is being detached concurrently counts as gone: queries pass it over.
const setSQL = `select coalesce(hashtextextended(string_agg(i.inhrelid || ' ' || i.xmin::text, ',' order by i.inhrelid), 0), 0)
	from pg_inherits i where i.inhparent = 'outbox_events'::regclass and not i.inhdetachpending`

// partitionsKnown is the set of partitions that was found to be whole.
type partitionsKnown struct {
	sync.Mutex
	set int64
}

// errSetChanged says that partitions came or went while events were read, and
// that they are all there now: what was read has to be read again.
var errSetChanged = errors.New("the partitions of outbox_events changed meanwhile")

// changes is how many of these in a row a claim bears.
const changes = 5

// readEvents runs queries that read events, and then makes sure that they had
// all of them before their eyes. What counts is what was known before: other
// leases find out meanwhile that what was missing has come back.
func (s *Store) readEvents(ctx context.Context, b *pgx.Batch) error {
	s.parts.Lock()
	known := s.parts.set
	s.parts.Unlock()
	var set int64
	b.Queue(setSQL).QueryRow(func(r pgx.Row) error { return r.Scan(&set) })
	if err := s.pool.SendBatch(ctx, b).Close(); err != nil {
		return err
	}
	if set == known {
		return nil
	}
	if err := s.checkPartitions(ctx); err != nil {
		return err
	}
	return errSetChanged
}

// checkPartitions makes sure that there is a partition for every id that is not
// known to have been removed, and remembers that.
func (s *Store) checkPartitions(ctx context.Context) error {
	set, _, err := s.view().partitions(ctx)
	if err != nil {
		return err
	}
	s.parts.Lock()
	defer s.parts.Unlock()
	s.parts.set = set
	return nil
}

// partitions are those there are, in order, and the number of their set. The
// error says which ids have none.
func (v view) partitions(ctx context.Context) (set int64, parts []partition, err error) {
	var names, bounds []string
	var divided *string
	var first int64
	err = v.q.QueryRow(ctx, `select (`+setSQL+`), 
			-- however much was declared removed: new ids need their partition
			least(coalesce((select first_id from outbox_source), 1) - 1, (select last_value from outbox_events_id_seq)) + 1,
			coalesce(array_agg(c.oid::regclass::text), '{}'), coalesce(array_agg(coalesce(pg_get_expr(c.relpartbound, c.oid), '')), '{}'),
			min(c.oid::regclass::text) filter (where c.relkind = 'p')
		from pg_inherits i join pg_class c on c.oid = i.inhrelid
		where i.inhparent = 'outbox_events'::regclass and not i.inhdetachpending`).Scan(&set, &first, &names, &bounds, &divided)
	if err != nil {
		return 0, nil, Explain(fmt.Errorf("look at the partitions of outbox_events: %w", err))
	}
	if divided != nil {
		return 0, nil, outrider.WithHint(fmt.Errorf("the partition %s of outbox_events has partitions itself: nobody would notice one that is missing", *divided),
			"no event is read: replace it by one without")
	}
	for i, bound := range bounds {
		if p, ok := parseBound(names[i], bound); ok {
			parts = append(parts, p)
		}
	}
	slices.SortFunc(parts, func(a, b partition) int { return cmpInt(a.from, b.from) })
	return set, parts, gap(parts, first)
}

var boundForm = regexp.MustCompile(`^FOR VALUES FROM \('?(-?\d+|MINVALUE)'?\) TO \('?(-?\d+|MAXVALUE)'?\)$`)

// parseBound reads a partition's bounds as the database prints them. false: it
// is no range, but the default partition, which stands in for none: what is
// missing has not been moved there.
func parseBound(name, bound string) (partition, bool) {
	m := boundForm.FindStringSubmatch(bound)
	if m == nil {
		return partition{}, false
	}
	p := partition{name: name, from: math.MinInt64, to: noEnd}
	var err error
	if m[1] != "MINVALUE" {
		if p.from, err = strconv.ParseInt(m[1], 10, 64); err != nil {
			return partition{}, false
		}
	}
	if m[2] != "MAXVALUE" {
		if p.to, err = strconv.ParseInt(m[2], 10, 64); err != nil {
			return partition{}, false
		}
	}
	return p, true
}

// gap finds the lowest ids from first on that have no partition. parts are
// in order.
func gap(parts []partition, first int64) error {
	at := first
	for _, p := range parts {
		if p.from > at {
			return outrider.WithHint(
				fmt.Errorf("outbox_events has no partition for the ids from %d to %d: events in it may not have been sent", at, p.from-1),
				fmt.Sprintf("no event is read until it is back: alter table outbox_events attach partition NAME for values from (%s) to (%d). If it was removed on purpose, and no destination needs anything of it any more: update outbox_source set first_id = %[2]d", bound(at, first), p.from))
		}
		if at = max(at, p.to); at == noEnd {
			return nil
		}
	}
	return outrider.WithHint(
		fmt.Errorf("outbox_events has no partition for the ids from %d on: events in it may not have been sent, and inserts fail", at),
		fmt.Sprintf("no event is read until it is back: alter table outbox_events attach partition NAME for values from (%s) to (maxvalue). If there never was one, make it: create table outbox_events_p%d partition of outbox_events for values from (%[1]s) to (maxvalue)", bound(at, first), at))
}

// bound is where the partition that holds at begins, in SQL. What begins the
// table had no beginning.
func bound(at, first int64) string {
	if at == first && first == 1 {
		return "minvalue"
	}
	return itoa(at)
}

// last is the partition that has no end.
func last(parts []partition) *partition {
	for i := range parts {
		if parts[i].to == noEnd {
			return &parts[i]
		}
	}
	return nil
}

// start is where the partition begins, in SQL.
func (p partition) start() string {
	if p.from == math.MinInt64 {
		return "minvalue"
	}
	return itoa(p.from)
}
