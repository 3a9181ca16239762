package outrider_test

import (
	"testing"

	"github.com/outrider-dev/outrider"
)

// laneVectors were computed with md5sum: printf %s KEY | md5sum, the first 8
// digits modulo 64. Clients in other languages can be held to them.
var laneVectors = []struct {
	key  string
	lane int
}{
	{"42", 40}, {"order-1", 41}, {"a", 57}, {" ", 28}, {"Grüße", 53}, {"注文/42", 23}, {"заказ", 54}, {"🛒", 27}, {"e\u0301", 31}, {"\u00e9", 23}, {"\u2028'\"\\", 9},
}

func TestLanes(t *testing.T) {
	seen := map[int]bool{}
	for _, v := range laneVectors {
		if got := outrider.Lane(v.key); got != v.lane {
			t.Errorf("%q: lane %d, want %d", v.key, got, v.lane)
		}
		seen[v.lane] = true
	}
	if len(seen) < 8 {
		t.Errorf("the vectors cover %d lanes", len(seen))
	}
}
