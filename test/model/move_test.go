package model

import (
	"errors"

	"pgregory.net/rapid"

	"github.com/outrider-dev/outrider/store"
)

// release gives back a lease, whatever is in hand, or a part of one.
func (m *machine) release(t *rapid.T) {
	h := m.lease(t)
	if h.lost != nil || h.moving != nil {
		t.SkipNow()
	}
	keep := store.LaneSet(0)
	if len(h.inHand()) == 0 {
		keep = h.lease.Lanes & rapid.SampledFrom([]store.LaneSet{0, 0xffff, 0x5555555555555555, ^store.LaneSet(0xff)}).Draw(t, "keep")
	}
	m.maybeLose(t, h.r)
	m.releaseOf(h, keep)
}

// move is a Release or a Merge whose answer was lost, and is repeated before
// anything else is done with the lease.
type move struct {
	keep  store.LaneSet // Release
	other *holding      // Merge: the lease that is to be joined into this one,
	into  *holding      // or the one that this is to be joined into
}

// free reports whether lanes have been given back if the move took effect.
func (x *move) free(lanes store.LaneSet) bool {
	return x.other == nil && x.into == nil && lanes&x.keep == 0
}

func (m *machine) releaseOf(h *holding, keep store.LaneSet) {
	m.t.Helper()
	again := h.moving != nil
	left, err := h.r.s.Release(m.ctx, h.lease, keep)
	m.logf("  %s releases lease %d but for lanes %x: %v", h.r.name, h.lease.ID, keep, err)
	lost := m.calmed()
	if errors.Is(err, store.ErrFenced) && !(keep == 0 && (again || lost)) {
		h.findTaken()
	}
	switch {
	case errors.Is(err, store.ErrFenced) && (again || lost) && keep == 0:
		h.abandon()
		h.drop()
		return
	case err != nil && lost && !errors.Is(err, store.ErrFenced):
		h.moving = &move{keep: keep}
		return
	case err != nil:
		m.refused(h, "release", err)
		return
	case h.taken && again:
		h.drop()
		return
	}
	h.moving = nil
	if h.taken && keep != h.lease.Lanes {
		m.fatalf("%s: lease %d was released, and somebody else has it", h.r.name, h.lease.ID)
	}
	if left.Lanes != keep {
		m.fatalf("%s: lease %+v is left, want lanes %x", h.r.name, left, keep)
	}
	if keep == 0 {
		h.abandon()
		h.drop()
		return
	}
	h.lease = left
}

// merge joins two leases with nothing in hand.
func (m *machine) merge(t *rapid.T) {
	var a, b *holding
	for _, r := range m.relays {
		var free []*holding
		for _, h := range r.holdings {
			if !h.over && h.lost == nil && h.moving == nil && len(h.inHand()) == 0 {
				free = append(free, h)
			}
		}
		for i := range free {
			for _, x := range free[i+1:] {
				if x.lease.Destination == free[i].lease.Destination && a == nil {
					a, b = free[i], x
				}
			}
		}
	}
	if a == nil {
		t.SkipNow()
	}
	mg, ok := a.r.s.(store.Merger)
	if !ok {
		t.SkipNow()
	}
	if chance(t, "swap", 2) {
		a, b = b, a
	}
	m.maybeLose(t, a.r)
	m.mergeOf(mg, a, b)
}

func (m *machine) mergeOf(mg store.Merger, a, b *holding) {
	m.t.Helper()
	again := a.moving != nil
	l, ok, err := mg.Merge(m.ctx, a.lease, b.lease)
	m.logf("  merge of leases %d and %d: %v, %v", a.lease.ID, b.lease.ID, ok, err)
	lost := m.calmed()
	switch {
	case errors.Is(err, store.ErrFenced) && (a.taken || b.taken || a.unsure || b.unsure):
		a.moving, b.moving = nil, nil
	case err != nil && lost && !errors.Is(err, store.ErrFenced):
		a.moving, b.moving = &move{other: b}, &move{into: a}
	case err != nil:
		m.fatalf("merge: %v", err)
	case ok && (a.taken || b.taken) && !again:
		m.fatalf("leases were merged of which somebody else has one")
	case ok:
		if l.Lanes != a.lease.Lanes|b.lease.Lanes || l.ID != a.lease.ID {
			m.fatalf("merge of %+v and %+v gives %+v", a.lease, b.lease, l)
		}
		a.lease, a.moving = l, nil
		b.drop()
	default:
		a.moving, b.moving = nil, nil
	}
}

// repeat asks once more what had no answer.
func (h *holding) repeat() {
	m := h.r.m
	switch x := h.moving; {
	case x.into != nil:
		x.into.repeat()
	case x.other != nil:
		m.mergeOf(h.r.s.(store.Merger), h, x.other)
	default:
		m.releaseOf(h, x.keep)
	}
}

// arrive notes what is left of a lease, as it shows without a call having been
// repeated. No lanes: it is gone.
func (h *holding) arrive(left store.LaneSet) {
	x := h.moving
	if x == nil {
		return
	}
	h.moving = nil
	switch {
	case x.into != nil && left == 0: // joined
		x.into.lease.Lanes |= h.lease.Lanes
		x.into.moving = nil
	case x.into != nil:
		x.into.moving = nil
	case x.other != nil && left != h.lease.Lanes: // joined
		x.other.drop()
		h.lease.Lanes = left
	case x.other != nil:
		x.other.moving = nil
	case left == x.keep:
		h.lease.Lanes = left
	}
	if left == 0 {
		h.drop()
	}
}
