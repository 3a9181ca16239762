//go:build !linux

package sqlitestore_test

import (
	"syscall"
	"testing"
)

const errNoSpace = syscall.ENOSPC

func smallDisk(t *testing.T) string {
	t.Helper()
	t.Skip("a file system is mounted on Linux alone; the same is tested with a file that may not grow")
	return ""
}
