package model

import (
	"flag"
	"os"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/outrider-dev/outrider/memstore"
)

// given: the command line says how many runs there are.
var given bool

func TestMain(m *testing.M) {
	_ = flag.Set("rapid.nofailfile", "true") // a seed does
	_ = flag.Set("rapid.steps", "100")
	flag.Parse()
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "rapid.checks" })
	goleak.VerifyTestMain(m)
}

// checks sets the number of runs, unless the command line or make model does.
func checks(t *testing.T, n string) {
	t.Helper()
	if long := os.Getenv("OUTRIDER_MODEL_CHECKS"); long != "" {
		n = long
	} else if given {
		return
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
			walk(t, "100", inMemory(cfg, nil))
		})
	}
}

// unshrunk leaves failing walks of a test as they are.
func unshrunk(t *testing.T) {
	t.Helper()
	was := flag.Lookup("rapid.shrinktime").Value.String()
	set := func(d string) {
		if err := flag.Set("rapid.shrinktime", d); err != nil {
			t.Fatal(err)
		}
	}
	set("1ms")
	t.Cleanup(func() { set(was) })
}

func walk(t *testing.T, n string, make maker) {
	t.Helper()
	checks(t, n)
	rapid.Check(t, func(rt *rapid.T) { run(t, rt, make(t)) })
}
