package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/config"
	"github.com/outrider-dev/outrider/store"
)

// target says which event an operator means.
type target struct {
	ID          string `arg:"" optional:"" help:"The event's id, or its row's; one that begins with - stands behind --."`
	Key         string `placeholder:"KEY" help:"Or the key: its FAILED head is meant. --key=KEY takes one that begins with -."`
	Destination string `placeholder:"NAME" help:"Only with this destination; else with each where it has FAILED or waits."`
}

func (t *target) store() (store.Target, error) {
	switch {
	case t.ID == "" && t.Key == "":
		return store.Target{}, usagef("which event? give its ID or --key KEY")
	case t.ID != "" && t.Key != "":
		return store.Target{}, usagef("which event? %s and --key %s are two: give the ID or the key", t.ID, quote(t.Key))
	}
	return store.Target{Destination: t.Destination, ID: t.ID, Key: t.Key}, nil
}

func (t *target) String() string {
	if t.Key != "" {
		return fmt.Sprintf("of key %q", t.Key)
	}
	return t.ID
}

type operated struct {
	Changed int `json:"changed"`
}

type retryCmd struct {
	selection
	target
}

func (c *retryCmd) Run(a *app) error {
	return operate(a, &c.selection, &c.target, store.Operator.Retry, dueNow)
}

type skipCmd struct {
	selection
	target
}

func (c *skipCmd) Run(a *app) error {
	return operate(a, &c.selection, &c.target, store.Operator.Skip, discarded)
}

// dueNow is what retry says. Whether a relay runs is asked only to say it, so
// that an error of that is none of the command's.
func dueNow(ctx context.Context, o store.Operator, _ *target) string {
	if i, ok := o.(store.Inspector); ok {
		if s, err := i.Status(ctx); err == nil && alive(s) == 0 {
			return "due now; no relay is running, and the next that does sends it"
		}
	}
	return "due now; a relay sends it"
}

// discarded is what skip says. An event without a key held none back.
func discarded(ctx context.Context, o store.Operator, t *target) string {
	if i, ok := o.(store.Inspector); ok && t.Key == "" {
		events, err := i.Show(ctx, t.ID)
		keyed := func(d store.Detail) bool { return !d.Record.Unordered }
		if err == nil && !slices.ContainsFunc(events, keyed) {
			return "discarded"
		}
	}
	return "discarded; the key goes on"
}

func operate(a *app, s *selection, t *target, do func(store.Operator, context.Context, store.Target) (int, error), done func(context.Context, store.Operator, *target) string) error {
	what, err := t.store()
	if err != nil {
		return err
	}
	return with(a, s, "be operated on", func(o store.Operator) error {
		ctx, cancel := context.WithTimeout(a.ctx, openTimeout)
		defer cancel()
		n, err := do(o, ctx, what)
		if err != nil {
			return err
		}
		if n == 0 {
			return notOperated(ctx, o, s, t, s.matches(a))
		}
		return a.print(operated{n}, func(w io.Writer) {
			fmt.Fprintf(w, "%s: %s\n", plural(n, "event", "events"), done(ctx, o, t))
		}, "outrider status"+s.flags())
	})
}

// notOperated says why nothing was to be done: what the event's state is, or
// that there is no such event, key or destination.
func notOperated(ctx context.Context, o store.Operator, s *selection, t *target, m matches) error {
	i, ok := o.(store.Inspector)
	if !ok {
		return fmt.Errorf("no FAILED or waiting event %s was found", t)
	}
	if err := checkDestination(ctx, i, t.Destination); err != nil {
		return err
	}
	if t.Key != "" {
		return outrider.WithHint(fmt.Errorf("no FAILED event holds key %q back", t.Key), "outrider list --key "+quote(t.Key)+s.flags())
	}
	events, err := i.Show(ctx, t.ID)
	if err != nil {
		return err
	}
	if len(events) == 0 {
		return noEvent(t.ID, s)
	}
	var states []string
	var first store.Entry // that which needs somebody most
	hint := "a relay has to run once before there is anything to decide: outrider status" + s.flags()
	for _, d := range events {
		for _, e := range m.mark(d.Entries, &d.Record) {
			if t.Destination != "" && t.Destination != e.Destination {
				continue
			}
			states = append(states, e.Destination+": "+standing(e))
			if len(states) == 1 || over(e) < over(first) {
				first, hint = e, instead(e, s)
			}
		}
	}
	if states == nil {
		states = []string{"no destination is known yet"}
	}
	return outrider.WithHint(fmt.Errorf("event %s is neither FAILED nor waiting for its next attempt (%s)", t.ID, strings.Join(states, "; ")), hint)
}

