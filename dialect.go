package outrider

import "fmt"

// Dialect is the kind of database that holds the outbox.
type Dialect uint8

// The dialects. There is no default: the wrong one would be found out only
// where two of them differ.
const (
	Postgres Dialect = iota + 1
	SQLite
)

// String is the name that the command line and the configuration use.
func (d Dialect) String() string {
	switch d {
	case Postgres:
		return "postgres"
	case SQLite:
		return "sqlite"
	default:
		return fmt.Sprintf("Dialect(%d)", uint8(d))
	}
}

// PayloadKind is the type of the payload column on PostgreSQL, chosen when the
// table is made. Both give back the very bytes that were stored.
type PayloadKind uint8

const (
	// PayloadBytea takes any bytes. It is meant by the zero value as well,
	// wherever a table is made or written to.
	PayloadBytea PayloadKind = iota + 1
	// PayloadJSON takes JSON texts only and is readable in psql. The column is
	// of type json: jsonb would rewrite numbers and the order of members,
	// which breaks signatures.
	PayloadJSON
)

// String is the name of the column's type.
func (k PayloadKind) String() string {
	switch k {
	case 0, PayloadBytea:
		return "bytea"
	case PayloadJSON:
		return "json"
	default:
		return fmt.Sprintf("PayloadKind(%d)", uint8(k))
	}
}
