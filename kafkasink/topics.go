package kafkasink

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/sink"
)

const (
	// unreadLimit is Kafka's default max.message.bytes, for topics whose
	// configuration may not be read.
	unreadLimit = 1000012

	// A topic that is not there is looked up again after a second: it may be
	// made at any time, and its events must not flood the brokers until then.
	missingFor = time.Second

	// A new topic reaches all brokers within moments, so that not to find it
	// once means little.
	lookupTries = 3
	lookupPause = 100 * time.Millisecond

	lookupTimeout = 10 * time.Second
)

// topicInfo is what is known of a topic.
type topicInfo struct {
	limit  int          // bytes of the largest batch, with its overhead
	refuse *sink.Result // why nothing can be sent to it, nil if it can
	until  time.Time    // when to look again
}

// topics remembers topics, so that a missing one never gets into the producer,
// where it would wait, and records are measured before they are sent.
type topics struct {
	cfg Config

	mu    sync.Mutex
	known map[string]*topicInfo
	busy  map[string]bool // being refreshed
}

// limit is the largest batch of a topic, for the client library.
func (t *topics) limit(name string) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	if ti := t.known[name]; ti != nil && ti.refuse == nil {
		return ti.limit
	}
	return t.cap(unreadLimit)
}

func (t *topics) cap(limit int) int {
	if m := t.cfg.MaxMessageBytes; m > 0 {
		return min(limit, m)
	}
	return limit
}

// forget makes the next message look the topic up.
func (t *topics) forget(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.known, name)
}

// get gives what is known, nil if nothing is. stale asks for a refresh, which
// then is the caller's to do.
func (t *topics) get(name string) (ti *topicInfo, stale bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ti = t.known[name]
	if ti == nil || time.Now().Before(ti.until) {
		return ti, false
	}
	if ti.refuse != nil {
		return nil, false
	}
	stale = !t.busy[name]
	t.busy[name] = true
	return ti, stale
}

func (t *topics) put(found map[string]*topicInfo) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, ti := range found {
		t.known[name] = ti
	}
}

func (t *topics) refreshed(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.busy, name)
}

// lookup asks the cluster. The error means that it could not be asked.
func (t *topics) lookup(ctx context.Context, kc *kgo.Client, names ...string) (map[string]*topicInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, min(lookupTimeout, t.cfg.DeliveryTimeout))
	defer cancel()
	found := make(map[string]*topicInfo, len(names))
	var err error
	for try := range lookupTries {
		if try > 0 {
			select {
			case <-time.After(lookupPause):
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		if names, err = t.metadata(ctx, kc, names, found); err != nil {
			return nil, err
		}
		if len(names) == 0 {
			break
		}
	}
	var there []string
	for name, ti := range found {
		if ti.refuse == nil {
			there = append(there, name)
		}
	}
	t.limits(ctx, kc, there, found)
	return found, nil
}

// metadata puts into found what is said of each topic, and returns those that
// are worth another try.
func (t *topics) metadata(ctx context.Context, kc *kgo.Client, names []string, found map[string]*topicInfo) (again []string, err error) {
	req := kmsg.NewPtrMetadataRequest() // does not create topics
	for _, name := range names {
		mt := kmsg.NewMetadataRequestTopic()
		mt.Topic = kmsg.StringPtr(name)
		req.Topics = append(req.Topics, mt)
	}
	resp, err := req.RequestWith(ctx, kc)
	if err != nil {
		return nil, err
	}
	for _, rt := range resp.Topics {
		if rt.Topic == nil {
			continue
		}
		name := *rt.Topic
		ti := &topicInfo{limit: t.cap(unreadLimit), until: time.Now().Add(t.cfg.TopicRefresh)}
		if err := kerr.ErrorForCode(rt.ErrorCode); err != nil {
			r := judge(err).result(fmt.Errorf("topic %q: %w", name, err), false)
			if kerr.IsRetriable(err) && !errors.Is(err, kerr.UnknownTopicOrPartition) {
				r = sink.Result{Status: sink.Retry, Class: sink.ClassOther, Err: r.Err}
			}
			ti.refuse, ti.until = &r, time.Now().Add(missingFor)
			if kerr.IsRetriable(err) {
				again = append(again, name)
			}
		}
		found[name] = ti
	}
	for _, name := range names {
		if found[name] == nil {
			return nil, fmt.Errorf("the brokers did not answer for topic %q", name)
		}
	}
	return again, nil
}

// limits reads how large a batch each topic takes. Where that may not be read,
// the assumption stands.
func (t *topics) limits(ctx context.Context, kc *kgo.Client, names []string, found map[string]*topicInfo) {
	if len(names) == 0 {
		return
	}
	configs, err := kadm.NewClient(kc).DescribeTopicConfigs(ctx, names...)
	if err != nil {
		return
	}
	for _, rc := range configs {
		ti := found[rc.Name]
		if ti == nil || rc.Err != nil {
			continue
		}
		limit := 0
		for _, c := range rc.Configs {
			if c.Key != "max.message.bytes" && c.Key != "segment.bytes" || c.Value == nil {
				continue
			}
			if n, err := strconv.Atoi(*c.Value); err == nil && n > 0 && (limit == 0 || n < limit) {
				limit = n
			}
		}
		if limit > 0 {
			ti.limit = t.cap(limit)
		}
	}
}

// checkName applies Kafka's rules to a topic's name, so that one made of an
// event's fields gets an answer that says what is wrong.
func checkName(name string) error {
	if name == "" || name == "." || name == ".." || len(name) > 249 {
		return outrider.WithHint(fmt.Errorf("%q is no topic's name", name), hintTopic)
	}
	for _, c := range []byte(name) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '.', c == '_', c == '-':
		default:
			return outrider.WithHint(fmt.Errorf("%q is no topic's name: %q is not allowed in it", name, c), hintTopic)
		}
	}
	return nil
}
