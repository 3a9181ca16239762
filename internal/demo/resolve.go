package demo

import (
	"context"
	"encoding/json"
	"time"
)

// failure is a FAILED event as outrider list shows it.
type failure struct {
	Row     string `json:"row"`
	EventID string `json:"event_id"`
	Class   string `json:"class"`
	State   string `json:"state"`
}

// resolve plays the operator: when a poison message is FAILED and its key is
// blocked, it is left so for a moment, then skipped with the command that a
// person would use.
func (d *demo) resolve(ctx context.Context) {
	seen := map[string]time.Time{}
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		poisoned := d.ledger.poisoned()
		if len(poisoned) == 0 {
			continue
		}
		for _, f := range d.failures(ctx) {
			key, ok := poisoned[f.EventID]
			if !ok {
				continue
			}
			if _, known := seen[f.Row]; !known {
				seen[f.Row] = time.Now()
				d.board.say("event %s is FAILED (%s) and blocks %s; other keys go on", f.Row, f.Class, key)
			}
			if time.Since(seen[f.Row]) >= resolveAfter {
				d.skip(ctx, f, key)
			}
		}
	}
}

func (d *demo) failures(ctx context.Context) []failure {
	out, err := d.operator(ctx, "list", "--state", "failed", "--limit", "1000", "--output", "json", "--db", "sqlite:"+d.database)
	var list struct {
		Entries []failure `json:"entries"`
	}
	if err != nil || json.Unmarshal(out, &list) != nil {
		return nil // asked again
	}
	return list.Entries
}

func (d *demo) skip(ctx context.Context, f failure, key string) {
	behind := d.ledger.behind(key) - 1
	if _, err := d.operator(ctx, "skip", f.Row, "--db", "sqlite:"+d.database); err != nil {
		return // tried again
	}
	d.ledger.skip(f.EventID)
	d.board.say("outrider skip %s --db sqlite:shop.db: given up, and %s goes on (%d waited behind it)", f.Row, key, behind)
}

// operator runs a command as a person would.
func (d *demo) operator(ctx context.Context, args ...string) ([]byte, error) {
	return d.Command(ctx, args...).Output()
}
