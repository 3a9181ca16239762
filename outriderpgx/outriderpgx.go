// Package outriderpgx lets outrider write through pgx: a transaction, a
// connection or a pool.
package outriderpgx

import (
	"context"
	"database/sql"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outrider-dev/outrider"
)

// Conn is what pgx.Tx, *pgx.Conn, *pgxpool.Conn and *pgxpool.Pool have in
// common.
type Conn interface {
	Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error)
	Begin(ctx context.Context) (pgx.Tx, error)
}

// Tx gives Outbox.Add a way to write through pgx. It is meant for a pgx.Tx.
// Given a pool, or a connection that is in no transaction, a call of Add is a
// transaction by itself.
func Tx(c Conn) outrider.Execer { return adapter{c} }

type adapter struct{ conn Conn }

func (a adapter) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	tag, err := a.conn.Exec(ctx, query, args...)
	return result(tag.RowsAffected()), err
}

// InTx begins a transaction where there is none. pgx would begin a savepoint
// inside of its Tx, which is of no use here, and on a connection that is in a
// transaction by a statement it would commit that one.
func (a adapter) InTx(ctx context.Context, fn func(outrider.Execer) error) error {
	var conn *pgx.Conn
	switch c := a.conn.(type) {
	case *pgx.Conn:
		conn = c
	case interface{ Conn() *pgx.Conn }: // pgx.Tx, *pgxpool.Conn
		conn = c.Conn()
	}
	if conn != nil && conn.PgConn().TxStatus() != 'I' {
		return fn(a)
	}
	return pgx.BeginFunc(ctx, a.conn, func(tx pgx.Tx) error { return fn(adapter{tx}) })
}

type result int64

func (r result) RowsAffected() (int64, error) { return int64(r), nil }

func (result) LastInsertId() (int64, error) {
	return 0, errors.New("PostgreSQL has no last insert id")
}
