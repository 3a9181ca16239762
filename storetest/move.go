package storetest

import (
	"errors"
	"slices"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

var moveTests = []test{
	{"ExceptionsMove", testExceptionsMove},
	{"BacklogMoves", testBacklogMoves},
	{"Merge", testMerge},
	{"MergeBacklog", testMergeBacklog},
}

// What waits, has failed or is held moves with its lane.
func testExceptionsMove(b *bench) {
	one, two := b.owner(), b.join()
	e := append(spread(60, 30), events("", "")...)
	b.put(e...)
	one.params.MaxRecords = 40
	c := one.hand()
	outcomes := one.outcomes(c, func(outrider.Record) store.Outcome { return waiting(1, 0) })
	one.settle(c, outcomes...)
	keep := store.AllLanes.First(30)
	left, err := one.s.Release(b.ctx, one.lease, keep)
	if err != nil {
		b.t.Fatal(err)
	}
	one.lease = left
	two.lease = two.acquire(64)[0]
	n := 0
	b.until("all are delivered by who has the lane", func() bool {
		for _, m := range []*member{one, two} {
			for _, kind := range []store.Kind{store.Fresh, store.Due} {
				got, err := m.round(kind, nil)
				if err != nil {
					b.t.Fatal(err)
				}
				for _, r := range got {
					if !m.lease.Lanes.Has(r.Lane) {
						b.t.Errorf("event of lane %d came under lanes %x", r.Lane, m.lease.Lanes)
					}
				}
				n += len(got)
			}
		}
		return n >= len(e)
	})
	one.idle()
	two.idle()
	if n != len(e) {
		b.t.Errorf("%d came, want %d", n, len(e))
	}
}

// A lease that is split and moved in the middle of a backlog, several times.
func testBacklogMoves(b *bench) {
	members := []*member{b.owner(), b.join(), b.join()}
	for i := range 10 {
		b.put(spread(30, 20)...)
		if i%3 == 0 {
			b.put(events("", "")...)
		}
	}
	total := 308
	n, turn := 0, 0
	held := map[*member][]store.Lease{members[0]: {members[0].lease}}
	b.until("all are delivered", func() bool {
		turn++
		for i, m := range members {
			var keep []store.Lease
			for _, l := range held[m] {
				m.lease = l
				m.params.MaxRecords = 5 + i
				for _, kind := range []store.Kind{store.Fresh, store.Due} {
					got, err := m.round(kind, func(r outrider.Record) store.Outcome {
						if r.Attempts == 0 && turn%4 == 0 {
							return waiting(1, 0)
						}
						return published
					})
					if err != nil {
						b.t.Fatal(err)
					}
					n += len(got)
				}
				if turn%2 == 0 {
					left, err := m.s.Release(b.ctx, l, l.Lanes.First(l.Lanes.Len()/2))
					if err != nil {
						b.t.Fatal(err)
					}
					l = left
				}
				if l.Lanes != 0 {
					keep = append(keep, l)
				}
			}
			next := members[(i+turn)%len(members)]
			held[m] = keep
			held[next] = append(held[next], next.acquire(25)...)
		}
		var all []store.Lease
		for _, m := range members {
			all = append(all, held[m]...)
		}
		disjoint(b, all...)
		return n >= total
	})
	if n != total {
		b.t.Errorf("%d came, want %d", n, total)
	}
	if left := b.ledger.Missing(mainDest); len(left) > 0 {
		b.t.Errorf("lost %v", idsOf(left))
	}
}

// merge joins leases, with what work it takes; it returns what was delivered.
func (m *member) merge(leases []store.Lease, total int) (store.Lease, int) {
	m.t.Helper()
	g := m.s.(store.Merger) //nolint:errcheck // who cannot merge has no such test
	a, n := leases[0], 0
	for _, l := range leases[1:] {
		m.b.until("two leases are joined", func() bool {
			joined, ok, err := g.Merge(m.b.ctx, a, l)
			if err != nil {
				m.t.Fatalf("merge: %v", err)
			}
			if ok {
				if joined.Lanes != a.Lanes|l.Lanes {
					m.t.Fatalf("lanes %x and %x are joined to %x", a.Lanes, l.Lanes, joined.Lanes)
				}
				a = joined
				return true
			}
			for _, x := range []store.Lease{a, l} {
				m.lease = x
				got, err := m.round(store.Fresh, nil)
				if err != nil {
					m.t.Fatal(err)
				}
				n += len(got)
			}
			return false
		})
	}
	if n > total {
		m.t.Errorf("%d came, want at most %d", n, total)
	}
	return a, n
}

// Leases are joined, with all that hangs on them.
func testMerge(b *bench) {
	m := b.join()
	if _, ok := m.s.(store.Merger); !ok {
		b.t.Skip("not a Merger")
	}
	b.put(spread(60, 30)...)
	var leases []store.Lease
	for range 4 {
		leases = append(leases, m.acquire(16)...)
	}
	n, waits := 0, 0
	for i, l := range leases {
		m.lease = l
		m.params.MaxRecords = 3 + 2*i
		c := m.nextFresh()
		m.start(c)
		for _, o := range m.settleWith(c, func(r outrider.Record) store.Outcome {
			if i%2 == 0 {
				return waiting(1, 0)
			}
			return published
		}) {
			if o.State == store.Published {
				n++
			} else {
				waits++
			}
		}
	}
	if waits == 0 {
		b.t.Fatal("nothing waits")
	}
	// They stand at different pages, too.
	b.put(spread(60, 30)...)
	m.params.MaxRecords = 1
	for i, l := range leases {
		m.lease = l
		for range 2 * i {
			got, err := m.round(store.Fresh, nil)
			if err != nil {
				b.t.Fatal(err)
			}
			n += len(got)
		}
	}
	old := slices.Clone(leases)
	joined, more := m.merge(leases, 120)
	n += more
	if joined.Lanes != store.AllLanes {
		b.t.Fatalf("joined lanes are %x", joined.Lanes)
	}
	m.lease = joined
	m.params.MaxRecords = 100
	b.put(spread(40, 30)...)
	m.drain(160-n, nil)
	m.idle()
	for _, l := range old {
		if l.ID != joined.ID {
			m.lease = l
			if _, err := m.s.Release(b.ctx, l, 0); !errors.Is(err, store.ErrFenced) {
				b.t.Errorf("release of a lease that was joined to another: %v, want ErrFenced", err)
			}
		}
	}
}

// settleWith settles by what decide says, and returns the outcomes.
func (m *member) settleWith(c *store.Claim, decide func(outrider.Record) store.Outcome) []store.Outcome {
	m.t.Helper()
	o := m.outcomes(c, decide)
	m.settle(c, o...)
	return o
}

// Leases that stand at different places of a backlog, while more is written,
// some of it with ids that commit late.
func testMergeBacklog(b *bench) {
	m := b.join()
	if _, ok := m.s.(store.Merger); !ok {
		b.t.Skip("not a Merger")
	}
	m.params.MaxRecords = 7
	var leases []store.Lease
	for range 2 {
		leases = append(leases, m.acquire(32)...)
	}
	b.put(spread(100, 20)...)
	n := 0
	for i := range 6 {
		m.lease = leases[0]
		got, err := m.round(store.Fresh, nil)
		if err != nil {
			b.t.Fatal(err)
		}
		n += len(got)
		if b.harness.OneWriter {
			b.put(spread(10, 20)...)
			continue
		}
		x := b.begin()
		x.add(spread(5, 20)...)
		b.put(spread(5, 20)...)
		if i%2 == 0 {
			m.lease = leases[1]
			got, err := m.round(store.Fresh, nil)
			if err != nil {
				b.t.Fatal(err)
			}
			n += len(got)
		}
		x.commit()
	}
	joined, more := m.merge(leases, 160)
	m.lease = joined
	m.params.MaxRecords = 100
	m.drain(160-n-more, nil)
	m.idle()
	if left := b.ledger.Missing(mainDest); len(left) > 0 {
		b.t.Errorf("lost %v", idsOf(left))
	}
}
