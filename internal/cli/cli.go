// Package cli is the command line: what it takes, does and prints. Everything
// goes through Run, so tests call it as a shell would.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"regexp"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/internal/config"
	"github.com/outrider-dev/outrider/internal/daemon"
	"github.com/outrider-dev/outrider/store"
)

// The exit codes; migrate status has some of its own.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

// commands is the whole command line, as kong reads it from tags.
type commands struct {
	Output string `short:"o" enum:"text,json" default:"text" placeholder:"text|json" help:"Form of what is printed: text or json. In json, ids are strings, durations are numbers of seconds, and an error is an object on standard error."`

	Demo    demoCmd    `cmd:"" group:"start" help:"See it survive crashes: a shop, a relay and a broker on this machine, no servers needed."`
	Dev     devCmd     `cmd:"" group:"start" help:"Relay one database to one destination, without a file."`
	Run     runCmd     `cmd:"" group:"start" help:"Relay as a configuration file says."`
	Migrate migrateCmd `cmd:"" group:"start" help:"Make, check and remove the outbox's tables."`
	Config  configCmd  `cmd:"" group:"start" help:"Look at a configuration file."`

	Status statusCmd `cmd:"" group:"look" help:"How each destination stands, the oldest waiting event first."`
	List   listCmd   `cmd:"" group:"look" help:"List events, by state, type, key and destination."`
	Show   showCmd   `cmd:"" group:"look" help:"Show one event: payload, attempts, why it waits."`

	Retry  retryCmd  `cmd:"" group:"act" help:"Send a FAILED event again, or hurry one that waits."`
	Skip   skipCmd   `cmd:"" group:"act" help:"Discard a FAILED or waiting event and let its key go on."`
	Retire retireCmd `cmd:"" group:"act" help:"Forget a destination that is not wanted any more."`
	Rebase rebaseCmd `cmd:"" group:"act" help:"Go on in another database cluster, after a restore."`

	Version versionCmd `cmd:"" help:"Print the version."`

	ShowVersion versionFlag `name:"version" hidden:"" help:"Print the version."`
}

var groups = []kong.Group{
	{Key: "start", Title: "Start:"},
	{Key: "look", Title: "Look:"},
	{Key: "act", Title: "Act:"},
}

const about = "A transactional outbox: events are written in your transaction and carried to a broker, at least once and in order."

// app is what a command works with.
type app struct {
	config   *config.Config // the last that a selection has loaded
	ctx      context.Context
	in       io.Reader
	out, err io.Writer
	args     []string
	json     bool
	// open is daemon.OpenInspector; tests put in a store of theirs.
	open func(context.Context, config.Source, *slog.Logger) (store.Store, error)
	// command is which one it is, for hints.
	command string
	// given are the flags of the command line itself; the others' values are
	// defaults or from the environment.
	given map[string]bool
	// redact takes secrets out of whatever is printed.
	redact func(string) string
}

// Run runs the command line and returns the exit code.
func Run(ctx context.Context, args []string, in io.Reader, out, errOut io.Writer) int {
	a := &app{ctx: ctx, in: in, out: out, err: errOut, open: daemon.OpenInspector}
	return a.run(args)
}

// exit is how kong ends after it has printed help.
type exit int

func (a *app) run(args []string) (code int) {
	a.redact = func(s string) string { return s }
	a.args, a.json = args, asksForJSON(args)
	var c commands
	parser, err := newParser(&c, a)
	if err != nil {
		return a.fail(err, exitFailed)
	}
	defer func() {
		switch r := recover().(type) {
		case nil:
		case exit:
			code = int(r)
		default:
			panic(r)
		}
	}()
	if len(args) == 0 {
		args = []string{"--help"}
	}
	k, err := parser.Parse(args)
	if err != nil {
		return a.usage(err)
	}
	a.json = c.Output == "json"
	a.command = k.Selected().FullPath()
	a.given = map[string]bool{}
	for _, p := range k.Path {
		if p.Flag != nil && !p.Resolved {
			a.given[p.Flag.Name] = true
		}
	}
	if err := k.Run(a); err != nil {
		var u *usageError
		var e *ended
		switch {
		case errors.As(err, &u):
			return a.usage(err)
		case errors.As(err, &e) && e.error == nil:
			return e.code // and all is said
		case errors.As(err, &e) && e.code != 0:
			return a.fail(err, e.code)
		}
		return a.fail(err, exitFailed)
	}
	return exitOK
}

func newParser(c *commands, a *app) (*kong.Kong, error) {
	return kong.New(c,
		kong.Name("outrider"),
		kong.Description(about),
		kong.Writers(a.out, a.err),
		kong.Bind(a),
		kong.Exit(func(code int) { panic(exit(code)) }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, WrapUpperBound: 100, NoExpandSubcommands: true}),
		kong.ExplicitGroups(groups),
	)
}

// asksForJSON finds out before anything is parsed, for errors of the parser.
func asksForJSON(args []string) bool {
	for i, arg := range args {
		switch {
		case arg == "--":
			return false
		case arg == "-o" || arg == "--output":
			if i+1 < len(args) && args[i+1] == "json" {
				return true
			}
		case arg == "-ojson" || arg == "-o=json" || arg == "--output=json":
			return true
		}
	}
	return false
}

// ended is an error with an exit code of its own; without one in it, all has
// been printed.
type ended struct {
	error
	code int
}

func (e *ended) Error() string {
	if e.error == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.error.Error()
}

func (e *ended) Unwrap() error { return e.error }

// usageError is a mistake in how a command was called.
type usageError struct{ error }

