package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"
)

// check holds what arrives against what was booked.
type check struct {
	mu       sync.Mutex
	flights  map[string]*flight // by event id; those that are to come
	seen     map[string]bool    // ids that came
	last     map[string]int64   // per airport, the highest number that came
	again    int                // duplicates
	problems []string
	waits    []time.Duration // from the insert to the arrival
	latest   time.Time       // of the last that came first
}

func newCheck(flights []flight, before map[string]int64) *check {
	c := &check{flights: map[string]*flight{}, seen: map[string]bool{}, last: map[string]int64{}, latest: time.Now()}
	for i := range flights {
		c.flights[flights[i].ID] = &flights[i]
	}
	for code, n := range before {
		c.last[code] = n
	}
	return c
}

// arrived takes down a message. Its payload is the booked flight with a number.
func (c *check) arrived(id, key string, payload []byte, wait time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	want, ours := c.flights[id]
	switch {
	case c.seen[id]:
		c.again++
		return
	case !ours: // left over from an earlier run
		return
	}
	c.seen[id] = true
	var f flight
	if err := json.Unmarshal(payload, &f); err != nil {
		c.problem("departure %d cannot be read: %v", want.Line, err)
		return
	}
	f.ID = id
	number := f.Number
	f.Number = 0
	if f != *want || key != want.Origin {
		c.problem("departure %d of %s is %+v", want.Line, key, f)
		return
	}
	if number != c.last[key]+1 {
		c.problem("%s: number %d comes behind %d", key, number, c.last[key])
	}
	c.last[key] = max(c.last[key], number)
	c.waits = append(c.waits, wait)
	c.latest = time.Now()
}

func (c *check) problem(format string, args ...any) {
	if len(c.problems) < 10 {
		c.problems = append(c.problems, fmt.Sprintf(format, args...))
	}
}

// missing is how many are still to come, and for how long none has.
func (c *check) missing() (int, time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.flights) - len(c.seen), time.Since(c.latest)
}

// wait is how long it took for that part of the flights.
func (c *check) wait(part float64) time.Duration {
	slices.Sort(c.waits)
	if len(c.waits) == 0 {
		return 0
	}
	return c.waits[int(part*float64(len(c.waits)-1))]
}
