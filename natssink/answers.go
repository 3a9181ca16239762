package natssink

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/sink"
)

const (
	hintStream = "create a stream that listens to the subject, or correct the rule that names it"
	hintReach  = "check URLs, and that the server runs with JetStream"
	hintAuth   = "check user, token, nkey or credentials"
	hintRights = "allow the user to publish to the subject"
)

var (
	errHeld    = errors.New("held behind an earlier message of its key")
	errStopped = errors.New("the call was ended before this message was sent")
	errCut     = errors.New("the call was ended while this message was on its way")
	errTimeout = errors.New("no acknowledgement in time")
	errNobody  = errors.New("no stream has taken the message")
)

// pubAck is JetStream's answer to a publish.
type pubAck struct {
	Stream    string              `json:"stream"`
	Seq       uint64              `json:"seq"`
	Duplicate bool                `json:"duplicate"`
	Error     *jetstream.APIError `json:"error"`
}

// acknowledged is called for every answer.
func (s *Sink) acknowledged(m *nats.Msg) {
	s.settle(m.Subject, answer(m))
}

func answer(m *nats.Msg) sink.Result {
	if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
		// Nobody listens. Whether a stream ought to is found out later.
		return sink.Result{Status: sink.Retry, Class: sink.ClassNoTarget, Err: errNobody}
	}
	var a pubAck
	if err := json.Unmarshal(m.Data, &a); err != nil {
		// Somebody else answered, a subscriber of the subject perhaps.
		return sink.Result{Status: sink.Unknown, Class: sink.ClassOther,
			Err: fmt.Errorf("the answer is no acknowledgement of a stream: %w", err)}
	}
	switch {
	case a.Error != nil:
		return verdict(a.Error)
	case a.Stream == "":
		return sink.Result{Status: sink.Unknown, Class: sink.ClassOther,
			Err: errors.New("the answer is no acknowledgement of a stream")}
	}
	return sink.Result{Status: sink.Delivered, Receipt: a.Stream + "@" + strconv.FormatUint(a.Seq, 10)}
}

// JetStream's error codes that tell more than their class does.
const (
	codeInsufficient = 10023 // no resources at the moment
	codeStorage      = 10047 // account's or server's storage is used up
	codeTooLarge     = 10054 // over the stream's max_msg_size
	codeStoreFailed  = 10077 // stream is full and discards new messages
)

// verdict sorts an answer that is a no. What a full stream or server refuses
// will fit when consumers have caught up or an operator made room.
func verdict(e *jetstream.APIError) sink.Result {
	r := sink.Result{Status: sink.Retry, Class: sink.ClassOther, Err: e}
	switch {
	case e.ErrorCode == codeTooLarge:
		r.Status, r.Class = sink.Reject, sink.ClassOversize
	case e.ErrorCode == codeInsufficient, e.ErrorCode == codeStorage, e.ErrorCode == codeStoreFailed:
		r.Class = sink.ClassThrottled
	case e.Code >= 400 && e.Code < 500:
		r.Status, r.Class = sink.Reject, sink.ClassRefused
	}
	return r
}

func permissionResult(err error) sink.Result {
	return sink.Result{Status: sink.Retry, Class: sink.ClassAuth, Err: outrider.WithHint(err, hintRights)}
}

// notSent is the answer to a message that the client library did not take.
func (s *Sink) notSent(err error) sink.Result {
	switch {
	case errors.Is(err, nats.ErrMaxPayload):
		return sink.Result{Status: sink.Reject, Class: sink.ClassOversize,
			Err: fmt.Errorf("payload and headers are over the server's limit of %d bytes: %w", s.nc.MaxPayload(), err)}
	case errors.Is(err, nats.ErrBadSubject):
		return sink.Result{Status: sink.Reject, Class: sink.ClassNoTarget, Err: outrider.WithHint(err, hintStream)}
	case errors.Is(err, nats.ErrHeadersNotSupported):
		// What the client says until a server has told what it can, and of none
		// that has JetStream.
		return s.unreachable(err)
	case errors.Is(err, nats.ErrBadHeaderMsg):
		return sink.Result{Status: sink.Reject, Class: sink.ClassInvalid, Err: err}
	case errors.Is(err, nats.ErrReconnectBufExceeded), errors.Is(err, nats.ErrConnectionClosed),
		errors.Is(err, nats.ErrConnectionDraining):
		return s.unreachable(err)
	}
	return sink.Result{Status: sink.Unknown, Class: sink.ClassUnreachable, Err: err}
}

