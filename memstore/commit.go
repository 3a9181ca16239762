package memstore

import (
	"context"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/outrider-dev/outrider/store"
)

// Commit implements store.Session.
func (ss *session) Commit(ctx context.Context, p store.CommitParams) error {
	return ss.store.do(ctx, OpCommit, func(now time.Time) error {
		l, err := ss.held(p.Lease)
		if err != nil {
			return err
		}
		if same(l.last, p) {
			return nil // its answer was lost
		}
		if err := l.check(p); err != nil {
			return err
		}
		for _, st := range p.Settle {
			st.Claim.Driver.(*claim).settle(st.Outcomes, now) //nolint:errcheck // check has asked
		}
		for _, c := range p.Start {
			c.Driver.(*claim).start() //nolint:errcheck // check has asked
		}
		l.last = store.CommitParams{Settle: slices.Clone(p.Settle), Start: slices.Clone(p.Start)}
		return nil
	})
}

// same reports whether two commits are one that was repeated.
func same(a, b store.CommitParams) bool {
	return len(a.Settle)+len(a.Start) > 0 && slices.Equal(a.Start, b.Start) &&
		slices.EqualFunc(a.Settle, b.Settle, func(x, y store.Settlement) bool {
			return x.Claim == y.Claim && slices.Equal(x.Outcomes, y.Outcomes)
		})
}

// start puts a claim in hand.
func (c *claim) start() {
	c.started = true
	for i, x := range c.cells {
		x.seq = c.place(i)
		x.state = store.InHand
		delete(x.dest.exceptions, x)
	}
	for _, k := range c.held {
		if k.share == c {
			k.share = nil
		}
	}
}

// settle notes what became of a claim's records.
func (c *claim) settle(outcomes []store.Outcome, now time.Time) {
	d := c.lease.dest
	for i, o := range outcomes {
		x := c.cells[i]
		if o.State == store.Unchanged {
			continue
		}
		if o.State == store.InHand {
			d.exceptions[x] = struct{}{}
			x.hold(now)
			continue
		}
		x.claim = nil
		delete(d.exceptions, x)
		if o.State == store.Pending { // not sent: nothing is known anew
			x.state = store.Pending
			x.hold(now)
			continue
		}
		x.again, x.piece = false, 0
		delete(d.again, x)
		switch o.State {
		case store.Waiting, store.Failed:
			x.fail(o, now)
		case store.Scheduled:
			x.state, x.due = store.Scheduled, x.row.record.AvailableAt
			d.exceptions[x] = struct{}{}
		default:
			x.finish(o.State)
		}
	}
	c.settled = true
	if !slices.ContainsFunc(c.cells, func(x *cell) bool { return x.claim == c }) {
		c.drop()
	}
	for _, x := range c.cells {
		if x.key != nil {
			d.rest(x.key)
		}
	}
}

// fail notes a failure.
func (x *cell) fail(o store.Outcome, now time.Time) {
	if o.Attempts > x.attempts && x.firstFailed.IsZero() {
		x.firstFailed = now
	}
	x.lastFailed = now
	x.attempts, x.class, x.message = o.Attempts, o.Class, cut(o.Message)
	x.free = o.State == store.Failed && o.Free
	if x.free {
		x.finish(store.Failed)
		return
	}
	x.state, x.due = o.State, now.Add(o.Due)
	x.dest.exceptions[x] = struct{}{}
	x.hold(now)
}

// cut makes evidence fit to be kept: text without NULs, of bounded length.
func cut(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	s = strings.ReplaceAll(s, "\x00", "\uFFFD")
	if len(s) <= store.MaxMessage {
		return s
	}
	n := store.MaxMessage
	for !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// check finds what is against the rules of package store.
func (l *lease) check(p store.CommitParams) error {
	settled := map[*claim]bool{} // by this commit, for the first time
	left := map[*claim]int{}     // records in hand after this commit
	for _, c := range l.claims {
		for _, x := range c.cells {
			if c.started && x.claim == c {
				left[c]++
			}
		}
	}
	for _, st := range p.Settle {
		c, ok := st.Claim.Driver.(*claim)
		if !ok || !slices.Contains(l.claims, c) || !c.started {
			return misuse("settlement of a claim that is not in hand")
		}
		first := !c.settled && !settled[c]
		if err := c.check(st.Outcomes, first); err != nil {
			return err
		}
		if first && c.Kind == store.Fresh {
			for _, x := range l.claims[:slices.Index(l.claims, c)] {
				if x.Kind == store.Fresh && !x.settled && !settled[x] {
					return misuse("a Fresh claim was settled before the one in front of it")
				}
			}
		}
		settled[c] = true
		for _, o := range st.Outcomes {
			if o.State != store.Unchanged && o.State != store.InHand {
				left[c]--
			}
		}
	}
	starting := map[*claim]bool{}
	for _, pub := range p.Start {
		c, ok := pub.Driver.(*claim)
		if !ok || !slices.Contains(l.claims, c) || c.started || starting[c] {
			return misuse("start of a claim that has been started, settled or forgotten, or has no records")
		}
		for _, x := range l.claims {
			busy := left[x] > 0 || starting[x]
			switch {
			case x == c:
			case busy && (c.Exclusive || x.Exclusive):
				return misuse("start of a claim beside an exclusive one")
			case c.Kind == store.Fresh && x.Kind == store.Fresh && !x.started && !starting[x] &&
				slices.Index(l.claims, x) < slices.Index(l.claims, c):
				return misuse("a Fresh claim was started before the one in front of it")
			}
		}
		starting[c] = true
	}
	return nil
}

// check finds what is wrong with the outcomes of one claim.
func (c *claim) check(outcomes []store.Outcome, first bool) error {
	if len(outcomes) != len(c.cells) {
		return misuse("%d outcomes for %d records", len(outcomes), len(c.cells))
	}
	stopped := map[*key]bool{}
	for i, o := range outcomes {
		x := c.cells[i]
		switch {
		case o.State > store.Failed:
			return misuse("outcome %d is %v", i, o.State)
		case first && o.State == store.Unchanged:
			return misuse("outcome %d of a first settlement is Unchanged", i)
		case !first && o.State != store.Unchanged && x.claim != c:
			return misuse("outcome %d was settled before", i)
		case !first:
			continue
		case x.key != nil && stopped[x.key] && o.State != store.Pending:
			return misuse("outcome %d is %d behind one of its key that was not delivered", i, o.State)
		}
		switch {
		case o.State == store.Published, o.State == store.Scheduled, o.State == store.Failed && o.Free:
		case x.key != nil:
			stopped[x.key] = true
		}
	}
	return nil
}
