package relay_test

import (
	"context"
	"fmt"
	"log"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/memstore"
	"github.com/outrider-dev/outrider/relay"
)

func Example() {
	st, sk := memstore.New(memstore.Config{}), memsink.New(memsink.Config{})
	r, err := relay.New(relay.Config{
		Store: st,
		Destinations: []relay.Destination{{
			Name: "orders", Sink: sk, FromEarliest: true,
			Match: func(rec *outrider.Record) bool { return rec.AggregateType == "order" },
			To:    func(rec *outrider.Record) (string, error) { return "shop." + rec.Type, nil },
		}},
	})
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- r.Run(ctx) }()

	tx := st.Begin()
	for _, typ := range []string{"OrderPlaced", "OrderPaid"} {
		if _, err := tx.Add(outrider.Event{AggregateType: "order", AggregateID: "42", Type: typ}); err != nil {
			log.Fatal(err)
		}
	}
	if err := tx.Commit(); err != nil {
		log.Fatal(err)
	}
	r.Wake()
	if err := sk.Wait(ctx, 2); err != nil {
		log.Fatal(err)
	}
	for _, m := range sk.Messages() {
		fmt.Println(m.To, m.Key)
	}
	stop()
	fmt.Println(<-done)
	// Output:
	// shop.OrderPlaced 42
	// shop.OrderPaid 42
	// <nil>
}
