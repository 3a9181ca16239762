package sinktest

import (
	"context"
	"fmt"
	"sync"
	"time"

	"go.uber.org/goleak"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/sink"
)

// testEmpty: a call without messages ends, and is accepted like any other.
func testEmpty(s *suite) {
	s.open()
	s.publish()
	s.wantArrived(s.Place, nil)
}

// testContent: payloads and headers arrive as they are.
func testContent(s *suite) {
	s.open()
	bytes256 := make([]byte, 256)
	for i := range bytes256 {
		bytes256[i] = byte(i)
	}
	var ms []sink.Message
	add := func(payload []byte, change func(m *sink.Message)) {
		m := s.message(fmt.Sprintf("key-%d", len(ms)), "")
		m.Payload = payload
		if change != nil {
			change(&m)
		}
		ms = append(ms, m)
	}
	add(nil, nil)
	add([]byte{}, nil)
	add([]byte{0}, nil)
	add(bytes256, func(m *sink.Message) { m.ContentType = "application/octet-stream" })
	add([]byte(big(s.Fits)), nil)
	add([]byte(" {\"a\": 1.00,\n \"a\": 2}\n"), nil)
	add([]byte("x"), func(m *sink.Message) {
		m.Headers = map[string]string{
			"tenant": "acme", "Tenant": "other case", "empty": "", "text": "käse, \"quoted\": = ; 日本",
			"X-Long": big64(2000), "id": "the event's own", "sequence": "too", "key": "as well",
		}
		m.Traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
		m.Sequence = outrider.Sequence{Page: 1<<53 + 1, Pos: 7}
	})
	add([]byte("x"), func(m *sink.Message) { m.Key, m.AggregateID = "schlüssel 日本/+.>*", "ä ö" })
	add([]byte("x"), func(m *sink.Message) { m.Key, m.Unordered = "", true })
	add([]byte("x"), func(m *sink.Message) { m.CreatedAt = m.CreatedAt.Add(-20 * 24 * time.Hour) })
	s.wantDelivered(s.publish(ms...))
	s.wantArrived(s.Place, ms)
}

// big64 is n printable bytes.
func big64(n int) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = 'a' + byte(i%26)
	}
	return string(b)
}

// testThousands: many keys in one batch, each reported once, each in order.
func testThousands(s *suite) {
	s.open()
	ms := s.many(5000, 300)
	s.wantDelivered(s.publish(ms...))
	s.wantArrived(s.Place, ms)
}

// testConcurrent: calls from several goroutines do not disturb each other.
func testConcurrent(s *suite) {
	s.open()
	const callers = 8
	all := make([][]sink.Message, callers)
	var wg sync.WaitGroup
	for g := range all {
		ms := s.many(400, 20)
		for i := range ms {
			if ms[i].Key != "" {
				ms[i].Key = fmt.Sprintf("caller-%d-%s", g, ms[i].Key)
			}
		}
		all[g] = ms
		wg.Go(func() {
			for len(ms) > 0 {
				s.wantDeliveredLater(s.publish(ms[:100]...))
				ms = ms[100:]
			}
		})
	}
	wg.Wait()
	var ms []sink.Message
	for _, part := range all {
		ms = append(ms, part...)
	}
	s.wantArrived(s.Place, ms)
}

// wantDeliveredLater is wantDelivered for goroutines other than the test's.
func (s *suite) wantDeliveredLater(rs []sink.Result) {
	for i, r := range rs {
		if r.Status != sink.Delivered {
			s.Errorf("message %d: %v %q: %v", i, r.Status, r.Class, r.Err)
			return
		}
	}
}

// testPlaces: one batch goes to two places.
func testPlaces(s *suite) {
	if s.OtherPlace == "" {
		s.Skip("the destination has one place")
	}
	s.open()
	ms := s.many(200, 20)
	var here, there []sink.Message
	for i := range ms {
		if i%2 == 0 {
			here = append(here, ms[i])
			continue
		}
		if ms[i].Key != "" {
			ms[i].Key += "-there" // order is kept within a place, not over two
		}
		ms[i].To = s.OtherPlace
		there = append(there, ms[i])
	}
	s.wantDelivered(s.publish(ms...))
	s.wantArrived(s.Place, here)
	s.wantArrived(s.OtherPlace, there)
}

// testDeduplicates: claimed, a message sent again is confirmed and not kept
// twice; not claimed, it is kept twice.
func testDeduplicates(s *suite) {
	s.open()
	m := s.message("key", "{}")
	s.wantDelivered(s.publish(m))
	m.Redelivery = true
	s.wantDelivered(s.publish(m))
	want := 2
	if s.caps.Deduplicates {
		want = 1
	}
	s.wantDelivered(s.publish(s.message("key", "{}"))) // whatever is to come is here now
	if got := s.Read(s.T, s.Place, want+1); len(got) != want+1 {
		s.Errorf("a message sent twice and another one: %d arrived, want %d", len(got), want+1)
	}
}

// testGoroutines: after Close nothing of the sink runs on, even if a call was
// cut short.
func testGoroutines(s *suite) {
	before := goleak.IgnoreCurrent()
	s.sink = s.Env.Open(s.T)
	s.caps = s.sink.Capabilities()
	s.wantDelivered(s.publish(s.many(500, 50)...))
	ctx, cancel := context.WithCancel(context.Background())
	c := s.start(ctx, s.many(500, 50))
	cancel()
	c.wait()
	closing, stop := context.WithTimeout(context.Background(), Patience)
	defer stop()
	if err := s.sink.Close(closing); err != nil {
		s.Errorf("Close: %v", err)
	}
	// Find itself waits a second or so for what is on its way out.
	err := goleak.Find(before)
	for limit := time.Now().Add(Patience); err != nil && time.Now().Before(limit); {
		err = goleak.Find(before)
	}
	if err != nil {
		s.Errorf("after Close: %v", err)
	}
}
