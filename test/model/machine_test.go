// Package model is a test of the seam of package store: relays, applications
// and operators do what they may do, in any order, with deaths and lost answers
// at every step, and a model of what was promised looks on. A run is a random
// walk that is shrunk when it fails.
//
//	go test ./test/model                  # a bounded number of runs
//	go test ./test/model -rapid.checks=5000 -run Postgres
//	make model                            # thousands
package model

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
	"github.com/outrider-dev/outrider/storetest"
)

const (
	ttl   = time.Hour
	grace = time.Millisecond
)

// machine is one run: a store, those who use it, and what is known of them.
type machine struct {
	*subject
	tb     testing.TB // of the whole test, for what cannot fail
	t      *rapid.T
	ctx    context.Context
	caps   store.Capabilities
	ledger *storetest.Ledger
	dests  []string
	views  map[string]*view

	trace  []string
	losing bool          // the next answer
	now    time.Duration // that the model has let pass
	events int
	joined int
	txs    []*appTx
	relays []*relay          // all that ever were
	keysOf map[string]string // of events by id
}

// appTx is an application's open transaction.
type appTx struct {
	storetest.Tx
	ledger *storetest.LedgerTx
}

// relay is a member of the outbox.
type relay struct {
	m        *machine
	name     string
	s        store.Session
	dead     bool // killed: its process goes on until it finds out
	cut      bool // an answer on its own connection was lost, and the connection with it
	left     bool
	holdings []*holding
}

func newMachine(tb testing.TB, t *rapid.T, s *subject) *machine {
	tb.Helper()
	m := &machine{subject: s, tb: tb, t: t, ctx: context.Background(), caps: s.Capabilities(),
		ledger: storetest.NewLedger(), views: map[string]*view{}, keysOf: map[string]string{}}
	m.ledger.Sequences = m.caps.Sequences
	m.dests = []string{"main"}
	if m.caps.FanOut && rapid.IntRange(0, 3).Draw(t, "fan out") == 0 {
		m.dests = append(m.dests, "side")
	}
	for _, d := range m.dests {
		m.views[d] = newView(d)
	}
	m.take(m.join(), "main", 64) // most walks would idle without
	return m
}

// run is the property: a walk, and the end of it.
func run(tb testing.TB, t *rapid.T, s *subject) {
	tb.Helper()
	m := newMachine(tb, t, s)
	defer m.end()
	t.Repeat(map[string]func(*rapid.T){
		"":         func(t *rapid.T) { m.t = t; m.verify() },
		"put":      m.put,
		"put more": m.put,
		"begin":    m.beginTx,
		"add":      m.addTx,
		"end":      m.endTx,
		"join":     func(t *rapid.T) { m.doJoin(t) },
		"acquire":  m.acquire,
		"renew":    m.renew,
		"claim":    m.claim,
		"claim 2":  m.claim,
		"claim 3":  m.claim,
		"send":     m.send,
		"send 2":   m.send,
		"send 3":   m.send,
		"commit":   m.commit,
		"commit 2": m.commit,
		"commit 3": m.commit,
		"work":     m.workOn,
		"work 2":   m.workOn,
		"resolve":  m.resolve,
		"forget":   m.forget,
		"release":  m.release,
		"merge":    m.merge,
		"kill":     m.kill,
		"leave":    m.leave,
		"expire":   m.expire,
		"time":     m.pass,
		"retry":    m.retry,
		"skip":     m.skip,
		"idle":     m.idle,
	})
	m.t = t
	m.drain()
	if m.ended != nil {
		m.ended(m.trace)
	}
}

// end leaves nothing behind.
func (m *machine) end() {
	if m.calm != nil {
		m.calm()
	}
	for _, x := range m.txs {
		x.Rollback(m.tb)
	}
	for _, r := range m.relays {
		if !r.left {
			_ = r.s.Leave(m.ctx)
		}
	}
}

func (m *machine) logf(format string, args ...any) {
	m.t.Logf(format, args...)
	m.trace = append(m.trace, fmt.Sprintf(format, args...))
}

