package config

import (
	"encoding"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/outrider-dev/outrider"
	"github.com/outrider-dev/outrider/route"
)

// maxFile is how large a configuration may be.
const maxFile = 256 << 10

// Load reads a file. The error is an *Error with all that is wrong, or says why
// the file can't be read.
func Load(file string) (*Config, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, outrider.WithHint(err, "outrider dev needs no file; docs/CONFIG.md begins with one to copy")
	}
	defer f.Close() //nolint:errcheck // it was only read
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, err
	}
	return Parse(file, data, os.LookupEnv)
}

// Parse reads what a file holds; lookup gives environment variables.
func Parse(file string, data []byte, lookup func(string) (string, bool)) (*Config, error) {
	d := &decoder{file: file, dir: filepath.Dir(file), lookup: lookup, at: map[string]position{}}
	c := &Config{file: file, at: d.at}
	if len(data) > maxFile {
		return nil, &Error{File: file, Problems: []Problem{{Line: 1, Message: fmt.Sprintf("has more than %d bytes", maxFile)}}}
	}
	root, problem := parse(data)
	if problem != nil {
		return nil, &Error{File: file, Problems: []Problem{*problem}}
	}
	if root.kind == scalar || root.kind == sequence {
		d.fail(root.position, "", "the file has to be a map of keys to values")
		return nil, &Error{File: file, Problems: d.problems}
	}
	d.structure(root, reflect.ValueOf(c).Elem(), "")
	c.secrets = d.secrets
	d.problems = append(d.problems, c.check(d.problems)...)
	if len(d.problems) > 0 {
		e := &Error{File: file, Problems: d.problems}
		e.sort()
		for i := range e.Problems {
			e.Problems[i].Message = (&Config{secrets: d.secrets}).Redact(e.Problems[i].Message)
		}
		return nil, e
	}
	return c, nil
}

type decoder struct {
	file, dir string
	lookup    func(string) (string, bool)
	problems  []Problem
	secrets   []Secret
	at        map[string]position
}

func (d *decoder) fail(at position, path, format string, args ...any) {
	d.problems = append(d.problems, Problem{
		Line: max(1, at.line), Column: at.column, Path: path, Message: fmt.Sprintf(format, args...),
	})
}

// structure fills a struct from a map. Nothing is the same as an empty map.
func (d *decoder) structure(n *node, v reflect.Value, path string) {
	if n.kind != mapping && n.kind != null {
		d.wrongKind(n, path, mapping)
		return
	}
	d.at[path] = n.position
	t := v.Type()
	names := keysOf(t)
	given := map[string]*node{}
	for _, e := range n.entries {
		given[e.key] = e.value
		d.at[join(path, e.key)] = e.position
		if !contains(names, e.key) {
			d.unknown(e, path, names)
		}
	}
	for i := range t.NumField() {
		tag := t.Field(i).Tag
		name := tag.Get("yaml")
		if name == "" {
			continue
		}
		if value, ok := given[name]; ok {
			d.field(value, v.Field(i), tag, join(path, name))
		} else {
			d.missing(n, v.Field(i), tag, path, name)
		}
	}
}

// keysOf are the keys that a block can have.
func keysOf(t reflect.Type) []string {
	var names []string
	for i := range t.NumField() {
		if name := t.Field(i).Tag.Get("yaml"); name != "" {
			names = append(names, name)
		}
	}
	return names
}

func (d *decoder) unknown(e entry, path string, names []string) {
	hint := "there are " + strings.Join(names, ", ")
	if near := nearest(e.key, names); near != "" {
		hint = fmt.Sprintf("did you mean %q?", near)
	}
	d.fail(e.position, join(path, e.key), "unknown key; %s", hint)
}

// missing fills in what a field is when it is left out.
func (d *decoder) missing(n *node, v reflect.Value, tag reflect.StructTag, path, name string) {
	switch {
	case tag.Get("needed") != "":
		d.fail(n.position, join(path, name), "is missing")
	case v.Kind() == reflect.Struct && isBlock(v.Type()):
		d.structure(&node{kind: null, position: n.position}, v, join(path, name))
	case tag.Get("default") != "":
		d.scalar(&node{position: n.position, text: tag.Get("default")}, v, tag, join(path, name))
	}
}

