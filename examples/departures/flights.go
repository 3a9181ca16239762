package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"database/sql"
	_ "embed" // for the sample
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"

	"github.com/outrider-dev/outrider"
)

//go:embed sample.csv.gz
var sample []byte

// flight is a line of the file, and the payload of its event.
type flight struct {
	// ID is the event's, which tells this run's flights from others.
	ID          string `json:"-"`
	Line        int    `json:"line"`
	DepartedAt  string `json:"departed_at"`
	Origin      string `json:"origin"`
	Destination string `json:"destination"`
	Miles       int    `json:"distance_miles"`
	Delay       int    `json:"delay_minutes"`
	// Number counts the airport's departures. The transaction sets it.
	Number int64 `json:"number"`
}

// load reads flights; "" is the sample, and a limit of 0 is none.
func load(path string, limit int) ([]flight, error) {
	var in io.Reader = bytes.NewReader(sample)
	if path != "" {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		defer f.Close() //nolint:errcheck // only read
		in = f
	}
	unzipped, err := gzip.NewReader(in)
	if err != nil {
		return nil, err
	}
	lines := csv.NewReader(unzipped)
	lines.ReuseRecord = true
	if _, err := lines.Read(); err != nil { // the names of the columns
		return nil, err
	}
	var out []flight
	for limit == 0 || len(out) < limit {
		l, err := lines.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		f := flight{ID: outrider.NewID(), Line: len(out) + 1, DepartedAt: l[0], Origin: l[1], Destination: l[2]}
		if f.Miles, err = strconv.Atoi(l[3]); err != nil {
			return nil, fmt.Errorf("departure %d: %w", f.Line, err)
		}
		if f.Delay, err = strconv.Atoi(l[4]); err != nil {
			return nil, fmt.Errorf("departure %d: %w", f.Line, err)
		}
		out = append(out, f)
	}
	return out, nil
}

// tables are the business's own.
const tables = `
	create table if not exists airports (
		code          text primary key,
		departures    bigint not null default 0,
		delay_minutes bigint not null default 0
	);
	create table if not exists flights (
		origin         text not null references airports,
		number         bigint not null,
		departed_at    timestamp not null,
		destination    text not null,
		distance_miles int not null,
		delay_minutes  int not null,
		primary key (origin, number)
	)`

// office books departures.
type office struct {
	db     *sql.DB
	outbox *outrider.Outbox
	before map[string]int64 // what the airports had counted before
}

func newOffice(ctx context.Context, db *sql.DB, flights []flight) (*office, error) {
	o := &office{db: db, before: map[string]int64{}}
	var err error
	if o.outbox, err = outrider.New(outrider.Config{Dialect: outrider.Postgres}); err != nil {
		return nil, err
	}
	if _, err := db.ExecContext(ctx, tables); err != nil {
		return nil, err
	}
	for i := range flights {
		code := flights[i].Origin
		if _, ok := o.before[code]; ok {
			continue
		}
		if _, err := db.ExecContext(ctx, `insert into airports (code) values ($1) on conflict do nothing`, code); err != nil {
			return nil, err
		}
		var n int64
		if err := db.QueryRowContext(ctx, `select departures from airports where code = $1`, code).Scan(&n); err != nil {
			return nil, err
		}
		o.before[code] = n
	}
	return o, nil
}

// bookAll books all flights, n at a time.
func (o *office) bookAll(ctx context.Context, flights []flight, n int) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	next := make(chan flight)
	var writers sync.WaitGroup
	for range n {
		writers.Go(func() {
			for f := range next {
				if err := o.book(ctx, f); err != nil {
					stop(fmt.Errorf("departure %d: %w", f.Line, err))
				}
			}
		})
	}
	for _, f := range flights {
		if ctx.Err() != nil {
			break
		}
		next <- f
	}
	close(next)
	writers.Wait()
	return context.Cause(ctx)
}

// book is one departure: the airport counts it, the flight is noted, and the
// event says so, all or nothing. The airport's row is locked first, so that the
// airport's transactions come one after the other, as its events will.
func (o *office) book(ctx context.Context, f flight) error {
	tx, err := o.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // after a commit it is a no-op, else the first error counts
	if err := tx.QueryRowContext(ctx, `
		update airports set departures = departures + 1, delay_minutes = delay_minutes + $2
		where code = $1 returning departures`, f.Origin, f.Delay).Scan(&f.Number); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, `insert into flights values ($1, $2, $3::timestamp, $4, $5, $6)`,
		f.Origin, f.Number, f.DepartedAt, f.Destination, f.Miles, f.Delay); err != nil {
		return err
	}
	payload, err := json.Marshal(f)
	if err != nil {
		return err
	}
	if err := o.outbox.Add(ctx, tx, outrider.Event{ID: f.ID, AggregateType: "airport", AggregateID: f.Origin,
		Type: "FlightDeparted", Payload: payload}); err != nil {
		return err
	}
	return tx.Commit()
}
