package sqlitestore_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
)

// publish claims and settles all that can be claimed now.
func publish(t *testing.T, ses store.Session, l store.Lease) (n int, err error) {
	t.Helper()
	for {
		c, err := ses.Claim(context.Background(), store.ClaimParams{Lease: l, Kind: store.Fresh, MaxRecords: 1000, MaxBytes: 1 << 20})
		if err != nil || len(c.Records) == 0 {
			return n, err
		}
		p := store.CommitParams{Lease: l, Start: []*store.Claim{c}}
		if err := ses.Commit(context.Background(), p); err != nil {
			return n, err
		}
		p = store.CommitParams{Lease: l, Settle: []store.Settlement{{Claim: c, Outcomes: make([]store.Outcome, len(c.Records))}}}
		for i := range p.Settle[0].Outcomes {
			p.Settle[0].Outcomes[i].State = store.Published
		}
		if err := ses.Commit(context.Background(), p); err != nil {
			return n, err
		}
		n += len(c.Records)
	}
}

// Ids that are set back under a session pass over nothing: it is refused, and
// stays so when the ids have climbed up again, also between two looks, until an
// operator has put it right.
func TestIDsSetBackUnderASession(t *testing.T) {
	for _, c := range []struct {
		name  string
		looks bool // between the first events and the rest
	}{{"looked at", true}, {"climbed up unseen", false}} {
		t.Run(c.name, func(t *testing.T) {
			db := makeDB(t, migrate.Stream)
			s := open(t, migrate.Stream, sqlitestore.Config{Path: db.path})
			ses := join(t, s, time.Hour)
			l := acquire(t, ses)
			db.fill(t, 50)
			if n, err := publish(t, ses, l); n != 50 || err != nil {
				t.Fatalf("published %d, %v", n, err)
			}
			db.exec(t, "delete from outbox_events")
			db.exec(t, "delete from sqlite_sequence where name = 'outbox_events'")
			refused := func(n int, err error) {
				t.Helper()
				if n != 0 || err == nil || !strings.Contains(err.Error(), "set back, from 50") || !strings.Contains(outrider.Hint(err), "seen_id") {
					t.Fatalf("published %d, %v, hint %q", n, err, outrider.Hint(err))
				}
			}
			db.fill(t, 5)
			if c.looks {
				refused(publish(t, ses, l))
			}
			db.fill(t, 60)
			refused(publish(t, ses, l))
			refused(publish(t, ses, l))
			if _, err := ses.Claim(context.Background(), store.ClaimParams{Lease: l, Kind: store.Due, MaxRecords: 10, MaxBytes: 1000}); err == nil {
				t.Error("what is due was handed out")
			}
			other := open(t, migrate.Stream, sqlitestore.Config{Path: db.path})
			_, err := other.Join(context.Background(), store.JoinParams{TTL: time.Hour, Grace: time.Hour})
			refused(0, err)
			refused(0, s.(store.Maintainer).Maintain(context.Background()))

			// As the hint says: the events come again, under new ids.
			db.exec(t, "update sqlite_sequence set seq = 65 where name = 'outbox_events'")
			db.exec(t, `insert into outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload)
				select event_id, aggregate_type, aggregate_id, event_type, payload from outbox_events where id <= 65 order by id`)
			db.exec(t, "delete from outbox_events where id <= 65")
			db.exec(t, "update outbox_source set seen_id = 65")
			if n, err := publish(t, ses, l); n != 65 || err != nil {
				t.Fatalf("published %d of 65, %v", n, err)
			}
		})
	}
}

// Rows carry their state: what came under former ids is sent.
func TestRowIDsSetBackUnderASession(t *testing.T) {
	for _, first := range []int{5, 65} {
		db := makeDB(t, migrate.Rows)
		s := open(t, migrate.Rows, sqlitestore.Config{Path: db.path})
		ses := join(t, s, time.Hour)
		l := acquire(t, ses)
		pending := func(n int) {
			t.Helper()
			db.exec(t, `with recursive c(i) as (select 1 union all select i + 1 from c where i < ?)
				insert into outbox_rows (aggregate_type, aggregate_id, event_type, payload) select 'order', 'key', 'Done', '{}' from c`, n)
		}
		pending(50)
		if n, err := publish(t, ses, l); n != 50 || err != nil {
			t.Fatalf("published %d, %v", n, err)
		}
		db.exec(t, "delete from outbox_rows")
		db.exec(t, "delete from sqlite_sequence where name = 'outbox_rows'")
		total := 0
		for _, n := range []int{first, 70 - first} {
			pending(n)
			n, err := publish(t, ses, l)
			if err != nil {
				t.Fatal(err)
			}
			total += n
		}
		if total != 70 {
			t.Errorf("published %d of 70", total)
		}
	}
}
