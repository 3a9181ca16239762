package relay

import "testing"

// A budget gives no more than it has, nothing where only a crumb is left, and
// tells those that were turned away when there is more.
func TestBudgetGivesWhatIsFree(t *testing.T) {
	b, w := newBudget(100, 1000), &worker{news: make(chan struct{}, 1)}
	for i, c := range []struct {
		want, got share
		ok        bool
	}{
		{share{60, 300}, share{60, 300}, true},
		{share{60, 300}, share{40, 300}, true}, // records are short
		{share{1, 1}, share{}, false},
	} {
		if got, ok := b.take(w, c.want); got != c.got || ok != c.ok {
			t.Errorf("%d: wanted %v, got %v %v, not %v", i, c.want, got, ok, c.got)
		}
	}
	select {
	case <-w.news:
		t.Error("woken while nothing had come back")
	default:
	}
	b.give(share{100, 300})
	select {
	case <-w.news:
	default:
		t.Error("not woken when there was more")
	}
	if got, ok := b.take(w, share{60, 800}); got != (share{60, 700}) || !ok { // bytes are short
		t.Errorf("got %v %v", got, ok)
	}
	b.give(share{0, 40}) // a crumb
	if got, ok := b.take(w, share{10, 800}); ok {
		t.Errorf("got %v, too little to be worth a claim", got)
	}
}
