package storetest

import (
	"slices"
	"strings"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

var operateTests = []test{
	{"Show", testShow},
	{"List", testList},
	{"Pages", testPages},
	{"Status", testStatus},
	{"StatusOfTheDead", testStatusOfTheDead},
	{"StatusOfTheDeadBesideTheLiving", testStatusOfTheDeadBesideTheLiving},
	{"StatusOfTheExpired", testStatusOfTheExpired},
	{"Retry", testRetry},
	{"RetryFree", testRetryFree},
	{"RetryWaiting", testRetryWaiting},
	{"RetryByKey", testRetryByKey},
	{"ByKeyFailedHeadsOnly", testOperateByKey},
	{"Skip", testSkip},
	{"SkipWaiting", testSkipWaiting},
	{"SkipBeforeDeath", testSkipBeforeDeath},
	{"NotInHand", testOperateNotInHand},
	{"NotScheduled", testOperateNotScheduled},
	{"DelayedSuccessorHoldsNothing", testOperateDelayedSuccessor},
}

func (b *bench) inspector() store.Inspector {
	in, ok := b.Store.(store.Inspector)
	if !ok {
		b.t.Skip("not an Inspector")
	}
	return in
}

func (b *bench) operator() store.Operator {
	op, ok := b.Store.(store.Operator)
	if !ok {
		b.t.Skip("not an Operator")
	}
	return op
}

// sorts makes one event of each state, in this order: published, waiting, held
// behind it, failed, held behind it, delayed, in hand, new.
func (b *bench) sorts(m *member) []outrider.Event {
	b.t.Helper()
	e := events("done", "wait", "wait", "fail", "fail", "late", "hand", "new")
	e[5].Delay = forever
	b.put(e[:6]...)
	c := m.fresh()
	wantIDs(b.t, "Fresh", c.Records, e[:5]...)
	m.start(c)
	m.deliver(c, 0)
	m.settle(c, published, waiting(2, forever), pending, failed(5, false), pending)
	b.put(e[6])
	m.hand()
	b.put(e[7])
	return e
}

// An event is shown with its payload, by its id and by its row's.
func testShow(b *bench) {
	in := b.inspector()
	m := b.owner()
	e := b.sorts(m)
	for i, want := range []struct {
		state           store.State
		reason          string
		attempts        int
		class, message  string
		failed, dueLate bool
	}{
		{state: store.Published},
		{state: store.Waiting, reason: "retry", attempts: 2, class: "refused", message: "not now", failed: true, dueLate: true},
		{state: store.Pending, reason: "held behind "},
		{state: store.Failed, attempts: 5, class: "invalid", message: "never", failed: true},
		{state: store.Pending, reason: "held behind "},
		{state: store.Scheduled, reason: "due later", dueLate: true},
		{state: store.InHand},
		{state: store.Pending, reason: "new"},
	} {
		d, err := in.Show(b.ctx, e[i].ID)
		if err != nil || len(d) != 1 || len(d[0].Entries) != 1 {
			b.t.Fatalf("show %d: %+v, %v", i, d, err)
		}
		r, x := d[0].Record, d[0].Entries[0]
		if r.ID != e[i].ID || string(r.Payload) != string(e[i].Payload) || r.Key != e[i].Key || r.Row == "" {
			b.t.Errorf("event %d is shown as %+v", i, r)
		}
		if x.Destination != mainDest || x.Row != r.Row || x.EventID != r.ID || x.Type != r.Type || x.Key != r.Key ||
			x.AggregateType != r.AggregateType || x.AggregateID != r.AggregateID || x.CreatedAt.IsZero() {
			b.t.Errorf("entry %d is %+v", i, x)
		}
		reason := x.Reason
		if want.reason == "held behind " {
			head, _ := in.Show(b.ctx, e[i-1].ID)
			want.reason += head[0].Record.Row
		}
		if x.State != want.state || reason != want.reason || x.Attempts != want.attempts || x.Class != want.class ||
			x.Message != want.message || x.LastFailure.IsZero() == want.failed || x.DueIn > 0 != want.dueLate {
			b.t.Errorf("entry %d is %+v, want %+v", i, x, want)
		}
		byRow, err := in.Show(b.ctx, r.Row)
		if err != nil || len(byRow) != 1 || byRow[0].Record.ID != r.ID {
			b.t.Errorf("show row %s: %+v, %v", r.Row, byRow, err)
		}
	}
	for _, id := range []string{eventID(999_999_999), "999999999", "nothing", "", "'"} {
		if d, _ := in.Show(b.ctx, id); len(d) > 0 {
			b.t.Errorf("show %q: %+v", id, d)
		}
	}
}

// Lists are selected by what is asked.
func testList(b *bench) {
	in := b.inspector()
	m := b.owner()
	e := b.sorts(m)
	for _, c := range []struct {
		p    store.ListParams
		want []int
	}{
		{store.ListParams{State: store.Published}, []int{0}},
		{store.ListParams{State: store.Waiting}, []int{1}},
		{store.ListParams{State: store.Failed}, []int{3}},
		{store.ListParams{State: store.Scheduled}, []int{5}},
		{store.ListParams{State: store.InHand}, []int{6}},
		{store.ListParams{State: store.Pending}, []int{2, 4, 7}},
		{store.ListParams{State: store.Discarded}, nil},
		{store.ListParams{Key: "fail"}, []int{3, 4}},
		{store.ListParams{Key: "fail", State: store.Failed}, []int{3}},
		{store.ListParams{Type: "Happened"}, []int{0, 1, 2, 3, 4, 5, 6, 7}},
		{store.ListParams{Destination: mainDest}, []int{0, 1, 2, 3, 4, 5, 6, 7}},
		{store.ListParams{Destination: "other"}, nil},
		{store.ListParams{Type: "Other"}, nil},
		{store.ListParams{Key: "other"}, nil},
	} {
		page, err := in.List(b.ctx, c.p)
		if err != nil {
			b.t.Errorf("list %+v: %v", c.p, err)
			continue
		}
		var want []string
		for _, i := range c.want {
			want = append(want, e[i].ID)
		}
		var got []string
		for _, x := range page.Entries {
			got = append(got, x.EventID)
		}
		if !slices.Equal(got, want) || page.Next != "" {
			b.t.Errorf("list %+v: %v, next %q, want %v", c.p, got, page.Next, want)
		}
	}
}

// Pages follow each other without gap or repeat, while others are added.
func testPages(b *bench) {
	in := b.inspector()
	m := b.owner()
	e := spread(25, 25)
	b.put(e...)
	m.settle(m.hand(), failed(1, false))
	var got []string
	p := store.ListParams{State: store.Failed, Limit: 10}
	for i := range 3 {
		page, err := in.List(b.ctx, p)
		if err != nil {
			b.t.Fatal(err)
		}
		for _, x := range page.Entries {
			got = append(got, x.EventID)
		}
		if n := len(page.Entries); n != min(10, 25-10*i) || page.Next == "" != (i == 2) {
			b.t.Fatalf("page %d has %d entries, next %q", i, n, page.Next)
		}
		p.AfterRow = page.Next
		b.put(event("new"))
	}
	if !slices.Equal(got, idsOf(e)) {
		b.t.Errorf("listed %v, want %v", got, idsOf(e))
	}
}

func (b *bench) operate(what string, f func() (int, error), want int) {
	b.t.Helper()
	if n, err := f(); n != want || err != nil {
		b.t.Errorf("%s: %d, %v, want %d", what, n, err, want)
	}
}

// A failed event that is retried begins anew, at its key's head.
func testRetry(b *bench) {
	op := b.operator()
	m := b.owner()
	e := events("a", "a", "b")
	b.put(e...)
	m.settle(m.hand(), failed(4, false), pending, failed(4, false))
	m.idle()
	retry := func(t store.Target, want int) {
		b.t.Helper()
		b.operate("retry", func() (int, error) { return op.Retry(b.ctx, t) }, want)
	}
	retry(store.Target{ID: e[1].ID}, 0) // merely behind it
	for _, t := range []store.Target{{ID: eventID(999_999_999)}, {ID: e[0].ID, Destination: "other"}} {
		if n, _ := op.Retry(b.ctx, t); n != 0 {
			b.t.Errorf("retry of %+v: %d, want 0", t, n)
		}
	}
	m.idle()
	retry(store.Target{ID: e[0].ID, Destination: mainDest}, 1)
	c := m.nextDue()
	wantHead(b.t, "due", c.Records, e[:2]...)
	if r := c.Records[0]; r.Attempts != 0 || r.Starts != 0 || r.Waited != 0 {
		b.t.Errorf("retried with %d attempts, %d starts, waited %v", r.Attempts, r.Starts, r.Waited)
	}
	m.start(c)
	m.settle(c, failed(1, false), pending)
	retry(store.Target{ID: e[0].ID}, 1)
	retry(store.Target{ID: e[2].ID}, 1)
	m.drain(3, nil)
	m.idle()
	retry(store.Target{ID: e[0].ID}, 0) // is published
	m.idle()
}

// So is one whose key has gone on.
func testRetryFree(b *bench) {
	op := b.operator()
	m := b.owner()
	e := events("a", "a", "")
	b.put(e...)
	c := m.hand()
	b.ledger.GivenUp(mainDest, e[0].ID, e[2].ID)
	m.deliver(c, 1)
	m.settle(c, failed(4, true), published, failed(4, true))
	m.idle()
	for _, x := range []outrider.Event{e[0], e[2]} {
		b.operate("retry", func() (int, error) { return op.Retry(b.ctx, store.Target{ID: x.ID}) }, 1)
		b.ledger.Retried(mainDest, x.ID)
		wantIDs(b.t, "retried", m.drain(1, nil), x)
	}
	b.put(event("a"))
	m.drain(1, nil)
	m.idle()
}

// One that waits is hurried, and keeps its count.
func testRetryWaiting(b *bench) {
	op := b.operator()
	m := b.owner()
	e := events("a", "a")
	b.put(e...)
	m.settle(m.hand(), waiting(4, forever), pending)
	m.idle()
	b.operate("retry", func() (int, error) { return op.Retry(b.ctx, store.Target{ID: e[0].ID}) }, 1)
	c := m.nextDue()
	wantHead(b.t, "due", c.Records, e...)
	if n := c.Records[0].Attempts; n != 4 {
		b.t.Errorf("attempts are %d, want 4", n)
	}
	m.start(c)
	m.finish(c)
	m.drain(2-len(c.Records), nil)
	m.idle()
}

// The failed head of a key is found by the key.
func testRetryByKey(b *bench) {
	op := b.operator()
	m := b.owner()
	e := events("a", "a", "b")
	b.put(e...)
	m.settle(m.hand(), failed(4, false), pending, failed(4, false))
	if n, _ := op.Retry(b.ctx, store.Target{Key: "c"}); n != 0 {
		b.t.Errorf("retry of a key without events: %d", n)
	}
	b.operate("retry", func() (int, error) { return op.Retry(b.ctx, store.Target{Key: "a"}) }, 1)
	wantIDs(b.t, "retried", m.drain(2, nil), e[:2]...)
	m.idle()
	b.operate("skip", func() (int, error) { return op.Skip(b.ctx, store.Target{Key: "b"}) }, 1)
	m.idle()
}

// By its key nothing is meant but a head that has failed and still holds the key
// back.
func testOperateByKey(b *bench) {
	op := b.operator()
	m := b.owner()
	e := events("wait", "wait", "free", "both", "both", "both", "fail", "fail")
	b.put(e...)
	c := m.hand()
	b.ledger.GivenUp(mainDest, e[2].ID, e[3].ID)
	m.settle(c, waiting(2, forever), pending, failed(4, true), failed(4, true), failed(4, false), pending, failed(4, false), pending)
	m.idle()
	retry := func(key string, want int) {
		b.t.Helper()
		b.operate("retry of "+key, func() (int, error) { return op.Retry(b.ctx, store.Target{Key: key}) }, want)
	}
	skip := func(key string, want int) {
		b.t.Helper()
		b.operate("skip of "+key, func() (int, error) { return op.Skip(b.ctx, store.Target{Key: key}) }, want)
	}
	stands := func(x outrider.Event, want store.State) {
		b.t.Helper()
		for _, y := range b.standing(x.ID) {
			if y.State != want {
				b.t.Errorf("%s of key %s is %v, want %v", x.ID, x.Key, y.State, want)
			}
		}
	}
	for _, key := range []string{"wait", "free"} {
		retry(key, 0)
		skip(key, 0)
	}
	stands(e[0], store.Waiting)
	stands(e[2], store.Failed)
	m.idle() // what waits is not hurried

	retry("fail", 1)
	retry("fail", 0) // it waits now
	skip("fail", 0)
	retry("both", 1)
	stands(e[3], store.Failed)
	got := m.drain(4, nil)
	wantIDs(b.t, "retried", ofKey(got, "both"), e[4:6]...)
	wantIDs(b.t, "retried", ofKey(got, "fail"), e[6:]...)
	m.idle()

	retry("both", 0) // nothing is left of it but the one that let it go on
	skip("both", 0)
	stands(e[3], store.Failed)

	next := events("both", "both")
	b.put(next[0])
	m.drain(1, func(outrider.Record) store.Outcome { return failed(1, false) })
	b.put(next[1])
	skip("both", 1)
	skip("both", 0)
	b.ledger.GivenUp(mainDest, next[0].ID)
	stands(e[3], store.Failed)
	stands(next[0], store.Discarded)
	wantIDs(b.t, "behind the skipped one", m.drain(1, nil), next[1])
	m.idle()

	b.operate("retry of the one that waits", func() (int, error) { return op.Retry(b.ctx, store.Target{ID: e[0].ID}) }, 1)
	wantIDs(b.t, "hurried", m.drain(2, nil), e[:2]...)
	m.idle()
}

// A failed event that is skipped is gone, and its key goes on.
func testSkip(b *bench) {
	op := b.operator()
	m := b.owner()
	e := events("a", "a", "a", "b", "")
	b.put(e[0], e[1], e[3], e[4])
	m.settle(m.hand(), failed(4, false), pending, failed(4, true), failed(4, false))
	b.put(e[2])
	m.idle()
	for _, i := range []int{0, 3, 4} {
		b.operate("skip", func() (int, error) { return op.Skip(b.ctx, store.Target{ID: e[i].ID}) }, 1)
		b.operate("second skip", func() (int, error) { return op.Skip(b.ctx, store.Target{ID: e[i].ID}) }, 0)
		b.operate("retry of a skipped one", func() (int, error) { return op.Retry(b.ctx, store.Target{ID: e[i].ID}) }, 0)
		b.ledger.GivenUp(mainDest, e[i].ID)
		for _, x := range b.standing(e[i].ID) {
			if x.State != store.Discarded {
				b.t.Errorf("a skipped event is %v", x.State)
			}
		}
	}
	wantIDs(b.t, "behind the skipped one", m.drain(2, nil), e[1], e[2])
	b.operate("skip of a published one", func() (int, error) { return op.Skip(b.ctx, store.Target{ID: e[1].ID}) }, 0)
	m.idle()
}

// So is one that waits.
func testSkipWaiting(b *bench) {
	op := b.operator()
	m := b.owner()
	e := events("a", "a")
	b.put(e...)
	m.settle(m.hand(), waiting(4, forever), pending)
	b.operate("skip", func() (int, error) { return op.Skip(b.ctx, store.Target{ID: e[0].ID}) }, 1)
	b.ledger.GivenUp(mainDest, e[0].ID)
	wantIDs(b.t, "behind the skipped one", m.drain(1, nil), e[1])
	m.idle()
}

// It stays gone when its owner, who does not know yet, writes about its key and
// dies.
func testSkipBeforeDeath(b *bench) {
	op := b.operator()
	m := b.mortalOwner()
	e := events("a", "a")
	b.put(e[0])
	one := m.hand()
	b.put(e[1])
	two := m.hand()
	m.settle(one, waiting(4, forever))
	b.operate("skip", func() (int, error) { return op.Skip(b.ctx, store.Target{ID: e[0].ID}) }, 1)
	b.ledger.GivenUp(mainDest, e[0].ID)
	m.settle(two, pending)
	m.die()
	m = b.heir()
	wantIDs(b.t, "behind the skipped one", m.drain(1, nil), e[1])
	m.idle()
}

// What is in hand is the relay's.
func testOperateNotInHand(b *bench) {
	op := b.operator()
	m := b.owner()
	e := events("a", "b")
	b.put(e...)
	m.settle(m.hand(), failed(1, false), waiting(1, 0))
	b.operate("retry", func() (int, error) { return op.Retry(b.ctx, store.Target{ID: e[0].ID}) }, 1)
	c := m.nextDue()
	for len(c.Records) < 2 {
		m.s.Forget(c)
		c = m.nextDue()
	}
	m.start(c)
	for _, x := range e {
		b.operate("retry in hand", func() (int, error) { return op.Retry(b.ctx, store.Target{ID: x.ID}) }, 0)
		b.operate("skip in hand", func() (int, error) { return op.Skip(b.ctx, store.Target{ID: x.ID}) }, 0)
	}
	m.idle()
	m.finish(c)
	m.idle()
	for _, x := range e {
		for _, y := range b.standing(x.ID) {
			if y.State != store.Published || strings.Contains(y.Reason, "held") {
				b.t.Errorf("in the end it is %+v", y)
			}
		}
	}
}

// What is not due yet has not come to its turn: it is neither hurried nor
// skipped.
func testOperateNotScheduled(b *bench) {
	op := b.operator()
	m := b.owner()
	e := event("a")
	e.Delay = forever
	b.put(e)
	m.idle()
	b.operate("retry of a delayed one", func() (int, error) { return op.Retry(b.ctx, store.Target{ID: e.ID}) }, 0)
	b.operate("skip of a delayed one", func() (int, error) { return op.Skip(b.ctx, store.Target{ID: e.ID}) }, 0)
	m.idle()
	for _, x := range b.standing(e.ID) {
		if x.State != store.Scheduled {
			b.t.Errorf("it is %+v", x)
		}
	}
	b.ledger.GivenUp(mainDest, e.ID)
}

// A held key is freed of which nothing is left but a delayed event: what comes
// behind that one does not wait for it.
func testOperateDelayedSuccessor(b *bench) {
	op := b.operator()
	m := b.owner()
	head, late, next := event("a"), event("a"), event("a")
	late.Delay = forever
	b.put(head)
	m.drain(1, func(outrider.Record) store.Outcome { return failed(1, false) })
	b.put(late)
	m.idle() // the lease passes over it
	b.operate("skip", func() (int, error) { return op.Skip(b.ctx, store.Target{ID: head.ID}) }, 1)
	b.ledger.GivenUp(mainDest, head.ID)
	m.idle()
	b.put(next)
	wantIDs(b.t, "delivered", m.drain(1, nil), next)
	b.ledger.GivenUp(mainDest, late.ID)
}
