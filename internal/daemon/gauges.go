package daemon

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outrider-dev/outrider/store"
)

// databaseGauges show what a database says of itself. It is asked at a cadence
// of its own and over connections of its own: a scrape never asks, and a slow
// answer holds up no event.
//
//	outrider_oldest_pending_timestamp_seconds{destination}  when the oldest event that should have been delivered was written; 0: none
//	outrider_oldest_blocked_timestamp_seconds{destination}  the same of those behind a failed or waiting one of their key
//	outrider_oldest_failed_timestamp_seconds{destination}   the same of those that FAILED
//	outrider_pending_events{destination}                    not sent yet
//	outrider_publishing_events{destination}                 sent, their end not known
//	outrider_stuck_publishing_events{destination}           those of them that no living relay has in hand
//	outrider_waiting_events{destination}                    for their next attempt
//	outrider_scheduled_events{destination}                  not to be sent yet
//	outrider_failed_events{destination}                     given up; a person has to look
//	outrider_blocked_keys{destination}                      keys that are held back
//	outrider_count_is_estimate{destination}                 1 if one of these numbers is capped or estimated
//	outrider_oldest_transaction_timestamp_seconds           when the oldest open transaction that keeps the database from tidying up began; 0: none
//	outrider_table_bytes                                    of the outbox's tables with their indexes; SQLite: of the file
//	outrider_dead_tuples                                    about how many dead rows the tables have; PostgreSQL alone, as the next two
//	outrider_partitions                                     of the events' table
//	outrider_last_partition_ids                             handed out since the last partition began; -1: none reaches to the end
//	outrider_collector_errors_total                         times that the database could not be asked
//	outrider_collector_last_success_timestamp_seconds       when it was asked last
//
// Numbers that are older than three turns are not shown: no number is better
// than a wrong one.
type databaseGauges struct {
	inspector store.Inspector
	every     time.Duration
	log       *slog.Logger
	source    prometheus.Labels

	oldestPending, oldestBlocked, oldestFailed        *prometheus.Desc
	pending, publishing, waiting, scheduled, failed   *prometheus.Desc
	blockedKeys, isEstimate, errorsTotal, lastSuccess *prometheus.Desc
	oldestTransaction, stuck                          *prometheus.Desc
	tableBytes, deadTuples, partitions, lastPartition *prometheus.Desc

	mu     sync.Mutex
	status store.Status
	at     time.Time // when it was asked; zero: never
	errors int
}

func newDatabaseGauges(source string, i store.Inspector, every time.Duration, log *slog.Logger) *databaseGauges {
	g := &databaseGauges{inspector: i, every: every, log: log, source: prometheus.Labels{"source": source}}
	of := func(name, help string, by ...string) *prometheus.Desc {
		return prometheus.NewDesc("outrider_"+name, help, by, g.source)
	}
	const by = "destination"
	g.oldestPending = of("oldest_pending_timestamp_seconds", "When the oldest event that should have been delivered was written; 0: none.", by)
	g.oldestBlocked = of("oldest_blocked_timestamp_seconds", "When the oldest event behind a failed or waiting one of its key was written; 0: none.", by)
	g.oldestFailed = of("oldest_failed_timestamp_seconds", "When the oldest FAILED event was written; 0: none.", by)
	g.pending = of("pending_events", "Events not sent yet.", by)
	g.publishing = of("publishing_events", "Events sent whose end is not known.", by)
	g.stuck = of("stuck_publishing_events", "Events in hand with no relay that lives: their lease has expired, or its owner is gone.", by)
	g.waiting = of("waiting_events", "Events that wait for their next attempt.", by)
	g.scheduled = of("scheduled_events", "Events not to be sent yet.", by)
	g.failed = of("failed_events", "Events given up; a person has to look.", by)
	g.blockedKeys = of("blocked_keys", "Keys that are held back.", by)
	g.isEstimate = of("count_is_estimate", "1 if one of the numbers is capped or estimated.", by)
	g.oldestTransaction = of("oldest_transaction_timestamp_seconds", "When the oldest open transaction that keeps the database from tidying up began; 0: none.")
	g.tableBytes = of("table_bytes", "Size of the outbox's tables with their indexes; on SQLite of the whole file.")
	g.deadTuples = of("dead_tuples", "About how many rows of the outbox's tables await vacuum.")
	g.partitions = of("partitions", "Partitions of the events' table.")
	g.lastPartition = of("last_partition_ids", "Ids handed out since the last partition's first; beyond a partition's size none is made ahead; -1: no partition reaches to the end of all ids.")
	g.errorsTotal = of("collector_errors_total", "Times that the database could not be asked.")
	g.lastSuccess = of("collector_last_success_timestamp_seconds", "When the database was asked last.")
	return g
}

// run asks until ctx ends.
func (g *databaseGauges) run(ctx context.Context) {
	tick := time.NewTicker(g.every)
	defer tick.Stop()
	for {
		g.ask(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (g *databaseGauges) ask(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, g.every)
	defer cancel()
	s, err := g.inspector.Status(limited)
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case err == nil:
		g.status, g.at = s, time.Now()
	case ctx.Err() == nil:
		g.errors++
		g.log.Debug("the database's figures cannot be had", "error", err)
	}
}

// Describe implements prometheus.Collector.
func (g *databaseGauges) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		g.oldestPending, g.oldestBlocked, g.oldestFailed, g.pending, g.publishing, g.waiting, g.scheduled, g.failed,
		g.blockedKeys, g.isEstimate, g.oldestTransaction, g.errorsTotal, g.lastSuccess,
		g.stuck, g.tableBytes, g.deadTuples, g.partitions, g.lastPartition,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. It asks no database.
func (g *databaseGauges) Collect(ch chan<- prometheus.Metric) {
	g.mu.Lock()
	defer g.mu.Unlock()
	gauge := func(d *prometheus.Desc, v float64, by ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, by...)
	}
	ch <- prometheus.MustNewConstMetric(g.errorsTotal, prometheus.CounterValue, float64(g.errors))
	gauge(g.lastSuccess, unix(g.at))
	if time.Since(g.at) > 3*g.every {
		return
	}
	since := func(age time.Duration) float64 {
		if age <= 0 {
			return 0
		}
		return unix(g.at.Add(-age))
	}
	gauge(g.oldestTransaction, since(g.status.OldestTransaction))
	if s := g.status.Storage; s.Bytes > 0 {
		gauge(g.tableBytes, float64(s.Bytes))
		if s.Partitions > 0 {
			gauge(g.deadTuples, float64(s.DeadRows))
			gauge(g.partitions, float64(s.Partitions))
			gauge(g.lastPartition, float64(s.LastPartitionIDs))
		}
	}
	for _, d := range g.status.Destinations {
		gauge(g.oldestPending, since(d.OldestPending), d.Name)
		gauge(g.oldestBlocked, since(d.OldestBlocked), d.Name)
		gauge(g.oldestFailed, since(d.OldestFailed), d.Name)
		estimate := false
		for _, c := range []struct {
			desc  *prometheus.Desc
			count store.Count
		}{
			{g.pending, d.Pending}, {g.publishing, d.Publishing}, {g.stuck, d.Stuck}, {g.waiting, d.Waiting},
			{g.scheduled, d.Scheduled}, {g.failed, d.Failed}, {g.blockedKeys, d.BlockedKeys},
		} {
			gauge(c.desc, float64(c.count.N), d.Name)
			estimate = estimate || c.count.Estimate
		}
		v := 0.0
		if estimate {
			v = 1
		}
		gauge(g.isEstimate, v, d.Name)
	}
}

func unix(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMilli()) / 1000
}
