package cli

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/outrider-dev/outrider/store"
)

// A row written by hand may have any instant that the database takes; one that
// package time does not print would keep the whole list from being shown.
func TestFarYearsArePrinted(t *testing.T) {
	far := time.Date(20000, 1, 2, 3, 4, 5, 6000, time.UTC)
	out, err := json.Marshal(viewEntry(store.Entry{CreatedAt: far, LastFailure: far}))
	if err != nil || strings.Count(string(out), `"20000-01-02T03:04:05.000006Z"`) != 2 {
		t.Errorf("%s, %v", out, err)
	}
}
