package relay

import (
	"fmt"
	"strings"
)

// dump shows what a relay's workers have in hand; nothing may be running.
func (r *running) dump() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%+v\n", r.Health())
	r.workers.each(func(w *worker) {
		fmt.Fprintf(&b, "  worker %s lease %d: draining %v leaving %v told %v reading %v commit %v wantFresh %v wantDue %v dueAt %v nextAt %v now %v held %d parked %d turn %d calls %d\n",
			w.dest.Name, w.lease.ID, w.draining, w.leaving, w.told, w.reading != nil, w.commit != nil, w.wantFresh, w.wantDue, w.dueAt, w.nextAt, r.now(), len(w.held), len(w.parked), w.turn, len(w.calls))
		for _, k := range w.inHand() {
			fmt.Fprintf(&b, "    claim %d kind %d stage %d n %d left %d todo %d stuck %d asides %d excl %v alone %v alone %+v states %v\n", k.seq, k.claim.Kind, k.stage, len(k.state), k.left, k.todo, k.stuck, k.asides, k.claim.Exclusive, k.claim.Alone, k.alone, k.state[:min(len(k.state), 20)])
		}
		for _, c := range w.calls {
			fmt.Fprintf(&b, "    call of %d n %d left %d seen %d accepted %v fate %d ticket %+v\n", c.k.seq, len(c.msgs), c.left.Load(), c.seen, c.isAccepted(), c.fate.Load(), c.ticket)
		}
	})
	for _, d := range r.dests {
		fmt.Fprintf(&b, "  breaker %+v\n", d.brk.state)
		fmt.Fprintf(&b, "  allow %d out %d until %v probe %v asked %d failed %d\n", d.brk.allow, d.brk.out, d.brk.until, d.brk.probe != nil, len(d.brk.asked), d.brk.failed)
	}
	fmt.Fprintf(&b, "  gate %+v\n", r.cfg.Gate.shared)
	return b.String()
}
