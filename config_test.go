package outrider

import (
	"strings"
	"testing"
)

func TestConfigNamesTheField(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  Config
		want string // "" = accepted
	}{
		{"no dialect", Config{}, "Config.Dialect: is not set"},
		{"other dialect", Config{Dialect: 9}, "Config.Dialect: Dialect(9)"},
		{"defaults", Config{Dialect: Postgres}, ""},
		{"json", Config{Dialect: Postgres, Payload: PayloadJSON}, ""},
		{"json on sqlite", Config{Dialect: SQLite, Payload: PayloadJSON}, "Config.Payload: json exists on PostgreSQL only"},
		{"other payload", Config{Dialect: Postgres, Payload: 9}, "Config.Payload: PayloadKind(9)"},
		{"no limits", Config{Dialect: SQLite, MaxPayload: -1, MaxType: -1, MaxHeaders: -1, MaxHeaderBytes: -1}, ""},
		{"payload", Config{Dialect: SQLite, MaxPayload: -2}, "Config.MaxPayload: -2"},
		{"type", Config{Dialect: SQLite, MaxType: -2}, "Config.MaxType: -2"},
		{"headers", Config{Dialect: SQLite, MaxHeaders: -2}, "Config.MaxHeaders: -2"},
		{"header bytes", Config{Dialect: SQLite, MaxHeaderBytes: -2}, "Config.MaxHeaderBytes: -2"},
		{"key", Config{Dialect: SQLite, MaxKey: 2048}, ""},
		{"long key", Config{Dialect: SQLite, MaxKey: 2049}, "Config.MaxKey: 2049 is not between 1 and 2048"},
		{"unlimited key", Config{Dialect: SQLite, MaxKey: -1}, "Config.MaxKey: -1"},
		{"table", Config{Dialect: SQLite, Table: "a.b.c"}, "Config.Table: "},
	} {
		_, err := New(c.cfg)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
	}
}

func TestTableNames(t *testing.T) {
	long := strings.Repeat("x", 64)
	for _, c := range []struct{ in, want, wrong string }{
		{"outbox_events", `"outbox_events"`, ""},
		{"App.Events", `"App"."Events"`, ""},
		{`"my.app".outbox_events`, `"my.app"."outbox_events"`, ""},
		{`"say ""hi"""."x"`, `"say ""hi"""."x"`, ""},
		{`x; drop table users`, `"x; drop table users"`, ""},
		{"ünïcode", `"ünïcode"`, ""},
		{`x" (a) values (1); --`, "", "a quote stands inside a name"},
		{`"x" (a); --`, "", "something other than a dot"},
		{`"x`, "", "not closed"},
		{`"x""`, "", "not closed"},
		{".x", "", "a name is empty"},
		{"x.", "", "a name is empty"},
		{`"".x`, "", "a name is empty"},
		{"a.b.c", "", "more parts"},
		{"a\x00b", "", "NUL"},
		{"a\xff", "", "UTF-8"},
		{long, "", "64 bytes"},
	} {
		got, err := quoteTable(Postgres, c.in)
		if got != c.want || (c.wrong == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.wrong) {
			t.Errorf("%q: %s, %v; want %s, %q", c.in, got, err, c.want, c.wrong)
		}
	}
	if _, err := quoteTable(SQLite, long); err != nil {
		t.Errorf("SQLite has no limit: %v", err)
	}
}

func TestNames(t *testing.T) {
	got := []string{Postgres.String(), SQLite.String(), Dialect(7).String(), PayloadKind(0).String(), PayloadBytea.String(), PayloadJSON.String(), PayloadKind(7).String()}
	if want := "postgres sqlite Dialect(7) bytea bytea json PayloadKind(7)"; strings.Join(got, " ") != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
