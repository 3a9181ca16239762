package cli

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/store"
)

func number(n int64) string { return strconv.FormatInt(n, 10) }

type listCmd struct {
	selection
	State       string `enum:"any,pending,waiting,publishing,scheduled,published,failed,discarded" default:"any" help:"Only events in this state: pending, waiting (for their next attempt), publishing, scheduled, published, failed, discarded."`
	Type        string `placeholder:"TYPE" help:"Only events of this type."`
	Key         string `placeholder:"KEY" help:"Only events of this key."`
	Destination string `placeholder:"NAME" help:"Only as they stand with this destination."`
	After       string `placeholder:"ROW" help:"Go on behind this row: the next page."`
	Limit       int    `default:"50" help:"Events on a page, 1 to 1000."`
}

var states = map[string]store.State{
	"any": store.Unchanged, "pending": store.Pending, "waiting": store.Waiting, "publishing": store.InHand,
	"scheduled": store.Scheduled, "published": store.Published, "failed": store.Failed, "discarded": store.Discarded,
}

func (*listCmd) Help() string {
	return "An event is listed once per destination. ATTEMPTS counts those that failed; the one that is under way or went well is not among them."
}

func (c *listCmd) Run(a *app) error {
	if c.Limit < 1 || c.Limit > 1000 {
		return usagef("--limit is %d, want 1 to 1000", c.Limit)
	}
	return with(a, &c.selection, "be looked into", func(i store.Inspector) error {
		ctx, cancel := context.WithTimeout(a.ctx, openTimeout)
		defer cancel()
		page, stopped, err := c.find(ctx, i)
		if err != nil {
			return err
		}
		page.Entries = c.matches(a).mark(page.Entries, nil)
		note := ""
		switch {
		case stopped:
			note = fmt.Sprintf("so far only up to row %s was looked at: events that do not match come in between", page.Next)
		case len(page.Entries) == 0:
			if note, err = c.nothing(ctx, i); err != nil {
				return err
			}
		}
		view := listView{Entries: []entryView{}, After: page.Next, Note: note}
		for _, e := range page.Entries {
			view.Entries = append(view.Entries, viewEntry(e))
		}
		return a.print(view, func(w io.Writer) { c.write(w, page, note) }, c.next(page))
	})
}

// Bounds of what one list looks through.
const (
	listPages = 1000
	listTime  = 20 * time.Second
	listAhead = 1000 // rows in a page of the store, once a first one was not enough
)

// find goes from page to page of the store until there are as many events as
// were asked for: those of another state may stand in front by the thousand. It
// reports whether it stopped before.
func (c *listCmd) find(ctx context.Context, i store.Inspector) (out store.Page, stopped bool, err error) {
	until := time.Now().Add(listTime)
	p := store.ListParams{
		Destination: c.Destination, State: states[c.State], Key: c.Key, Type: c.Type,
		AfterRow: c.After, Limit: c.Limit,
	}
	rows, full := 0, false
	for pages := 1; ; pages++ {
		page, err := i.List(ctx, p)
		if err != nil {
			return out, false, err
		}
		out.Next = page.Next
		for _, e := range page.Entries {
			if n := len(out.Entries); n == 0 || out.Entries[n-1].Row != e.Row {
				if rows == c.Limit { // the rest is for the next list
					out.Next = out.Entries[n-1].Row
					return out, false, nil
				}
				rows++
			}
			out.Entries = append(out.Entries, e)
		}
		switch {
		case page.Next == "" || full:
			return out, false, nil
		case pages == listPages || time.Now().After(until):
			return out, true, nil
		}
		// A full list reads once more, to offer a next page only if there is one.
		full = rows == c.Limit
		p.AfterRow, p.Limit = page.Next, listAhead
	}
}

// nothing says why a list is empty. Events stand with destinations, and before
// a relay has run there are none to stand with.
func (c *listCmd) nothing(ctx context.Context, i store.Inspector) (string, error) {
	s, err := i.Status(ctx)
	if err != nil {
		return "", err
	}
	if len(s.Destinations) == 0 {
		return "no destination is known yet, so no event stands anywhere: a relay has to run once; until then outrider show ID shows single events", nil
	}
	if c.Destination != "" {
		var known []string
		for _, d := range s.Destinations {
			known = append(known, d.Name)
		}
		return "no event matches", knownDestination(c.Destination, known)
	}
	return "no event matches", nil
}

func (c *listCmd) write(w io.Writer, page store.Page, note string) {
	if len(page.Entries) == 0 {
		fmt.Fprintln(w, note)
		return
	}
	rows := [][]string{{"ROW", "EVENT", "CREATED", "TYPE", "KEY", "DESTINATION", "STATE", "ATTEMPTS", "WHY"}}
	for _, e := range page.Entries {
		rows = append(rows, []string{
			e.Row, e.EventID, stamp(e.CreatedAt), line(e.Type, 40), keyText(e.Key, e.Unordered), e.Destination,
			e.State.String(), strconv.Itoa(e.Attempts), why(e),
		})
	}
	table(w, rows...)
	if note != "" {
		fmt.Fprintln(w, note)
	}
	if page.Next != "" {
		fmt.Fprintf(w, "more: outrider list%s --after %s\n", c.same(), quote(page.Next))
	}
}