// unreachable says why there is no connection.
func (s *Sink) unreachable(err error) sink.Result {
	if down := s.down.Load(); down != nil {
		err = *down
	} else if last := s.nc.LastError(); last != nil {
		err = last
	} else if errors.Is(err, nats.ErrReconnectBufExceeded) || errors.Is(err, nats.ErrHeadersNotSupported) && !s.nc.IsConnected() {
		err = errNoConnection // what the client says of it is about its buffer
	}
	r := sink.Result{Status: sink.NotSent, Class: sink.ClassUnreachable, Err: outrider.WithHint(err, hintReach)}
	if isAuth(err) {
		r.Class, r.Err = sink.ClassAuth, outrider.WithHint(err, hintAuth)
	}
	return r
}

var errNoConnection = errors.New("nats: there is no connection to a server yet")

func isAuth(err error) bool {
	return errors.Is(err, nats.ErrAuthorization) || errors.Is(err, nats.ErrAuthExpired) ||
		errors.Is(err, nats.ErrAuthRevoked) || strings.Contains(err.Error(), "Authorization Violation")
}

// whyNobody asks whether a stream ought to have taken a subject: none does, or
// it has no leader at the moment.
func (s *Sink) whyNobody(ctx context.Context, subject string) sink.Result {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.AckTimeout)
	defer cancel()
	js, err := jetstream.New(s.nc)
	if err != nil {
		return sink.Result{Status: sink.Retry, Class: sink.ClassOther, Err: err}
	}
	stream, err := js.StreamNameBySubject(ctx, subject)
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		// It may be made at any time, as by a deploy that comes second.
		return sink.Result{Status: sink.Retry, Class: sink.ClassNoTarget,
			Err: outrider.WithHint(fmt.Errorf("no stream listens to %q", subject), hintStream)}
	case err == nil:
		return sink.Result{Status: sink.Retry, Class: sink.ClassOther,
			Err: fmt.Errorf("stream %s listens to %q and does not answer; it may have no leader", stream, subject)}
	}
	return sink.Result{Status: sink.Retry, Class: sink.ClassOther,
		Err: outrider.WithHint(fmt.Errorf("no stream answers for %q, and JetStream cannot be asked: %w", subject, err), hintReach)}
}

// Check implements sink.Checker: a server answers and takes the login, it runs
// JetStream for this account, and streams listen to the subjects of rules that
// do not depend on the event. It sends nothing.
func (s *Sink) Check(ctx context.Context) error {
	if err := s.nc.FlushWithContext(ctx); err != nil {
		return fmt.Errorf("nats: no server answers: %w", s.unreachable(err).Err)
	}
	js, err := jetstream.New(s.nc)
	if err != nil {
		return fmt.Errorf("nats: %w", err)
	}
	if _, err := js.AccountInfo(ctx); err != nil {
		return outrider.WithHint(fmt.Errorf("nats: JetStream: %w", err), hintReach)
	}
	var errs []error
	for _, subject := range s.cfg.Subjects.Constants() {
		err := checkSubject(subject)
		if err == nil {
			_, err = js.StreamNameBySubject(ctx, subject)
		}
		if err != nil {
			errs = append(errs, outrider.WithHint(fmt.Errorf("nats: subject %q: %w", subject, err), hintStream))
		}
	}
	return errors.Join(errs...)
}

var (
	_ sink.Sink    = (*Sink)(nil)
	_ sink.Checker = (*Sink)(nil)
)
