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
	rate float64         // per second
	lat  []time.Duration // from commit to acknowledgement; nil: not measured
	cpu  time.Duration   // of this process
	note string
}

// at is a percentile of the latencies.
func (s sample) at(percent int) time.Duration {
	if len(s.lat) == 0 {
		return 0
	}
	slices.Sort(s.lat)
	return s.lat[min(len(s.lat)-1, len(s.lat)*percent/100)]
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
	{"open", "drain to memory while a writing transaction stays open", ">= 0.95", "with it", "without", drainOpenWriter},
	{"backlog", "drain to memory, ten times the backlog", ">= 0.9", "large", "small", drainBacklog},
	{"latency100", "commit to ack at 100/s", "p50 <= +3 ms, p99 <= +15 ms", "outrider", "produce after commit", latencyAt(100, 1000)},
	{"latency2000", "commit to ack at 2,000/s", "p50 <= +3 ms, p99 <= +15 ms", "outrider", "produce after commit", latencyAt(2000, 10000)},
	{"burst", "100/s over 1,000 keys while another key gets 100,000 at once", "p99 <= 3x", "same destination", "paused one of its own", burst},
	{"writers", "16 writers, business row and event, relay running", "reported", "with", "business row alone", writers(false)},
	{"doorbell", "the same, doorbell on and off", ">= 0.85", "on", "off", writers(true)},
	{"sqlite", "SQLite, drain to memory", ">= 0.8", "outrider", "bare loop", drainSQLite},
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

// compare runs the pairs and prints the median of their ratios and its spread;
// where latencies are measured, how much later the one side is.
func compare(ctx context.Context, e env, s scenario) error {
	fmt.Printf("%s: %s (%s / %s, target %s)\n", s.name, s.what, s.a, s.b, s.target)
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	var ratios []float64
	for i := range e.pairs {
		a, b, err := s.measure(ctx, e)
		if err != nil {
			return err
		}
		if a.lat != nil {
			if i == 0 {
				fmt.Fprintf(w, "\t%s p50\tp95\tp99\t%s p50\tp95\tp99\tp50 +\tp99 +\tp99 x\t\n", s.a, s.b)
			}
			ratios = append(ratios, float64(a.at(99))/float64(b.at(99)))
			fmt.Fprintf(w, "\t%v\t%v\t%v\t%v\t%v\t%v\t%v\t%v\t%.2f\t%s\n", ms(a.at(50)), ms(a.at(95)), ms(a.at(99)), ms(b.at(50)), ms(b.at(95)), ms(b.at(99)),
				ms(a.at(50)-b.at(50)), ms(a.at(99)-b.at(99)), ratios[i], strings.TrimSpace(a.note+" "+b.note))
			continue
		}
		if i == 0 {
			fmt.Fprintf(w, "\t%s/s\tCPU s\t%s/s\tCPU s\tratio\t\n", s.a, s.b)
		}
		ratios = append(ratios, a.rate/b.rate)
		fmt.Fprintf(w, "\t%.0f\t%.1f\t%.0f\t%.1f\t%.2f\t%s\n", a.rate, a.cpu.Seconds(), b.rate, b.cpu.Seconds(), ratios[i],
			strings.TrimSpace(a.note+" "+b.note))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	slices.Sort(ratios)
	fmt.Printf("  median %.2f, from %.2f to %.2f\n\n", ratios[len(ratios)/2], ratios[0], ratios[len(ratios)-1])
	return nil
}

func ms(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000) }
