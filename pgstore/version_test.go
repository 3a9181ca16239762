package pgstore_test

import (
	"context"
	"net/url"
	"strings"
	"testing"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/pgstore"
)

// A server's number decides; what packagers write into its text does not.
func TestVersionCheck(t *testing.T) {
	for _, c := range []struct{ number, text, want string }{
		{"90624", "9.6.24", "PostgreSQL 9.6.24 is too old"},
		{"130022", "13.22 (Debian 13.22-1.pgdg120+1)", "PostgreSQL 13.22 (Debian 13.22-1.pgdg120+1) is too old"},
		{"139999", "13.99", "too old"},
		{"140000", "14beta1", ""},
		{"140019", "14.19", ""},
		{"170002", "17.2 (Debian 17.2-1)", ""},
		{"180000", "18beta1", ""},
		{"190000", "19devel", ""},
		{"1000000", "", ""},
		{"170002", "whatever a packager writes", ""},
		{"", "17.2", "cannot be understood"},
		{"17.2", "17.2", "cannot be understood"},
		{"18beta1", "18beta1", "cannot be understood"},
		{"-170002", "17.2", "cannot be understood"},
		{"0", "17.2", "cannot be understood"},
		{"99999999999999999999", "17.2", "cannot be understood"},
	} {
		err := pgstore.CheckVersion(c.number, c.text)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s (%s) is refused: %v", c.number, c.text, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s (%s): %v, want %q", c.number, c.text, err, c.want)
		case err != nil && !strings.Contains(outrider.Hint(err), "14 or newer"):
			t.Errorf("%s (%s): hint %q", c.number, c.text, outrider.Hint(err))
		}
	}
}

// A server that says that it is old is refused at start, by relays and by
// commands. A function ahead on the search path speaks for it.
func TestOldServerIsRefused(t *testing.T) {
	s, db := open(t, pgstore.Config{})
	_, err := db.Exec(`create schema old;
		create function old.current_setting(name text) returns text language sql as
			$$ select case name when 'server_version_num' then '130022' when 'server_version' then '13.22' else pg_catalog.current_setting(name) end $$`)
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(pgstore.DSN(s))
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	q.Set("search_path", "old,pg_catalog,public")
	u.RawQuery = q.Encode()
	for _, inspect := range []bool{false, true} {
		s, err := pgstore.Open(context.Background(), pgstore.Config{DSN: u.String(), Inspect: inspect})
		if err == nil {
			_ = s.Close()
			t.Errorf("opened (inspect %t)", inspect)
		} else if !strings.Contains(err.Error(), "PostgreSQL 13.22 is too old") {
			t.Errorf("inspect %t: %v", inspect, err)
		}
	}
}
