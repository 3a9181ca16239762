package outrider

import "errors"

// hinted is an error with advice for the person who reads it.
type hinted struct {
	error
	hint string
}

func (h *hinted) Unwrap() error { return h.error }

// WithHint wraps err with a line that says what to do about it. A nil err
// stays nil.
func WithHint(err error, hint string) error {
	if err == nil {
		return nil
	}
	return &hinted{err, hint}
}

// Hint is the advice that err or what it wraps carries, or "". The outermost
// one wins.
func Hint(err error) string {
	var h *hinted
	if errors.As(err, &h) {
		return h.hint
	}
	return ""
}
