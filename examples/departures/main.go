// Command departures books flights in PostgreSQL and has two relays carry an
// event of each to Kafka while it does. See README.md.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "departures:", err)
		os.Exit(1) //nolint:gocritic // nothing is left to be undone
	}
}

// options are the command line.
type options struct {
	db, kafka, file string
	lines, writers  int
}

func run(ctx context.Context, args []string, out io.Writer) error {
	var o options
	f := flag.NewFlagSet("departures", flag.ContinueOnError)
	f.SetOutput(out)
	f.StringVar(&o.db, "db", "", "`DSN` of a PostgreSQL database, not through a pooler")
	f.StringVar(&o.kafka, "kafka", "", "`host:port` of a Kafka broker")
	f.StringVar(&o.file, "file", "", "`path` of a gzipped CSV file to be used instead of the sample")
	f.IntVar(&o.lines, "lines", 0, "how many departures; 0: all")
	f.IntVar(&o.writers, "writers", 16, "how many write at the same time")
	if err := f.Parse(args); err != nil {
		return err
	}
	if o.db == "" || o.kafka == "" || o.writers < 1 {
		f.Usage()
		return fmt.Errorf("--db and --kafka are needed, and a writer")
	}
	flights, err := load(o.file, o.lines)
	if err != nil {
		return err
	}
	return depart(ctx, o, flights, out)
}
