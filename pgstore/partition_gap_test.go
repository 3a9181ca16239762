package pgstore

import (
	"context"
	"math"
	"strings"
	"testing"

	"github.com/outrider-dev/outrider"
)

// Which ids have no partition is found among those that are there, in whatever
// order, from the first that counts on.
func TestGap(t *testing.T) {
	const begin = math.MinInt64
	for _, c := range []struct {
		name  string
		first int64
		parts []partition
		want  string // "": none
		hint  string
	}{
		{"one for all", 1, []partition{{from: begin, to: noEnd}}, "", ""},
		{"from one on", 1, []partition{{from: 1, to: noEnd}}, "", ""},
		{"three", 1, []partition{{from: begin, to: 10}, {from: 10, to: 20}, {from: 20, to: noEnd}}, "", ""},
		{"the oldest", 1, []partition{{from: 10, to: 20}, {from: 20, to: noEnd}}, "from 1 to 9:", "from (minvalue) to (10)"},
		{"the oldest, removed", 10, []partition{{from: 10, to: 20}, {from: 20, to: noEnd}}, "", ""},
		{"more than was removed", 10, []partition{{from: 20, to: noEnd}}, "from 10 to 19:", "from (10) to (20)"},
		{"part of what is there was removed", 15, []partition{{from: 10, to: 20}, {from: 20, to: noEnd}}, "", ""},
		{"in the middle", 1, []partition{{from: begin, to: 10}, {from: 20, to: noEnd}}, "from 10 to 19:", "set first_id = 20"},
		{"in the middle, removed", 20, []partition{{from: begin, to: 10}, {from: 20, to: noEnd}}, "", ""},
		{"the last", 1, []partition{{from: begin, to: 10}}, "from 10 on", "from (10) to (maxvalue)"},
		{"all", 1, nil, "from 1 on", "from (minvalue) to (maxvalue)"},
		{"all but a removed one", 10, []partition{{from: begin, to: 5}}, "from 10 on", "from (10) to (maxvalue)"},
	} {
		err := gap(c.parts, c.first)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v, want none", c.name, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		case !strings.Contains(outrider.Hint(err), c.hint):
			t.Errorf("%s: hint %q, want %q in it", c.name, outrider.Hint(err), c.hint)
		}
	}
}

func TestParseBound(t *testing.T) {
	for text, want := range map[string]partition{
		"FOR VALUES FROM (MINVALUE) TO (MAXVALUE)":                            {from: math.MinInt64, to: noEnd},
		"FOR VALUES FROM ('1') TO ('10000000')":                               {from: 1, to: 10_000_000},
		"FOR VALUES FROM ('9223372036854775806') TO (MAXVALUE)":               {from: math.MaxInt64 - 1, to: noEnd},
		"FOR VALUES FROM ('-9223372036854775808') TO ('0')":                   {from: math.MinInt64, to: 0},
		"FOR VALUES FROM ('1') TO ('10000000000000000000000000000000000000')": {},
		"DEFAULT": {},
		"":        {},
	} {
		if got, ok := parseBound("", text); got != want || ok != (want != partition{}) {
			t.Errorf("%q: %+v, %v", text, got, ok)
		}
	}
}

// A partition that went and came back between two statements of one claim has
// been missing in the first: the number of the set tells.
func TestSetTellsOfAPartitionThatCameBack(t *testing.T) {
	ctx := context.Background()
	s := openStore(t)
	set := func() (n int64) {
		t.Helper()
		if err := s.pool.QueryRow(ctx, setSQL).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := set()
	if again := set(); again != before {
		t.Errorf("it is %d and %d with nothing in between", before, again)
	}
	for _, q := range []string{`alter table outbox_events detach partition outbox_events_p0`,
		`alter table outbox_events attach partition outbox_events_p0 for values from (minvalue) to (maxvalue)`} {
		if _, err := s.pool.Exec(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	if after := set(); after == before {
		t.Error("it is the same after a partition went and came back")
	}
}

// A payload that is fetched by itself, and whose row has gone meanwhile, is no
// empty payload.
func TestLargePayloadThatWentAway(t *testing.T) {
	rows := []row{{id: 7, size: 1 << 20, large: true, rec: &outrider.Record{}}}
	if err := openStore(t).fetchLarge(context.Background(), rows); err == nil || !strings.Contains(err.Error(), "row 7 went away") {
		t.Errorf("it says %v", err)
	}
}
