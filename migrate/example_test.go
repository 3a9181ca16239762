package migrate_test

import (
	"fmt"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/migrate"
)

// Any program in any language enqueues with this, inside its own transaction.
func ExamplePlainInsert() {
	fmt.Println(migrate.PlainInsert(migrate.Options{Dialect: outrider.Postgres}))
	// Output:
	// insert into outbox_events
	//     (aggregate_type, aggregate_id, event_type, payload, event_key)
	// values ($1, $2, $3, $4, $5) <nil>
}
