// Command departures books flights in PostgreSQL and has two relays carry an
// event of each to Kafka while it does. See README.md.
package main

import (
	"context"
	"errors"
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

// check names what is missing or out of its range.
func (o options) check() error {
	switch {
	case o.db == "":
		return errors.New("--db is missing: the DSN of a PostgreSQL database")
	case o.kafka == "":
		return errors.New("--kafka is missing: host:port of a broker")
	case o.writers < 1:
		return fmt.Errorf("--writers is %d, want at least 1", o.writers)
	case o.lines < 0:
		return fmt.Errorf("--lines is %d, want at least 1, or 0 for all", o.lines)
	}
	return nil
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
	if err := f.Parse(args); errors.Is(err, flag.ErrHelp) {
		return nil // it has been shown
	} else if err != nil {
		return err
	}
	if err := o.check(); err != nil {
		return err
	}
	flights, err := load(o.file, o.lines)
	if err != nil {
		return err
	}
	return depart(ctx, o, flights, out)
}