// fatalf ends the run. Shrinking may lose a failure that depends on more than
// the walk, such as time on a real server: the first one is kept in the file that
// OUTRIDER_MODEL_TRACE names.
func (m *machine) fatalf(format string, args ...any) {
	m.t.Helper()
	m.logf(format, args...)
	if name := os.Getenv("OUTRIDER_MODEL_TRACE"); name != "" {
		if f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644); err == nil {
			_, _ = f.WriteString(strings.Join(m.trace, "\n") + "\n")
			_ = f.Close()
		}
	}
	m.t.Fatalf(format, args...)
}

// pick draws one of a list, or ends the action if there is none.
func pick[T any](t *rapid.T, what string, from []T) T {
	if len(from) == 0 {
		t.SkipNow()
	}
	return from[rapid.IntRange(0, len(from)-1).Draw(t, what)]
}

// chance is true once in n times.
func chance(t *rapid.T, what string, n int) bool {
	return rapid.IntRange(0, n-1).Draw(t, what) == n-1
}

// keys are few, so that they meet, and some share a lane.
var keys = []string{"", "a", "b", "c", "d", "e", "f"}

func (m *machine) event(t *rapid.T) outrider.Event {
	m.events++
	k := rapid.SampledFrom(keys).Draw(t, "key")
	e := outrider.Event{
		ID:            fmt.Sprintf("00000000-0000-7000-8000-%012d", m.events),
		AggregateType: "order", AggregateID: "42", Type: "Happened",
		Key: k, Unordered: k == "",
		Payload: fmt.Appendf(nil, `{"n": %d}`, m.events),
	}
	if chance(t, "large", 10) {
		e.Payload = fmt.Appendf(nil, `{"n": %d, "text": "%0500d"}`, m.events, 7)
	}
	if chance(t, "delayed", 10) {
		e.Delay = time.Duration(rapid.IntRange(1, 40).Draw(t, "minutes")) * time.Minute
	}
	m.keysOf[e.ID] = e.Key
	return e
}

func (x *appTx) add(m *machine, e ...outrider.Event) {
	for _, e := range e {
		m.logf("  event %s key %q delay %v", short(e.ID), e.Key, e.Delay)
	}
	x.ledger.Add(e...)
	x.Add(m.tb, e...)
}

func (m *machine) eventsOf(t *rapid.T, most int) []outrider.Event {
	var out []outrider.Event
	for range rapid.IntRange(1, most).Draw(t, "events") {
		out = append(out, m.event(t))
	}
	return out
}

// put is a whole transaction.
func (m *machine) put(t *rapid.T) {
	most := 6
	if chance(t, "many", 5) {
		most = 40
	}
	e := m.eventsOf(t, most)
	x := m.newTx()
	x.add(m, e...)
	m.finish(x, !chance(t, "roll back", 8))
}

func (m *machine) newTx() *appTx {
	l := m.ledger.Begin()
	return &appTx{m.begin(m.tb), l}
}

// finish ends a transaction.
func (m *machine) finish(x *appTx, commit bool) {
	if commit {
		x.Commit(m.tb)
		x.ledger.Commit()
		return
	}
	x.ledger.Rollback()
	x.Rollback(m.tb)
}

func (m *machine) beginTx(t *rapid.T) {
	if m.oneWriter || len(m.txs) >= 4 {
		t.SkipNow()
	}
	m.txs = append(m.txs, m.newTx())
}

func (m *machine) addTx(t *rapid.T) {
	x := pick(t, "transaction", m.txs)
	x.add(m, m.eventsOf(t, 3)...)
}

func (m *machine) endTx(t *rapid.T) {
	x := pick(t, "transaction", m.txs)
	m.txs = slices.DeleteFunc(m.txs, func(y *appTx) bool { return x == y })
	m.finish(x, !chance(t, "roll back", 5))
}

// join makes a relay.
func (m *machine) join() *relay {
	m.t.Helper()
	m.joined++
	r := &relay{m: m, name: fmt.Sprintf("relay-%d", m.joined)}
	p := store.JoinParams{Relay: r.name, TTL: ttl, Grace: grace}
	for _, d := range m.dests {
		p.Destinations = append(p.Destinations, store.Destination{Name: d, FromEarliest: true})
	}
	var err error
	if r.s, err = m.Join(m.ctx, p); err != nil {
		m.fatalf("join: %v", err)
	}
	m.relays = append(m.relays, r)
	return r
}

