package relay

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/store"
)

// sweeping is a store whose sessions can sweep.
type sweeping struct {
	store.Store
	sweep func() (store.Swept, error)
}

type sweepingSession struct {
	store.Session
	sweep func() (store.Swept, error)
}

func (s sweeping) Join(ctx context.Context, p store.JoinParams) (store.Session, error) {
	ses, err := s.Store.Join(ctx, p)
	return sweepingSession{ses, s.sweep}, err
}

func (s sweepingSession) Sweep(context.Context) (store.Swept, error) { return s.sweep() }

// Sweeps are made at their pace, told to the hook, and what they find is an
// error in the log. One that cannot be made is made again the next time.
func TestSweeps(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		var log strings.Builder
		var told []int
		sweeps := 0
		r := w.start(func(c *Config) {
			c.Store = sweeping{w.store, func() (store.Swept, error) {
				sweeps++
				switch sweeps {
				case 2:
					return store.Swept{}, errors.New("away")
				case 3:
					return store.Swept{Found: 2, Rows: []string{"out 7", "out 9"}}, nil
				}
				return store.Swept{}, nil
			}}
			c.Hooks.Swept = func(found int) { told = append(told, found) }
			c.Logger = slog.New(slog.NewTextHandler(&log, nil))
			c.SweepEvery = time.Hour
		})
		time.Sleep(4*time.Hour + time.Minute)
		r.stop()
		<-r.done
		if sweeps != 4 || len(told) != 3 || told[0] != 0 || told[1] != 2 || told[2] != 0 {
			t.Errorf("%d sweeps in four hours, told %v; want 4, and 0, 2, 0 of those that were made", sweeps, told)
		}
		if !strings.Contains(log.String(), `level=ERROR`) || !strings.Contains(log.String(), "out 7") {
			t.Errorf("what was found is not in the log:\n%s", log.String())
		}
	})
}
