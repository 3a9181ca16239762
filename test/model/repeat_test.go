package model

import (
	"context"
	"flag"
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/outrider-dev/outrider/memstore"
	"github.com/outrider-dev/outrider/migrate"
	"github.com/outrider-dev/outrider/sqlitestore"
	"github.com/outrider-dev/outrider/store"
)

// A seed is a walk: it can be walked again, whatever was walked before. On
// PostgreSQL it is not for certain: snapshots have in them what others do on the
// same server.
func TestWalksRepeat(t *testing.T) {
	stream := func(c sqlitestore.Config) (store.Store, error) {
		return sqlitestore.OpenStream(context.Background(), c)
	}
	rows := func(c sqlitestore.Config) (store.Store, error) { return sqlitestore.OpenRows(context.Background(), c) }
	for _, x := range []struct {
		name string
		make maker
	}{
		{"Memory", inMemory(memstore.Config{}, nil)},
		{"Stream", onSQLite(t, migrate.Stream, "outbox_events", stream)},
		{"Rows", onSQLite(t, migrate.Rows, "outbox_rows", rows)},
	} {
		t.Run(x.name, func(t *testing.T) {
			setFlag(t, "rapid.checks", "20")
			var seen []string
			for n := range 2 {
				setFlag(t, "rapid.seed", "7")
				i := 0
				rapid.Check(t, func(rt *rapid.T) {
					sub := x.make(t)
					sub.ended = func(trace []string) {
						if n == 0 {
							seen = append(seen, trace...)
							return
						}
						if len(seen) < i+len(trace) {
							t.Fatalf("the first time there were %d steps, and now there are more", len(seen))
						}
						for j, line := range trace {
							if seen[i+j] != line {
								t.Fatalf("step %d was\n%s\nand is\n%s\nbehind\n%s", i+j, seen[i+j], line,
									fmt.Sprint(slices.Clone(seen[max(0, i+j-20):i+j])))
							}
						}
						i += len(trace)
					}
					run(t, rt, sub)
				})
			}
		})
	}
}

// setFlag sets a flag for the time of a test.
func setFlag(t *testing.T, name, value string) {
	t.Helper()
	was := flag.Lookup(name).Value.String()
	if err := flag.Set(name, value); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = flag.Set(name, was) })
}
