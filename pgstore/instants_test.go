package pgstore_test

import (
	"testing"

	"github.com/outrider-dev/outrider/pgstore"
)

// A row's instant is that of its insert. now() would be the transaction's
// beginning, the same for all its rows, and ages would count from there.
func TestRowsHaveTheirOwnInstants(t *testing.T) {
	_, db := open(t, pgstore.Config{})
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback() // the database goes with the test
	for range 2 {
		if _, err := tx.Exec(oneEvent); err != nil {
			t.Fatal(err)
		}
	}
	var own bool
	if err := tx.QueryRow(`select count(distinct created_at) = 2 and min(created_at) > now() from outbox_events`).Scan(&own); err != nil {
		t.Fatal(err)
	}
	if !own {
		t.Error("rows of one transaction have its beginning as their instant")
	}
}
