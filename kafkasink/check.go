package kafkasink

import (
	"context"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/sink"
)

// Check implements sink.Checker: a broker answers and takes the login, this
// producer may write with idempotence, and the topics of rules that do not
// depend on the event exist and may be written to. It sends nothing.
func (s *Sink) Check(ctx context.Context) error {
	s.mu.Lock()
	cl := s.client
	s.mu.Unlock()
	if err := cl.kc.Ping(ctx); err != nil {
		if down := cl.downError(); down != nil {
			err = down
		}
		return checkError("no broker answers", err, hintUnreachable)
	}
	if _, _, err := cl.kc.ProducerID(ctx); err != nil {
		return checkError("no producer id", err, hintAuth)
	}
	names := s.cfg.Topics.Constants()
	if len(names) == 0 {
		return nil
	}
	var errs []error
	var there []string
	for _, name := range names {
		if err := checkName(name); err != nil {
			errs = append(errs, fmt.Errorf("kafka: %w", err))
			continue
		}
		there = append(there, name)
	}
	found, err := s.topics.lookup(ctx, cl.kc, there...)
	if err != nil {
		return checkError("looking up topics", err, hintUnreachable)
	}
	s.topics.put(found)
	there = there[:0]
	for name, ti := range found {
		if ti.refuse != nil {
			errs = append(errs, fmt.Errorf("kafka: %w", ti.refuse.Err))
			continue
		}
		there = append(there, name)
	}
	return errors.Join(append(errs, s.checkWrite(ctx, cl, there)...)...)
}

// checkError adds the hint for what an error turns out to be.
func checkError(what string, err error, hint string) error {
	if v := judge(err); v.class == sink.ClassAuth {
		hint = v.hint
	}
	return outrider.WithHint(fmt.Errorf("kafka: %s: %w", what, err), hint)
}

// opWrite is the ACL operation Write as a bit of a topic's authorised
// operations; a broker that does not tell them gives the lowest number.
const (
	opWrite   = 1 << 4
	opsUntold = -1 << 31
)

// checkWrite asks what the user may do with topics.
func (s *Sink) checkWrite(ctx context.Context, cl *client, names []string) []error {
	if len(names) == 0 {
		return nil
	}
	req := kmsg.NewPtrMetadataRequest()
	req.IncludeTopicAuthorizedOperations = true
	for _, name := range names {
		mt := kmsg.NewMetadataRequestTopic()
		mt.Topic = kmsg.StringPtr(name)
		req.Topics = append(req.Topics, mt)
	}
	resp, err := req.RequestWith(ctx, cl.kc)
	if err != nil {
		return []error{checkError("asking for rights", err, hintUnreachable)}
	}
	var errs []error
	for _, t := range resp.Topics {
		if t.Topic != nil && t.AuthorizedOperations != opsUntold && t.AuthorizedOperations&opWrite == 0 {
			errs = append(errs, outrider.WithHint(
				fmt.Errorf("kafka: topic %q: %w", *t.Topic, kerr.TopicAuthorizationFailed), hintTopicAuth))
		}
	}
	return errs
}

var (
	_ sink.Sink    = (*Sink)(nil)
	_ sink.Checker = (*Sink)(nil)
)
