package relay

import "sync"

// budget bounds what the relay has in hand of one destination, in records and
// bytes.
type budget struct {
	mu             sync.Mutex
	records, bytes int // free; less than nothing after one huge record
	maxRecords     int
	maxBytes       int
	waiting        map[*worker]bool
}

func newBudget(records, bytes int) *budget {
	records, bytes = max(1, records), max(1, bytes)
	return &budget{records: records, bytes: bytes, maxRecords: records, maxBytes: bytes,
		waiting: map[*worker]bool{}}
}

// share is a part of the budget.
type share struct{ records, bytes int }

// crumb is the smallest part of what is wanted that is worth a claim.
const crumb = 16

// take reserves up to want, or nothing if too little is free; w is poked when
// there is more.
func (b *budget) take(w *worker, want share) (share, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.records < (want.records+crumb-1)/crumb || b.bytes < (want.bytes+crumb-1)/crumb {
		b.waiting[w] = true
		return share{}, false
	}
	got := share{min(want.records, b.records), min(want.bytes, b.bytes)}
	b.records -= got.records
	b.bytes -= got.bytes
	return got, true
}

// give adds to what is free; the share may be negative.
func (b *budget) give(s share) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.records += s.records
	b.bytes += s.bytes
	for w := range b.waiting {
		w.poke()
	}
	clear(b.waiting)
}

// forget takes a worker that has ended off the list.
func (b *budget) forget(w *worker) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.waiting, w)
}
