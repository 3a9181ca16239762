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
	var pg *pgconn.PgError
	var lite *sqlite.Error
	if errors.As(err, &pg) {
		if hint := postgresHint(pg.Code); hint != "" {
			return outrider.WithHint(err, hint)
		}
	}
	switch {
	case errors.As(err, new(*pgconn.ParseConfigError)):
		return pgstore.ErrDSN
	case errors.As(err, new(*net.DNSError)):
		return outrider.WithHint(err, "the host's name cannot be resolved: look at it, and at the network")
	case errors.As(err, new(*pgconn.ConnectError)):
		return outrider.WithHint(err, "look at host, port and database of the DSN, and whether the server is up")
	case isUnreachable(err):
		return outrider.WithHint(err, "look at the address, and whether the server is up")
	case errors.As(err, &lite) && lite.Code()&0xff == sqliteNotADB:
		return outrider.WithHint(err, "the file is there and holds something else than an SQLite database, or one that is encrypted: look at the path; a path without a file makes a new one")
	case strings.Contains(err.Error(), "unable to open database file"):
		return outrider.WithHint(err, "look at the path: the folder has to exist and to be writable")
	}
	return err
}

func postgresHint(code string) string {
	switch {
	case code == codeRights:
		return "the role lacks a right that the error names: grant it; " + rightsDoc
	case code == "42P01":
		return "a table is missing: outrider migrate up, or look at the search_path"
	case code == "42703":
		return "the schema is of another version: outrider migrate status"
	case code == "42P05", code == "26000":
		return "a transaction pooler stands in front of the database: give a DSN that leads to PostgreSQL itself"
	case code == "53300":
		return "the server has no connection left: raise max_connections, or lower max_conns"
	case strings.HasPrefix(code, "28"):
		return "the server refuses the log-in: look at user, password and pg_hba.conf"
	case code == "3D000":
		return "there is no such database: look at the DSN's last part"
	}
	return ""
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
