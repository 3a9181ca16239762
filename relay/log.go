package relay

import (
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/outrider-dev/outrider"
)

// logger says things, but none of them again and again.
type logger struct {
	*slog.Logger
	mu   sync.Mutex
	said map[string]*saying
}

type saying struct {
	at      time.Time
	skipped int
}

// repeatAfter is how long one thing is not said again, and maxSayings how many
// things are remembered.
const (
	repeatAfter = time.Minute
	maxSayings  = 1000
)

func newLogger(l *slog.Logger) *logger {
	return &logger{Logger: l, said: map[string]*saying{}}
}

// seldom warns at most once a minute for one id, and then tells how many times
// it kept quiet.
func (l *logger) seldom(id, msg string, args ...any) {
	l.mu.Lock()
	s := l.said[id]
	if s != nil && time.Since(s.at) < repeatAfter {
		s.skipped++
		l.mu.Unlock()
		return
	}
	if s == nil {
		if len(l.said) >= maxSayings {
			clear(l.said)
		}
		s = &saying{}
		l.said[id] = s
	}
	skipped := s.skipped
	s.at, s.skipped = time.Now(), 0
	l.mu.Unlock()
	if skipped > 0 {
		args = append(args, "repeated", fmt.Sprintf("%d times since", skipped))
	}
	l.Warn(msg, args...)
}

func hint(err error) string { return outrider.Hint(err) }
