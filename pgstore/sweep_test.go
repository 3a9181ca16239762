package pgstore_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/store"
)

// A sweep finds rows that no claim will ever hand out: one that bears the id of
// a transaction that had long ended, as a copied row does, and one that a window
// held when it was read and that was not seen.
func TestSweepFindsWhatWasPassedOver(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s, db := open(t, pgstore.Config{})
	ses, err := s.Join(ctx, store.JoinParams{Relay: "r", TTL: time.Hour, Grace: time.Second,
		Destinations: []store.Destination{{Name: "d", FromEarliest: true}}})
	if err != nil {
		t.Fatal(err)
	}
	lease := acquire(t, ses)
	insert := func(txID string) (row string) {
		t.Helper()
		err := db.QueryRow(`insert into outbox_events (tx_id, aggregate_type, aggregate_id, event_type, payload)
			values (` + txID + `, 'a', 'k', 'T', '{}') returning id`).Scan(&row)
		if err != nil {
			t.Fatal(err)
		}
		return row
	}
	deliver := func(want int) {
		t.Helper()
		got := 0
		for more := true; more; {
			c, err := ses.Claim(ctx, store.ClaimParams{Lease: lease, MaxRecords: 2, MaxBytes: 1 << 20})
			if err != nil {
				t.Fatal(err)
			}
			more = c.More
			if len(c.Records) == 0 {
				continue
			}
			got += len(c.Records)
			out := make([]store.Outcome, len(c.Records))
			for i := range out {
				out[i].State = store.Published
			}
			for _, p := range []store.CommitParams{{Start: []*store.Claim{c}}, {Settle: []store.Settlement{{Claim: c, Outcomes: out}}}} {
				p.Lease = lease
				if err := ses.Commit(ctx, p); err != nil {
					t.Fatal(err)
				}
			}
		}
		if got != want {
			t.Fatalf("%d events delivered, want %d", got, want)
		}
	}
	sweep := func(want ...string) {
		t.Helper()
		for i, w := range want {
			want[i] = "d " + w
		}
		got, err := ses.(store.Sweeper).Sweep(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if got.Found != len(want) || !slices.Equal(got.Rows, want) {
			t.Errorf("a sweep found %+v, want %v", got, want)
		}
	}
	const own = `pg_current_xact_id()`
	for range 5 {
		insert(own)
	}
	deliver(5)
	sweep() // notes where the lease stands
	lost := insert(`'3'`)
	insert(own)
	deliver(1)
	sweep(lost)
	sweep() // once is enough

	// A window of several pages, of which one row came to light afterwards.
	for range 5 {
		insert(own)
	}
	deliver(5)
	late := insert(`(select tx_id from outbox_events order by id desc offset 2 limit 1)`)
	insert(own)
	deliver(1)
	sweep(late)
	sweep()
}

// Rows with ids that somebody chose, beyond all that have been given out, blind
// no sweep: neither one near the end of all numbers nor more than are noted one
// by one, and none of them is taken for lost.
func TestSweepSeesBelowAFarID(t *testing.T) {
	for name, far := range map[string]string{
		"one row":  `select 9223372036854775000`,
		"some":     `select 1000000 + n from generate_series(1, 99) n union all select 4611686018427387904`,
		"too many": `select 1000000 + n from generate_series(1, 300) n union all select 4611686018427387904`,
	} {
		t.Run(name, func(t *testing.T) {
			x := newSole(t, store.ClaimParams{MaxRecords: 500})
			ids := func(sql string) (out []string) {
				t.Helper()
				rows, err := x.db.QueryContext(x.ctx, sql)
				if err != nil {
					t.Fatal(err)
				}
				defer rows.Close()
				for rows.Next() {
					var id string
					if err := rows.Scan(&id); err != nil {
						t.Fatal(err)
					}
					out = append(out, id)
				}
				if err := rows.Err(); err != nil {
					t.Fatal(err)
				}
				return out
			}
			sweep := func(want ...string) {
				t.Helper()
				for i := range want {
					want[i] = "d " + want[i]
				}
				got, err := x.ses.(store.Sweeper).Sweep(x.ctx)
				if err != nil {
					t.Fatal(err)
				}
				if got.Found != len(want) || !slices.Equal(got.Rows, want) {
					t.Errorf("a sweep found %+v, want %v", got, want)
				}
			}
			given := func(txID string) []string {
				t.Helper()
				return ids(`insert into outbox_events (tx_id, aggregate_type, aggregate_id, event_type, payload)
					values (` + txID + `, 'a', 'k', 'T', '{}') returning id`)
			}
			chosen := func(txID, sql string) []string {
				t.Helper()
				return ids(`insert into outbox_events (tx_id, id, aggregate_type, aggregate_id, event_type, payload)
					select ` + txID + `, x, 'a', 'k', 'T', '{}' from (` + sql + `) x(x) returning id`)
			}
			const own = `pg_current_xact_id()`
			given(own)
			n := len(chosen(own, far))
			if got := x.publish(n + 1); len(got) != n+1 {
				t.Fatalf("%d events delivered, want %d", len(got), n+1)
			}
			sweep()
			sweep() // what is noted is not taken for lost
			if name == "too many" {
				// The sequence says nothing there; what comes behind the
				// others does.
				sweep(chosen(`'3'`, `select 1000301`)...)
				return
			}
			lost := given(`'3'`)
			given(own)
			x.publish(1)
			sweep(lost...)
			sweep()
		})
	}
}
