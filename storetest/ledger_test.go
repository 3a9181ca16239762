package storetest

import (
	"testing"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// One relay's start takes effect, and before that is noted another has taken
// over, delivered and settled. A start that begins after the end is a fault.
func TestLedgerStartNotedLate(t *testing.T) {
	l := NewLedger()
	e := event("a")
	x := l.Begin()
	x.Add(e)
	x.Commit()
	claim := func() *store.Claim {
		return &store.Claim{Lease: store.Lease{Destination: mainDest}, Records: []outrider.Record{{Event: e}}}
	}
	one, two := claim(), claim()
	late := l.starting([]*store.Claim{one})
	l.starting([]*store.Claim{two})()
	late()
	l.Delivered(mainDest, two.Records[0])
	late = l.starting([]*store.Claim{one})
	l.Settle(two, []store.Outcome{published}).Done()
	late()
	if err := l.Err(); err != nil {
		t.Fatal(err)
	}
	l.Started(claim())
	if l.Err() == nil {
		t.Error("a start after the end is no fault")
	}
}