// over orders how an event stands with its destinations: what is still to be
// sent to one of them counts before what is over with another.
func over(e store.Entry) int {
	switch {
	case e.State == store.Published && e.Reason == notMatched:
		return 4
	case e.State == store.Published:
		return 3
	case e.State == store.Discarded:
		return 2
	case heldBehind(e) == "":
		return 1
	default:
		return 0
	}
}

// heldBehind is the row that holds an event back, "" if none does.
func heldBehind(e store.Entry) string {
	head, held := strings.CutPrefix(e.Reason, "held behind ")
	if !held || strings.ContainsFunc(head, func(r rune) bool { return r < '0' || r > '9' }) {
		return ""
	}
	return head
}

// instead is what to do about an event that is neither FAILED nor waiting.
func instead(e store.Entry, s *selection) string {
	switch {
	case e.State == store.Published && e.Reason == notMatched:
		return "the destination's match does not want it; an event that is inserted after the match was changed is sent"
	case e.State == store.Published:
		return "it is done; to send it once more, insert it again as a new event"
	case e.State == store.Discarded:
		return "it was skipped before, which is final; to send it after all, insert it again as a new event"
	case e.State == store.InHand:
		return "a relay is sending it; look again in a moment: outrider show " + quote(e.Row) + s.flags()
	case e.State == store.Scheduled:
		return "it is sent when it is due; an event that has not come to its turn cannot be skipped"
	case heldBehind(e) != "":
		return "decide about the event that holds it back: outrider show " + quote(heldBehind(e)) + s.flags()
	default:
		return "it is sent as soon as its turn comes, if a relay runs: outrider status" + s.flags()
	}
}

func noEvent(id string, s *selection) error {
	return outrider.WithHint(fmt.Errorf("there is no event %q", id),
		"give the id of an event or the number of its row; outrider list"+s.flags()+" shows both")
}

// checkDestination finds out whether a destination is known; "" is.
func checkDestination(ctx context.Context, i store.Inspector, name string) error {
	if name == "" {
		return nil
	}
	s, err := i.Status(ctx)
	if err != nil {
		return err
	}
	known := make([]string, 0, len(s.Destinations))
	for _, d := range s.Destinations {
		known = append(known, d.Name)
	}
	return knownDestination(name, known)
}

func knownDestination(name string, known []string) error {
	if slices.Contains(known, name) {
		return nil
	}
	slices.Sort(known)
	hint := "there are " + strings.Join(known, ", ")
	switch near := config.Nearest(name, known); {
	case len(known) == 0:
		hint = "none is known yet: a relay has to run once"
	case near != "":
		hint = "did you mean " + near + "? " + hint
	}
	return outrider.WithHint(fmt.Errorf("there is no destination %q in this database", name), hint)
}

type retireCmd struct {
	selection
	Destination string `arg:"" help:"Its name, as in status."`
	DryRun      bool   `help:"Only say what would be given up."`
	Yes         bool   `help:"Give up its events that are pending or FAILED."`
}

func (*retireCmd) Help() string {
	return "Take the destination out of the relays' configuration first: one that is served is refused. " +
		"What is kept of it is removed, so that it holds back no clean-up; the events stay. If a relay names it again later, it begins anew, " +
		"its sequences too: take another name then if consumers remember sequences."
}

type retireView struct {
	Destination string `json:"destination"`
	store.RetireReport
	Retired bool `json:"retired"`
	DryRun  bool `json:"dry_run"`
}

