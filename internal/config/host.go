package config

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/outrider-dev/outrider/route"
)

// CheckHost looks at what the file names on this host: files of logs, keys and
// databases. It is apart from Load, since operators read the same file on hosts
// where no relay runs. Nothing is made, written or connected to. dsn is how the
// driver reads a DSN; its error is not shown, as it may hold the password.
func (c *Config) CheckHost(dsn func(string) error) error {
	k := &checker{Config: c}
	for i, s := range c.Sources {
		path := fmt.Sprintf("sources[%d]", i)
		switch {
		case s.Postgres != nil && dsn(s.Postgres.DSN.Reveal()) != nil:
			k.bad(path+".postgres.dsn", "cannot be understood: write postgres://USER:PASSWORD@HOST:PORT/DATABASE, with special characters of the password percent-encoded, as @ is %%40")
		case s.SQLite != nil:
			k.writable(path+".sqlite.path", string(s.SQLite.Path))
		}
	}
	for i, d := range c.Destinations {
		path := fmt.Sprintf("destinations[%d]", i)
		switch {
		case d.Log != nil && d.Log.File != "":
			k.writable(path+".log.file", string(d.Log.File))
		case d.Kafka != nil:
			k.tlsFiles(path+".kafka.tls", d.Kafka.TLS)
		case d.NATS != nil:
			k.tlsFiles(path+".nats.tls", d.NATS.TLS)
			k.readable(path+".nats.nkey_file", d.NATS.NKeyFile)
			k.readable(path+".nats.creds_file", d.NATS.CredsFile)
		}
	}
	if len(k.problems) == 0 {
		return nil
	}
	e := &Error{File: c.file, Problems: k.problems}
	e.sort()
	return e
}

// writable finds out whether a file can be written or made, without making it.
func (k *checker) writable(path, file string) {
	switch info, err := os.Stat(file); {
	case err == nil && info.IsDir():
		k.bad(path, "%s is a folder", file)
	case err == nil && info.Mode().IsRegular():
		f, err := os.OpenFile(file, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			k.bad(path, "cannot be written: %v", err)
			return
		}
		_ = f.Close() // nothing was written
	case err == nil: // a pipe or a device: opening one may do something
	case errors.Is(err, fs.ErrNotExist):
		k.folder(path, filepath.Dir(file))
	default:
		k.bad(path, "cannot be written: %v", err)
	}
}

func (k *checker) folder(path, dir string) {
	switch info, err := os.Stat(dir); {
	case err != nil:
		k.bad(path, "cannot be made: %v", err)
	case !info.IsDir():
		k.bad(path, "cannot be made: %s is no folder", dir)
	case info.Mode().Perm()&0o222 == 0:
		k.bad(path, "cannot be made: nobody may write in the folder %s", dir)
	}
}

func (k *checker) readable(path string, file Path) []byte {
	if file == "" {
		return nil
	}
	data, err := os.ReadFile(string(file))
	if err != nil {
		k.bad(path, "%v", err)
	}
	return data
}

func (k *checker) tlsFiles(path string, t *TLS) {
	if t == nil {
		return
	}
	if ca := k.readable(path+".ca_file", t.CAFile); ca != nil && !x509.NewCertPool().AppendCertsFromPEM(ca) {
		k.bad(path+".ca_file", "%s has no certificate in PEM", t.CAFile)
	}
	cert, key := k.readable(path+".cert_file", t.CertFile), k.readable(path+".key_file", t.KeyFile)
	if cert == nil || key == nil {
		return
	}
	if _, err := tls.X509KeyPair(cert, key); err != nil {
		k.bad(path+".cert_file", "does not go with key_file: %v", err)
	}
}

// dsn looks at a DSN's form. What it is stays unsaid: it is a secret.
func (k *checker) dsn(path, dsn string) {
	scheme, _, isURL := strings.Cut(dsn, "://")
	const want = "want postgres://USER:PASSWORD@HOST:PORT/DATABASE"
	switch {
	case strings.HasPrefix(dsn, "sqlite:"), strings.HasPrefix(dsn, "file:"):
		k.bad(path, "is a file of SQLite; write sqlite: {path: ...} instead of postgres")
	case isURL && scheme != "postgres" && scheme != "postgresql":
		// Anything may stand before :// in what is no URL, such as a password.
		if strings.Trim(scheme, "abcdefghijklmnopqrstuvwxyz0123456789+") != "" {
			scheme = "another"
		}
		k.bad(path, "has the scheme %s, %s", scheme, want)
	case !isURL && !strings.Contains(dsn, "="):
		k.bad(path, "is neither a URL nor key=value pairs; %s", want)
	}
}

// sqlitePath refuses what is no path: a file of that name would be made.
func (k *checker) sqlitePath(path, file string) {
	base := filepath.ToSlash(file)
	for _, scheme := range []string{"postgres:/", "postgresql:/", "mysql:/"} {
		if strings.Contains(base, scheme) {
			k.bad(path, "is an address, want the path of a file; for PostgreSQL write postgres: {dsn: ...}")
			return
		}
	}
	for _, scheme := range []string{"sqlite:", "file:"} {
		if strings.HasPrefix(filepath.Base(base), scheme) || strings.Contains(base, "/"+scheme) {
			k.bad(path, "begins with %s, want the path alone", scheme)
			return
		}
	}
}

// port says what is wrong with one; "" for nothing.
func port(p string) string {
	if _, err := net.DefaultResolver.LookupPort(context.Background(), "tcp", p); err != nil {
		return fmt.Sprintf("has the port %q, want 1 to 65535", p)
	}
	return ""
}

func natsPort(u *url.URL) string {
	if u.Port() == "" {
		return ""
	}
	return port(u.Port())
}

// literals is a template with an x for each field: sinks make those fit.
func literals(t route.Template) string { return field.ReplaceAllString(t.String(), "x") }

var field = regexp.MustCompile(`\{[^}]*\}`)

// subject says what no subject of NATS can have.
func subject(t route.Template) string {
	switch s := literals(t); {
	case strings.ContainsAny(s, " \t\r\n"):
		return "has white space, which no subject has"
	case strings.ContainsAny(s, "*>"):
		return "has * or >, which stand for many subjects: an event is sent to one"
	case strings.HasPrefix(s, "."), strings.HasSuffix(s, "."), strings.Contains(s, ".."):
		return "has nothing between two dots, or before or behind one"
	}
	return ""
}

// topic says what no topic of Kafka can have.
func topic(t route.Template) string {
	if strings.IndexFunc(literals(t), func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._-", r))
	}) >= 0 {
		return "has other characters than letters, digits, dot, _ and -, and no topic has those"
	}
	return ""
}
