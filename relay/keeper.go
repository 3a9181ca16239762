package relay

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/outrider-dev/outrider/store"
)

// keeper knows when leases were last renewed. Everybody may ask it.
type keeper struct {
	relay   *Relay
	renewed atomic.Int64 // by Relay.now, when the call began; 0: never
	relays  atomic.Int64
	joined  atomic.Bool
}

// stale is for how much of the grace a relay that cannot renew goes on. What
// is left of it is for calls that have just begun.
func (k *keeper) stale() time.Duration { return k.relay.cfg.Grace * 6 / 10 }

// fresh reports whether the relay may begin to send: it could renew not long
// ago by its own monotonic clock, so nobody has taken its leases yet.
func (k *keeper) fresh() bool {
	at := k.renewed.Load()
	return at != 0 && k.relay.now()-time.Duration(at) < k.stale()
}

// left is for how long nobody can have taken the leases, as far as they were
// renewed.
func (k *keeper) left() time.Duration {
	return time.Duration(k.renewed.Load()) + k.relay.cfg.LeaseTTL - k.relay.now()
}

func (k *keeper) show() (joined bool, relays int, ago time.Duration) {
	if at := k.renewed.Load(); at != 0 {
		ago = k.relay.now() - time.Duration(at)
	}
	return k.joined.Load(), int(k.relays.Load()), ago
}

// renew asks until ctx ends. It has a goroutine of its own, and the store gives
// it a connection of its own, so that no load makes a healthy relay look dead.
func (m *membership) renew(ctx context.Context) {
	every := m.relay.cfg.Grace / 4
	t := time.NewTicker(every)
	defer t.Stop()
	for {
		m.renewOnce(ctx)
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
	}
}

func (m *membership) renewOnce(ctx context.Context) {
	k := &m.relay.keeper
	leases := m.leases()
	from := m.relay.now()
	rctx, cancel := context.WithTimeout(ctx, m.relay.cfg.Grace)
	a, err := m.sess.Renew(rctx, leases)
	cancel()
	if ctx.Err() != nil || m.handing.Load() {
		return
	}
	m.relay.storeError("", "renew", err)
	if err != nil {
		if errors.Is(err, store.ErrFenced) || m.relay.now()-m.lastRenewal > m.relay.cfg.LeaseTTL {
			m.rejoin(ctx)
		}
		return
	}
	starved := !k.fresh()
	m.lastRenewal = from
	// Before renewed, which is what lets balance begin.
	k.relays.Store(int64(a.Relays))
	for _, d := range m.relay.dests {
		d.serving.Store(int64(a.Serving[d.Name]))
	}
	k.renewed.Store(int64(from))
	m.lost(leases, a.Lost)
	if starved {
		m.relay.workers.each((*worker).poke)
	}
	m.poke()
}

// rejoin enters the store anew when the old membership cannot be renewed for so
// long that its leases have expired in any case. The old one is asked once
// more, because it is worth more: nothing that is in hand under it is lost.
func (m *membership) rejoin(ctx context.Context) {
	jctx, cancel := context.WithTimeout(ctx, m.relay.cfg.Grace)
	defer cancel()
	sess, err := m.relay.join(jctx)
	if err != nil {
		return
	}
	if _, err := m.sess.Renew(jctx, m.leases()); err == nil {
		_ = sess.Leave(jctx)
		return
	}
	m.relay.log.Warn("membership is gone; the relay joins anew", "relay", m.relay.cfg.Name)
	select {
	case m.next <- sess:
	default:
		_ = sess.Leave(jctx)
	}
}