// isBlock reports whether a type is a block of keys, not a value of its own.
func isBlock(t reflect.Type) bool {
	return t != secretType && !reflect.PointerTo(t).Implements(unmarshalerType)
}

var (
	secretType      = reflect.TypeFor[Secret]()
	durationType    = reflect.TypeFor[time.Duration]()
	sizeType        = reflect.TypeFor[Size]()
	pathType        = reflect.TypeFor[Path]()
	unmarshalerType = reflect.TypeFor[encoding.TextUnmarshaler]()
)

func (d *decoder) field(n *node, v reflect.Value, tag reflect.StructTag, path string) {
	t := v.Type()
	switch {
	case t == secretType:
		d.secret(n, v, path)
	case t.Kind() == reflect.Pointer && isBlock(t.Elem()):
		v.Set(reflect.New(t.Elem()))
		d.structure(n, v.Elem(), path)
	case t.Kind() == reflect.Struct && isBlock(t):
		d.structure(n, v, path)
	case t.Kind() == reflect.Slice:
		d.list(n, v, tag, path)
	case n.kind == null:
		d.fail(n.position, path, "has no value; leave the key out for its default")
	case n.kind != scalar:
		d.wrongKind(n, path, scalar)
	default:
		text, err := interpolate(n.text, d.lookup)
		if err != nil {
			d.fail(n.position, path, "%v", err)
			return
		}
		d.scalar(&node{position: n.position, text: text}, v, tag, path)
	}
}

func (d *decoder) wrongKind(n *node, path string, want kind) {
	hint := ""
	if want == scalar && n.kind == mapping {
		hint = `; a value that begins with { has to be put in quotes`
	}
	if want == sequence && n.kind == scalar {
		hint = `; write it as [...] or with - before each line`
	}
	d.fail(n.position, path, "is %v, want %v%s", n.kind, want, hint)
}

func (d *decoder) list(n *node, v reflect.Value, tag reflect.StructTag, path string) {
	if n.kind != sequence {
		d.wrongKind(n, path, sequence)
		return
	}
	if len(n.items) == 0 && tag.Get("needed") != "" {
		d.fail(n.position, path, "is empty")
	}
	v.Set(reflect.MakeSlice(v.Type(), len(n.items), len(n.items)))
	for i, item := range n.items {
		at := fmt.Sprintf("%s[%d]", path, i)
		d.at[at] = item.position
		d.field(item, v.Index(i), "", at)
	}
}

// secret is a text, {env: NAME} or {file: PATH}.
func (d *decoder) secret(n *node, v reflect.Value, path string) {
	var text string
	switch n.kind {
	case scalar:
		var err error
		if text, err = interpolate(n.text, d.lookup); err != nil {
			d.fail(n.position, path, "%v", err)
			return
		}
	case mapping:
		var ok bool
		if text, ok = d.reference(n, path); !ok {
			return
		}
	default:
		d.fail(n.position, path, "is %v, want {env: NAME} or {file: PATH}", n.kind)
		return
	}
	if text == "" {
		d.fail(n.position, path, "is empty")
		return
	}
	for _, s := range dsnSecrets(text) {
		d.secrets = append(d.secrets, NewSecret(s))
	}
	v.Set(reflect.ValueOf(NewSecret(text)))
}

func (d *decoder) reference(n *node, path string) (string, bool) {
	const want = "want exactly one of {env: NAME} and {file: PATH}"
	if len(n.entries) != 1 || n.entries[0].value.kind != scalar {
		d.fail(n.position, path, want)
		return "", false
	}
	e := n.entries[0]
	switch e.key {
	case "env":
		text, ok := d.lookup(e.value.text)
		if !ok {
			d.fail(e.position, path, "the environment variable %s is not set", e.value.text)
		}
		return text, ok
	case "file":
		data, err := os.ReadFile(d.path(e.value.text))
		if err != nil {
			d.fail(e.position, path, "%v", err)
			return "", false
		}
		return strings.TrimRight(string(data), "\r\n"), true
	default:
		d.fail(e.position, path, "unknown key %q; %s", e.key, want)
		return "", false
	}
}

