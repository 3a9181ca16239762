package relay

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/outrider-dev/outrider/sink"
	"github.com/outrider-dev/outrider/store"
)

// What a sink says is kept in the database, and a text that a database does not
// take would keep its settlement, and all behind it, from ever being written.

// maxReceipt is how much of a receipt is kept.
const maxReceipt = 400

// clean makes a text fit to be kept: valid, without NULs, of bounded length.
func clean(s string, limit int) string {
	if len(s) <= limit && !strings.Contains(s, "\x00") && utf8.ValidString(s) {
		return s
	}
	s = s[:min(len(s), limit+utf8.UTFMax)] // what is cut in two goes with the rest
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
	if len(s) <= limit {
		return s
	}
	n := limit
	for !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// isClass reports whether a class is one of package sink's.
func isClass(c sink.Class) bool {
	switch c {
	case sink.ClassNone, sink.ClassUnreachable, sink.ClassTimeout, sink.ClassThrottled, sink.ClassAuth,
		sink.ClassNoTarget, sink.ClassOversize, sink.ClassInvalid, sink.ClassRefused, sink.ClassHeld,
		sink.ClassWorkerDied, sink.ClassExpired, sink.ClassStopped, sink.ClassOther:
		return true
	}
	return false
}

// maxClass is how much of a class that does not exist is shown.
const maxClass = 100

// classed is a result with one of the classes there are: they are in metrics,
// of which each text would make another one. What the sink said is kept with
// the evidence.
func classed(r sink.Result) (_ sink.Result, ok bool) {
	if isClass(r.Class) {
		return r, true
	}
	said := clean(string(r.Class), maxClass)
	r.Class = sink.ClassOther
	if r.Err == nil {
		r.Err = fmt.Errorf("of class %q", said)
	} else {
		r.Err = fmt.Errorf("of class %q: %w", said, r.Err)
	}
	return r, false
}

// text is an error as the store gets it.
func text(err error) string {
	if err == nil {
		return ""
	}
	return clean(err.Error(), store.MaxMessage)
}