// alive are the relays that work.
func (m *machine) alive() []*relay {
	var out []*relay
	for _, r := range m.relays {
		if !r.dead && !r.left {
			out = append(out, r)
		}
	}
	return out
}

func (m *machine) doJoin(t *rapid.T) {
	if len(m.alive()) >= 3 {
		t.SkipNow()
	}
	m.join()
}

func (m *machine) acquire(t *rapid.T) {
	r := pick(t, "relay", m.alive())
	d := pick(t, "destination", m.dests)
	lanes := rapid.SampledFrom([]int{64, 64, 64, 40, 8, 1}).Draw(t, "lanes")
	m.maybeLose(t, r)
	m.take(r, d, lanes)
}

// maybeLose lets the answer of what is asked next be lost, now and then.
func (m *machine) maybeLose(t *rapid.T, r *relay) {
	if m.loseAny && chance(t, "lose answer", 10) {
		m.losing = true
		m.lose(r.s)
	}
}

// calmed reports whether the answer to what was asked just now may be lost.
func (m *machine) calmed() bool {
	was := m.losing
	if m.calm != nil {
		m.calm()
	}
	m.losing = false
	return was
}

// take acquires, and sees to it that nobody's lease was taken that lives.
func (m *machine) take(r *relay, d string, lanes int) {
	m.t.Helper()
	got, err := r.s.Acquire(m.ctx, store.AcquireParams{Destination: d, Lanes: lanes})
	if m.calmed() && err != nil {
		m.logf("  %s acquires lanes of %s: %v", r.name, d, err)
		r.cut = true
		for h := range m.holdings() {
			h.unsure = h.unsure || h.lease.Destination == d && h.mayBeTaken()
		}
		return
	}
	if err != nil {
		m.fatalf("%s: acquire: %v", r.name, err)
	}
	r.cut = false
	n := 0
	for _, l := range got {
		m.logf("  %s acquires lease %d/%d lanes %x of %s", r.name, l.ID, l.Epoch, l.Lanes, d)
		n += l.Lanes.Len()
		if l.Destination != d || l.Lanes == 0 {
			m.fatalf("acquired %+v of %s", l, d)
		}
		for h := range m.holdings() {
			if h.over || h.taken || h.lease.Destination != d || h.lease.Lanes&l.Lanes == 0 {
				continue
			}
			if h.moving != nil && h.moving.free(l.Lanes) {
				if h.moving.keep == 0 { // or nothing was given back, and this is a death
					h.loseToDeath()
				}
				continue
			}
			if !h.mayBeTaken() && !h.unsure {
				m.fatalf("lease %+v was taken from %s, which lives and holds %+v", l, h.r.name, h.lease)
			}
			h.loseToDeath()
		}
		r.holdings = append(r.holdings, &holding{r: r, lease: l, until: m.now + ttl, holds: map[string]*work{}})
	}
	if n > lanes {
		m.fatalf("acquired %d lanes, asked for %d", n, lanes)
	}
}

// renew finds out which leases are still held.
func (m *machine) renew(t *rapid.T) {
	r := pick(t, "relay", m.alive())
	m.renewOf(r)
}

func (m *machine) renewOf(r *relay) {
	m.t.Helper()
	var leases []store.Lease
	var held []*holding
	for _, h := range r.holdings {
		if !h.over && !h.again() {
			leases, held = append(leases, h.lease), append(held, h)
		}
	}
	a, err := r.s.Renew(m.ctx, leases)
	if err != nil {
		m.fatalf("%s: renew: %v", r.name, err)
	}
	r.cut = false
	for _, h := range held {
		lost := slices.Contains(a.Lost, h.lease.ID)
		if lost {
			h.findTaken()
		}
		switch {
		case lost && h.moving != nil && !h.taken:
			h.arrive(0)
		case lost && !h.taken:
			m.fatalf("%s: lease %d is lost, and nobody has taken it", r.name, h.lease.ID)
		case !lost && h.taken:
			m.fatalf("%s: lease %d is not lost, and somebody has taken it", r.name, h.lease.ID)
		case lost:
			h.drop()
		default:
			h.until = max(h.until, m.now+ttl-m.lazy)
		}
	}
	if n := len(m.alive()); a.Relays < 1 || a.Relays > n {
		m.fatalf("%s: %d relays are alive, want %d at most", r.name, a.Relays, n)
	}
	for _, d := range m.dests { // all relays serve all
		if a.Serving[d] != a.Relays {
			m.fatalf("%s: of %d relays %d serve %s", r.name, a.Relays, a.Serving[d], d)
		}
	}
}

