package relay

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// Receipts are compacted, and bounded.
func TestReceipts(t *testing.T) {
	var rs receipts
	for i := range 3 {
		rs.add(fmt.Sprintf("orders/3@%d", 17+i))
		rs.add(fmt.Sprintf("orders/0@%d", i))
	}
	rs.add("orders/3@25")
	rs.add("200 OK")
	rs.add("x@y")
	rs.add("")
	want := []string{"orders/3@17-19", "orders/0@0-2", "orders/3@25", "200 OK", "x@y"}
	if got := rs.list(); !reflect.DeepEqual(got, want) {
		t.Errorf("got %q", got)
	}
	rs.reset()
	for i := range 1000 {
		rs.add(fmt.Sprintf("orders/0@%d", 2*i))
	}
	if got := rs.list(); len(got) != maxReceipts+1 || got[maxReceipts] != "+936 more" {
		t.Errorf("%d entries, the last is %q", len(got), got[len(got)-1])
	}
	// What no database takes is not kept as it is, nor are long ones.
	rs.reset()
	long := strings.Repeat("x", 2*maxReceipt)
	for _, s := range []string{"a\x00b@1", "a\x00b@2", "c\xFF", long} {
		rs.add(s)
	}
	want = []string{"a\uFFFDb@1", "a\uFFFDb@2", "c\uFFFD", long[:maxReceipt]}
	if got := rs.list(); !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.StringN(-1, -1, maxReceipt).Draw(t, "receipt")
		rs.reset()
		rs.add(s)
		if got := rs.list(); s != "" && !slices.Equal(got, []string{clean(s, maxReceipt)}) && !strings.Contains(s, "@0") {
			t.Fatalf("%q became %q", s, got)
		}
	})
}
