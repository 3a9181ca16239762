package daemon

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"modernc.org/sqlite"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/pgstore"
)

// sqliteNotADB is SQLITE_NOTADB.
const sqliteNotADB = 26

// explain adds advice to an error that carries none, by what it wraps.
func explain(err error) error {
	if err == nil || outrider.Hint(err) != "" {
		return err
	}
	var lite *sqlite.Error
	switch {
	case errors.As(err, new(*pgconn.PgError)), errors.As(err, new(*pgconn.ConnectError)), errors.As(err, new(*pgconn.ParseConfigError)):
		return pgstore.Explain(err)
	case errors.As(err, new(*net.DNSError)):
		return outrider.WithHint(err, "the host's name cannot be resolved: look at it, and at the network")
	case isUnreachable(err):
		return outrider.WithHint(err, "look at the address, and whether the server is up")
	case errors.As(err, &lite) && lite.Code()&0xff == sqliteNotADB:
		return outrider.WithHint(err, "the file is there and holds something else than an SQLite database, or one that is encrypted: look at the path; a path without a file makes a new one")
	case strings.Contains(err.Error(), "unable to open database file"):
		return outrider.WithHint(err, "look at the path: the folder has to exist and to be writable")
	}
	return err
}

// isUnreachable reports whether nobody answered: what a restart would not mend
// and waiting may.
func isUnreachable(err error) bool {
	var timeout interface{ Timeout() bool }
	return errors.As(err, new(*net.OpError)) || errors.As(err, new(*net.DNSError)) ||
		errors.Is(err, context.DeadlineExceeded) || errors.Is(err, io.EOF) ||
		errors.As(err, &timeout) && timeout.Timeout()
}

// Explain adds advice to an error of a database that carries none.
func Explain(err error) error { return explain(err) }
