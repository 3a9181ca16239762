package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"path/filepath"
	"strings"
	"testing"
)

// One command on a database that has nothing: it says that it makes the tables,
// and relays.
func TestDev(t *testing.T) {
	cleanEnvironment(t)
	dsn := "sqlite:" + filepath.Join(t.TempDir(), "new.db")
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	read, write := io.Pipe()
	var errs bytes.Buffer
	code := make(chan int, 1)
	go func() {
		code <- Run(ctx, []string{"dev", "--db", dsn, "--to", "log:"}, strings.NewReader(""), write, &errs)
		_ = write.Close()
	}()
	// Enqueued once there are tables, which a second dev would not make again.
	for ctx.Err() == nil && Run(ctx, []string{"status", "--db", dsn}, strings.NewReader(""), io.Discard, io.Discard) != exitOK {
	}
	enqueue(t, dsn, 1)
	line, err := bufio.NewReader(read).ReadBytes('\n')
	if err != nil {
		t.Fatal(err)
	}
	var event struct{ Type, Key string }
	if err := json.Unmarshal(line, &event); err != nil || event.Type != "OrderPlaced" || event.Key != "key-0" {
		t.Errorf("%s, %v", line, err)
	}
	cancel()
	go func() { _, _ = io.Copy(io.Discard, read) }()
	if c := <-code; c != exitOK {
		t.Errorf("exit %d", c)
	}
	for _, want := range []string{"has no outbox yet: making its tables", dsn + " -> log:", "outrider status --db " + dsn} {
		if !strings.Contains(errs.String(), want) {
			t.Errorf("%q was not said:\n%s", want, errs.String())
		}
	}
}
