package memstore

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outrider-dev/outrider/store"
)

// Retire implements store.Retirer.
func (s *Store) Retire(ctx context.Context, name string, dry bool) (store.RetireReport, error) {
	var out store.RetireReport
	err := s.do(ctx, OpOperate, func(now time.Time) error {
		d := s.find(name)
		if d == nil {
			return fmt.Errorf("memstore: retire %q: %w", name, store.ErrUnknownDestination)
		}
		for _, l := range d.leases {
			if l.owner != nil && now.Before(l.expires) {
				return fmt.Errorf("memstore: retire %q: %w", name, store.Served(l.owner.params.Relay, l.expires.Sub(now)))
			}
		}
		out = d.status(now, true).Retiring()
		if dry {
			return nil
		}
		s.destinations = slices.DeleteFunc(s.destinations, func(x *destination) bool { return x == d })
		for _, r := range s.rows {
			r.cells = slices.DeleteFunc(r.cells, func(c *cell) bool { return c.dest == d })
		}
		return nil
	})
	return out, err
}
