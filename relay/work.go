package relay

import (
	"slices"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// recState is where a record of a claim in hand stands.
type recState uint8

const (
	todo  recState = iota // to be sent
	out                   // in the sink's hands
	done                  // its outcome stands
	back                  // not sent, goes back behind the one that holds its key
	aside                 // in the sink's hands, and settled as InHand
	gone                  // in the sink's hands, and settled as Pending: too late
)

// stage is where a claim stands with the store.
type stage uint8

const (
	isRead    stage = iota // Claim has returned it
	starting               // a Commit that starts it is under way
	started                // it may be sent
	settling               // a Commit with its first settlement is under way
	isSettled              // only records set aside are in hand
)

// work is a claim and all that is known of it. Its worker owns it.
type work struct {
	claim *store.Claim
	seq   int64 // grows in the order in which the worker's claims were asked for
	stage stage

	state    []recState
	outcomes []store.Outcome
	tries    map[int]int  // failed attempts in hand, on top of Record.Attempts
	again    map[int]bool // may have been delivered in hand
	refused  map[int]int  // held back by the sink, with nothing in front
	left     int          // records that are todo or out
	todo     int
	from     int   // none before it is todo
	probes   int   // worker.probes when it was read
	stuck    int64 // worker.turn in which nothing of it could be sent

	sent     bool // a call has begun with something of it
	marred   bool // not everything was published
	asides   int  // InHand in the store, or about to be
	ended    map[int]store.Outcome
	receipts receipts

	alone pass // for a claim that has to be alone
	share share
}

// newWork wraps a claim, in a used work if there is one.
func (w *worker) newWork(c *store.Claim, seq int64, s share) *work {
	var k *work
	if n := len(w.spare); n > 0 {
		k = w.spare[n-1]
		w.spare = w.spare[:n-1]
	} else {
		k = &work{tries: map[int]int{}, again: map[int]bool{}, refused: map[int]int{},
			ended: map[int]store.Outcome{}}
	}
	n := len(c.Records)
	k.claim, k.seq, k.stage, k.share = c, seq, isRead, s
	k.state = slices.Grow(k.state[:0], n)[:n]
	clear(k.state)
	k.outcomes = slices.Grow(k.outcomes[:0], n)[:n]
	clear(k.outcomes)
	k.left, k.todo, k.from, k.stuck, k.probes = n, n, 0, -1, w.probes
	return k
}

// recycle keeps a work that has ended for the next claim, unless the sink still
// has something of it in hand.
func (w *worker) recycle(k *work) {
	if w.called(k) {
		return
	}
	clear(k.tries)
	clear(k.again)
	clear(k.refused)
	clear(k.ended)
	k.receipts.reset()
	k.claim, k.asides, k.marred, k.sent = nil, 0, false, false
	if len(w.spare) < w.relay.cfg.InFlightClaims+1 {
		w.spare = append(w.spare, k)
	}
}

// resolved reports whether the first settlement can be written.
func (k *work) resolved() bool { return k.stage == started && k.left == 0 }

func (k *work) rec(i int) *outrider.Record { return &k.claim.Records[i] }

// attempts of a record so far.
func (k *work) attempts(i int) int {
	n := k.rec(i).Attempts
	if len(k.tries) > 0 {
		n += k.tries[i]
	}
	return n
}

// set moves a record to another state and keeps the counts.
func (k *work) set(i int, s recState) {
	was := k.state[i]
	if was == todo {
		k.todo--
	}
	if s == todo {
		k.todo++
		k.from = min(k.from, i)
	}
	if was <= out && s > out {
		k.left--
	} else if was > out && s <= out {
		k.left++
	}
	k.state[i] = s
}

// finish gives a record its outcome. For one that was set aside it is kept for
// a settlement of its own.
func (k *work) finish(i int, o store.Outcome) {
	if k.state[i] == aside {
		k.ended[i] = o
		k.state[i] = done
		return
	}
	k.outcomes[i] = o
	k.marred = k.marred || o.State != store.Published
	k.set(i, done)
}

// giveBack says that a record was not sent.
func (k *work) giveBack(i int) {
	k.outcomes[i] = store.Outcome{State: store.Pending}
	k.marred = true
	k.set(i, back)
}

// hold says that a key goes no further: what is later in order, of claims that
// were asked for up to a certain one, goes back. Claims that are asked for
// later do not contain the key, unless the store has freed it.
type hold struct {
	seq  int64 // the earliest record that holds: its claim
	pos  int   // and its place there
	head int64 // the claim whose settlement tells the store
	till int64 // last claim concerned; forever: the store does not know yet
	slow bool  // it is set aside, and has not failed
	prev *hold // an earlier one of which claims are still in hand
}

const forever = int64(1)<<62 - 1

// later reports whether a place is behind the one that holds.
func (h *hold) later(seq int64, pos int) bool {
	return seq <= h.till && (seq > h.seq || seq == h.seq && pos > h.pos)
}

// park says that a key's message has failed and may be sent again in hand: as
// long as others of the key are in the sink's hands nothing of it is sent,
// because what the sink stops would else be overtaken.
//
// It is also said of a key whose message is slow while other keys go on.
type park struct {
	failed bool
	seq    int64 // the earliest that failed
	pos    int
	out    int
}

func (p *park) later(seq int64, pos int) bool {
	return p.failed && (seq > p.seq || seq == p.seq && pos > p.pos)
}

// isHeld reports whether a record goes back.
func (w *worker) isHeld(k *work, i int) bool { return w.heldBy(k, i) != nil }

// heldBy is what holds a record back, nil for nothing.
func (w *worker) heldBy(k *work, i int) *hold {
	if len(w.held) == 0 {
		return nil
	}
	for h := w.held[k.rec(i).Key]; h != nil; h = h.prev {
		if h.later(k.seq, i) {
			return h
		}
	}
	return nil
}

// holdKey stops a record's key behind it.
func (w *worker) holdKey(k *work, i int) {
	key := k.rec(i).Key
	if key == "" {
		return
	}
	w.unswept = true
	h := w.held[key]
	switch {
	case h == nil || h.till != forever:
		w.held[key] = &hold{seq: k.seq, pos: i, head: k.seq, till: forever, prev: h}
	case k.seq < h.seq || k.seq == h.seq && i < h.pos:
		h.seq, h.pos, h.head, h.slow = k.seq, i, k.seq, false
	}
}

// parkKey keeps a record's key from being sent until the sink has let go of it.
func (w *worker) parkKey(k *work, i int) {
	key := k.rec(i).Key
	if key == "" {
		return
	}
	p := w.parked[key]
	if p == nil {
		p = &park{}
		w.parked[key] = p
	}
	if !p.failed || k.seq < p.seq || k.seq == p.seq && i < p.pos {
		p.failed, p.seq, p.pos = true, k.seq, i
	}
}

// sweep applies new holds to what is in hand, so that each settlement obeys
// the rule that everything behind a key's first unfinished record is Pending.
// It also covers what was decided without sending while an earlier message of
// the key was still on its way.
func (w *worker) sweep() {
	if !w.unswept {
		return
	}
	w.unswept = false
	for _, k := range w.inHand() {
		if k.stage >= settling {
			continue
		}
		for i := range k.state {
			if k.state[i] != todo && k.state[i] != done || !w.isHeld(k, i) {
				continue
			}
			k.giveBack(i)
		}
	}
}

// recount finds parked keys that the sink has let go of.
func (w *worker) recount() {
	if len(w.parked) == 0 {
		return
	}
	for _, p := range w.parked {
		p.out = 0
	}
	for _, k := range w.inHand() {
		for i, s := range k.state {
			if s == out || s == aside || s == gone {
				if p := w.parked[k.rec(i).Key]; p != nil {
					p.out++
				}
			}
		}
	}
	for key, p := range w.parked {
		if p.out == 0 {
			delete(w.parked, key)
		}
	}
}

// release forgets holds that concern no claim any more.
func (w *worker) release() {
	if len(w.held) == 0 {
		return
	}
	oldest := forever
	for _, k := range w.inHand() {
		if k.stage < isSettled {
			oldest = min(oldest, k.seq)
		}
	}
	if w.reading != nil {
		oldest = min(oldest, w.reading.seq)
	}
	for key, h := range w.held {
		if h = h.without(oldest); h == nil {
			delete(w.held, key)
		} else {
			w.held[key] = h
		}
	}
}

// without is the chain without the holds that concern no claim from oldest on.
func (h *hold) without(oldest int64) *hold {
	if h == nil {
		return nil
	}
	h.prev = h.prev.without(oldest)
	if h.till < oldest {
		return h.prev
	}
	return h
}

// inHand lists all claims, those set aside first, each kind in its order.
func (w *worker) inHand() []*work {
	w.all = append(append(w.all[:0], w.aside...), w.fresh...)
	if w.due != nil {
		w.all = append(w.all, w.due)
	}
	return w.all
}

// waiting is the outcome of a record that is to be tried again later at no
// cost.
func (w *worker) waiting(k *work, i int, due time.Duration, class sink.Class, err error) store.Outcome {
	return store.Outcome{State: store.Waiting, Attempts: k.attempts(i), Due: due,
		Class: string(class), Message: text(err)}
}
