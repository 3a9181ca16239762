package cli

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/config"
	"github.com/outrider-dev/outrider/store"
)

type statusCmd struct {
	selection
}

func (c *statusCmd) Run(a *app) error {
	sources, err := c.sources(a)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(a.ctx, openTimeout)
	defer cancel()
	var view statusView
	var all []store.Status
	for _, src := range sources {
		err := withSource(a, src, "be looked into", func(i store.Inspector) error {
			s, err := i.Status(ctx)
			if err != nil {
				return err
			}
			slices.SortStableFunc(s.Destinations, func(x, y store.DestinationStatus) int {
				return int(min(1, max(-1, y.OldestPending-x.OldestPending)))
			})
			slices.SortStableFunc(s.Relays, livingFirst)
			s.Warnings = append(s.Warnings, c.findings(s)...)
			all = append(all, s)
			view.Sources = append(view.Sources, viewStatus(src.Name, s))
			return nil
		})
		if err != nil && len(sources) > 1 {
			err = outrider.WithHint(fmt.Errorf("source %s: %w", src.Name, err), outrider.Hint(err))
		}
		if err != nil {
			return err
		}
	}
	return a.print(view, func(w io.Writer) {
		for i, s := range all {
			if len(all) > 1 {
				fmt.Fprintf(w, "source %s\n", sources[i].Name)
			}
			writeStatus(w, s)
		}
	}, c.next(sources, all))
}

func writeStatus(w io.Writer, s store.Status) {
	rows := [][]string{{"DESTINATION", "OLDEST", "PENDING", "PUBLISHING", "WAITING", "SCHEDULED", "FAILED", "BLOCKED KEYS", "LANES HELD"}}
	for _, d := range s.Destinations {
		held, lanes := lanesHeld(d)
		rows = append(rows, []string{
			d.Name, age(d.OldestPending), count(d.Pending), count(d.Publishing), count(d.Waiting), count(d.Scheduled),
			since(d.Failed, d.OldestFailed), since(d.BlockedKeys, d.OldestBlocked), fmt.Sprintf("%d of %d", held, lanes),
		})
	}
	if len(rows) == 1 {
		fmt.Fprintln(w, "no destination is known yet: a relay has to run once")
	} else {
		table(w, rows...)
	}
	for _, r := range s.Relays {
		seen := "seen " + age(max(1, r.Seen)) + " ago"
		if r.Gone {
			seen = "gone, last " + seen
		}
		fmt.Fprintf(w, "relay %s, %s\n", line(r.Name, 80), seen)
	}
	if alive(s) == 0 {
		fmt.Fprintln(w, "no relay is running")
	}
	for _, d := range s.Destinations {
		for _, left := range leftBehind(d) {
			fmt.Fprintf(w, "%s: %s\n", d.Name, left)
		}
	}
	for _, x := range s.Warnings {
		fmt.Fprintf(w, "warning: %s\n", line(x, 500))
	}
}

// since shows a number with the age of the oldest.
func since(c store.Count, oldest time.Duration) string {
	if c.N == 0 || oldest <= 0 {
		return count(c)
	}
	return count(c) + ", " + age(oldest)
}

// next is what helps most: a restored database first, where no relay starts, then
// what failed, then what is not running.
func (c *statusCmd) next(sources []config.Source, all []store.Status) string {
	for i, s := range all {
		if flags := c.flags(); elsewhere(s) {
			if len(all) > 1 {
				flags += " --source " + quote(sources[i].Name)
			}
			return "outrider rebase --dry-run" + flags
		}
	}
	running, known := true, false
	for _, s := range all {
		for _, d := range s.Destinations {
			known = true
			if d.Failed.N > 0 {
				return "outrider list --state failed" + c.flags()
			}
		}
		running = running && alive(s) > 0
	}
	if !running {
		return c.start(known)
	}
	return "outrider list" + c.flags()
}

// start is how a relay is started. For destinations that are known it takes a
// file: another sink would take what is meant for them.
func (c *statusCmd) start(known bool) string {
	switch {
	case c.File != "":
		return "outrider run -c " + quote(c.File)
	case known:
		return "outrider run -c FILE, with the destinations above"
	default:
		return "outrider dev" + c.flags() + " --to log:"
	}
}

// livingFirst: those that are gone are history, and there may be many.
func livingFirst(x, y store.RelayStatus) int {
	switch {
	case x.Gone == y.Gone:
		return 0
	case x.Gone:
		return 1
	default:
		return -1
	}
}

// alive is how many relays live.
func alive(s store.Status) int {
	n := 0
	for _, r := range s.Relays {
		if !r.Gone {
			n++
		}
	}
	return n
}

// lanesHeld is how many of a destination's lanes a relay that lives has.
func lanesHeld(d store.DestinationStatus) (held, all int) {
	for _, l := range d.Leases {
		all += l.Count
		if l.Held() {
			held += l.Count
		}
	}
	return held, all
}

// leftBehind tells of the lanes that are still in the name of an owner who does
// not hold them any more.
func leftBehind(d store.DestinationStatus) []string {
	type left struct{ owner, how string }
	lanes := map[left]int{}
	for _, l := range d.Leases {
		if l.Owner == "" || l.Held() {
			continue
		}
		how := "were given up"
		switch {
		case l.Expires < 0:
			how = "expired " + age(-l.Expires) + " ago"
		case l.Expires > 0:
			how = "whose process or connection has ended, are free in " + age(l.Expires) + " at the latest"
		}
		lanes[left{l.Owner, how}] += l.Count
	}
	var out []string
	for l, n := range lanes {
		out = append(out, fmt.Sprintf("%s of relay %s, %s", plural(n, "lane", "lanes"), line(l.owner, 80), l.how))
	}
	slices.Sort(out)
	return out
}

// findings are warnings about who serves what.
func (c *statusCmd) findings(s store.Status) []string {
	var out []string
	var waiting []string
	for _, d := range s.Destinations {
		// Not those that are SCHEDULED: a relay would not send them now.
		var n store.Count
		for _, x := range []store.Count{d.Pending, d.Publishing, d.Waiting} {
			n.N += x.N
			n.Estimate = n.Estimate || x.Estimate
		}
		if n.N > 0 {
			waiting = append(waiting, count(n)+" to "+d.Name)
		}
		if held, _ := lanesHeld(d); held == 0 && alive(s) > 0 {
			out = append(out, fmt.Sprintf("no relay that runs serves destination %s: nothing is sent to it, and what it has not had cannot be cleaned up; "+
				"name it in a relay's configuration, or forget it with: outrider retire %s%s", d.Name, quote(d.Name), c.flags()))
		}
	}
	if alive(s) == 0 && len(waiting) > 0 {
		start := ""
		if !elsewhere(s) {
			start = "; start one: " + c.start(true)
		}
		out = append(out, "no relay is running, and events wait to be sent: "+strings.Join(waiting, ", ")+start)
	}
	return out
}

// elsewhere reports whether the store warns that its positions belong to another
// cluster: no relay starts before a rebase.
func elsewhere(s store.Status) bool {
	return slices.ContainsFunc(s.Warnings, func(w string) bool { return strings.Contains(w, "outrider rebase --dry-run") })
}
