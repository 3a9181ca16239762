//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package sqlitestore

import (
	"errors"
	"os"
	"syscall"
)

// flock takes an advisory lock of a file without waiting; it ends with the file
// descriptor, so with the process. false: somebody has it.
func flock(f *os.File, exclusive bool) (bool, error) {
	how := syscall.LOCK_SH
	if exclusive {
		how = syscall.LOCK_EX
	}
	for {
		err := syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB)
		switch {
		case err == nil:
			return true, nil
		case errors.Is(err, syscall.EWOULDBLOCK):
			return false, nil
		case !errors.Is(err, syscall.EINTR):
			return false, err
		}
	}
}
