package sqlitestore_test

import (
	"path/filepath"
	"syscall"
	"testing"
)

const errNoSpace = syscall.ENOSPC

// smallDisk mounts a file system with little room, which not everybody may.
func smallDisk(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "disk")
	if err := syscall.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("outrider-test", dir, "tmpfs", 0, "size=8m"); err != nil {
		t.Skipf("a file system cannot be mounted (the same is tested with a file that may not grow): %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}
