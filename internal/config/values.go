package config

import (
	"fmt"
	"log/slog"
	"math"
	"net/url"
	"regexp"
	"strconv"
	"strings"
)

// Redacted stands for a secret wherever one would be shown.
const Redacted = "[redacted]"

// Secret is a text that no output shows, whatever it is printed with. It is
// behind a pointer because fmt calls no methods on what is in unexported fields.
type Secret struct{ value *string }

// NewSecret makes one.
func NewSecret(value string) Secret { return Secret{&value} }

// Reveal is the text itself, for the driver that needs it.
func (s Secret) Reveal() string {
	if s.value == nil {
		return ""
	}
	return *s.value
}

// IsZero reports whether there is none.
func (s Secret) IsZero() bool { return s.Reveal() == "" }

// String never is the text; nor is what the other methods give.
func (s Secret) String() string {
	if s.IsZero() {
		return ""
	}
	return Redacted
}

// Format implements fmt.Formatter: no verb shows the text.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(s.String())) }

// MarshalText implements encoding.TextMarshaler.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// LogValue implements slog.LogValuer.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// Path is a file's name. In the file it is relative to the file's own folder.
type Path string

// Size is a number of bytes, written with KiB, MiB or GiB behind it or as such.
type Size int

// String is the size as it is written in the file.
func (s Size) String() string {
	for _, u := range units {
		if s != 0 && int(s)%u.bytes == 0 {
			return strconv.Itoa(int(s)/u.bytes) + u.name
		}
	}
	return strconv.Itoa(int(s))
}

var units = []struct {
	name  string
	bytes int
}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}}

func parseSize(s string) (Size, error) {
	scale, digits := 1, s
	for _, u := range units {
		if d, ok := strings.CutSuffix(s, u.name); ok {
			scale, digits = u.bytes, strings.TrimSpace(d)
		}
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("want a number of bytes, such as 65536, 64KiB or 16MiB")
	}
	if n > math.MaxInt64/int64(scale) {
		return 0, fmt.Errorf("is more than there is")
	}
	return Size(n * int64(scale)), nil
}

var passwordPair = regexp.MustCompile(`(?i)\bpassword\s*=\s*('(?:[^'\\]|\\.)*'|[^\s'&]+)`)

// dsnSecrets are what of a DSN must not be shown: itself, then its parts.
func dsnSecrets(dsn string) []string {
	out := []string{dsn}
	if u, err := url.Parse(dsn); err == nil && u.User != nil {
		if p, ok := u.User.Password(); ok {
			out = append(out, p, url.QueryEscape(p), url.PathEscape(p))
			if _, raw, ok := strings.Cut(u.User.String(), ":"); ok {
				out = append(out, raw)
			}
		}
	}
	for _, m := range passwordPair.FindAllStringSubmatch(dsn, -1) {
		out = append(out, strings.Trim(m[1], "'"))
	}
	return out
}

// Redact takes out of a text what is secret in the configuration.
func (c *Config) Redact(s string) string {
	for _, secret := range c.secrets {
		// Shorter ones would hit words that have nothing to do with them.
		if text := secret.Reveal(); len(text) >= 3 {
			s = strings.ReplaceAll(s, text, Redacted)
		}
	}
	return s
}

// RedactDSN is a DSN without its password, to be shown.
func RedactDSN(dsn string) string {
	if u, err := url.Parse(dsn); err == nil && u.Scheme != "" {
		return passwordPair.ReplaceAllString(u.Redacted(), "password=xxxxx")
	}
	return passwordPair.ReplaceAllString(dsn, "password=xxxxx")
}
