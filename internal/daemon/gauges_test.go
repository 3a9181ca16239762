package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/outrider-dev/outrider/store"
)

type inspector struct {
	store.Inspector
	status store.Status
	err    error
}

func (i *inspector) Status(context.Context) (store.Status, error) { return i.status, i.err }

// shown is what a collector shows, a line each.
func shown(t *testing.T, c prometheus.Collector) []string {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(c); err != nil {
		t.Fatal(err)
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetName()+"="+l.GetValue())
			}
			v := m.GetGauge().GetValue() + m.GetCounter().GetValue()
			out = append(out, fmt.Sprintf("%s{%s} %v", f.GetName(), strings.Join(labels, ","), v))
		}
	}
	return out
}

func TestDatabaseGauges(t *testing.T) {
	i := &inspector{status: store.Status{OldestTransaction: 6 * time.Minute,
		Storage: store.Storage{Bytes: 1 << 30, Partitions: 3, DeadRows: 70, LastPartitionIDs: 500}, Destinations: []store.DestinationStatus{{
			Name: "kafka", OldestPending: 90 * time.Second, OldestFailed: time.Hour,
			Pending: store.Count{N: 1000, Estimate: true}, Publishing: store.Count{N: 2}, Stuck: store.Count{N: 1}, Waiting: store.Count{N: 3},
			Scheduled: store.Count{N: 4}, Failed: store.Count{N: 5}, BlockedKeys: store.Count{N: 6},
		}}}}
	g := newDatabaseGauges("shop", i, time.Minute, slog.New(slog.DiscardHandler))
	before := []string{
		"outrider_collector_errors_total{source=shop} 0",
		"outrider_collector_last_success_timestamp_seconds{source=shop} 0",
	}
	if diff := cmp.Diff(before, shown(t, g)); diff != "" {
		t.Errorf("before it has asked (-want +got)\n%s", diff)
	}
	g.ask(t.Context())
	asked := g.at
	want := []string{
		"outrider_blocked_keys{destination=kafka,source=shop} 6",
		"outrider_collector_errors_total{source=shop} 0",
		fmt.Sprintf("outrider_collector_last_success_timestamp_seconds{source=shop} %v", unix(asked)),
		"outrider_count_is_estimate{destination=kafka,source=shop} 1",
		"outrider_dead_tuples{source=shop} 70",
		"outrider_failed_events{destination=kafka,source=shop} 5",
		"outrider_last_partition_ids{source=shop} 500",
		"outrider_oldest_blocked_timestamp_seconds{destination=kafka,source=shop} 0",
		fmt.Sprintf("outrider_oldest_failed_timestamp_seconds{destination=kafka,source=shop} %v", unix(asked.Add(-time.Hour))),
		fmt.Sprintf("outrider_oldest_pending_timestamp_seconds{destination=kafka,source=shop} %v", unix(asked.Add(-90*time.Second))),
		fmt.Sprintf("outrider_oldest_transaction_timestamp_seconds{source=shop} %v", unix(asked.Add(-6*time.Minute))),
		"outrider_partitions{source=shop} 3",
		"outrider_pending_events{destination=kafka,source=shop} 1000",
		"outrider_publishing_events{destination=kafka,source=shop} 2",
		"outrider_scheduled_events{destination=kafka,source=shop} 4",
		"outrider_stuck_publishing_events{destination=kafka,source=shop} 1",
		"outrider_table_bytes{source=shop} 1.073741824e+09",
		"outrider_waiting_events{destination=kafka,source=shop} 3",
	}
	if diff := cmp.Diff(want, shown(t, g)); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}

	// What a file has, and no partitions.
	i.status.Storage = store.Storage{Bytes: 1 << 20}
	g.ask(t.Context())
	if got := shown(t, g); len(got) != len(want)-3 || !slices.Contains(got, "outrider_table_bytes{source=shop} 1.048576e+06") {
		t.Errorf("of a file:\n%s", strings.Join(got, "\n"))
	}
	want = want[:len(want)-3]

	// A database that is away: the error is counted, the numbers stay until
	// they are too old.
	i.err = errors.New("away")
	g.ask(t.Context())
	if got := shown(t, g); !slices.Contains(got, "outrider_collector_errors_total{source=shop} 1") || len(got) != len(want) {
		t.Errorf("with the database away:\n%s", strings.Join(got, "\n"))
	}
	g.at = g.at.Add(-4 * time.Minute)
	if got := shown(t, g); len(got) != 2 {
		t.Errorf("stale numbers are shown:\n%s", strings.Join(got, "\n"))
	}
}
