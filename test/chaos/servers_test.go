//go:build linux

package chaos_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/outrider-dev/outrider/internal/testdb"
)

// servers are a PostgreSQL and a Kafka of the test's own, which it may kill.
type servers struct {
	t      testing.TB
	dir    string
	script string

	postgres, kafka string
}

// ownServers brings them up, and takes them down at the end of the test.
func ownServers(t testing.TB) *servers {
	t.Helper()
	testdb.Kafka(t) // the test is skipped where there are no servers at all
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	s := &servers{t: t, script: filepath.Join(root, "scripts", "servers")}
	if s.dir, err = os.MkdirTemp("", "outrider-chaos-"); err != nil { //nolint:usetesting // what is above t.TempDir() is closed to PostgreSQL's user
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.run("purge")
		_ = os.RemoveAll(s.dir)
	})
	if err := os.Chmod(s.dir, 0o755); err != nil { // PostgreSQL runs as a user of its own
		t.Fatal(err)
	}
	s.borrowKafka(os.Getenv("OUTRIDER_SERVERS_DIR"), filepath.Join(root, ".servers"))
	s.run("up", "postgres", "kafka")
	env := s.run("env", "postgres", "kafka")
	for line := range strings.Lines(env) {
		name, value, _ := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "export "), "=")
		switch name {
		case testdb.EnvPostgres:
			s.postgres = value
		case testdb.EnvKafka:
			s.kafka = value
		}
	}
	return s
}

// borrowKafka uses the broker's program as another set of servers has it, so
// that it is not fetched again.
func (s *servers) borrowKafka(dirs ...string) {
	for _, dir := range dirs {
		lib := filepath.Join(dir, "kafka", "lib")
		if _, err := os.Stat(filepath.Join(lib, ".pom")); dir == "" || err != nil {
			continue
		}
		if err := os.Mkdir(filepath.Join(s.dir, "kafka"), 0o755); err != nil {
			s.t.Fatal(err)
		}
		if err := os.Symlink(lib, filepath.Join(s.dir, "kafka", "lib")); err != nil {
			s.t.Fatal(err)
		}
		return
	}
}

func (s *servers) run(args ...string) string {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, s.script, args...)
	cmd.Env = append(os.Environ(), "OUTRIDER_SERVERS_DIR="+s.dir,
		"OUTRIDER_KAFKA_OPTS=-XX:TieredStopAtLevel=1") // it starts faster so
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	if err := cmd.Run(); err != nil {
		s.t.Errorf("servers %s: %v\n%s", strings.Join(args, " "), err, log.String())
	}
	return out.String()
}

// crash is kill -9 of a server, which is then started again.
func (s *servers) crash(name string) {
	s.t.Helper()
	s.run("kill", name)
	s.run("start", name)
}
