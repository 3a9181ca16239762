package kafkasink

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/sink"
)

var (
	errHeld    = errors.New("held behind an earlier message of its key")
	errStale   = errors.New("held, since an earlier message has failed and the call was made without knowing")
	errLate    = errors.New("held behind an earlier message of its key, whose answer is still awaited")
	errStopped = errors.New("the call was ended before this message was sent")
	errCut     = errors.New("the call was ended while this message was on its way")
	errShared  = errors.New("refused in one batch with others; it goes alone next time")
	errTimeout = errors.New("no answer within the delivery time-out")
)

// verdict is what an error says of a record.
type verdict struct {
	status sink.Status
	class  sink.Class
	// own: the fault of one record of a batch, and nobody says of which.
	own bool
	// renew: the producer cannot go on after it.
	renew bool
	hint  string
}

// judge sorts what the library says of a record that failed for good. None of
// these leaves the record in the log, except where an answer was lost before;
// the caller knows that.
func judge(err error) verdict {
	switch {
	case errors.Is(err, kerr.UnknownTopicOrPartition): // it may be made at any time, as by a deploy that comes second
		return verdict{status: sink.Retry, class: sink.ClassNoTarget, hint: hintTopic}
	case errors.Is(err, kerr.InvalidTopicException):
		return verdict{status: sink.Reject, class: sink.ClassNoTarget, hint: hintTopic}
	case errors.Is(err, kerr.UnknownTopicID): // deleted and made again: the library keeps to the old one
		return verdict{status: sink.NotSent, class: sink.ClassHeld, renew: true}
	case errors.Is(err, kerr.TopicAuthorizationFailed):
		return verdict{status: sink.Retry, class: sink.ClassAuth, hint: hintTopicAuth}
	case errors.Is(err, kerr.SaslAuthenticationFailed), errors.Is(err, kerr.UnsupportedSaslMechanism),
		errors.Is(err, kerr.IllegalSaslState), errors.Is(err, kerr.ClusterAuthorizationFailed):
		return verdict{status: sink.NotSent, class: sink.ClassAuth, renew: true, hint: hintAuth}
	case errors.Is(err, kerr.MessageTooLarge), errors.Is(err, kerr.RecordListTooLarge):
		return verdict{status: sink.Reject, class: sink.ClassOversize, own: true, renew: true}
	case errors.Is(err, kerr.InvalidRecord), errors.Is(err, kerr.InvalidTimestamp),
		errors.Is(err, kerr.CorruptMessage):
		return verdict{status: sink.Reject, class: sink.ClassInvalid, own: true}
	case errors.Is(err, kerr.PolicyViolation):
		return verdict{status: sink.Reject, class: sink.ClassRefused, own: true}
	case errors.Is(err, kerr.ProducerFenced), errors.Is(err, kerr.InvalidProducerEpoch),
		errors.Is(err, kerr.InvalidProducerIDMapping), errors.Is(err, kerr.OutOfOrderSequenceNumber),
		errors.Is(err, kerr.UnknownProducerID):
		return verdict{status: sink.Unknown, class: sink.ClassOther, renew: true}
	case isNetwork(err):
		return verdict{status: sink.NotSent, class: sink.ClassUnreachable, hint: hintUnreachable}
	}
	var ke *kerr.Error
	if errors.As(err, &ke) && !ke.Retriable {
		return verdict{status: sink.Reject, class: sink.ClassRefused, own: true}
	}
	if errors.As(err, &ke) {
		return verdict{status: sink.Retry, class: sink.ClassOther}
	}
	return verdict{status: sink.Unknown, class: sink.ClassOther, renew: true}
}

const (
	hintTopic       = "create the topic, or correct the rule that names it; topics are never created by the relay"
	hintTopicAuth   = "give the user the ACL operations Write and Describe on the topic"
	hintAuth        = "check SASL mechanism, user and password, and the ACL operation IdempotentWrite on the cluster"
	hintUnreachable = "check Brokers, and that the addresses which the brokers advertise can be reached from here"
)

func isNetwork(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errFenced)
}

// result is what is reported for a record that failed with err. maybeSent: an
// earlier attempt was written and its answer was lost.
func (v verdict) result(err error, maybeSent bool) sink.Result {
	r := sink.Result{Status: v.status, Class: v.class, Err: outrider.WithHint(err, v.hint)}
	if maybeSent && r.Status != sink.Unknown {
		r.Status = sink.Unknown
		r.Err = fmt.Errorf("an answer was lost, then: %w", r.Err)
	}
	return r
}

// closedResult is for records of a client that was taken down with them.
func (c *client) closedResult(wrote bool) sink.Result {
	r := c.timeoutResult()
	if !wrote {
		r.Status = sink.NotSent
		if r.Class == sink.ClassTimeout {
			r.Class = sink.ClassUnreachable
		}
	}
	return r
}

// timeoutResult is for records without an answer.
func (c *client) timeoutResult() sink.Result {
	down := c.downError()
	if down == nil {
		return sink.Result{Status: sink.Unknown, Class: sink.ClassTimeout, Err: errTimeout}
	}
	v := judge(down)
	if v.class != sink.ClassAuth {
		v = verdict{class: sink.ClassUnreachable, hint: hintUnreachable}
	}
	return sink.Result{Status: sink.Unknown, Class: v.class, Err: outrider.WithHint(down, v.hint)}
}
