package sqlitestore

import "github.com/outrider-dev/outrider/store"

// page is what a claim covers: the rows with From < id <= To. These bounds are
// committed before it is sent, so that who comes after a crash reads the same
// rows. Its JSON form is kept in outbox_leases.open.
type page struct {
	From int64 `json:"from"`
	To   int64 `json:"to"`
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
// the former owner gave it back: it stays as it was.
func (h hand) died(clean bool) hand {
	total := 0
	for _, p := range h.Open {
		total += p.N
	}
	out := hand{Open: []page{}}
	for _, p := range h.Open {
		switch {
		case clean:
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

// heldKey is a key that does not move with its lease: because its head failed,
// waits or is slow, or because it has more than its share. It has a position
// of its own.
type heldKey struct {
	key  string
	lane int
	head int64 // its exception; 0: free, to be drained
	at   int64 // its successors are done up to here
	last int64 // and there may be some that were passed over up to here

	inHand   int   // successors in hand
	inHandTo int64 // the last of them
	page     int64 // of their sequences
	// After a death: up to where they were in hand, how many of them go
	// together, and how often the first was alone.
	again    int64
	together int
	starts   int

	// born is the number of the claim at which the key was held back; wait is
	// that of the last claim that may have records of the key in hand: the key
	// is drained once that one is settled.
	born, wait int64
	loaded     bool  // it was held back before the lease was acquired
	borrowed   bool  // and the database does not know yet
	parked     bool  // exceptions may wait for its head to be out of the way
	served     int64 // when it was last part of a Due claim
}

// ready reports whether nothing is in hand that may hold records of the key.
// Called with mu held.
func (k *heldKey) ready(l *lease) bool {
	return k.inHand == 0 && (len(l.open) == 0 || l.open[0].no > k.wait)
}

// unknown are the held keys that the database does not know and has to as soon as
// it says that the lease stands at an id: that the lease has passed over some of
// theirs is written nowhere else. Called with mu held.
func (l *lease) unknown(done int64) []*heldKey {
	var out []*heldKey
	for key := range l.borrowed {
		switch k := l.held[key]; {
		case k == nil || !k.borrowed:
			delete(l.borrowed, key)
		case k.at < done:
			out = append(out, k)
		}
	}
	return out
}

// copies are keys to be written while others may change.
func copies(keys []*heldKey) []heldKey {
	out := make([]heldKey, len(keys))
	for i, k := range keys {
		out[i] = *k
	}
	return out
}

// mask is the lanes as SQLite keeps them.
func mask(s store.LaneSet) int64 { return int64(s) }
