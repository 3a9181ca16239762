// Command bench measures Outrider against bare loops of the same statements, in
// one run on one machine, and prints ratios. Single figures depend on the
// machine; the ratios are what to look at.
//
//	go run ./bench -postgres DSN -kafka HOST:PORT [-pairs 5] [-events 200000] [scenario ...]
//
// Scenarios: see the table in scenarios. Databases and topics are made and
// dropped by the program.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// env is what a scenario is run with.
type env struct {
	postgres string
	kafka    string
	events   int
	pairs    int
}

// sample is one side of one pair.
type sample struct {
	rate float64       // events per second, unless the scenario says otherwise
	cpu  time.Duration // of this process
	note string
}

// scenario compares two sides.
type scenario struct {
	name    string
	what    string
	target  string
	a, b    string // the sides' names; the ratio is a/b
	measure func(ctx context.Context, e env) (a, b sample, err error)
}

var scenarios = []scenario{
	{"kafka", "drain to Kafka, ordered, fenced, journal kept, a consumer reading along", ">= 1.5", "outrider", "bare loop", drainKafka},
	{"kafka2", "the same with two relays", ">= 0.85", "two relays", "one relay", drainKafkaTwo},
	{"memsink", "drain to memory", ">= 0.85", "outrider", "bare pipelined loop", drainMemory},
	{"snapshot", "drain to memory while an old snapshot is held open", ">= 0.95", "with it", "without", drainOldSnapshot},
	{"backlog", "drain to memory, ten times the backlog", ">= 0.9", "large", "small", drainBacklog},
}

func main() {
	var e env
	flag.StringVar(&e.postgres, "postgres", os.Getenv("OUTRIDER_TEST_POSTGRES"), "DSN of a PostgreSQL server, as superuser")
	flag.StringVar(&e.kafka, "kafka", os.Getenv("OUTRIDER_TEST_KAFKA"), "address of a Kafka broker")
	flag.IntVar(&e.events, "events", 200_000, "events per drain")
	flag.IntVar(&e.pairs, "pairs", 5, "interleaved pairs per scenario")
	profile := flag.String("cpuprofile", "", "write a CPU profile to this file")
	flag.Parse()
	if *profile != "" {
		f, err := os.Create(*profile)
		if err == nil {
			err = pprof.StartCPUProfile(f)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "error:", err)
			os.Exit(1)
		}
		defer pprof.StopCPUProfile()
	}
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, e, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, e env, names []string) error {
	fmt.Printf("%s, %d cores, %s, %d events, %d pairs\n\n", runtime.GOARCH, runtime.NumCPU(), runtime.Version(), e.events, e.pairs)
	for _, s := range scenarios {
		if len(names) > 0 && !slices.Contains(names, s.name) {
			continue
		}
		if err := compare(ctx, e, s); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return nil
}

// compare runs the pairs and prints the median of their ratios and its spread.
func compare(ctx context.Context, e env, s scenario) error {
	fmt.Printf("%s: %s (%s / %s, target %s)\n", s.name, s.what, s.a, s.b, s.target)
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "\t%s/s\tCPU s\t%s/s\tCPU s\tratio\t\n", s.a, s.b)
	var ratios []float64
	for range e.pairs {
		a, b, err := s.measure(ctx, e)
		if err != nil {
			return err
		}
		ratios = append(ratios, a.rate/b.rate)
		fmt.Fprintf(w, "\t%.0f\t%.1f\t%.0f\t%.1f\t%.2f\t%s\n", a.rate, a.cpu.Seconds(), b.rate, b.cpu.Seconds(), a.rate/b.rate,
			strings.TrimSpace(a.note+" "+b.note))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	slices.Sort(ratios)
	fmt.Printf("  median %.2f, from %.2f to %.2f\n\n", ratios[len(ratios)/2], ratios[0], ratios[len(ratios)-1])
	return nil
}
