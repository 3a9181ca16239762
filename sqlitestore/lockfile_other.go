//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

package sqlitestore

import (
	"errors"
	"os"
)

// flock is not there: leases are taken over when they have expired.
func flock(*os.File, bool) (bool, error) {
	return false, errors.ErrUnsupported
}
