package migrate

import (
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	_ "modernc.org/sqlite"

	"github.com/outrider-dev/outrider"
)

func TestFilesAreNumberedAndHaveAWayBack(t *testing.T) {
	f := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }
	for _, c := range []struct {
		fsys fstest.MapFS
		want string
	}{
		{fstest.MapFS{}, "no migrations"},
		{fstest.MapFS{"d/1_a.up.sql": f("")}, "is not named NNNN_name.up.sql"},
		{fstest.MapFS{"d/0002_a.up.sql": f(""), "d/0002_a.down.sql": f("")}, "should have number 0001"},
		{fstest.MapFS{"d/0001_a.up.sql": f("")}, "0001_a.down.sql"},
	} {
		if _, err := readFiles(c.fsys, "d"); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: got %v, want %q", c.fsys, err, c.want)
		}
	}
}

// Steps of several migrations: to a version and back, each with the fingerprint
// of its own tables.
func TestSeveralVersions(t *testing.T) {
	fsys := fstest.MapFS{}
	for i, text := range []string{
		"create table outbox_events (\n  id integer\n);",
		"create table other (\n  id integer\n);",
		"alter table outbox_events add note text;",
	} {
		name := fmt.Sprintf("d/%04d_n%d.", i+1, i+1)
		fsys[name+"up.sql"] = &fstest.MapFile{Data: []byte(text)}
		down := []string{"drop table outbox_events;", "drop table other;", "alter table outbox_events drop column note;"}[i]
		fsys[name+"down.sql"] = &fstest.MapFile{Data: []byte(down)}
	}
	files, err := readFiles(fsys, "d")
	if err != nil {
		t.Fatal(err)
	}
	m := &migrator{Options: Options{Dialect: outrider.SQLite, Set: Stream}, dialect: sqlite{}, files: files, events: "outbox_events"}
	db, err := sql.Open("sqlite", filepath.Join(t.TempDir(), "db"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	move := func(step func(last int) (*Step, error), last int) string {
		var names []string
		for {
			s, err := step(last)
			if err != nil {
				t.Fatal(err)
			}
			if s == nil {
				return strings.Join(names, " ")
			}
			names = append(names, s.Name)
		}
	}
	up := func(last int) (*Step, error) { return m.up(t.Context(), db, last) }
	down := func(last int) (*Step, error) { return m.down(t.Context(), db, last) }
	check := func(want error) {
		t.Helper()
		s, err := m.read(t.Context(), db)
		if err != nil {
			t.Fatal(err)
		}
		if len(s.drift) != 0 {
			t.Errorf("drift at version %d: %v", s.version(), s.drift)
		}
		if err := m.check(s); !errors.Is(err, want) {
			t.Errorf("version %d: %v, want %v", s.version(), err, want)
		}
	}
	for _, c := range []struct {
		step func(int) (*Step, error)
		to   int
		want string
		err  error
	}{
		{up, 2, "n1 n2", ErrOlder},
		{up, 3, "n3", nil},
		{down, 1, "n3 n2", ErrOlder},
		{up, 3, "n2 n3", nil},
		{down, 0, "n3 n2 n1", ErrMissing},
	} {
		if got := move(c.step, c.to); got != c.want {
			t.Errorf("to %d: %q, want %q", c.to, got, c.want)
		}
		check(c.err)
	}
}
