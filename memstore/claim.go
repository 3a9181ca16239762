package memstore

import (
	"cmp"
	"context"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// claim is what stands behind a store.Claim.
type claim struct {
	*store.Claim
	lease   *lease
	page    int64
	cells   []*cell
	held    []*key // that its KeyShare has held back
	started bool
	settled bool // for the first time
}

// drop lets go of what the claim still holds.
func (c *claim) drop() {
	for _, x := range c.cells {
		if x.claim == c {
			x.claim = nil
		}
	}
	for _, k := range c.held {
		if k.share == c {
			c.lease.dest.free(k)
		}
	}
	c.lease.claims = slices.DeleteFunc(c.lease.claims, func(x *claim) bool { return x == c })
}

// Claim implements store.Session.
func (ss *session) Claim(ctx context.Context, p store.ClaimParams) (*store.Claim, error) {
	var c *claim
	err := ss.store.do(ctx, OpClaim, func(now time.Time) error {
		l, err := ss.held(p.Lease)
		if err != nil {
			return err
		}
		b := newBuilder(l, p, now)
		if p.Kind == store.Due {
			b.due()
		} else {
			b.fresh()
		}
		c = b.claim
		if len(c.cells) > 0 {
			l.page++
			l.claims = append(l.claims, c)
		}
		return nil
	})
	if err != nil {
		if c != nil {
			ss.Forget(c.Claim) // the answer was lost: as if never read
		}
		return nil, err
	}
	return c.Claim, nil
}

// Forget implements store.Session.
func (ss *session) Forget(pub *store.Claim) {
	ss.store.mu.Lock()
	defer ss.store.mu.Unlock()
	c := pub.Driver.(*claim) //nolint:errcheck // a claim of another store is misuse
	i := slices.Index(c.lease.claims, c)
	if i < 0 {
		return // without records, or not held any more
	}
	for _, x := range slices.Clone(c.lease.claims[i:]) {
		if x == c || c.Kind == store.Fresh && x.Kind == store.Fresh {
			if x.started {
				ss.store.misuse = append(ss.store.misuse, "memstore: misuse: a claim was forgotten that had been started")
				continue
			}
			x.drop()
		}
	}
}

// builder fills a claim.
type builder struct {
	p     store.ClaimParams
	lease *lease
	dest  *destination
	now   time.Time
	claim *claim
	keys  map[*key]int
	bytes int
}

func newBuilder(l *lease, p store.ClaimParams, now time.Time) *builder {
	c := &claim{Claim: &store.Claim{Lease: l.public(), Kind: p.Kind}, lease: l, page: l.page + 1}
	c.Driver = c
	return &builder{p: p, lease: l, dest: l.dest, now: now, claim: c, keys: map[*key]int{}}
}

// verdict is what becomes of a cell that is offered to a claim.
type verdict int

const (
	taken verdict = iota
	share         // its key has its share
	full          // it does not fit: the claim is full, or of another sort
)

// offer puts a cell into the claim if it fits.
func (b *builder) offer(x *cell) verdict {
	n := len(b.claim.cells)
	if n > 0 {
		first := b.claim.cells[0]
		switch {
		case b.p.MaxRecords > 0 && n >= b.p.MaxRecords,
			b.p.MaxBytes > 0 && b.bytes+x.row.record.Size() > b.p.MaxBytes:
			return full
		case b.p.Kind == store.Fresh && x.again != first.again:
			return full
		case (x.piece > 0) != (first.piece > 0), x.piece > 0 && n >= min(x.piece, first.piece):
			return full
		}
	}
	if x.key != nil {
		if b.p.KeyShare > 0 && b.keys[x.key] >= b.p.KeyShare {
			return share
		}
		b.keys[x.key]++
	}
	b.bytes += x.row.record.Size()
	b.claim.cells = append(b.claim.cells, x)
	x.claim = b.claim
	if x.piece > 0 {
		b.claim.Exclusive = true
		b.claim.Alone = x.piece == 1
	}
	b.claim.Redelivery = b.claim.Redelivery || x.again || x.state == store.Waiting
	b.claim.Records = append(b.claim.Records, b.record(x, n))
	return taken
}

// place is where the i-th record of a claim stands among the deliveries of its
// key: where it was when it was in hand before, or here.
func (c *claim) place(i int) outrider.Sequence {
	if x := c.cells[i]; !x.seq.IsZero() {
		return x.seq
	}
	return outrider.Sequence{Page: c.page, Pos: int64(i + 1)}
}

// record is what is handed out of a cell, as the i-th of its claim.
func (b *builder) record(x *cell, i int) outrider.Record {
	r := x.row.record
	if !b.lease.owner.store.cfg.NoSequences {
		r.Sequence = b.claim.place(i)
	}
	r.Attempts, r.Starts = x.attempts, x.starts
	if !x.firstFailed.IsZero() {
		r.Waited = b.now.Sub(x.firstFailed)
	}
	return r
}

// fresh fills a Fresh claim.
func (b *builder) fresh() {
	if b.p.MaxExceptions > 0 && b.exceptions() >= b.p.MaxExceptions {
		return
	}
	for x := range b.candidates() {
		if b.later(x) {
			continue
		}
		switch b.offer(x) {
		case share:
			x.hold(b.now)
			x.key.share = b.claim
			b.claim.held = append(b.claim.held, x.key)
		case full:
			b.claim.More = true
			return
		}
	}
}

// exceptions counts those that bound the lease, a held key without a head being
// one.
func (b *builder) exceptions() int {
	n := 0
	for x := range b.dest.exceptions {
		idle := x.state == store.Scheduled || x.state == store.Failed && x.key == nil
		if !idle && b.lease.lanes.Has(x.row.record.Lane) {
			n++
		}
	}
	for k := range b.dest.held {
		if b.lease.lanes.Has(k.lane) && !slices.ContainsFunc(k.cells, (*cell).head) {
			n++
		}
	}
	return n
}

// candidates are what a Fresh claim may hold: first what was in hand when an
// owner ended, as it was sent, then what nobody has read, by row id.
func (b *builder) candidates() iter.Seq[*cell] {
	ok := func(x *cell) bool {
		return b.lease.lanes.Has(x.row.record.Lane) && x.claim == nil &&
			x.state == store.Pending && (x.key == nil || !x.key.held)
	}
	return func(yield func(*cell) bool) {
		for _, x := range slices.SortedFunc(maps.Keys(b.dest.again), bySequence) {
			if ok(x) && !yield(x) {
				return
			}
		}
		for _, x := range b.dest.open {
			if ok(x) && !x.again && !yield(x) {
				return
			}
		}
	}
}

func bySequence(a, b *cell) int {
	return cmp.Or(cmp.Compare(a.seq.Page, b.seq.Page), cmp.Compare(a.seq.Pos, b.seq.Pos), byRow(a, b))
}

// later sets an event apart that is not available yet.
func (b *builder) later(x *cell) bool {
	if at := x.row.record.AvailableAt; x.state == store.Pending && at.After(b.now) {
		x.state, x.due = store.Scheduled, at
		b.dest.exceptions[x] = struct{}{}
		return true
	}
	return false
}

// queue is what is due of a key, or one unordered event.
type queue struct {
	since time.Time
	cells []*cell
}

// due fills a Due claim: of each queue as much as its share, those that have
// waited longest first.
func (b *builder) due() {
	var queues []queue
	for x := range b.dest.exceptions {
		if !b.lease.lanes.Has(x.row.record.Lane) || x.claim != nil || x.state == store.Failed {
			continue
		}
		if x.due.After(b.now) {
			if d := x.due.Sub(b.now); b.claim.NextDue == 0 || d < b.claim.NextDue {
				b.claim.NextDue = d
			}
			continue
		}
		if x.key == nil {
			queues = append(queues, queue{x.due, []*cell{x}})
		} else {
			// A delayed event that is due takes its key along, or its
			// sequence would not grow over what is in hand of it.
			x.hold(b.now)
		}
	}
	for k := range b.dest.held {
		if b.lease.lanes.Has(k.lane) {
			if cells := b.drain(k); len(cells) > 0 {
				queues = append(queues, queue{k.served, cells})
			}
		}
	}
	slices.SortFunc(queues, func(x, y queue) int {
		return cmp.Or(x.since.Compare(y.since), byRow(x.cells[0], y.cells[0]))
	})
	for _, q := range queues {
		for i, x := range q.cells {
			v := b.offer(x)
			if v == full && i == 0 {
				b.claim.More = true
			}
			if v != taken {
				break
			}
			if x.key != nil {
				x.key.served = b.now
			}
		}
	}
}

// drain is what a held key has to send next, in order: nothing while some of it
// is in hand, while its head waits or has failed. What was in hand once goes
// first, the head among it, as it was sent then; the rest follows by row id.
func (b *builder) drain(k *key) []*cell {
	var out []*cell
	for _, x := range k.cells {
		switch {
		case x.claim != nil, x.state == store.Failed, x.state == store.Waiting && x.due.After(b.now):
			return nil
		case b.later(x), x.state == store.Scheduled && x.due.After(b.now):
			continue
		}
		out = append(out, x)
	}
	if len(out) == 0 {
		b.dest.rest(k)
	}
	slices.SortFunc(out, func(x, y *cell) int {
		if a, b := x.seq.IsZero(), y.seq.IsZero(); a != b {
			if b {
				return -1
			}
			return 1
		}
		return bySequence(x, y)
	})
	return out
}
