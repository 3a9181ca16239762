package storetest

import (
	"github.com/outrider-dev/outrider/store"
)

// A destination is summed up.
func testStatus(b *bench) {
	in := b.inspector()
	m := b.owner()
	of := func() store.DestinationStatus {
		b.t.Helper()
		s, err := in.Status(b.ctx)
		if err != nil || len(s.Destinations) != 1 || s.Destinations[0].Name != mainDest {
			b.t.Fatalf("status: %+v, %v", s, err)
		}
		if len(s.Relays) != 1 || s.Relays[0].Name != "relay" || s.Relays[0].Seen < 0 {
			b.t.Errorf("relays: %+v", s.Relays)
		}
		return s.Destinations[0]
	}
	s := of()
	if s.OldestPending+s.OldestBlocked+s.OldestFailed != 0 || s.Pending.N+s.Failed.N+s.Waiting.N+s.Publishing.N != 0 {
		b.t.Errorf("status of nothing is %+v", s)
	}
	if len(s.Leases) != 1 || s.Leases[0].Owner != "relay" || s.Leases[0].Count != 64 || s.Leases[0].Epoch != m.lease.Epoch ||
		s.Leases[0].Expires <= 0 || s.Leases[0].ID != m.lease.ID || s.Leases[0].Lanes != store.AllLanes {
		b.t.Errorf("leases are %+v", s.Leases)
	}
	b.sorts(m)
	b.pause()
	s = of()
	if s.OldestPending <= 0 || s.OldestBlocked <= 0 || s.OldestFailed <= 0 {
		b.t.Errorf("ages are %+v", s)
	}
	if n := s.Pending; !n.Estimate && n.N != 3 && n.N != 1 {
		b.t.Errorf("pending are %+v, want 3, or 1 that is not held", n)
	}
	if s.Failed.N != 1 || s.Waiting.N != 1 || s.Scheduled.N != 1 || s.Publishing.N != 1 || s.BlockedKeys.N != 2 {
		b.t.Errorf("status is %+v", s)
	}
	if _, err := m.s.Release(b.ctx, m.lease, 0); err != nil {
		b.t.Fatal(err)
	}
	if s := of(); len(s.Leases) != 1 || s.Leases[0].Owner != "" {
		b.t.Errorf("leases after release are %+v", s.Leases)
	}
}

// status is how the only lease and the only relay stand.
func (b *bench) status() (store.LeaseStatus, store.RelayStatus) {
	b.t.Helper()
	s, err := b.inspector().Status(b.ctx)
	if err != nil || len(s.Destinations) != 1 || len(s.Destinations[0].Leases) != 1 || len(s.Relays) > 1 {
		b.t.Fatalf("status: %+v, %v", s, err)
	}
	if len(s.Relays) == 0 {
		return s.Destinations[0].Leases[0], store.RelayStatus{}
	}
	return s.Destinations[0].Leases[0], s.Relays[0]
}

// stuck is how many are in hand with nobody.
func (b *bench) stuck() int64 {
	b.t.Helper()
	s, err := b.inspector().Status(b.ctx)
	if err != nil || len(s.Destinations) != 1 {
		b.t.Fatalf("status: %+v, %v", s, err)
	}
	return s.Destinations[0].Stuck.N
}

// A relay whose connection has ended holds nothing, though nobody has taken
// over yet.
func testStatusOfTheDead(b *bench) {
	m := b.mortalOwner()
	if l, r := b.status(); !l.Held() || l.Gone || r.Gone {
		b.t.Errorf("alive: %+v, %+v", l, r)
	}
	b.put(events("a", "b", "c")...)
	m.settle(m.hand(), inHand, published, waiting(1, 0))
	m.start(m.nextDue())
	if got := b.stuck(); got != 0 {
		b.t.Errorf("%d are stuck with one that lives", got)
	}
	m.die()
	b.until("the dead hold nothing", func() bool {
		l, r := b.status()
		return !l.Held() && l.Owner != "" && r.Gone
	})
	if got := b.stuck(); got != 2 {
		b.t.Errorf("%d are stuck, want 2: one that was slow and one that was tried again", got)
	}
	if l, _ := b.status(); l.Gone != b.caps.LiveTakeOver {
		b.t.Errorf("its owner is gone: %+v, while LiveTakeOver is %v", l, b.caps.LiveTakeOver)
	}
	m = b.heir()
	if got := b.stuck(); got != 0 {
		b.t.Errorf("%d are stuck after the take-over", got)
	}
	m.drain(2, nil)
	m.idle()
}

// Of relays that share the lanes one is dead: what it had in hand is stuck, and
// what the other has is not.
func testStatusOfTheDeadBesideTheLiving(b *bench) {
	dead, alive := b.joinMortal(), b.join()
	dead.lease = dead.acquire(20)[0]
	alive.lease = alive.acquire(64)[0]
	b.put(spread(90, 90)...)
	left, slow := dead.hand(), alive.hand()
	dead.settle(left, inHand)
	alive.settle(slow, inHand)
	if got := b.stuck(); got != 0 {
		b.t.Errorf("%d are stuck with two that live", got)
	}
	dead.die()
	b.until("what the dead one had in hand is stuck", func() bool { return b.stuck() == int64(len(left.Records)) })
	alive.finish(slow)
}

// So does one that was not heard of for as long as its leases live. One that
// left is not shown, and its leases are free since no time at all.
func testStatusOfTheExpired(b *bench) {
	m := b.joinAs(terms{ttl: b.short()}).takeAll()
	b.until("the lease expires", func() bool {
		l, r := b.status()
		return !l.Held() && l.Expires <= 0 && r.Gone
	})
	if l, _ := b.status(); l.Gone || l.Expires < -forever {
		b.t.Errorf("expired: %+v", l)
	}
	if err := m.s.Leave(b.ctx); err != nil {
		b.t.Fatal(err)
	}
	if l, r := b.status(); l.Held() || l.Expires > 0 || l.Expires < -forever || r.Name != "" {
		b.t.Errorf("left: %+v, %+v", l, r)
	}
}