func (c *retireCmd) Run(a *app) error {
	return with(a, &c.selection, "retire a destination", func(r store.Retirer) error {
		report, err := r.Retire(a.ctx, c.Destination, true)
		if err != nil {
			return c.explain(a, r, err)
		}
		if given := c.given(report); given != "" && !c.Yes && !c.DryRun {
			return outrider.WithHint(fmt.Errorf("destination %s has %s, which would be given up", c.Destination, given),
				"outrider retire "+quote(c.Destination)+c.flags()+" --yes, or look at them: outrider list --destination "+quote(c.Destination)+c.flags())
		}
		if !c.DryRun {
			if report, err = r.Retire(a.ctx, c.Destination, false); err != nil {
				return c.explain(a, r, err)
			}
		}
		view := retireView{c.Destination, report, !c.DryRun, c.DryRun}
		return a.print(view, func(w io.Writer) { c.write(w, report) }, c.next(report))
	})
}

// explain names the destinations that there are.
func (c *retireCmd) explain(a *app, r store.Retirer, err error) error {
	if i, ok := r.(store.Inspector); ok && errors.Is(err, store.ErrUnknownDestination) {
		ctx, cancel := context.WithTimeout(a.ctx, openTimeout)
		defer cancel()
		if unknown := checkDestination(ctx, i, c.Destination); unknown != nil {
			return unknown
		}
	}
	return err
}

// given is what is given up, "" for nothing.
func (c *retireCmd) given(r store.RetireReport) string {
	var parts []string
	if r.Pending.N > 0 {
		parts = append(parts, count(r.Pending)+" that were not delivered yet")
	}
	if r.Failed.N > 0 {
		parts = append(parts, count(r.Failed)+" FAILED")
	}
	if parts == nil {
		return ""
	}
	return "events: " + strings.Join(parts, ", ")
}

func (c *retireCmd) write(w io.Writer, r store.RetireReport) {
	given := c.given(r)
	switch {
	case c.DryRun && given != "":
		fmt.Fprintf(w, "%s would be given up with its %s\n", c.Destination, given)
	case c.DryRun:
		fmt.Fprintf(w, "%s would be retired; no event is given up\n", c.Destination)
	case given != "":
		fmt.Fprintf(w, "%s is retired, and given up with it are its %s\n", c.Destination, given)
	default:
		fmt.Fprintf(w, "%s is retired; no event was given up\n", c.Destination)
	}
	if c.DryRun {
		fmt.Fprintln(w, "dry run: nothing was changed")
	}
}

func (c *retireCmd) next(r store.RetireReport) string {
	switch {
	case c.DryRun && c.given(r) != "":
		return "outrider retire " + quote(c.Destination) + c.flags() + " --yes"
	case c.DryRun:
		return "outrider retire " + quote(c.Destination) + c.flags()
	default:
		return "outrider status" + c.flags()
	}
}

type rebaseCmd struct {
	selection
	DryRun bool `help:"Only say what would be done."`
}

type rebaseView struct {
	From    string           `json:"from"`
	To      string           `json:"to"`
	Pending map[string]int64 `json:"pending"`
	Changed bool             `json:"changed"`
	DryRun  bool             `json:"dry_run"`
}

func (c *rebaseCmd) Run(a *app) error {
	return with(a, &c.selection, "be rebased", func(r store.Rebaser) error {
		report, err := r.Rebase(a.ctx, c.DryRun)
		if err != nil {
			return err
		}
		view := rebaseView{report.From, report.To, report.Pending, report.Changed, c.DryRun}
		return a.print(view, func(w io.Writer) { writeRebase(w, view) }, c.next(view))
	})
}

func writeRebase(w io.Writer, v rebaseView) {
	if v.From == v.To {
		fmt.Fprintf(w, "the position belongs to this cluster (%s)\n", v.To)
	} else {
		fmt.Fprintf(w, "the position belongs to cluster %s, this is %s\n", v.From, v.To)
	}
	names := make([]string, 0, len(v.Pending))
	for name := range v.Pending {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		fmt.Fprintf(w, "%s: %s to be sent\n", name, plural(int(v.Pending[name]), "event", "events"))
	}
	switch {
	case v.Changed:
		fmt.Fprintln(w, "rebased: relays go on from here")
	case v.DryRun:
		fmt.Fprintln(w, "dry run: nothing was changed")
	default:
		fmt.Fprintln(w, "nothing was to be changed")
	}
}

func (c *rebaseCmd) next(v rebaseView) string {
	if v.DryRun && v.From != v.To {
		return "outrider rebase" + c.flags()
	}
	return "outrider status" + c.flags()
}
