package storetest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

var concurrentTests = []test{
	{"Relays", testConcurrentRelays},
	{"Pipelined", testConcurrentPipeline},
}

// load writes transactions from several writers at once.
type load struct {
	writers, transactions, keys int
}

func (l load) run(b *bench, wg *sync.WaitGroup) {
	if b.harness.OneWriter {
		l.transactions *= l.writers
		l.writers = 1
	}
	for w := range l.writers {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(1, uint64(w)))
			for range l.transactions {
				x := b.begin()
				for range 1 + rnd.IntN(4) {
					k := fmt.Sprintf("key-%d", rnd.IntN(l.keys))
					if rnd.IntN(10) == 0 {
						k = ""
					}
					e := event(k)
					if rnd.IntN(20) == 0 {
						e.Delay = b.short() / 10
					}
					x.add(e)
				}
				if rnd.IntN(10) == 0 {
					x.rollback()
				} else {
					x.commit()
				}
			}
		})
	}
}

// Relays come, go, die, give leases back and let them expire, while writers
// write and messages fail: nothing is lost, nothing held twice, no order broken.
func testConcurrentRelays(b *bench) {
	var writers, relays sync.WaitGroup
	load{writers: 4, transactions: 40, keys: 15}.run(b, &writers)
	var done atomic.Bool
	kills := atomic.Int64{}
	for i := range 4 {
		relays.Go(func() {
			rnd := rand.New(rand.NewPCG(2, uint64(i)))
			for life := 0; !done.Load() && b.ctx.Err() == nil; life++ {
				m, err := b.tryJoin(terms{})
				mortal := kills.Add(1) <= 3
				if mortal && err == nil {
					m, err = b.tryJoin(b.mortal())
				}
				if err != nil {
					b.t.Error(err)
					return
				}
				m.live(rnd, &done, mortal)
			}
		})
	}
	writers.Wait()
	end := time.Now().Add(limit)
	for len(b.ledger.Missing(mainDest)) > 0 && time.Now().Before(end) && b.ledger.Err() == nil {
		b.pause()
	}
	done.Store(true)
	relays.Wait()
	if left := b.ledger.Missing(mainDest); len(left) > 0 {
		b.t.Errorf("%d events did not come: %v", len(left), idsOf(left[:min(len(left), 10)]))
	}
}

// live is a relay's life. It ends by leaving, by death, or when all is done.
func (m *member) live(rnd *rand.Rand, done *atomic.Bool, mortal bool) {
	var leases []store.Lease
	for turns := 20 + rnd.IntN(200); turns > 0 && !done.Load(); turns-- {
		if m.b.ledger.Err() != nil {
			return
		}
		if rnd.IntN(4) == 0 || len(leases) == 0 {
			got, err := m.s.Acquire(m.b.ctx, store.AcquireParams{Destination: mainDest, Lanes: 1 + rnd.IntN(64)})
			if err != nil {
				m.t.Errorf("acquire: %v", err)
				return
			}
			leases = append(leases, got...)
		}
		if len(leases) == 0 {
			m.b.pause()
			continue
		}
		i := rnd.IntN(len(leases))
		l := leases[i]
		m.params.MaxRecords = 1 + rnd.IntN(30)
		m.params.KeyShare = []int{0, 1, 5}[rnd.IntN(3)]
		left, err := m.turn(rnd, l)
		if mortal && err == nil && rnd.IntN(30) == 0 {
			p := m.params
			p.Lease, m.lease = left, left
			if c, err := m.s.Claim(m.b.ctx, p); err == nil && len(c.Records) > 0 {
				_ = m.commit(nil, c)
			}
			m.die()
			return
		}
		if err != nil && !errors.Is(err, store.ErrFenced) {
			m.t.Errorf("turn: %v", err)
			return
		}
		if err != nil || left.Lanes == 0 {
			leases = append(leases[:i], leases[i+1:]...)
		} else {
			leases[i] = left
		}
	}
	if err := m.s.Leave(m.b.ctx); err != nil {
		m.t.Errorf("leave: %v", err)
	}
}

