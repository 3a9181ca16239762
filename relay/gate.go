package relay

import "sync"

// Gate lets relays of one process send together, or one of them alone. See
// Config.Gate. A call of a sink passes it for as long as it takes; a claim that
// has to be alone passes it before its start is written, and until it is
// settled, so that a death in between can have no other cause; but not beyond
// the end of its lease.
type Gate struct {
	mu      sync.Mutex
	shared  int // calls under way
	alone   bool
	wanted  int // who waits to be alone: nobody else enters meanwhile
	waiting map[*worker]bool
}

// processGate is the one thing that is global here, because a process is: it
// dies as a whole.
var processGate = NewGate()

// NewGate makes a gate.
func NewGate() *Gate { return &Gate{waiting: map[*worker]bool{}} }

// pass is a call's or a claim's way through the gate.
type pass struct {
	held, alone, waits bool
}

// enter tries to pass. If it may not be yet, w is poked when it should try
// again.
func (g *Gate) enter(w *worker, p *pass, alone bool) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if p.held {
		return true
	}
	free := !g.alone && (g.wanted == 0 || p.waits)
	if alone {
		free = free && g.shared == 0
	}
	if !free {
		g.waiting[w] = true
		if alone && !p.waits {
			p.waits = true
			g.wanted++
		}
		return false
	}
	if p.waits {
		p.waits = false
		g.wanted--
	}
	p.held, p.alone = true, alone
	if alone {
		g.alone = true
	} else {
		g.shared++
	}
	return true
}

// leave gives up what p holds or waits for.
func (g *Gate) leave(p *pass) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case p.waits:
		g.wanted--
	case p.held && p.alone:
		g.alone = false
	case p.held:
		g.shared--
	default:
		return
	}
	*p = pass{}
	if g.alone || g.shared > 0 && g.wanted > 0 {
		return
	}
	for w := range g.waiting {
		w.poke()
	}
	clear(g.waiting)
}

// forget takes a worker that has ended off the list.
func (g *Gate) forget(w *worker) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.waiting, w)
}