func (d *decoder) path(s string) string {
	if filepath.IsAbs(s) || s == "" {
		return s
	}
	return filepath.Join(d.dir, s)
}

// scalar sets a value from its text.
func (d *decoder) scalar(n *node, v reflect.Value, tag reflect.StructTag, path string) {
	special, _, _ := strings.Cut(tag.Get("special"), ":")
	if n.text == special && (v.Kind() == reflect.Int || v.Kind() == reflect.Int64) && !isNumber(special) {
		v.SetInt(-1)
		return
	}
	if err := d.set(n.text, v); err != nil {
		if special != "" && !isNumber(special) {
			err = fmt.Errorf("%w, or %s", err, special)
		}
		d.fail(n.position, path, "%v", describe(n.text, err))
		return
	}
	if err := inRange(v, tag); err != nil {
		d.fail(n.position, path, "%v", err)
	}
}

func isNumber(s string) bool { return s != "" && s[0] >= '0' && s[0] <= '9' }

// describe says what the text is, unless the error does it better.
func describe(text string, err error) error {
	if se := (*route.SyntaxError)(nil); errors.As(err, &se) {
		return err
	}
	return fmt.Errorf("is %q: %w", text, err)
}

func (d *decoder) set(text string, v reflect.Value) error {
	switch t := v.Type(); {
	case t == durationType:
		x, err := time.ParseDuration(text)
		if err != nil {
			return errors.New("want a duration with its unit, such as 250ms, 5s or 1h30m")
		}
		if x < 0 {
			return errors.New("want a duration that is not negative")
		}
		v.SetInt(int64(x))
	case t == sizeType:
		x, err := parseSize(text)
		if err != nil {
			return err
		}
		v.SetInt(int64(x))
	case t == pathType:
		v.SetString(d.path(text))
	case t.Kind() == reflect.Pointer:
		v.Set(reflect.New(t.Elem()))
		return d.set(text, v.Elem())
	case reflect.PointerTo(t).Implements(unmarshalerType):
		return v.Addr().Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(text)) //nolint:errcheck // the case has asked
	case t.Kind() == reflect.String:
		v.SetString(text)
	case t.Kind() == reflect.Int:
		x, err := strconv.Atoi(text)
		if err != nil {
			return errors.New("want a whole number")
		}
		v.SetInt(int64(x))
	case t.Kind() == reflect.Bool:
		if text != "true" && text != "false" {
			return errors.New("want true or false")
		}
		v.SetBool(text == "true")
	}
	return nil
}

// inRange checks a value against the bounds of its tag.
func inRange(v reflect.Value, tag reflect.StructTag) error {
	if list := tag.Get("enum"); list != "" {
		names := strings.Split(list, "|")
		if contains(names, v.String()) {
			return nil
		}
		hint := ""
		if near := nearest(v.String(), names); near != "" {
			hint = fmt.Sprintf("; did you mean %q?", near)
		}
		return fmt.Errorf("is %q, want %s%s", v.String(), strings.Join(names, ", "), hint)
	}
	if v.Kind() != reflect.Int && v.Kind() != reflect.Int64 {
		return nil
	}
	low, high := tag.Get("min"), tag.Get("max")
	if low != "" && v.Int() < bound(low, v.Type()) || high != "" && v.Int() > bound(high, v.Type()) {
		return fmt.Errorf("is %v, want %s", v.Interface(), rangeText(low, high))
	}
	return nil
}

func rangeText(low, high string) string {
	switch {
	case high == "":
		return "at least " + low
	case low == "":
		return "at most " + high
	default:
		return low + " to " + high
	}
}

// bound reads a tag's number in the unit of the field. The tags are ours: a
// test reads them all.
func bound(text string, t reflect.Type) int64 {
	v := reflect.New(t).Elem()
	if err := (&decoder{}).set(text, v); err != nil {
		panic("config: tag " + text + ": " + err.Error())
	}
	return v.Int()
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

func contains(names []string, name string) bool {
	for _, n := range names {
		if n == name {
			return true
		}
	}
	return false
}