func usagef(format string, args ...any) error {
	return &usageError{fmt.Errorf(format, args...)}
}

// usage prints a mistake in the call.
func (a *app) usage(err error) int {
	if outrider.Hint(err) == "" {
		command := "outrider"
		var p *kong.ParseError
		switch {
		case a.command != "":
			command = a.command
		case errors.As(err, &p) && p.Context != nil && p.Context.Selected() != nil:
			command = p.Context.Selected().FullPath()
		}
		hint := command + " --help"
		if p != nil && p.Context != nil && strings.HasPrefix(err.Error(), "unexpected argument ") {
			if names := commandsOf(p.Context.Selected(), p.Context.Model.Node); names != "" {
				err = errors.New(strings.Replace(err.Error(), "unexpected argument", "unknown command", 1))
				hint = "there are " + names + ": " + hint
			}
		}
		if m := noValue.FindStringSubmatch(err.Error()); m != nil {
			err = fmt.Errorf("%s lacks its value", m[1])
		}
		if dash := a.dashed(err); dash != "" {
			err = fmt.Errorf("%s is taken for a flag, and there is none of that name", dash)
			hint = "an argument that begins with - stands behind --, and all flags before it: " + command + " [flags] -- " + quote(dash)
		}
		err = outrider.WithHint(err, hint)
	}
	return a.fail(err, exitUsage)
}

// commandsOf names the commands that can follow; "" if none can.
func commandsOf(n, top *kong.Node) string {
	if n == nil {
		n = top
	}
	var names []string
	for _, c := range n.Children {
		if c.Type == kong.CommandNode && !c.Hidden {
			names = append(names, c.Name)
		}
	}
	return strings.Join(names, ", ")
}

// noValue is what the parser says of a flag at the end of the line.
var noValue = regexp.MustCompile(`^(--[\w-]+): expected \w+ value but got "EOL"`)

// dashed is the argument that was taken for a flag, if it can have been meant as
// an id: no flag of ours begins with a digit.
func (a *app) dashed(err error) string {
	if !strings.Contains(err.Error(), "unknown flag") {
		return ""
	}
	for _, arg := range a.args {
		if len(arg) > 1 && arg[0] == '-' && arg[1] >= '0' && arg[1] <= '9' {
			return arg
		}
	}
	return ""
}

// failure is an error as JSON.
type failure struct {
	Error    string           `json:"error"`
	Hint     string           `json:"hint,omitempty"`
	Problems []config.Problem `json:"problems,omitempty"` // of a configuration file, each by itself
	Code     int              `json:"exit_code"`
}

// fail prints an error and what to do about it.
func (a *app) fail(err error, code int) int {
	var invalid *config.Error
	hint := outrider.Hint(err)
	if errors.As(err, &invalid) && hint == "" {
		hint = "docs/CONFIG.md tells each key with its default"
	}
	// Drivers spread an error over lines.
	text := strings.Join(strings.Fields(err.Error()), " ")
	if a.json {
		f := failure{Error: a.redact(text), Hint: a.redact(hint), Code: code}
		if invalid != nil {
			f.Error, f.Problems = a.redact(err.Error()), invalid.Problems
		}
		enc := json.NewEncoder(a.err)
		enc.SetEscapeHTML(false)
		_ = enc.Encode(f) // like every write to the terminal
		return code
	}
	switch {
	case errors.As(err, &invalid):
		for line := range strings.SplitSeq(invalid.Error(), "\n") {
			fmt.Fprintf(a.err, "error: %s\n", a.redact(line))
		}
	default:
		fmt.Fprintf(a.err, "error: %s\n", a.redact(text))
	}
	if hint != "" {
		fmt.Fprintf(a.err, "hint: %s\n", a.redact(hint))
	}
	return code
}

// print writes a result: v as JSON, or what text writes, and then the command
// that is useful next.
func (a *app) print(v any, text func(w io.Writer), next string) error {
	if !a.json {
		text(a.out)
		if next != "" {
			fmt.Fprintf(a.out, "next: %s\n", next)
		}
		return nil
	}
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if next != "" && len(data) > 2 && data[len(data)-1] == '}' {
		n, err := json.Marshal(next)
		if err != nil {
			return err
		}
		data = append(append(data[:len(data)-1], `,"next":`...), append(n, '}')...)
	}
	var indented strings.Builder
	enc := json.NewEncoder(&indented)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	if err := enc.Encode(json.RawMessage(data)); err != nil {
		return err
	}
	_, err = io.WriteString(a.out, indented.String())
	return err
}

// say tells people something on the way, on standard error.
func (a *app) say(format string, args ...any) {
	text := a.redact(fmt.Sprintf(format, args...))
	if a.json {
		a.logger(config.Log{Level: "info"}).Info(text)
		return
	}
	fmt.Fprintln(a.err, text)
}

// logger writes messages to standard error, without secrets.
func (a *app) logger(c config.Log) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(c.Level)) // one of four, as the file was read
	o := &slog.HandlerOptions{Level: level, ReplaceAttr: func(_ []string, at slog.Attr) slog.Attr {
		switch at.Value.Kind() {
		case slog.KindString:
			if at.Value.String() == "" {
				return slog.Attr{} // left out: there is no hint, no destination, ...
			}
			at.Value = slog.StringValue(a.redact(at.Value.String()))
		case slog.KindAny:
			if err, ok := at.Value.Any().(error); ok {
				at.Value = slog.StringValue(a.redact(err.Error()))
			}
		}
		return at
	}}
	if c.Format == "json" || a.json {
		return slog.New(slog.NewJSONHandler(a.err, o))
	}
	return slog.New(slog.NewTextHandler(a.err, o))
}
