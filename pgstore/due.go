package pgstore

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// due is the driver's part of a Due claim: exceptions by themselves first, then
// successors of held keys.
type due struct {
	l       *lease
	claim   *store.Claim
	singles []int64
	drains  []*drain
	page    int64
	settled bool
}

// drain is what a Due claim has of one held key.
type drain struct {
	key       string
	first     int     // index of its first record in the claim
	ids       []int64 // of its records
	to        int64   // the last row that was read
	all       bool    // nothing is left up to the key's target
	scheduled []row
	passed    []int64 // rows to pass over
	records   []outrider.Record
}

// ids are the row ids of the claim's records.
func (d *due) ids() []int64 {
	out := slices.Clone(d.singles)
	for _, dr := range d.drains {
		out = append(out, dr.ids...)
	}
	return out
}

// single is a due exception as it was read.
type single struct {
	row
	together int
	again    bool // it may have been sent before
	missing  bool // its event's row is gone
}

const maxDrains = 64 // held keys in one Due claim

// claimDue hands out what is due of the exceptions, and of the keys that wait
// to be drained. It marks them as in hand itself, so that an operator who acts
// on them at the same moment comes before or after, never in between.
func (l *lease) claimDue(ctx context.Context, p store.ClaimParams) (*store.Claim, error) {
	l.writing.Lock()
	defer l.writing.Unlock()
	if err := l.resolve(ctx); err != nil {
		return nil, err
	}
	c := &store.Claim{Lease: l.Lease, Kind: store.Due}
	l.mu.Lock()
	busy := l.exclusive()
	l.mu.Unlock()
	if busy {
		return c, nil
	}
	next, err := l.lookDue(ctx)
	if err != nil {
		return nil, err
	}
	c.NextDue = next
	d := &due{l: l, claim: c}
	c.Driver = d
	var singles []single
	if next == dueNow {
		if singles, c.More, err = l.readSingles(ctx, p); err != nil {
			return nil, err
		}
	}
	if room := p.MaxRecords - len(singles); room > 0 && (len(singles) == 0 || singles[0].together == 0) {
		if err := l.readDrains(ctx, p, d, singles, room); err != nil {
			return nil, err
		}
	}
	d.pick(singles)
	if len(singles) == 0 && len(d.drains) == 0 {
		if c.NextDue == dueNow {
			c.NextDue = 0 // what is due waits for something in hand
		}
		return c, nil
	}
	return c, d.begin(ctx, singles)
}

// dueNow stands for "at once" in Claim.NextDue, where 0 means never.
const dueNow = time.Nanosecond

// lookDue finds when the next exception is due, and takes note of keys that
// operators have freed.
func (l *lease) lookDue(ctx context.Context) (time.Duration, error) {
	var next *int64
	for after := ""; ; {
		var freed []string
		var ats []int64
		err := l.ses.st.pool.QueryRow(ctx, `
			select (select (extract(epoch from due_at - clock_timestamp()) * 1000000)::bigint
			        from outbox_exceptions
			        where destination = $2 and state in ('WAITING', 'SCHEDULED', 'PUBLISHING')
			          and (($1::bigint >> lane::int) & 1) = 1 and due_at < 'infinity' and id <> all($3)
			        order by due_at limit 1),
			       array(select event_key from outbox_held_keys where destination = $2 and freed and event_key > $4
			             and (($1::bigint >> lane::int) & 1) = 1 order by event_key limit $5),
			       array(select at from outbox_held_keys where destination = $2 and freed and event_key > $4
			             and (($1::bigint >> lane::int) & 1) = 1 order by event_key limit $5)`,
			mask(l.Lanes), l.Destination, l.inHandIDs(), after, freedAtOnce).Scan(&next, &freed, &ats)
		if err != nil {
			return 0, fmt.Errorf("pgstore: look for due exceptions of lease %d: %w", l.ID, err)
		}
		l.free(freed, ats)
		// They are found until they are written or deleted, which takes a
		// commit: those behind the first ones must not wait for that.
		if len(freed) < freedAtOnce {
			break
		}
		after = freed[len(freed)-1]
	}
	switch {
	case next == nil:
		return 0, nil
	case *next <= 0:
		return dueNow, nil
	}
	return max(time.Duration(*next)*time.Microsecond, dueNow), nil
}

const freedAtOnce = 1000 // freed keys read together

// free notes keys that operators have freed, and up to where.
func (l *lease) free(keys []string, ats []int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, key := range keys {
		if k := l.held[key]; k != nil && k.head != 0 && i < len(ats) && k.head == ats[i] {
			k.head, k.at, k.near = 0, ats[i], false
		}
	}
}

