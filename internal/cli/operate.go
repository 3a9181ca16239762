package cli

import (
	"context"
	"fmt"
	"io"
	"slices"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

// target says which event an operator means.
type target struct {
	ID          string `arg:"" optional:"" help:"The event's id, or its row's."`
	Key         string `placeholder:"KEY" help:"Or the key: its FAILED head is meant."`
	Destination string `placeholder:"NAME" help:"Only with this destination; else with each where it has FAILED or waits."`
}

func (t *target) store() (store.Target, error) {
	if (t.ID == "") == (t.Key == "") {
		return store.Target{}, usagef("which event? give its ID or --key KEY")
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
	return operate(a, &c.selection, &c.target, store.Operator.Retry, "due now; a relay sends it")
}

type skipCmd struct {
	selection
	target
}

func (c *skipCmd) Run(a *app) error {
	return operate(a, &c.selection, &c.target, store.Operator.Skip, "discarded; the key goes on")
}

func operate(a *app, s *selection, t *target, do func(store.Operator, context.Context, store.Target) (int, error), done string) error {
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
			return outrider.WithHint(fmt.Errorf("no FAILED or waiting event %s was found", t), "outrider list --state failed"+s.flags())
		}
		return a.print(operated{n}, func(w io.Writer) {
			fmt.Fprintf(w, "%s: %s\n", plural(n, "event", "events"), done)
		}, "outrider status"+s.flags())
	})
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
	return with(a, &c.selection, "be rebased: its position is not bound to a cluster", func(r store.Rebaser) error {
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
