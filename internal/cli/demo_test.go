package cli

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
)

// The relay is killed, the broker stopped, the way made slow and a message
// poisoned, and the broker is down when the shop closes: nothing is lost, out of order, or sent though it was rolled back.
func TestDemo(t *testing.T) {
	t.Setenv(asProgram, "1") // for the relay and the operator's commands
	var out, log bytes.Buffer
	code := Run(t.Context(), []string{
		"demo", "--for", "4s", "--assert", "-o", "json", "--rate", "50",
		"--script", "500ms poison, 1s kill, 1500ms stop-broker, 2500ms start-broker, 3s slow, 3500ms stop-broker",
	}, strings.NewReader(""), &out, &log)
	if code != 0 {
		t.Fatalf("exit %d\n%s", code, log.String())
	}
	var v demoView
	if err := json.Unmarshal(out.Bytes(), &v); err != nil {
		t.Fatalf("%v: %s", err, out.String())
	}
	if !v.OK || v.Kills != 1 || v.Outages != 2 || v.Skipped != 1 || v.Committed == 0 || v.RolledBack == 0 || v.First <= 0 || v.Delivered+v.Skipped != v.Committed {
		t.Errorf("%+v\n%s", v, log.String())
	}
	for _, line := range []string{"kill -9 of the relay", "is started again", "is FAILED (oversize) and blocks customer-", "outrider skip ", "the broker is back"} {
		if !strings.Contains(log.String(), line) {
			t.Errorf("nothing was said of %q:\n%s", line, log.String())
		}
	}
}