func (l *lease) inHandIDs() []int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]int64, 0, len(l.inHand))
	for id := range l.inHand {
		out = append(out, id)
	}
	return out
}

// ready reports whether nothing is in hand that may hold records of the key.
// Called with mu held.
func (k *heldKey) ready(l *lease) bool {
	return len(l.open) == 0 || l.open[0].no > k.wait
}

// readSingles reads due exceptions: one key's only when nothing of the key is
// in hand in a fresh claim.
func (l *lease) readSingles(ctx context.Context, p store.ClaimParams) (found []single, more bool, err error) {
	inHand := l.inHandIDs()
	unready := []string{}
	l.mu.Lock()
	for key, k := range l.held {
		if !k.ready(l) {
			unready = append(unready, key)
		}
	}
	l.mu.Unlock()
	var out []single
	var b pgx.Batch
	b.Queue(l.ses.st.sql.due, mask(l.Lanes), inline(p), l.Destination, inHand, p.MaxRecords+1, unready).
		Query(func(r pgx.Rows) (err error) {
			out, more, err = l.singles(r, p.MaxRecords)
			return err
		})
	if err := l.ses.st.readEvents(ctx, &b); err != nil {
		return nil, false, fmt.Errorf("pgstore: read due exceptions of lease %d: %w", l.ID, err)
	}
	rows := make([]row, len(out))
	for i := range out {
		rows[i] = out[i].row
	}
	if n := cut(rows, p.MaxBytes); n < len(out) {
		out, more = out[:n], true
	}
	rows = rows[:len(out)]
	if err := l.ses.st.fetchLarge(ctx, rows); err != nil {
		return nil, false, err
	}
	return out, more, nil
}

// singles takes due exceptions from a result, up to limit or to what goes
// together.
func (l *lease) singles(res pgx.Rows, limit int) (out []single, more bool, err error) {
	defer res.Close()
	for res.Next() {
		s := single{row: row{rec: &outrider.Record{}}}
		v, err := l.reader.scan(res, &s.row)
		if err != nil {
			return nil, false, err
		}
		n := func(i int) int64 { return number(v[i]) }
		s.rec.Attempts, s.rec.Starts, s.together = int(n(0)), int(n(1)), int(n(2))
		s.rec.Waited = time.Duration(n(3)) * time.Microsecond
		s.missing = s.id == 0
		s.id, s.again = n(4), v[5][0] == 1
		s.rec.Sequence.Pos = s.id
		if s.together > 0 {
			limit = min(limit, s.together)
		}
		if len(out) >= limit {
			return out, true, nil
		}
		out = append(out, s)
	}
	return out, false, res.Err()
}

// number reads a binary int4 or int8.
func number(b []byte) int64 {
	if len(b) == 4 {
		return int64(int32(binary.BigEndian.Uint32(b)))
	}
	return int64(binary.BigEndian.Uint64(b))
}

// start is the id behind which successors beyond the key's base may be: those
// that the lease passed over, and in a window those that it has yet to come to.
// false: there are none, or it is not known yet. Called with mu held.
func (k *heldKey) start(l *lease) (int64, bool) {
	switch {
	case l.done.target == nil:
		return k.next - 1, k.next != 0
	case l.done.at == 0:
		return 0, false // rows with low ids come first, and are still to be seen
	case k.next != 0:
		return min(k.next-1, l.done.at), true
	}
	return l.done.at, true
}

// aim gives a free key the next stretch to be drained. false: nothing is left up
// to where the lease stands. Called with mu held.
func (k *heldKey) aim(l *lease) bool {
	if k.target != nil {
		return true
	}
	to := l.done.base
	if l.done.target != nil {
		to = *l.done.target
	}
	if to.text == k.base.text {
		k.near = l.done.target == nil
		return false
	}
	from, any := k.start(l)
	if !any {
		if l.done.target == nil {
			k.base, k.near = to, true
		}
		return false
	}
	k.target, k.at, k.low, k.next, k.near = &to, from, k.next, 0, false
	return true
}

// drained reports whether nothing of the key is left up to where the lease
// stands, or is known of. Called with mu held.
func (k *heldKey) drained(l *lease) bool {
	if k.head != 0 || k.inHand > 0 || k.target != nil {
		return false
	}
	to := &l.done.base
	if l.done.target != nil {
		to = l.done.target
	}
	_, any := k.start(l)
	return !any || to.text == k.base.text
}