// turn does one thing with a lease and returns what is left of it.
func (m *member) turn(rnd *rand.Rand, l store.Lease) (store.Lease, error) {
	if rnd.IntN(20) == 0 {
		return m.s.Release(m.b.ctx, l, l.Lanes.First(rnd.IntN(l.Lanes.Len()+1)))
	}
	p := m.params
	m.lease = l
	p.Lease, p.Kind = l, store.Kind(rnd.IntN(2))
	c, err := m.s.Claim(m.b.ctx, p)
	if err != nil || len(c.Records) == 0 {
		m.b.pause()
		return l, err
	}
	if rnd.IntN(10) == 0 {
		m.s.Forget(c)
		return l, nil
	}
	if err := m.commit(nil, c); err != nil {
		return l, err
	}
	if rnd.IntN(30) == 0 {
		m.deliver(c, 0)
		return m.s.Release(m.b.ctx, l, 0)
	}
	outcomes := m.outcomes(c, func(outrider.Record) store.Outcome {
		switch rnd.IntN(20) {
		case 0:
			return waiting(1, time.Duration(rnd.IntN(int(m.b.short()/10))))
		case 1:
			return pending
		default:
			return published
		}
	})
	return l, m.commit([]store.Settlement{settlement(c, outcomes...)})
}

// pipeline is a relay with claims beside each other, Fresh and Due.
type pipeline struct {
	*member
	rnd        *rand.Rand
	fresh, due []*store.Claim // in hand
	// stops are the keys that a claim does not send any more: one of theirs
	// was not delivered under a claim that ended before it.
	stops map[*store.Claim]map[string]bool
}

// testConcurrentPipeline reads ahead and starts claims while others end,
// against concurrent writers.
func testConcurrentPipeline(b *bench) {
	var writers sync.WaitGroup
	load{writers: 4, transactions: 60, keys: 8}.run(b, &writers)
	written := make(chan struct{})
	go func() {
		writers.Wait()
		close(written)
	}()
	p := &pipeline{member: b.owner(), rnd: rand.New(rand.NewPCG(3, 4)), stops: map[*store.Claim]map[string]bool{}}
	p.params.KeyShare = 6
	over := false
	b.until("everything is delivered", func() bool {
		for n := 0; n < 1000 && p.step(); n++ {
		}
		if b.ledger.Err() != nil {
			return true
		}
		if !over {
			select {
			case <-written:
				over = true
			default:
			}
			return false
		}
		return len(b.ledger.Missing(mainDest)) == 0
	})
	for len(p.fresh)+len(p.due) > 0 && b.ledger.Err() == nil {
		p.step()
	}
	p.member.idle()
}

// step ends some of the claims in hand and starts others, in one commit; it
// reports whether there was anything to do.
func (p *pipeline) step() bool {
	p.t.Helper()
	p.params.MaxRecords = 1 + p.rnd.IntN(20)
	var settle []store.Settlement
	end := func(open []*store.Claim) []*store.Claim {
		if len(open) == 0 || len(open) < 3 && p.rnd.IntN(2) == 0 {
			return open
		}
		c := open[0]
		settle = append(settle, settlement(c, p.outcomes(c, func(r outrider.Record) store.Outcome {
			switch {
			case p.stops[c][r.Key] && !r.Unordered:
				return pending
			case p.rnd.IntN(15) == 0:
				return waiting(1, 0)
			default:
				return published
			}
		})...))
		return open[1:]
	}
	busy := len(p.fresh)+len(p.due) > 0
	p.fresh, p.due = end(p.fresh), end(p.due)
	var start []*store.Claim
	if len(p.fresh) < 3 {
		if c := p.member.fresh(); len(c.Records) > 0 {
			start = append(start, c)
			p.fresh = append(p.fresh, c)
		}
	}
	if len(p.due) < 2 {
		if c := p.member.due(); len(c.Records) > 0 {
			start = append(start, c)
			p.due = append(p.due, c)
		}
	}
	for _, s := range settle {
		delete(p.stops, s.Claim)
		for i, o := range s.Outcomes {
			if r := s.Claim.Records[i]; o.State != store.Published && !r.Unordered {
				p.stop(r.Key)
			}
		}
	}
	if len(settle)+len(start) == 0 {
		return busy
	}
	if err := p.commit(settle, start...); err != nil {
		p.t.Fatal(err)
	}
	return true
}

// stop ends the sending of a key under all claims in hand.
func (p *pipeline) stop(key string) {
	for _, open := range [][]*store.Claim{p.fresh, p.due} {
		for _, c := range open {
			if p.stops[c] == nil {
				p.stops[c] = map[string]bool{}
			}
			p.stops[c][key] = true
		}
	}
}