// same are the flags that give the same list.
func (c *listCmd) same() string {
	var b strings.Builder
	b.WriteString(c.flags())
	add := func(flag, value string) {
		if value != "" {
			b.WriteString(" --" + flag + " " + quote(value))
		}
	}
	if c.State != "any" {
		add("state", c.State)
	}
	add("type", c.Type)
	add("key", c.Key)
	add("destination", c.Destination)
	if c.Limit != 50 {
		add("limit", strconv.Itoa(c.Limit))
	}
	return b.String()
}

func (c *listCmd) next(page store.Page) string {
	switch {
	case len(page.Entries) == 0 && page.Next != "":
		return "outrider list" + c.same() + " --after " + quote(page.Next)
	case len(page.Entries) == 0:
		return "outrider status" + c.flags()
	}
	return "outrider show " + quote(page.Entries[0].Row) + c.flags()
}

func keyText(key string, unordered bool) string {
	if unordered {
		return "(unordered)"
	}
	return line(key, 40)
}

// why is the one thing to know of an entry.
func why(e store.Entry) string {
	var parts []string
	if e.Reason != "" {
		parts = append(parts, e.Reason)
	}
	if e.DueIn > 0 {
		parts = append(parts, "in "+age(e.DueIn))
	}
	if e.Class != "" {
		parts = append(parts, e.Class+": "+line(e.Message, 80))
	}
	return strings.Join(parts, ", ")
}

type showCmd struct {
	selection
	ID   string `arg:"" help:"The event's id, or its row's; one that begins with - stands behind --."`
	Full bool   `help:"Print the payload whole, however long it is."`
}

func (c *showCmd) Run(a *app) error {
	return with(a, &c.selection, "be looked into", func(i store.Inspector) error {
		ctx, cancel := context.WithTimeout(a.ctx, openTimeout)
		defer cancel()
		events, err := i.Show(ctx, c.ID)
		if err != nil {
			return err
		}
		if len(events) == 0 {
			return noEvent(c.ID, &c.selection)
		}
		var view showView
		for i := range events {
			events[i].Entries = c.matches(a).mark(events[i].Entries, &events[i].Record)
		}
		for _, d := range events {
			view.Events = append(view.Events, viewEvent(d))
		}
		return a.print(view, func(w io.Writer) {
			for _, d := range events {
				c.write(w, d)
			}
		}, c.next(events))
	})
}

// maxPayload is how much of a payload is shown without --full.
const maxPayload = 2000

func (c *showCmd) write(w io.Writer, d store.Detail) {
	r := d.Record
	rows := [][]string{
		{"event", r.ID}, {"row", r.Row}, {"type", line(r.Type, 200)},
		{"aggregate", line(r.AggregateType+" "+r.AggregateID, 200)},
		{"key", keyText(r.Key, r.Unordered)}, {"created", stamp(r.CreatedAt)},
	}
	if !r.AvailableAt.IsZero() {
		rows = append(rows, []string{"not before", stamp(r.AvailableAt)})
	}
	if r.Traceparent != "" {
		rows = append(rows, []string{"trace", r.Traceparent})
	}
	names := make([]string, 0, len(r.Headers))
	for name := range r.Headers {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		rows = append(rows, []string{"header", line(name+": "+r.Headers[name], 200)})
	}
	rows = append(rows, []string{"payload", fmt.Sprintf("%s, %s", line(r.ContentType, 80), plural(len(r.Payload), "byte", "bytes"))})
	table(w, rows...)
	c.writePayload(w, r)
	for _, e := range d.Entries {
		fmt.Fprintf(w, "%s: %s\n", e.Destination, standing(e))
		if e.State == store.Failed {
			fmt.Fprintf(w, "to give it up and let its key go on: outrider skip %s%s\n", quote(e.Row), c.flags())
		}
	}
}

func (c *showCmd) writePayload(w io.Writer, r outrider.Record) {
	text, binary := viewPayload(r)
	if text == nil {
		s := fmt.Sprintf("%x", binary)
		text = &s
	}
	shown := *text
	cut := len(shown) > maxPayload && !c.Full
	if cut {
		shown = strings.ToValidUTF8(shown[:maxPayload], "")
	}
	if shown != "" {
		fmt.Fprintf(w, "  %s\n", strings.ReplaceAll(printable(shown), "\n", "\n  "))
	}
	if cut {
		fmt.Fprintf(w, "  … and %d more; --full prints all\n", len(*text)-len(shown))
	}
}

// standing is a sentence on how an event stands with a destination, and whether
// it can be sent again without harm.
func standing(e store.Entry) string {
	s := e.State.String()
	if w := e.Reason; w != "" {
		s += ", " + w
	}
	if e.DueIn > 0 {
		s += ", in " + age(e.DueIn)
	}
	if e.Attempts > 0 {
		s += ", after " + plural(e.Attempts, "failed attempt", "failed attempts")
	}
	if !e.LastFailure.IsZero() {
		s += ", the last at " + stamp(e.LastFailure)
	}
	if e.Class != "" {
		s += "\n  " + e.Class + ": " + line(e.Message, 1000)
	}
	return s
}

func (c *showCmd) next(events []store.Detail) string {
	for _, d := range events {
		for _, e := range d.Entries {
			if e.State == store.Failed || e.State == store.Waiting {
				return "outrider retry " + quote(e.Row) + c.flags()
			}
			if head := heldBehind(e); head != "" {
				return "outrider show " + quote(head) + c.flags()
			}
		}
	}
	return "outrider status" + c.flags()
}
