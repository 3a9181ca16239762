package demo

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
)

// board shows how things stand: a picture that is drawn anew on a terminal,
// lines elsewhere.
type board struct {
	out io.Writer
	// live: the terminal takes control sequences.
	live bool

	mu     sync.Mutex
	begun  time.Time
	latest []string
	last   string
}

// latestLines is how many events the picture shows.
const latestLines = 8

// situation is what the board shows beside the report.
type situation struct {
	Report
	relay  int // pid, 0: none
	broker bool
	slow   bool
	rate   int
	phase  string
}

// say notes something that happened.
func (b *board) say(format string, args ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	text := fmt.Sprintf("%6.1fs  %s", time.Since(b.begun).Seconds(), fmt.Sprintf(format, args...))
	if !b.live {
		fmt.Fprintln(b.out, text)
		return
	}
	b.latest = append(b.latest, text)
	if len(b.latest) > latestLines {
		b.latest = b.latest[1:]
	}
}

func (b *board) open() {
	b.begun = time.Now()
	if b.live {
		// Another screen, no cursor: what was there comes back at the end.
		fmt.Fprint(b.out, "\x1b[?1049h\x1b[?25l")
	}
}

func (b *board) close() {
	if b.live {
		fmt.Fprint(b.out, "\x1b[?25h\x1b[?1049l")
	}
}

func (b *board) show(s situation) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.live {
		// A line that says nothing new is left out.
		if text := summaryLine(s); text != b.last {
			b.last = text
			fmt.Fprintf(b.out, "%6.1fs  %s\n", time.Since(b.begun).Seconds(), text)
		}
		return
	}
	// Raw mode needs the carriage return; each line clears what was right of
	// it, and the end what was below.
	text := strings.ReplaceAll(b.picture(time.Since(b.begun), s), "\n", "\x1b[K\r\n")
	fmt.Fprint(b.out, "\x1b[H"+text+"\x1b[J")
}

// summaryLine is the board in one line.
func summaryLine(s situation) string {
	return fmt.Sprintf("committed %d  delivered %d  waiting %d  lost %d  order breaks %d  duplicates %d  rolled back and never sent %d  latency p50 %s p95 %s p99 %s",
		s.Committed, s.Delivered, s.Waiting, s.Lost, s.Breaks, s.Duplicates, s.RolledBack-s.Ghosts,
		millis(s.P50), millis(s.P95), millis(s.P99))
}

func millis(d time.Duration) string {
	if d < 10*time.Millisecond {
		return fmt.Sprintf("%.1fms", float64(d)/float64(time.Millisecond))
	}
	return fmt.Sprintf("%dms", d.Milliseconds())
}

const (
	bold   = "\x1b[1m"
	dim    = "\x1b[2m"
	red    = "\x1b[31m"
	green  = "\x1b[32m"
	yellow = "\x1b[33m"
	plain  = "\x1b[0m"
)

// good colours a number that has to be zero.
func good(n int) string {
	if n == 0 {
		return green + fmt.Sprintf("%9d", n) + plain
	}
	return red + bold + fmt.Sprintf("%9d", n) + plain
}

func (b *board) picture(at time.Duration, s situation) string {
	var w strings.Builder
	relay := green + fmt.Sprintf("running, pid %d", s.relay) + plain
	if s.relay == 0 {
		relay = red + "dead" + plain
	}
	broker := green + "up" + plain
	switch {
	case !s.broker:
		broker = red + "down" + plain
	case s.slow:
		broker = yellow + "slow" + plain
	}
	fmt.Fprintf(&w, "%soutrider demo%s   %s   %s\n\n", bold, plain, at.Round(time.Second), s.phase)
	fmt.Fprintf(&w, "  shop      %d orders a second, one in ten rolled back; SQLite\n", s.rate)
	fmt.Fprintf(&w, "  relay     %s\n", relay)
	fmt.Fprintf(&w, "  broker    %s; NATS JetStream\n\n", broker)
	fmt.Fprintf(&w, "  committed   %9d        lost           %s\n", s.Committed, good(s.Lost))
	fmt.Fprintf(&w, "  delivered   %9d        order breaks   %s\n", s.Delivered, good(s.Breaks))
	fmt.Fprintf(&w, "  waiting     %9d        duplicates     %9d\n", s.Waiting, s.Duplicates)
	fmt.Fprintf(&w, "  given up    %9d        rolled back    %9d, %s\n\n", s.Skipped, s.RolledBack, neverSent(s.Ghosts))
	fmt.Fprintf(&w, "  commit to consumer     p50 %s   p95 %s   p99 %s\n\n", millis(s.P50), millis(s.P95), millis(s.P99))
	for i := range latestLines {
		text := ""
		if i < len(b.latest) {
			text = b.latest[i]
		}
		fmt.Fprintf(&w, "%s%s%s\n", dim, text, plain)
	}
	fmt.Fprintf(&w, "\n  %sk%s kill -9 the relay   %sb%s stop or start the broker   %sp%s poison message   %ss%s slow or fast   %sq%s quit\n",
		bold, plain, bold, plain, bold, plain, bold, plain, bold, plain)
	return w.String()
}

func neverSent(ghosts int) string {
	if ghosts == 0 {
		return green + "never sent" + plain
	}
	return red + bold + fmt.Sprintf("%d of them sent", ghosts) + plain
}
