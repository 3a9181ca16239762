package model

import (
	"flag"
	"os"
	"testing"

	"pgregory.net/rapid"

	"github.com/outrider-dev/outrider/memstore"
)

func TestMain(m *testing.M) {
	_ = flag.Set("rapid.nofailfile", "true") // a seed does
	_ = flag.Set("rapid.steps", "100")
	flag.Parse()
	os.Exit(m.Run())
}

// checks sets the number of runs, unless the command line does.
func checks(t *testing.T, n string) {
	t.Helper()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "rapid.checks" })
	if given && os.Getenv("OUTRIDER_MODEL_CHECKS") == "" {
		return
	}
	if long := os.Getenv("OUTRIDER_MODEL_CHECKS"); long != "" {
		n = long
	}
	if err := flag.Set("rapid.checks", n); err != nil {
		t.Fatal(err)
	}
}

func TestMemory(t *testing.T) {
	for name, cfg := range map[string]memstore.Config{
		"Full":  {},
		"Plain": {NoFanOut: true, NoSequences: true, NoLiveTakeOver: true},
	} {
		t.Run(name, func(t *testing.T) {
			walk(t, "200", inMemory(cfg, nil))
		})
	}
}

func walk(t *testing.T, n string, make maker) {
	t.Helper()
	checks(t, n)
	rapid.Check(t, func(rt *rapid.T) { run(t, rt, make(t)) })
}
