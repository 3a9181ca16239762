// Command bench measures Outrider against bare loops of the same statements, in
// one run on one machine, and prints ratios. Single figures depend on the
// machine; the ratios are what to look at.
//
//	go run ./bench -postgres DSN -kafka HOST:PORT [-pairs 5] [-json FILE] [scenario ...]
//
// docs/BENCH.md says what is measured and how. Databases, topics and files are
// made and dropped by the program. What is measured runs in processes of its
// own, which are this program once more.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"time"
)

// env is what scenarios are run with.
type env struct {
	postgres string
	kafka    string
	profile  string  // file for a CPU profile of the relay's process, or of the first of two
	events   int     // of a drain
	scale    float64 // of the numbers of events and the seconds

	copies    string            // how databases are copied
	templates map[string]string // databases to be copied, by what is in them
	files     map[int]string    // filled SQLite files, by their number of events
	dir       string            // of those files
}

// n is a number of events as this run is scaled.
func (e *env) n(full int) int { return max(200, int(float64(full)*e.scale)) }

// drained is how many events a drain has.
func (e *env) drained() int { return e.n(e.events) }

// drainedToMemory is how many a drain from PostgreSQL to memory has: fewer are
// gone in half a second, of which the start is a good part.
func (e *env) drainedToMemory() int { return e.n(5 * e.events) }

// span is a time as this run is scaled.
func (e *env) span(full time.Duration) time.Duration {
	return max(100*time.Millisecond, time.Duration(float64(full)*e.scale))
}

func main() {
	if text := os.Getenv(envChild); text != "" {
		os.Exit(childMain(text))
	}
	var e env
	flag.StringVar(&e.postgres, "postgres", os.Getenv("OUTRIDER_TEST_POSTGRES"), "DSN of a PostgreSQL server with wal_level = logical, as superuser")
	flag.StringVar(&e.kafka, "kafka", os.Getenv("OUTRIDER_TEST_KAFKA"), "address of a Kafka broker")
	flag.StringVar(&e.profile, "cpuprofile", "", "write a CPU profile of the relay's process to this file")
	flag.IntVar(&e.events, "events", 200_000, "events of a drain")
	flag.Float64Var(&e.scale, "scale", 1, "scale numbers of events and times; figures of less than 1 say little")
	pairs := flag.Int("pairs", 5, "interleaved pairs per scenario")
	file := flag.String("json", "", "write all samples to this file")
	flag.Usage = usage
	flag.Parse()
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, &e, *pairs, *file, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func usage() {
	out := flag.CommandLine.Output()
	fmt.Fprintln(out, "usage: go run ./bench [flags] [scenario ...]")
	flag.PrintDefaults()
	fmt.Fprintln(out, "scenarios, all when none is named:")
	for _, s := range scenarios {
		fmt.Fprintf(out, "  %-18s %s: %s / %s\n", s.name, s.what, s.a.name, s.b.name)
	}
}

// pick finds scenarios by name; none named means all.
func pick(names []string) ([]scenario, error) {
	if len(names) == 0 {
		return scenarios, nil
	}
	var out []scenario
	for _, n := range names {
		i := slices.IndexFunc(scenarios, func(s scenario) bool { return s.name == n })
		if i < 0 {
			return nil, fmt.Errorf("there is no scenario %q; -h lists them", n)
		}
		out = append(out, scenarios[i])
	}
	return out, nil
}

// run measures, and prints the table. A scenario that fails does not end the
// others, which may have taken an hour.
func run(ctx context.Context, e *env, pairs int, file string, names []string) error {
	chosen, err := pick(names)
	if err != nil {
		return err
	}
	if pairs < 1 || e.scale <= 0 || e.events < 1 {
		return errors.New("-pairs, -events and -scale have to be positive")
	}
	if err := e.check(ctx, chosen); err != nil {
		return err
	}
	defer e.close() //nolint:contextcheck // databases are dropped after an interrupt, too
	r := report{Machine: fmt.Sprintf("%s, %d cores, %s", runtime.GOARCH, runtime.NumCPU(), runtime.Version()),
		Events: e.events, Pairs: pairs, Scale: e.scale}
	if err := e.warm(ctx, chosen); err != nil {
		return fmt.Errorf("warm up: %w", err)
	}
	var failed []error
	for _, s := range chosen {
		began := time.Now()
		res, err := compare(ctx, e, s, pairs)
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", s.name, err))
			fmt.Fprintf(os.Stderr, "%s: error: %v\n", s.name, err)
		} else {
			r.Results = append(r.Results, res)
			fmt.Fprintf(os.Stderr, "%s: done in %v\n", s.name, time.Since(began).Round(time.Second))
		}
		if ctx.Err() != nil {
			break
		}
		if file != "" {
			failed = append(failed, r.save(file))
		}
	}
	r.print(os.Stdout)
	return errors.Join(failed...)
}

// check says what is missing before anything is begun.
func (e *env) check(ctx context.Context, chosen []scenario) error {
	most := needsNothing
	for _, s := range chosen {
		switch {
		case s.needs >= needsPostgres && e.postgres == "":
			return fmt.Errorf("%s needs PostgreSQL: -postgres DSN, or eval \"$(scripts/servers env)\"", s.name)
		case s.needs >= needsKafka && e.kafka == "":
			return fmt.Errorf("%s needs Kafka: -kafka HOST:PORT, or eval \"$(scripts/servers env)\"", s.name)
		}
		most = max(most, s.needs)
	}
	if most >= needsPostgres {
		return e.look(ctx)
	}
	return nil
}

// warm runs drains that are not measured, so that the servers' caches and
// compilers are as warm for the first pair as for the last.
func (e *env) warm(ctx context.Context, chosen []scenario) error {
	most := needsNothing
	for _, s := range chosen {
		most = max(most, s.needs)
	}
	var runs []func(context.Context, *env) (sample, error)
	switch most {
	case needsKafka:
		runs = append(runs, drainKafka(1), bareKafka, drainKafka(1))
	case needsPostgres:
		runs = append(runs, drainMemory(0), drainMemory(0))
	}
	for _, r := range runs {
		if _, err := r(ctx, e); err != nil {
			return err
		}
	}
	return nil
}

// compare measures pairs, first one side first and then the other, so that
// neither always has the warmer machine.
func compare(ctx context.Context, e *env, s scenario, pairs int) (result, error) {
	res := result{scenario: s, Name: s.name, What: s.what, A: s.a.name, B: s.b.name}
	for i := range pairs {
		var p pair
		order := []struct {
			side side
			into *sample
		}{{s.a, &p.A}, {s.b, &p.B}}
		if i%2 == 1 {
			slices.Reverse(order)
		}
		for _, o := range order {
			// What the last side left to be done is done before the next begins.
			if err := e.settle(ctx, s); err != nil {
				return res, err
			}
			v, err := o.side.measure(ctx, e)
			if err != nil {
				return res, fmt.Errorf("%s: %w", o.side.name, err)
			}
			*o.into = v
			fmt.Fprintf(os.Stderr, "%s %d/%d: %s: %v\n", s.name, i+1, pairs, o.side.name, v)
		}
		res.Pairs = append(res.Pairs, p)
	}
	res.judge()
	return res, nil
}
