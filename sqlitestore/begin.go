package sqlitestore

import (
	"cmp"
	"context"
	"slices"

	"github.com/outrider-dev/outrider"
)

// begin marks what was chosen as in hand. Called with writing held.
func (b *dueBuilder) begin(ctx context.Context) error {
	l, c := b.l, b.d.claim
	c.Alone = c.Exclusive && len(c.Records) == 1
	l.mu.Lock()
	l.page++
	b.d.page = l.page
	keys := b.keys()
	l.mu.Unlock()
	for i := range c.Records {
		if s := &c.Records[i].Sequence; s.Page == 0 && s.Pos != 0 {
			s.Page = b.d.page
		}
	}
	var dropped []int64
	lost := false
	what := &written{apply: func() {
		if b.apply(keys, dropped); lost {
			b.d.forget() // nobody has the claim
		}
	}}
	err := l.write(ctx, what, func(t *tx) (err error) {
		if _, err := t.exec(`update outbox_leases set page = max(page, ?) where lease = ?`, b.d.page, l.ID); err != nil {
			return err
		}
		if dropped, err = b.mark(t); err != nil {
			return err
		}
		for _, k := range keys {
			if slices.Contains(dropped, k.head) {
				k.head, k.at = 0, max(k.at, k.head)
			}
			if err := putKey(t, l, k); err != nil {
				return err
			}
		}
		if err := b.setAside(t); err != nil {
			return err
		}
		return b.comeBack(t, dropped)
	})
	lost = err != nil
	return err
}

// keys are the held keys of the claim as they are with it in hand. Called with
// mu held.
func (b *dueBuilder) keys() []*heldKey {
	var out []*heldKey
	for _, dr := range b.d.drains {
		if dr.key == "" {
			continue
		}
		k := *b.l.held[dr.key]
		k.borrowed = false
		n := len(dr.ids)
		if dr.head != 0 {
			k.head = dr.head
			n--
		}
		if n == 0 && dr.to > 0 {
			n = 1 // nothing but what is not due yet: it is settled with the claim
		}
		k.inHand, k.served = n, b.now
		if n > 0 {
			k.inHandTo = dr.to
			if k.again <= max(k.at, dr.head) {
				k.page = cmp.Or(dr.page, b.d.page)
			}
		}
		out = append(out, &k)
	}
	return out
}

// mark marks exceptions as in hand, and tells on which an operator was quicker
// to act.
func (b *dueBuilder) mark(t *tx) (dropped []int64, err error) {
	l, c := b.l, b.d.claim
	for _, dr := range b.d.drains {
		if dr.head == 0 {
			continue
		}
		n, err := t.exec(`
			update outbox_exceptions set state = 'PUBLISHING', alone = 0, page = ?
			where destination = ? and id = ? and state in ('WAITING', 'SCHEDULED', 'PUBLISHING')`,
			c.Records[dr.first].Sequence.Page, l.Destination, dr.head)
		if err != nil {
			return nil, err
		}
		if n == 0 {
			dropped = append(dropped, dr.head)
		}
	}
	return dropped, nil
}

// comeBack makes due again what waits for heads that an operator has taken away.
func (b *dueBuilder) comeBack(t *tx, dropped []int64) error {
	for _, dr := range b.d.drains {
		if dr.key != "" && slices.Contains(dropped, dr.head) {
			if err := unpark(t, b.l.Destination, dr.key); err != nil {
				return err
			}
		}
	}
	return nil
}

// setAside parks what waits for another head, and gives up what has no event
// any more.
func (b *dueBuilder) setAside(t *tx) error {
	for _, x := range b.park {
		if _, err := t.exec(`
			update outbox_exceptions set due_at = null
			where destination = ? and id = ? and state in ('WAITING', 'SCHEDULED')`, b.l.Destination, x.id); err != nil {
			return err
		}
	}
	for _, id := range b.gone {
		if _, err := t.exec(`
			update outbox_exceptions set state = 'FAILED', class = 'other', last_failed = ?1,
				first_failed = coalesce(first_failed, ?1), message = 'the row of the event is gone: somebody deleted it'
			where destination = ?2 and id = ?3`, t.now, b.l.Destination, id); err != nil {
			return err
		}
	}
	return nil
}

func (b *dueBuilder) apply(keys []*heldKey, dropped []int64) {
	l := b.l
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, dr := range b.d.drains {
		if dr.head != 0 && !slices.Contains(dropped, dr.head) {
			l.inHand[dr.head], l.waiting[dr.head] = true, struct{}{}
		}
	}
	for _, k := range keys {
		if old := l.held[k.key]; old != nil {
			k.last = max(k.last, old.last) // more may have been passed over meanwhile
		}
		l.held[k.key] = k
	}
	for _, x := range b.park {
		if k := l.held[x.key]; k != nil {
			k.parked = true
		}
	}
	for _, id := range slices.Concat(b.gone, dropped) {
		delete(l.waiting, id)
	}
	b.d.drop(dropped)
}

// drop takes records out of the claim that are not to be sent any more.
func (d *due) drop(dropped []int64) {
	if len(dropped) == 0 {
		return
	}
	var records []outrider.Record
	for _, dr := range d.drains {
		mine := d.claim.Records[dr.first : dr.first+len(dr.ids)]
		if slices.Contains(dropped, dr.head) {
			mine, dr.ids, dr.head = mine[1:], dr.ids[1:], 0
		}
		dr.first = len(records)
		records = append(records, mine...)
	}
	d.claim.Records = records
	d.drains = slices.DeleteFunc(d.drains, func(dr *drain) bool { return len(dr.ids) == 0 && dr.key == "" })
}

// forget makes due again what was claimed and is not going to be sent: it is
// found by the next Due claim.
func (d *due) forget() {
	l := d.l
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, dr := range d.drains {
		delete(l.inHand, dr.head)
		if k := l.held[dr.key]; k != nil {
			k.inHand = 0
		}
	}
}
