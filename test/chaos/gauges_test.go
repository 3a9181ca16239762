//go:build linux

package chaos_test

import (
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// gauges are numbers that a relay process writes and that outlive it: they are
// in a file that is mapped into memory.
type gauges struct {
	// InHand is how many events have been started and not been settled, those
	// of leases that were lost included: all that may be sent again.
	InHand atomic.Int64
	// Most is the highest that InHand has been.
	Most atomic.Int64
	// Unknown counts results that were not clear; such a message is sent again.
	Unknown atomic.Int64
	// Joined is 1 once the store was joined.
	Joined atomic.Int64
	// Fenced counts commits and claims that were refused, and leases lost.
	Fenced atomic.Int64
	// Stale counts settlements that were refused.
	Stale atomic.Int64
	// Delivered counts messages that the broker has confirmed.
	Delivered atomic.Int64
}

func mapGauges(path string) (*gauges, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	size := int(unsafe.Sizeof(gauges{}))
	if err := f.Truncate(int64(size)); err != nil {
		return nil, err
	}
	mem, err := syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return (*gauges)(unsafe.Pointer(&mem[0])), nil
}

func (g *gauges) hand(n int) {
	now := g.InHand.Add(int64(n))
	for most := g.Most.Load(); now > most && !g.Most.CompareAndSwap(most, now); most = g.Most.Load() {
	}
}
