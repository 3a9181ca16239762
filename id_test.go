package outrider

import (
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var uuid7 = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)

// The timestamp of the example in RFC 9562, appendix A.6, and the fraction of a
// millisecond behind it.
func TestIDLayout(t *testing.T) {
	var s idSource
	id := s.next(time.UnixMilli(0x017F22E279B0).Add(500 * time.Microsecond))
	if !strings.HasPrefix(id, "017f22e2-79b0-7800-") || !uuid7.MatchString(id) {
		t.Errorf("got %s", id)
	}
	// The last step within the millisecond doesn't run over into the next.
	if id := s.next(time.UnixMilli(0x017F22E279B0).Add(time.Millisecond - 1)); !strings.HasPrefix(id, "017f22e2-79b0-7fff-") {
		t.Errorf("got %s", id)
	}
	// Beyond it, the count does.
	if id := s.next(time.UnixMilli(0x017F22E279B0)); !strings.HasPrefix(id, "017f22e2-79b1-7000-") {
		t.Errorf("got %s", id)
	}
}

// Whatever the clock does, ids ascend.
func TestIDsAscendUnderAnyClock(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s idSource
		now := time.Unix(1_700_000_000, 0)
		last := ""
		for _, step := range rapid.SliceOf(rapid.Int64Range(-int64(time.Hour), int64(time.Hour))).Draw(t, "steps") {
			now = now.Add(time.Duration(step))
			id := s.next(now)
			if id <= last || !uuid7.MatchString(id) {
				t.Fatalf("%s after %s", id, last)
			}
			last = id
		}
	})
}

func TestNewIDOverGoroutines(t *testing.T) {
	const workers, each = 8, 5000
	made := make([][]string, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for range each {
				made[w] = append(made[w], NewID())
			}
		})
	}
	wg.Wait()
	seen := make(map[string]bool, workers*each)
	stamps := make(map[string]bool, workers*each)
	for _, ids := range made {
		for i, id := range ids {
			if i > 0 && id <= ids[i-1] {
				t.Fatalf("%s after %s", id, ids[i-1])
			}
			if _, err := ParseID(id); err != nil || !uuid7.MatchString(id) {
				t.Fatalf("%s: %v", id, err)
			}
			seen[id], stamps[id[:18]] = true, true
		}
	}
	// Not only the random part tells them apart.
	if len(seen) != workers*each || len(stamps) != workers*each {
		t.Errorf("%d ids and %d timestamps of %d calls", len(seen), len(stamps), workers*each)
	}
}

func TestParseID(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"0190163d-8694-739b-aea5-966c26f8ad91", "0190163d-8694-739b-aea5-966c26f8ad91"},
		{"0190163D-8694-739B-AEA5-966C26F8AD91", "0190163d-8694-739b-aea5-966c26f8ad91"},
		{"ffffffff-ffff-ffff-ffff-ffffffffffff", "ffffffff-ffff-ffff-ffff-ffffffffffff"},
		{"00000000-0000-0000-0000-000000000000", ""},
		{"", ""},
		{"0190163d8694739baea5966c26f8ad91", ""},
		{"{0190163d-8694-739b-aea5-966c26f8ad91}", ""},
		{"0190163d-8694-739b-aea5-966c26f8ad9g", ""},
		{"0190163d-8694-739b-aea5-966c26f8ad9é", ""},
		{"0190163d_8694-739b-aea5-966c26f8ad91", ""},
		{"0190163d-8694_739b-aea5-966c26f8ad91", ""},
		{"0190163d-8694-739b_aea5-966c26f8ad91", ""},
		{"0190163d-8694-739b-aea5_966c26f8ad91", ""},
		{"0190163-d8694-739b-aea5-966c26f8ad91", ""},
		{"urn:uuid:0190163d-8694-739b-aea5-966c26f8ad91", ""},
	} {
		got, err := ParseID(c.in)
		if got != c.want || (err != nil) != (c.want == "") {
			t.Errorf("%q: %q, %v", c.in, got, err)
		}
	}
}

func BenchmarkNewID(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		NewID()
	}
}