// kill ends a relay's connection. Its process goes on until it finds out.
func (m *machine) kill(t *rapid.T) {
	if m.subject.kill == nil {
		t.SkipNow()
	}
	r := pick(t, "relay", m.alive())
	m.logf("  %s dies", r.name)
	m.subject.kill(m.tb, r.s, r.name)
	r.dead = true
}

func (m *machine) leave(t *rapid.T) {
	r := pick(t, "relay", m.alive())
	m.leaveOf(r)
}

func (m *machine) leaveOf(r *relay) {
	m.t.Helper()
	m.logf("  %s leaves", r.name)
	if err := r.s.Leave(m.ctx); err != nil {
		m.fatalf("%s: leave: %v", r.name, err)
	}
	r.left = true
	for _, h := range r.holdings {
		if !h.over && !h.taken {
			h.loseToDeath()
		}
		h.over = true
	}
}

// expire lets all leases run out, but for relays that renew theirs in time.
func (m *machine) expire(t *rapid.T) {
	half := ttl/2 + time.Minute
	m.let(half)
	for _, r := range m.alive() {
		if chance(t, "renews", 2) {
			m.renewOf(r)
		}
	}
	m.let(half)
}

func (m *machine) pass(t *rapid.T) {
	m.let(time.Duration(rapid.IntRange(1, 20).Draw(t, "minutes")) * time.Minute)
}

func (m *machine) let(d time.Duration) {
	m.advance(m.tb, d)
	m.now += d
}

// retry is an operator's.
func (m *machine) retry(t *rapid.T) {
	op, ok := m.Store.(store.Operator)
	if !ok {
		t.SkipNow()
	}
	d := pick(t, "destination", m.dests)
	v := m.views[d]
	id := pick(t, "event", v.unhappy())
	n, err := op.Retry(m.ctx, store.Target{Destination: d, ID: id})
	if err != nil {
		m.fatalf("retry %s: %v", short(id), err)
	}
	m.logf("  retry %s of %s: %d", short(id), d, n)
	if n > 0 {
		m.ledger.Retried(d, id)
		m.acted(d, id)
		v.retried(id)
	}
}

// acted notes that an operator has done something about an event. Commits whose
// answers were lost had taken effect before that: when they are repeated, what
// they say of it holds no longer.
func (m *machine) acted(d, id string) {
	for h := range m.holdings() {
		if h.lost != nil && h.lease.Destination == d {
			h.lost.past = append(h.lost.past, id)
		}
	}
}

func (m *machine) skip(t *rapid.T) {
	op, ok := m.Store.(store.Operator)
	if !ok {
		t.SkipNow()
	}
	d := pick(t, "destination", m.dests)
	m.skipOf(op, d, pick(t, "event", m.views[d].unhappy()))
}

func (m *machine) skipOf(op store.Operator, d, id string) {
	m.t.Helper()
	n, err := op.Skip(m.ctx, store.Target{Destination: d, ID: id})
	if err != nil {
		m.fatalf("skip %s: %v", short(id), err)
	}
	m.logf("  skip %s of %s: %d", short(id), d, n)
	if n > 0 {
		m.ledger.GivenUp(d, id)
		m.acted(d, id)
		m.views[d].gaveUp(id)
	}
}

// idle polls whatever is held, and lets go of what comes.
func (m *machine) idle(t *rapid.T) {
	h := m.lease(t)
	for range 2 {
		for _, kind := range []store.Kind{store.Fresh, store.Due} {
			c, err := h.ask(store.ClaimParams{Kind: kind, MaxRecords: 5, MaxBytes: 1 << 20})
			if errors.Is(err, store.ErrFenced) {
				return
			}
			if err != nil {
				m.fatalf("idle poll: %v", err)
			}
			h.r.s.Forget(c)
		}
	}
}

// short is the end of an event's id.
func short(id string) string { return id[len(id)-4:] }