// readDrains reads successors of keys that are free, and of those whose heads
// are in the same claim: they are behind them there.
func (l *lease) readDrains(ctx context.Context, p store.ClaimParams, d *due, singles []single, room int) error {
	bytes := p.MaxBytes
	heads := map[int64]bool{}
	for i := range singles {
		bytes -= singles[i].size
		heads[singles[i].id] = true
	}
	if bytes <= 0 {
		return nil
	}
	keys := l.drainable(heads)
	if len(keys) == 0 {
		return nil
	}
	keys = keys[:min(len(keys), room)]
	share := room / len(keys)
	if p.KeyShare > 0 {
		share = min(share, p.KeyShare)
	}
	if suspects, limit := suspected(keys); limit > 0 {
		if len(singles) > 0 {
			return nil
		}
		keys = suspects[:min(len(suspects), limit)]
		share = min(share, max(1, limit/len(keys)))
	}
	var b pgx.Batch
	found := make([]batch, len(keys))
	for i, k := range keys {
		b.Queue(l.ses.st.sql.key, mask(l.Lanes), inline(p), k.key, max(k.at, k.head), k.target.text, k.base.text, share+1).
			Query(func(r pgx.Rows) error { return l.reader.rows(r, &found[i], p.MaxBytes, 0) })
	}
	if err := l.ses.st.readEvents(ctx, &b); err != nil {
		return fmt.Errorf("pgstore: read held keys of lease %d: %w", l.ID, err)
	}
	cuts, err := l.cutDrains(ctx, p, keys, found, share, bytes, len(singles) > 0)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, k := range keys {
		switch n := cuts[i]; {
		case n > 0:
			d.drains = append(d.drains, l.drain(k, found[i].rows[:n], n == len(found[i].rows) && !found[i].more))
		case len(found[i].rows) == 0 && k.head == 0:
			k.base, k.target, k.at, k.near = *k.target, nil, 0, true
		}
	}
	return nil
}

// cutDrains says how many of the rows found for each key fit the claim, and
// reads what was left out of those. some: the claim holds records already.
func (l *lease) cutDrains(ctx context.Context, p store.ClaimParams, keys []*heldKey, found []batch, share, bytes int, some bool) ([]int, error) {
	cuts := make([]int, len(keys))
	for i, k := range keys {
		room := share
		if k.head != 0 && p.KeyShare > 0 {
			room = min(room, p.KeyShare-1) // its head counts
		}
		rows := found[i].rows
		rows = rows[:min(len(rows), room)]
		if len(rows) == 0 || some && rows[0].size > bytes {
			continue // another time
		}
		n := cut(rows, bytes)
		if err := l.ses.st.fetchLarge(ctx, rows[:n]); err != nil {
			return nil, err
		}
		bytes -= bytesOf(rows[:n])
		cuts[i], some = n, true
	}
	return cuts, nil
}

// suspected picks the keys that were in hand at a death, and says how many
// records may go together.
func suspected(keys []*heldKey) (suspects []*heldKey, limit int) {
	for _, k := range keys {
		if k.together > 0 {
			suspects = append(suspects, k)
			if limit == 0 || k.together < limit {
				limit = k.together
			}
		}
	}
	return suspects, limit
}

// drainable picks held keys of which successors may be read now.
func (l *lease) drainable(heads map[int64]bool) []*heldKey {
	l.mu.Lock()
	defer l.mu.Unlock()
	var keys []*heldKey
	for _, k := range l.held {
		if k.inHand > 0 || !k.ready(l) {
			continue
		}
		if k.head != 0 && heads[k.head] && k.target != nil || k.head == 0 && k.aim(l) {
			keys = append(keys, k)
		}
		if len(keys) == maxDrains {
			break
		}
	}
	return keys
}

// drain makes what a claim has of a held key. Called with mu held.
func (l *lease) drain(k *heldKey, rows []row, all bool) *drain {
	dr := &drain{key: k.key, all: all, to: rows[len(rows)-1].id}
	for j := range rows {
		r := &rows[j]
		if l.pass.has(r.id) {
			dr.passed = append(dr.passed, r.id)
			continue
		}
		if r.later {
			dr.scheduled = append(dr.scheduled, *r)
			continue
		}
		r.rec.Sequence = outrider.Sequence{Pos: r.id}
		if len(dr.ids) == 0 && k.head == 0 {
			r.rec.Starts = k.starts
		}
		dr.ids = append(dr.ids, r.id)
		dr.records = append(dr.records, *r.rec)
	}
	return dr
}

// pick makes the claim of what was read.
func (d *due) pick(singles []single) {
	c := d.claim
	for i := range singles {
		s := &singles[i]
		if s.missing {
			continue
		}
		c.Records = append(c.Records, *s.rec)
		d.singles = append(d.singles, s.id)
		c.Redelivery = c.Redelivery || s.again
		if s.together > 0 {
			c.Exclusive = true
			c.Alone = s.together == 1
		}
	}
	for _, dr := range d.drains {
		dr.first = len(c.Records)
		c.Records = append(c.Records, dr.records...)
		dr.records = nil
		if k := d.l.held[dr.key]; k != nil && k.together > 0 {
			c.Exclusive, c.Redelivery = true, true
			c.Alone = k.together == 1
		}
	}
	if len(d.drains) > 0 {
		c.NextDue = dueNow
	}
}

