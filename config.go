package outrider

import (
	"errors"
	"fmt"
	"strings"
)

// Config says how New enqueues. Sizes are in bytes of UTF-8.
type Config struct {
	// Dialect of the database. Needed.
	Dialect Dialect

	// Table into which events are inserted. Default: "outbox_events".
	//
	// It may be qualified: "app.outbox_events". Names are taken as they are
	// written, case included, and quoted. A name that has a dot or a quote in
	// it is put in double quotes: `"my.app".outbox_events`.
	Table string

	// Payload is the type of the payload column on PostgreSQL, as it was
	// chosen at migration. Default: PayloadBytea. With PayloadJSON, payloads
	// that are not valid JSON are refused.
	Payload PayloadKind

	// MaxPayload bounds a payload. Default: 1 MiB. -1: no limit. Mind what
	// the destinations take; Kafka's default is 1 MB for a whole record.
	MaxPayload int

	// MaxKey bounds Key and AggregateID. Default: 512. At most 2,048, since
	// an index entry of PostgreSQL holds no more than about 2,700.
	MaxKey int

	// MaxType bounds AggregateType, Type and ContentType. Default: 255. -1:
	// no limit.
	MaxType int

	// MaxHeaders bounds how many headers an event has. Default: 64. -1: no
	// limit.
	MaxHeaders int

	// MaxHeaderBytes bounds the names and values of an event's headers
	// together. Default: 16 KiB. -1: no limit.
	MaxHeaderBytes int
}

// largestKey is what MaxKey may be.
const largestKey = 2048

// withDefaults returns a copy in which what is zero has its default.
func (c Config) withDefaults() Config {
	set := func(p *int, value int) {
		if *p == 0 {
			*p = value
		}
	}
	set(&c.MaxPayload, 1<<20)
	set(&c.MaxKey, 512)
	set(&c.MaxType, 255)
	set(&c.MaxHeaders, 64)
	set(&c.MaxHeaderBytes, 16<<10)
	if c.Table == "" {
		c.Table = "outbox_events"
	}
	if c.Payload == 0 {
		c.Payload = PayloadBytea
	}
	return c
}

// validate names the first field that can't be used. c has its defaults.
func (c Config) validate() error {
	bad := func(field, format string, args ...any) error {
		return fmt.Errorf("outrider: Config.%s: "+format, append([]any{field}, args...)...)
	}
	switch c.Dialect {
	case Postgres, SQLite:
	case 0:
		return WithHint(bad("Dialect", "is not set"), "set it to outrider.Postgres or outrider.SQLite")
	default:
		return bad("Dialect", "%s is not supported", c.Dialect)
	}
	switch {
	case c.Payload > PayloadJSON:
		return bad("Payload", "%s is unknown", c.Payload)
	case c.Payload == PayloadJSON && c.Dialect != Postgres:
		return bad("Payload", "%s exists on PostgreSQL only", c.Payload)
	}
	if _, err := quoteTable(c.Dialect, c.Table); err != nil {
		return bad("Table", "%w", err)
	}
	if c.MaxKey < 1 || c.MaxKey > largestKey {
		return bad("MaxKey", "%d is not between 1 and %d", c.MaxKey, largestKey)
	}
	for _, l := range []struct {
		field string
		value int
	}{{"MaxPayload", c.MaxPayload}, {"MaxType", c.MaxType}, {"MaxHeaders", c.MaxHeaders}, {"MaxHeaderBytes", c.MaxHeaderBytes}} {
		if l.value < -1 {
			return bad(l.field, "%d is negative; -1 means no limit", l.value)
		}
	}
	return nil
}

// quoteTable makes an identifier of a name that may be qualified.
func quoteTable(d Dialect, name string) (string, error) {
	var parts []string
	rest := name
	for {
		part, after, err := cutIdentifier(rest)
		if err != nil {
			return "", fmt.Errorf("%q: %w", name, err)
		}
		if d == Postgres && len(part) > 63 {
			return "", fmt.Errorf("%q: %q has %d bytes, PostgreSQL cuts names at 63", name, part, len(part))
		}
		parts = append(parts, `"`+strings.ReplaceAll(part, `"`, `""`)+`"`)
		if after == "" {
			break
		}
		rest = after[1:]
	}
	if len(parts) > 2 {
		return "", fmt.Errorf("%q has more parts than schema and table", name)
	}
	return strings.Join(parts, "."), nil
}

// cutIdentifier takes the first name off s. after is empty or begins with the
// dot.
func cutIdentifier(s string) (name, after string, err error) {
	end := strings.IndexByte(s, '.')
	if end < 0 {
		end = len(s)
	}
	name, after = s[:end], s[end:]
	if strings.HasPrefix(s, `"`) {
		if name, after, err = cutQuoted(s); err != nil {
			return "", "", err
		}
	} else if strings.Contains(name, `"`) {
		return "", "", errors.New(`a quote stands inside a name; quote the whole name and double the quote`)
	}
	switch {
	case name == "":
		return "", "", errors.New("a name is empty")
	case checkText(name) != "":
		return "", "", errors.New("a name " + checkText(name))
	}
	return name, after, nil
}

func cutQuoted(s string) (name, after string, err error) {
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch {
		case s[i] != '"':
			b.WriteByte(s[i])
		case i+1 < len(s) && s[i+1] == '"':
			b.WriteByte('"')
			i++
		case i+1 < len(s) && s[i+1] != '.':
			return "", "", errors.New("something other than a dot follows the closing quote")
		default:
			return b.String(), s[i+1:], nil
		}
	}
	return "", "", errors.New("a quote is not closed")
}
