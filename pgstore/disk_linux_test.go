package pgstore_test

import (
	"database/sql"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outrider-dev/outrider/internal/testdb"
	"github.com/outrider-dev/outrider/memsink"
	"github.com/outrider-dev/outrider/pgstore"
	"github.com/outrider-dev/outrider/relay"
)

// The same as "disk_full" of TestRefusedWhileRunning, with a disk that is: the
// relay's tables lie on a small file system, which not everybody may mount, and
// only where the server is.
func TestRelayOnAFullDisk(t *testing.T) {
	const first, n, keys = 10, 3000, 7
	space, disk := smallTablespace(t)
	s, db := open(t, pgstore.Config{})
	do := func(q string, args ...any) {
		t.Helper()
		if _, err := db.Exec(q, args...); err != nil {
			t.Fatalf("%s: %v", q, err)
		}
	}
	for _, table := range []string{"outbox_leases", "outbox_journal", "outbox_exceptions", "outbox_held_keys"} {
		do(`alter table ` + table + ` set tablespace ` + space)
	}
	gate := newGate(first)
	sk := memsink.New(memsink.Config{Decide: gate.decide})
	log := &logged{}
	r, stop := relaying(t, s, sk, relay.Config{Logger: slog.New(slog.NewTextHandler(log, nil)), LeaseTTL: 10 * time.Minute, Grace: 3 * time.Second, MaxRecords: 10})
	do(`insert into outbox_events (aggregate_type, aggregate_id, event_type, payload)
		select 'a', 'k' || i % $1, 'T', convert_to(i::text, 'UTF8') from generate_series(0, $2::int - 1) i`, keys, n)
	gate.wait(t)
	ballast, err := os.Create(filepath.Join(disk, "ballast"))
	if err != nil {
		t.Fatal(err)
	}
	defer ballast.Close()
	for block := make([]byte, 4096); err == nil; {
		_, err = ballast.Write(block)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	gate.open()
	until(t, "a relay that is not ready", func() bool { h := r.Health(); return !h.Ready() && h.Stuck })
	if h := r.Health(); !strings.Contains(h.StoreError, "53100") || !strings.Contains(h.StoreHint, "disk is full: make room") || sk.Len() == n {
		t.Errorf("%d messages were sent; health: %+v", sk.Len(), h)
	}
	if err := os.Remove(ballast.Name()); err != nil {
		t.Fatal(err)
	}
	if err := ballast.Close(); err != nil {
		t.Fatal(err)
	}
	arrive(t, sk, n, "when there was room")
	until(t, "a relay that is well", func() bool { return r.Health().StoreError == "" })
	stop()
	// A page's worth of room may let a commit through before the next one fails.
	if off, on := log.count("disk is full: make room"), log.count("asked again"); off == 0 || on != off {
		t.Errorf("said %d times that the disk is full, and %d times that it is not:\n%s", off, on, log.text())
	}
	mustBeOnceInOrder(t, sk, n, keys)
	mustHaveCostNothing(t, s)
}

// smallTablespace makes one with little room in a folder of its own.
func smallTablespace(t *testing.T) (name, disk string) {
	t.Helper()
	dsn := testdb.Postgres(t)
	db, err := sql.Open("pgx", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	var data string
	if err := db.QueryRow(`show data_directory`).Scan(&data); err != nil {
		t.Fatal(err)
	}
	fi, err := os.Stat(data)
	if err != nil {
		t.Skipf("the server's files are not to be seen from here (the same is tested with a trigger): %v", err)
	}
	disk, err = os.MkdirTemp("", "outrider-disk") //nolint:usetesting // the server may not enter a folder of the test
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(disk) })
	if err := syscall.Mount("outrider-test", disk, "tmpfs", 0, "size=2m"); err != nil {
		t.Skipf("a file system cannot be mounted (the same is tested with a trigger): %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(disk, 0); err != nil {
			t.Error(err)
		}
	})
	folder := filepath.Join(disk, "space")
	owner := fi.Sys().(*syscall.Stat_t)
	if err := errors.Join(os.Chmod(disk, 0o755), os.Mkdir(folder, 0o700), os.Chown(folder, int(owner.Uid), int(owner.Gid))); err != nil {
		t.Fatal(err)
	}
	name = testdb.DatabaseName(t, dsn)
	name = "s_" + name[max(0, len(name)-20):]
	if _, err := db.Exec(`create tablespace ` + name + ` location '` + folder + `'`); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := db.Exec(`drop tablespace ` + name); err != nil { // the database that was in it is dropped by now
			t.Error(err)
		}
	})
	return name, disk
}
