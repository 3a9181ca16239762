package relay

import (
	"testing"

	"github.com/outrider-dev/outrider/sink"
)

// A call is used again. What a sink that keeps no promise says to the use before
// is taken for nothing of this one, however late it looked for whom it speaks to.
func TestReportToAFormerUse(t *testing.T) {
	_, ws := testBreaker(t, 1)
	w := ws[0]
	broken := 0
	w.relay.cfg.Hooks.Broken = func(string) { broken++ }
	c := w.newCall(nil)
	c.msgs = make([]sink.Message, 1)
	former := c.open(0)
	former.report(0, sink.Result{Status: sink.Delivered})
	if c.left.Load() != 0 || c.flags[0].Load() != c.flag(flagSet) {
		t.Fatal("a report was not taken")
	}
	w.recycleCall(c)
	if w.newCall(nil) != c {
		t.Fatal("the call is not used again")
	}
	c.msgs = make([]sink.Message, 1)
	now := c.open(0)
	former.report(0, sink.Result{Status: sink.Delivered})
	former.accept()
	if c.left.Load() != 1 || c.flags[0].Load() != c.flag(flagNone) || c.isAccepted() {
		t.Error("what was said to a former use was taken")
	}
	if broken != 1 {
		t.Errorf("%d promises were broken, want 1", broken)
	}
	now.accept()
	now.report(0, sink.Result{Status: sink.Delivered})
	if c.left.Load() != 0 || c.flags[0].Load() != c.flag(flagSet) || !c.isAccepted() {
		t.Error("what was said to this use was not taken")
	}
}
