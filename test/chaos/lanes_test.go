//go:build linux

package chaos_test

import (
	"database/sql"
	"testing"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// lane is who holds one, and until when unless it is prolonged.
type lane struct {
	owner   string // "": nobody
	epoch   int64
	expires int64 // microseconds since 1970, by the database's clock
}

type lanesHeld [outrider.Lanes]lane

// When a lease expires, in microseconds.
const (
	expiresSQLite   = `expires_at`
	expiresPostgres = `(extract(epoch from expires_at) * 1000000)::bigint`
)

// lanes looks up who holds what.
func lanes(t testing.TB, db *sql.DB, expires string) (held lanesHeld) {
	t.Helper()
	rows, err := db.Query(`select lanes, coalesce(owner, ''), epoch, coalesce(` + expires + `, 0) from outbox_leases`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var set int64
		var l lane
		if err := rows.Scan(&set, &l.owner, &l.epoch, &l.expires); err != nil {
			t.Fatal(err)
		}
		for i := range held {
			if store.LaneSet(set).Has(i) {
				held[i] = l
			}
		}
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return held
}

// of counts the lanes of each owner.
func (h *lanesHeld) of() map[string]int {
	n := map[string]int{}
	for _, l := range h {
		if l.owner != "" {
			n[l.owner]++
		}
	}
	return n
}

// fair reports whether two share all lanes evenly.
func (h lanesHeld) fair() bool {
	of := h.of()
	for _, n := range of {
		if n != outrider.Lanes/2 {
			return false
		}
	}
	return len(of) == 2
}

// sameHolders reports whether no lane has changed hands, and back, since.
func (h *lanesHeld) sameHolders(now lanesHeld) bool {
	for i, l := range h {
		if l.owner != now[i].owner || l.epoch != now[i].epoch {
			return false
		}
	}
	return true
}

// firstExpiry is when the first lease to expire does.
func (h *lanesHeld) firstExpiry() int64 {
	first := h[0].expires
	for _, l := range h {
		first = min(first, l.expires)
	}
	return first
}

// lastExpiry is when the last one does.
func (h *lanesHeld) lastExpiry() int64 {
	last := h[0].expires
	for _, l := range h {
		last = max(last, l.expires)
	}
	return last
}
