package pgstore

import "github.com/outrider-dev/outrider/store"

// position is where a lease stands.
//
// Everything visible in base is done. When more has come since than fits a
// page, target is the snapshot up to which the lease is working, and at is the
// id up to which it has: of the rows visible in target and not in base, those
// up to at are done as well.
type position struct {
	base   snapshot
	target *snapshot
	at     int64 // 0 outside a window
	top    int64 // no row visible in target has a higher id
	hi     int64 // no row visible in base has a higher id
	page   int64 // number of the last page
}

// page is what a claim covers: the rows visible in Snap and not in Base, with
// From < id <= To. These bounds are committed before it is sent, so that who
// comes after a crash reads the same rows. Its JSON form is kept in
// outbox_leases.open.
type page struct {
	Base string `json:"base"`
	Snap string `json:"snap"`
	From int64  `json:"from"`
	To   int64  `json:"to"`
	Top  int64  `json:"top,omitempty"`
	// Last: with this page everything visible in Snap is done.
	Last bool  `json:"last,omitempty"`
	Page int64 `json:"page"`
	N    int   `json:"n"`
	// Alone: its one record was in hand with nothing beside it.
	Alone bool `json:"alone,omitempty"`

	// Of a page to be read again: at most Limit records together (0: any
	// number), and how often the record of row One was alone in hand at a
	// death: others may be due by now that were not when it was sent.
	Limit  int   `json:"limit,omitempty"`
	Starts int   `json:"starts,omitempty"`
	One    int64 `json:"one,omitempty"`
}

// hand is what a lease has in hand, and what it has to read again.
type hand struct {
	Open []page `json:"open"`
	Redo []page `json:"redo,omitempty"`
}

// divisor is by how much the pieces shrink in which what was in hand at a death
// is sent again, until the message that kills is alone: 5,000, 250, 13, 1.
const divisor = 20

// pieces is how many of n records that were in hand at a death go together.
func pieces(n int) int { return max(1, (n+divisor-1)/divisor) }

// died turns what was in hand into what is to be read again. clean says that
// the former owner gave it back.
func (h hand) died(clean bool) hand {
	total := 0
	for _, p := range h.Open {
		total += p.N
	}
	out := hand{Open: []page{}}
	for _, p := range h.Open {
		switch {
		case clean: // a piece stays one
		case p.Alone:
			p.Limit = 1
			p.Starts++
		default:
			p.Limit, p.Starts, p.One = pieces(total), 0, 0
		}
		p.Alone = false
		out.Redo = append(out.Redo, p)
	}
	out.Redo = append(out.Redo, h.Redo...)
	return out
}

// after is the position once p is done.
func (pos position) after(p page) (position, error) {
	snap, err := parseSnapshot(p.Snap)
	if err != nil {
		return pos, err
	}
	pos.page = max(pos.page, p.Page)
	if !p.Last {
		pos.target, pos.at, pos.top = &snap, p.To, p.Top
		return pos, nil
	}
	pos.base, pos.target, pos.at = snap, nil, 0
	pos.hi = max(pos.hi, p.To, p.Top)
	pos.top = 0
	return pos, nil
}

// heldKey is a key that does not move with its lease: because its head failed,
// waits or is slow, or because it has more than its share. It has a position
// of its own, of the same kind: what is visible in base is done, and of what
// is visible in target what is up to at.
type heldKey struct {
	key  string
	lane int
	head int64 // its exception; 0: free, to be drained

	base   snapshot
	target *snapshot
	at     int64
	low    int64 // no successor that came up since is below this id; 0: none came
	next   int64 // the same for those beyond target

	inHand int // successors in hand
	// After a death: how many of the next successors were in hand, how many
	// of them go together, and how often the first was alone.
	suspects int
	together int
	starts   int

	// born is the number of the claim at which the key was held back.
	born int64
	// near: the last look found nothing left up to where the lease then stood.
	near bool
	// wait is the number of the last claim that may hold records of the key
	// in hand; the key is drained once that one is settled.
	wait int64
}

// skip notes that a page passed over a record of the key.
func (k *heldKey) skip(id int64) {
	if k.next == 0 || id < k.next {
		k.next = id
	}
}

// lowest is from where on successors may be.
func lowest(a, b int64) int64 {
	if a == 0 || (b != 0 && b < a) {
		return b
	}
	return a
}

// mask is the lanes as a bigint.
func mask(s store.LaneSet) int64 { return int64(s) }
