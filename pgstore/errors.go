package pgstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outrider-dev/outrider"
)

// advice is what usually helps, by SQLSTATE or by its class, its first two
// characters. All that is told of PostgreSQL's errors is here, whether they come
// at the start or while a relay runs.
var advice = map[string]string{
	"08P01": adviceDirect,
	"26000": adviceDirect,
	"42P05": adviceDirect,

	"25006": "the server takes no writes: it is a standby, or default_transaction_read_only is on: give a DSN that leads to the primary " +
		"(with several hosts, target_session_attrs=read-write), or turn that off; a relay goes on by itself when writes are taken",
	"28":    "check user, password and pg_hba.conf: the server refuses the log-in",
	"3D000": "check the database's name, the last part of the DSN: there is no such database",
	"3F000": "the search_path names no schema that the role may use",
	"42501": `grant what the error names; docs/OPERATING.md lists the rights of relays and operators under "Rights on PostgreSQL"`,
	"42703": adviceSchema,
	"42883": adviceSchema,
	"42P01": adviceSchema,

	"53":    "the server lacks something that the error names: look at its log; nothing is lost, and a relay goes on by itself",
	"53100": "the server's disk is full: make room; nothing is lost, and a relay goes on by itself",
	"53200": "the server is out of memory: give it more, or lower work_mem and the number of connections; nothing is lost, and a relay goes on by itself",
	"53300": "the server has no connection left: raise max_connections, or lower max_conns",
	"53400": "the server has come to a limit of its configuration, which the error names: raise it; nothing is lost, and a relay goes on by itself",
	"57P":   adviceReach,
	"58":    "the server's disk or file system reports an error: look at its log, and at the kernel's",
	"XX001": adviceDamage,
	"XX002": adviceDamage,
}

const (
	adviceDirect = "a transaction pooler may stand in front of the database: give a DSN that leads to PostgreSQL itself"
	adviceSchema = "the schema is missing or old: run `outrider migrate up`, or look at the search_path of the role"
	adviceReach  = "look at host, port and database of the DSN, and whether the server is up"
	adviceName   = "check the host's name, and the network: it cannot be resolved"
	adviceDamage = "a table or index is damaged: look at the server's log and disk, and restore a backup or run reindex"
)

// Explain adds to an error of PostgreSQL's what usually helps, as a hint
// (outrider.Hint), unless it has one. The relay's store does so itself.
func Explain(err error) error {
	if err == nil || outrider.Hint(err) != "" {
		return err
	}
	var pg *pgconn.PgError
	switch {
	case errors.As(err, new(*pgconn.ParseConfigError)):
		return ErrDSN // the client's words hold the DSN, and of a malformed one the password
	case errors.As(err, &pg):
		for n := len(pg.Code); n >= 2; n-- {
			if a := advice[pg.Code[:n]]; a != "" {
				return outrider.WithHint(err, a)
			}
		}
		return err
	case errors.As(err, new(*net.DNSError)):
		return outrider.WithHint(err, adviceName)
	case unreached(err):
		return outrider.WithHint(err, adviceReach)
	}
	return err
}

// unreached reports whether nobody answered, or not any more.
func unreached(err error) bool {
	return errors.As(err, new(*pgconn.ConnectError)) || errors.As(err, new(*net.OpError)) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, context.DeadlineExceeded)
}

// ofSession reports whether an error may come from how a connection was set up,
// and stay with it when the cause is gone: a role's or database's search_path
// and default_transaction_read_only are read when a connection begins, and where
// it leads to is chosen then.
func ofSession(err error) bool {
	return isCode(err, "25006") || isCode(err, "42P01") || isCode(err, "3F000")
}

// explain is Explain for what a call of a relay's returns. Connections that may
// have been set up badly are made anew.
func (s *Store) explain(err *error) {
	if *err == nil {
		return
	}
	if ofSession(*err) {
		s.pool.Reset()
	}
	*err = Explain(*err)
}

// connectError is one of making a connection.
func connectError(err error) error {
	if errors.As(err, new(*pgconn.ParseConfigError)) {
		return ErrDSN
	}
	return Explain(fmt.Errorf("pgstore: connect: %w", err))
}
