package kafkasink

import (
	"fmt"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrider-dev/outrider/sink"
)

// The library fails what is behind a refusal with it. Of a key only the first is
// said to have failed: the others were never tried, and must not be charged.
func TestBehindARefusalNothingHasFailed(t *testing.T) {
	cluster, brokers := fake(t)
	topic := newTopic(t, brokers, 1, nil)
	s := closeLater(t, open(t, Config{Brokers: brokers}))
	wantDelivered(t, publish(s, message(topic, "0", "a")))
	cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Err: kerr.TopicAuthorizationFailed, Count: 1})
	for i, r := range publish(s, message(topic, "1", "a"), message(topic, "2", "a"), message(topic, "3", "a")) {
		if i == 0 {
			want(t, "the first", r, sink.Retry, sink.ClassAuth)
		} else {
			want(t, fmt.Sprintf("%d behind it", i), r, sink.NotSent, sink.ClassHeld)
		}
	}
}
