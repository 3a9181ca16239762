package outrider_test

import (
	"os/exec"
	"strings"
	"testing"
)

// An application that only enqueues links no driver; nor does migrate.
func TestDependencies(t *testing.T) {
	for pkg, want := range map[string]string{
		"github.com/outrider-dev/outrider":         "",
		"github.com/outrider-dev/outrider/migrate": "github.com/outrider-dev/outrider",
	} {
		out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", pkg).Output()
		if err != nil {
			t.Fatal(err)
		}
		got := strings.TrimSpace(strings.ReplaceAll("\n"+string(out)+"\n", "\n"+pkg+"\n", "\n"))
		if got != want {
			t.Errorf("%s imports %q, want %q", pkg, got, want)
		}
	}
}