// begin marks the claim's records as in hand. Called with writing held.
func (d *due) begin(ctx context.Context, singles []single) error {
	l, c := d.l, d.claim
	ids, gone := []int64{}, []int64{}
	for _, s := range singles {
		if s.missing {
			gone = append(gone, s.id)
			continue
		}
		ids = append(ids, s.id)
	}
	var marked []int64
	d.page = l.nextPage()
	for i := range c.Records {
		r := &c.Records[i]
		if k := l.held[r.Key]; i < len(d.singles) && (k == nil || k.head != d.singles[i]) {
			r.Sequence = outrider.Sequence{} // outside the order of its key
			continue
		}
		r.Sequence.Page = d.page
	}
	first := func(b *pgx.Batch) *pgx.QueuedQuery {
		return b.Queue(`update outbox_leases set writes = writes + 1, page = greatest(page, $4) where lease = $1 and epoch = $2 and writes = $3 and gen = $3::bigint >> 5`,
			l.ID, l.Epoch, l.writes, d.page)
	}
	others := []func(*pgx.Batch){func(b *pgx.Batch) {
		b.Queue(`
			update outbox_exceptions set state = 'PUBLISHING', alone = false
			where `+fenced+` and destination = $4 and id = any($5) and state in ('WAITING', 'SCHEDULED', 'PUBLISHING')
			returning id`, l.ID, l.Epoch, l.writes+1, l.Destination, ids).
			Query(func(r pgx.Rows) (err error) {
				marked, err = pgx.CollectRows(r, pgx.RowTo[int64])
				return err
			})
		if len(gone) > 0 {
			b.Queue(`
				update outbox_exceptions set state = 'FAILED', class = 'other', last_failed = clock_timestamp(),
					first_failed = coalesce(first_failed, clock_timestamp()),
					message = 'the row of the event is gone: its partition was dropped or the row deleted'
				where `+fenced+` and destination = $4 and id = any($5)`, l.ID, l.Epoch, l.writes+1, l.Destination, gone)
		}
		for _, dr := range d.drains {
			k := l.held[dr.key]
			b.Queue(putKeySQL, l.ID, l.Epoch, l.writes+1, l.Destination, k.key, k.lane, k.head, k.base.text, &k.target.text,
				k.at, lowest(k.low, k.next), max(1, len(dr.ids)), k.starts, k.together, k.suspects)
		}
	}}
	lost := false
	what := &written{apply: func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, id := range gone {
			delete(l.waiting, id)
		}
		for i, id := range ids {
			l.waiting[id] = c.Records[i].Lane
		}
		if lost {
			return // nobody has the claim: what it holds is found again, as after Forget
		}
		for i, id := range ids {
			l.inHand[id] = c.Records[i].Lane
		}
		for _, dr := range d.drains {
			l.held[dr.key].inHand = max(1, len(dr.ids))
		}
	}}
	if err := l.write(ctx, what, first, others...); err != nil {
		lost = true
		return err
	}
	d.drop(ids, marked)
	if len(c.Records) == 0 {
		// All that was read is not due yet, or gone: settle it at once.
		return l.commit(ctx, store.CommitParams{Lease: l.Lease, Settle: []store.Settlement{{Claim: c}}})
	}
	return nil
}

// drop takes records out of the claim that an operator was quicker to act on.
func (d *due) drop(ids, marked []int64) {
	if len(ids) == len(marked) {
		return
	}
	l, c := d.l, d.claim
	l.mu.Lock()
	defer l.mu.Unlock()
	var records []outrider.Record
	var singles []int64
	for i, id := range d.singles {
		if slices.Contains(marked, id) {
			records = append(records, c.Records[i])
			singles = append(singles, id)
			continue
		}
		delete(l.inHand, id)
		delete(l.waiting, id)
		if k := l.held[c.Records[i].Key]; k != nil && k.head == id {
			k.head, k.at = 0, id // skipped
		}
	}
	shift := len(d.singles) - len(singles)
	c.Records = append(records, c.Records[len(d.singles):]...)
	d.singles = singles
	for _, dr := range d.drains {
		dr.first -= shift
	}
}

// forget makes due again what was claimed and is not going to be sent: it is
// found by the next Due claim, as after a lost answer.
func (d *due) forget() {
	l := d.l
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range d.singles {
		delete(l.inHand, id)
	}
	for _, dr := range d.drains {
		if k := l.held[dr.key]; k != nil {
			k.inHand = 0
		}
	}
}
