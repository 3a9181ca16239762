package relay

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/memstore"
	"github.com/outrider-dev/outrider/store"
)

// unreadableStore is one whose events cannot be read for a while; all else can.
type unreadableStore struct {
	*memstore.Store
	away atomic.Bool
}

type unreadableSession struct {
	store.Session
	s *unreadableStore
}

func (s *unreadableStore) Join(ctx context.Context, p store.JoinParams) (store.Session, error) {
	ss, err := s.Store.Join(ctx, p)
	return &unreadableSession{ss, s}, err
}

func (s *unreadableSession) Claim(ctx context.Context, p store.ClaimParams) (*store.Claim, error) {
	if s.s.away.Load() && p.Kind == store.Fresh {
		return nil, errors.New("no right to read events")
	}
	return s.Session.Claim(ctx, p)
}

// That new events cannot be read is said once and tried less and less often,
// though looks for waiting ones succeed in between.
func TestOneKindOfClaimFails(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		s, log := &unreadableStore{Store: w.store}, &logLines{}
		r := w.start(func(c *Config) { c.Store, c.Logger = s, log.logger() })
		time.Sleep(time.Second)
		s.away.Store(true)
		ids := w.add("a")
		time.Sleep(5 * time.Minute)
		log.mu.Lock()
		text := log.buf.String()
		log.mu.Unlock()
		if off, on := strings.Count(text, "cannot be asked"), strings.Count(text, "asked again"); off != 1 || on != 0 {
			t.Errorf("said %d times that the store cannot be asked, and %d times that it can:\n%s", off, on, text)
		}
		if n := w.events.get(&w.events.storeErr); n > 150 {
			t.Errorf("tried %d times in five minutes", n)
		}
		s.away.Store(false)
		time.Sleep(10 * time.Second)
		w.mustBe(store.Published, ids...)
		log.mu.Lock()
		text = log.buf.String()
		log.mu.Unlock()
		if on := strings.Count(text, "asked again"); on != 1 {
			t.Errorf("said %d times that the store can be asked again:\n%s", on, text)
		}
		r.end()
	})
}

// What a worker could not ask is forgotten when its lease is lost: the one that
// follows does not know of it, and would never say that it is over.
func TestErrorsEndWithTheLease(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		s := &cutOffStore{Store: w.store}
		r := w.start(func(c *Config) { c.Store = s })
		time.Sleep(time.Second)
		s.renew.Store(true)
		s.rest.Store(true)
		other := w.start()
		time.Sleep(time.Minute)
		if r.Health().StoreError == "" {
			t.Error("no word of a database that is away")
		}
		s.renew.Store(false)
		s.rest.Store(false)
		time.Sleep(time.Minute)
		ids := w.add("a")
		time.Sleep(time.Minute)
		w.mustBe(store.Published, ids...)
		if got := r.Health().StoreError; got != "" {
			t.Errorf("the database is back, and the relay still says: %s", got)
		}
		r.end()
		other.end()
	})
}
