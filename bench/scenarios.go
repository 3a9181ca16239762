package main

import (
	"context"
	"time"
)

// side is one of the two that are compared.
type side struct {
	name    string
	measure func(ctx context.Context, e *env) (sample, error)
}

// needs says which servers a scenario needs; each includes those before it.
type needs int

const (
	needsNothing needs = iota
	needsPostgres
	needsKafka
)

// scenario compares two sides.
type scenario struct {
	name    string
	what    string
	needs   needs
	a, b    side
	figures []figure
}

const (
	largeBacklog  = 2_000_000
	middleBacklog = 1_000_000
	smallBacklog  = 100_000
	aMinute       = time.Minute
)

// noStall is how much longer than without a kill the others may wait at most:
// well below the second after which a lease is taken over, so whatever waited
// for that is beyond it.
const noStall = 0.25

var scenarios = []scenario{
	{"kafka", "drain to Kafka", needsKafka,
		side{"outrider", drainKafka(1)}, side{"bare loop", bareKafka},
		[]figure{{perSecond, ratio, atLeast(1.5)}}},
	{"cdc", "drain to Kafka", needsKafka,
		side{"outrider", drainKafka(1)}, side{"bare pgoutput", barePgoutput},
		[]figure{{perSecond, ratio, reported}}},
	{"kafka2", "drain to Kafka", needsKafka,
		side{"two relays", drainKafka(2)}, side{"one", drainKafka(1)},
		[]figure{{perSecond, ratio, atLeast(0.85)}}},
	{"memsink", "drain to memory", needsPostgres,
		side{"outrider", drainMemory(0)}, side{"bare pipelined loop", bareMemory},
		[]figure{{perSecond, ratio, atLeast(0.85)}}},
	{"snapshot", "drain to memory", needsPostgres,
		side{"an old snapshot open", drainHeld(oldSnapshot)}, side{"without", drainHeld(nothing)},
		[]figure{{perSecond, ratio, atLeast(0.95)}}},
	{"open", "drain to memory", needsPostgres,
		side{"a writer open", drainHeld(openWriter)}, side{"without", drainHeld(nothing)},
		[]figure{{perSecond, ratio, atLeast(0.95)}}},
	{"snapshot-latency", "200/s to memory for a minute", needsPostgres,
		side{"an old snapshot open", heldLatency(oldSnapshot)}, side{"without", heldLatency(nothing)},
		[]figure{{p95, ratio, atMost(1.5)}}},
	{"open-latency", "200/s to memory for a minute", needsPostgres,
		side{"a writer open", heldLatency(openWriter)}, side{"without", heldLatency(nothing)},
		[]figure{{p95, ratio, atMost(1.5)}}},
	{"burst", "100/s to Kafka while another key gets 100,000 at once", needsKafka,
		side{"same destination", burst(false)}, side{"a paused one of its own", burst(true)},
		[]figure{{p99, ratio, atMost(3)}}},
	{"backlog", "drain to memory", needsPostgres,
		side{"2,000,000", drainMemory(largeBacklog)}, side{"100,000", drainMemory(smallBacklog)},
		[]figure{{perSecond, ratio, atLeast(0.9)}, {peakMiB, ratio, atMost(1.2)}}},
	{"backlog-level", "drain to memory", needsPostgres,
		side{"2,000,000", drainMemory(largeBacklog)}, side{"1,000,000", drainMemory(middleBacklog)},
		[]figure{{perSecond, ratio, atLeast(0.9)}, {peakMiB, ratio, atMost(1.2)}}},
	{"latency100", "commit to ack at 100/s", needsKafka,
		side{"outrider", relayLatency(100)}, side{"produce after commit", directLatency(100)},
		[]figure{{p50, more, atMost(3)}, {p99, more, atMost(15)}}},
	{"latency2000", "commit to ack at 2,000/s", needsKafka,
		side{"outrider", relayLatency(2000)}, side{"produce after commit", directLatency(2000)},
		[]figure{{p50, more, atMost(3)}, {p99, more, atMost(15)}}},
	{"writers", "16 writers", needsPostgres,
		side{"row and event, relay running", writers(true, false)}, side{"row alone", writers(false, false)},
		[]figure{{perSecond, ratio, reported}}},
	{"doorbell", "16 writers, row and event, relay running", needsPostgres,
		side{"doorbell on", writers(true, true)}, side{"off", writers(true, false)},
		[]figure{{perSecond, ratio, atLeast(0.85)}}},
	{"stall", "longest wait at 500/s, two relays", needsKafka,
		side{"one killed", stall(true)}, side{"none killed", stall(false)},
		[]figure{{waitKilled, alone, never(2)}, {waitOthers, more, never(noStall)}}},
	{"sqlite", "SQLite, drain to memory", needsNothing,
		side{"outrider", drainSQLite}, side{"bare loop", bareSQLite},
		[]figure{{perSecond, ratio, atLeast(0.8)}}},
}
