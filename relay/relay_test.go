package relay

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/store"
)

func TestEventsArriveInOrder(t *testing.T) {
	inWorld(t, memsink.Config{}, func(w *world) {
		keys := many(1000, 7)
		ids := w.add(keys...)
		r := w.start()
		w.wait(len(ids), time.Second)
		more := w.add(many(500, 7)...)
		w.wait(len(ids)+len(more), time.Second)
		synctest.Wait()
		r.end()
		ids = append(ids, more...)
		w.mustArriveInOrder(append(keys, many(500, 7)...), ids, 0)
		w.mustBe(store.Published, ids...)
		if n := w.events.count(Published); n != len(ids) {
			t.Errorf("hooks were told of %d published events, not %d", n, len(ids))
		}
	})
}
