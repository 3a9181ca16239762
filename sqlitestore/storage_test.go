package sqlitestore_test

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
)

// What is told of a file is its size, and that there are no partitions.
func TestStorageIsTold(t *testing.T) {
	for _, set := range []migrate.Set{migrate.Stream, migrate.Rows} {
		db := makeDB(t, set)
		s := open(t, set, sqlitestore.Config{Path: db.path})
		db.exec(t, `insert into `+db.table()+` (aggregate_type, aggregate_id, event_type, payload, event_key) values ('a', 'b', 'T', ?, null)`,
			strings.Repeat("x", 1<<20))
		db.exec(t, `pragma wal_checkpoint(truncate)`)
		st, err := s.(store.Inspector).Status(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		f, err := os.Stat(db.path)
		if err != nil {
			t.Fatal(err)
		}
		if want := (store.Storage{Bytes: f.Size()}); st.Storage != want || f.Size() < 1<<20 {
			t.Errorf("%s: %+v of %d bytes", set, st.Storage, f.Size())
		}
	}
}
