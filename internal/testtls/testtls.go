// Package testtls makes certificates for tests of encrypted connections.
//
// The package is for tests only and must not be linked into the binary.
package testtls

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Authority signs certificates.
type Authority struct {
	// File holds its own certificate, in PEM.
	File string

	t    testing.TB
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewAuthority makes one that lives as long as the test.
func NewAuthority(t testing.TB) *Authority {
	t.Helper()
	a := &Authority{t: t}
	var der []byte
	a.cert = &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	a.key, der = a.sign(a.cert, nil)
	a.cert, _ = x509.ParseCertificate(der)
	a.File = a.write("CERTIFICATE", der)
	return a
}

// sign makes a key and signs its certificate by another, or by itself.
func (a *Authority) sign(cert *x509.Certificate, by *ecdsa.PrivateKey) (*ecdsa.PrivateKey, []byte) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	if by == nil {
		by = key
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, a.cert, &key.PublicKey, by)
	if err != nil {
		a.t.Fatal(err)
	}
	return key, der
}

func (a *Authority) write(kind string, der []byte) string {
	a.t.Helper()
	name := filepath.Join(a.t.TempDir(), "file.pem")
	if err := os.WriteFile(name, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.t.Fatal(err)
	}
	return name
}

// Issue makes a certificate for a name, and for 127.0.0.1, that serves both
// ends of a connection, and gives the files.
func (a *Authority) Issue(name string) (certFile, keyFile string) {
	a.t.Helper()
	key, der := a.sign(&x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name},
		DNSNames: []string{name}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}, a.key)
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	return a.write("CERTIFICATE", der), a.write("PRIVATE KEY", keyDER)
}

// Server is the configuration of a server of that name, which asks its clients
// for a certificate of the authority.
func (a *Authority) Server(name string) *tls.Config {
	a.t.Helper()
	certFile, keyFile := a.Issue(name)
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		a.t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair},
		RootCAs: pool, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert}
}
