package sqlitestore

import (
	"database/sql/driver"
	"strings"

	"github.com/outrider-dev/outrider"
)

var driverErrBadConn = driver.ErrBadConn

// SQLite's primary result codes.
const (
	codeError    = 1
	codeBusy     = 5
	codeReadOnly = 8
	codeIOErr    = 10
	codeCorrupt  = 11
	codeFull     = 13
	codeCantOpen = 14
	codeProtocol = 15
	codeNotADB   = 26
)

// isBusy reports that another connection stood in the way, which passes.
func isBusy(err error) bool {
	c := code(err)
	return c == codeBusy || c == codeProtocol
}

// explain adds what usually helps.
func explain(err error) error {
	if err == nil || outrider.Hint(err) != "" {
		return err
	}
	hint := ""
	switch code(err) {
	case codeError:
		if m := err.Error(); strings.Contains(m, "no such table") || strings.Contains(m, "no such column") {
			hint = "the schema is missing or old: run `outrider migrate up`"
		}
	case codeReadOnly:
		hint = "the relay has to write to the file and to its folder, where SQLite keeps -wal and -shm files beside it: check their owner and mode"
	case codeIOErr:
		hint = "the disk or its file system reports an error: look at the kernel's log; SQLite needs a local disk"
	case codeCorrupt:
		hint = "the file is damaged: stop all writers, then see `pragma integrity_check` and restore a backup"
	case codeFull:
		hint = "the disk is full: make room; nothing is lost, and sending goes on by itself"
	case codeCantOpen:
		hint = "check that the file and its folder can be read and written by the relay"
	case codeNotADB:
		hint = "the file is not a SQLite database, or an encrypted one: check the path"
	}
	if hint == "" {
		return err
	}
	return outrider.WithHint(err, hint)
}
