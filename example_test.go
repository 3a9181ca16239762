package outrider_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	_ "modernc.org/sqlite"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
)

// The event is written by the transaction that places the order.
func ExampleOutbox_Add() {
	ctx := context.Background()
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		panic(err)
	}
	defer db.Close()
	db.SetMaxOpenConns(1) // one memory, one connection
	if _, err := migrate.Up(ctx, db, migrate.Options{Dialect: outrider.SQLite}); err != nil {
		panic(err)
	}
	if _, err := db.ExecContext(ctx, "create table orders (id text, total integer)"); err != nil {
		panic(err)
	}
	outbox, err := outrider.New(outrider.Config{Dialect: outrider.SQLite})
	if err != nil {
		panic(err)
	}

	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		panic(err)
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, "insert into orders values ('42', 1999)"); err != nil {
		panic(err)
	}
	err = outbox.Add(ctx, tx, outrider.Event{
		AggregateType: "order",
		AggregateID:   "42",
		Type:          "OrderPlaced",
		Payload:       []byte(`{"total": 1999}`),
		Headers:       map[string]string{"tenant": "acme"},
	})
	if err != nil {
		panic(err)
	}
	if err := tx.Commit(); err != nil {
		panic(err)
	}

	var typ, payload, headers string
	err = db.QueryRowContext(ctx, "select event_type, payload, headers from outbox_events").Scan(&typ, &payload, &headers)
	fmt.Println(typ, payload, headers, err)
	// Output: OrderPlaced {"total": 1999} {"tenant":"acme"} <nil>
}

// What can't be delivered is refused before anything is written, and the error
// says which event it was and what to do.
func ExampleEventError() {
	outbox, err := outrider.New(outrider.Config{Dialect: outrider.Postgres})
	if err != nil {
		panic(err)
	}
	err = outbox.Add(context.Background(), new(sql.Tx), // never reached
		outrider.Event{AggregateType: "order", AggregateID: "42", Type: "OrderPlaced"},
		outrider.Event{AggregateType: "order", AggregateID: "42", Type: "OrderPaid", Key: "42", Unordered: true},
	)
	var bad *outrider.EventError
	if errors.As(err, &bad) {
		fmt.Println(bad.Index, bad.Field)
	}
	fmt.Println(err)
	fmt.Println(outrider.Hint(err))
	// Output:
	// 1 Key
	// outrider: event 1: Key is set though Unordered is too
	// keep one: Key for events that wait for each other, Unordered for one that waits for none
}

func ExampleParseID() {
	fmt.Println(outrider.ParseID("0190163D-8694-739B-AEA5-966C26F8AD91"))
	fmt.Println(outrider.ParseID("order-42"))
	// Output:
	// 0190163d-8694-739b-aea5-966c26f8ad91 <nil>
	//  "order-42" is not an id: a UUID such as 0190163d-8694-739b-aea5-966c26f8ad91 is wanted
}

func ExampleLane() {
	fmt.Println(outrider.Lane("42"), outrider.Lane("Grüße"))
	// Output: 40 53
}
