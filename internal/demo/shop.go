package demo

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/outrider-dev/outrider"
)

// shop is an application: it places orders, each in a transaction with its
// event.
type shop struct {
	db     *sql.DB
	outbox *outrider.Outbox
	ledger *ledger
	orders int
}

const (
	customers = 20
	// rollBackEvery is how many transactions come to one that is rolled back.
	rollBackEvery = 10
	// poisonBytes is more than the broker takes.
	poisonBytes = maxPayload + 1<<10
)

// order is the payload of an event.
type order struct {
	Order    int    `json:"order"`
	Customer string `json:"customer"`
	N        int    `json:"n"` // the customer's n-th
	Total    string `json:"total"`
	Note     string `json:"note,omitempty"`
}

func newShop(ctx context.Context, db *sql.DB, l *ledger) (*shop, error) {
	o, err := outrider.New(outrider.Config{Dialect: outrider.SQLite})
	if err != nil {
		return nil, err
	}
	for _, ddl := range []string{
		"create table customers (id text primary key, orders integer not null)",
		"create table orders (id integer primary key, customer text not null, n integer not null, total text not null)",
	} {
		if _, err := db.ExecContext(ctx, ddl); err != nil {
			return nil, err
		}
	}
	for i := range customers {
		if _, err := db.ExecContext(ctx, "insert into customers values (?, 0)", customer(i)); err != nil {
			return nil, err
		}
	}
	return &shop{db: db, outbox: o, ledger: l}, nil
}

func customer(i int) string { return fmt.Sprintf("customer-%02d", i+1) }

// place places one order: business rows and event in one transaction. One in
// ten is rolled back at the last moment.
func (s *shop) place(ctx context.Context, poison bool) error {
	s.orders++
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // nothing to roll back after the commit
	o := order{Order: s.orders, Customer: customer(s.orders % customers), Total: fmt.Sprintf("%d.%02d", 5+s.orders%95, s.orders%100)}
	if poison {
		o.Note = strings.Repeat("x", poisonBytes)
	}
	err = tx.QueryRowContext(ctx, "update customers set orders = orders + 1 where id = ? returning orders", o.Customer).Scan(&o.N)
	if err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, "insert into orders values (?, ?, ?, ?)", o.Order, o.Customer, o.N, o.Total); err != nil {
		return err
	}
	payload, err := json.Marshal(o)
	if err != nil {
		return err
	}
	e := outrider.Event{
		ID: outrider.NewID(), AggregateType: "order", AggregateID: fmt.Sprint(o.Order), Type: "OrderPlaced",
		Key: o.Customer, Payload: payload,
	}
	if err := s.outbox.Add(ctx, tx, e); err != nil {
		return err
	}
	s.ledger.place(e.ID, e.Key, o.N, poison, time.Now())
	if !poison && s.orders%rollBackEvery == 0 {
		s.ledger.rollBack(e.ID)
		return tx.Rollback()
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	s.ledger.commit(e.ID)
	return nil
}
