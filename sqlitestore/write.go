package sqlitestore

import (
	"encoding/json"
	"maps"
	"slices"
	"time"
)

// write makes the changes in the database.
func (p *plan) write(t *tx, page int64, doc string) error {
	l := p.l
	_, err := t.exec(`
		update outbox_leases set base = ?, page = max(page, ?), open = ?, expires_at = ? where lease = ?`,
		p.done, page, doc, t.now+l.ses.params.TTL.Microseconds(), l.ID)
	if err != nil {
		return err
	}
	for _, key := range p.dropKey {
		if _, err := t.exec(`delete from outbox_held_keys where destination = ? and event_key = ?`, l.Destination, key); err != nil {
			return err
		}
	}
	for key, at := range p.joined {
		if _, err := t.exec(`update outbox_held_keys set joined = ? where destination = ? and event_key = ?`, at, l.Destination, key); err != nil {
			return err
		}
	}
	for _, id := range slices.Sorted(maps.Keys(p.put)) {
		if err := putException(t, l, id, p.put[id]); err != nil {
			return err
		}
	}
	for _, id := range p.drop {
		if _, err := t.exec(`delete from outbox_exceptions where destination = ? and id = ?`, l.Destination, id); err != nil {
			return err
		}
	}
	for _, k := range p.keys {
		if err := putKey(t, l, k); err != nil {
			return err
		}
	}
	for _, key := range p.unpark {
		if err := unpark(t, l.Destination, key); err != nil {
			return err
		}
	}
	if p.alone != nil {
		if err := p.alone.putAlone(t); err != nil {
			return err
		}
	}
	for _, j := range p.journal {
		if err := putJournal(t, l, j); err != nil {
			return err
		}
	}
	return nil
}

// putAlone notes that a death from now on counts against what is in hand. It
// does not while a claim is only read, however long that takes.
func (d *due) putAlone(t *tx) error {
	for _, dr := range d.drains {
		_, err := t.exec(`
			update outbox_exceptions set alone = 1 where destination = ? and id = ? and state = 'PUBLISHING'`, d.l.Destination, dr.head)
		if err != nil {
			return err
		}
		if _, err := t.exec(`
			update outbox_held_keys set alone = 1 where destination = ? and event_key = ? and in_hand = 1`, d.l.Destination, dr.key); err != nil {
			return err
		}
	}
	return nil
}

func putJournal(t *tx, l *lease, j journalRow) error {
	if j.receipts == nil {
		j.receipts = []string{}
	}
	receipts, err := json.Marshal(j.receipts)
	if err != nil {
		return err
	}
	_, err = t.exec(`
		insert into outbox_journal (destination, lease, epoch, relay, kind, from_id, to_id, records, published, receipts)
		values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		l.Destination, l.ID, l.Epoch, l.ses.params.Relay, j.kind, j.from, j.to, j.records, j.published, string(receipts))
	return err
}

func putException(t *tx, l *lease, id int64, e exception) error {
	due := t.now + ceilMicros(e.due)
	if !e.at.IsZero() {
		due = e.at.UnixMicro()
	}
	var first, last *int64
	if e.counted {
		first = &t.now
	}
	if e.failed {
		last = &t.now
	}
	_, err := t.exec(`
		insert into outbox_exceptions as x (destination, id, lane, event_key, event_id, event_type, state, due_at,
			attempts, starts, together, page, class, message, created_at, first_failed, last_failed)
		values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
		on conflict (destination, id) do update set state = excluded.state, due_at = excluded.due_at,
			attempts = excluded.attempts, page = excluded.page, alone = 0,
			together = case when excluded.state = 'WAITING' and excluded.last_failed is null then max(x.together, excluded.together) else 0 end,
			class = case when excluded.last_failed is null then x.class else excluded.class end,
			message = case when excluded.last_failed is null then x.message else excluded.message end,
			first_failed = coalesce(x.first_failed, excluded.first_failed),
			last_failed = coalesce(excluded.last_failed, x.last_failed)`,
		l.Destination, id, e.rec.Lane, e.rec.Key, e.rec.ID, e.rec.Type, e.state, due,
		e.attempts, e.rec.Starts, e.together, e.page, e.class, e.message, e.rec.CreatedAt.UnixMicro(), first, last)
	return err
}

// ceilMicros never makes a time shorter.
func ceilMicros(d time.Duration) int64 { return int64((d + time.Microsecond - 1) / time.Microsecond) }

// putKey writes where a held key stands. A head that an operator has taken away
// does not come back by it.
func putKey(t *tx, l *lease, k *heldKey) error {
	var head *int64
	if k.head != 0 {
		head = &k.head
	}
	_, err := t.exec(`
		insert into outbox_held_keys as h (destination, event_key, lane, head, at, in_hand, in_hand_to, again, starts, together, page)
		values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
		on conflict (destination, event_key) do update set
			head = case when h.freed <> excluded.head then excluded.head end,
			at = max(excluded.at, h.freed), in_hand = excluded.in_hand, in_hand_to = excluded.in_hand_to, alone = 0,
			again = excluded.again, starts = excluded.starts, together = excluded.together, page = excluded.page, joined = 0`,
		l.Destination, k.key, k.lane, head, k.at, k.inHand, k.inHandTo, k.again, k.starts, k.together, k.page)
	return err
}

func putKeys(t *tx, l *lease, keys []heldKey) error {
	for i := range keys {
		if err := putKey(t, l, &keys[i]); err != nil {
			return err
		}
	}
	return nil
}

// unpark makes exceptions due that have waited for the head of their key.
func unpark(t *tx, destination, key string) error {
	_, err := t.exec(`
		update outbox_exceptions set due_at = ? where destination = ? and event_key = ? and due_at is null
		  and state in ('WAITING', 'SCHEDULED')`, t.now, destination, key)
	return err
}
