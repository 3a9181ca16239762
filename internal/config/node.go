package config

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// position is where something stands in the file, from 1.
type position struct{ line, column int }

// node is the part of YAML that a configuration needs: no anchors, tags or
// merges, which hide where a value comes from.
type node struct {
	position
	kind    kind
	text    string // of a scalar
	entries []entry
	items   []*node
}

type entry struct {
	position
	key   string
	value *node
}

type kind uint8

const (
	scalar kind = iota
	null
	mapping
	sequence
)

func (k kind) String() string {
	return [...]string{"a value", "nothing", "a map", "a list"}[k]
}

// maxDepth is how deep a file may be nested; a configuration needs six.
const maxDepth = 32

// parse reads one YAML document.
func parse(data []byte) (n *node, err *Problem) {
	// The library has been seen to panic on texts that no person writes.
	defer func() {
		if r := recover(); r != nil {
			n, err = nil, &Problem{Line: 1, Message: "is not valid YAML"}
		}
	}()
	file, perr := parser.ParseBytes(data, 0)
	if perr != nil {
		return nil, unquoted(data, syntaxProblem(perr))
	}
	var body ast.Node
	for _, doc := range file.Docs {
		switch {
		case doc.Body == nil:
		case body != nil:
			return nil, problemAt(doc.Body, "the file holds more than one document")
		default:
			body = doc.Body
		}
	}
	if body == nil {
		return &node{kind: null, position: position{1, 1}}, nil
	}
	return convert(body, 0)
}

func syntaxProblem(err error) *Problem {
	p := &Problem{Line: 1, Message: "is not valid YAML: " + firstLine(err.Error())}
	var at yaml.Error
	if errors.As(err, &at) {
		p.Message = "is not valid YAML: " + firstLine(at.GetMessage())
		if t := at.GetToken(); t != nil && t.Position != nil {
			p.Line, p.Column = t.Position.Line, t.Position.Column
		}
	}
	return p
}

// template is a value that YAML takes for a map with something behind it.
var template = regexp.MustCompile(`([A-Za-z_][\w-]*):\s+(\{[^\s{}"',]*\}[^\s,\]"']+)`)

// unquoted says what to do where a syntax error comes from a template without
// quotes; what the library says of it helps nobody.
func unquoted(data []byte, p *Problem) *Problem {
	lines := strings.Split(string(data), "\n")
	if p.Line > len(lines) {
		return p
	}
	m := template.FindStringSubmatch(lines[p.Line-1])
	if m == nil {
		return p
	}
	value := m[2]
	for strings.Count(value, "}") > strings.Count(value, "{") { // of the map around it
		value = strings.TrimSuffix(value, "}")
	}
	p.Message = fmt.Sprintf("is not valid YAML: a value that begins with { has to be put in quotes, or it is read as a map: %s: %q", m[1], value)
	return p
}

func firstLine(s string) string {
	s, _, _ = strings.Cut(s, "\n")
	return s
}

func problemAt(n ast.Node, format string, args ...any) *Problem {
	at := positionOf(n.GetToken())
	return &Problem{Line: at.line, Column: at.column, Message: fmt.Sprintf(format, args...)}
}

func positionOf(t *token.Token) position {
	if t == nil || t.Position == nil {
		return position{1, 1}
	}
	return position{t.Position.Line, t.Position.Column}
}

func convert(n ast.Node, depth int) (*node, *Problem) {
	if depth > maxDepth {
		return nil, problemAt(n, "is nested too deeply")
	}
	out := &node{position: positionOf(n.GetToken())}
	switch n := n.(type) {
	case *ast.StringNode:
		out.text = n.Value
	case *ast.LiteralNode:
		out.text = n.Value.Value
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		out.text = n.GetToken().Value
	case *ast.NullNode:
		out.kind = null
	case *ast.MappingNode:
		return out, out.addEntries(n.Values, depth)
	case *ast.MappingValueNode:
		return out, out.addEntries([]*ast.MappingValueNode{n}, depth)
	case *ast.SequenceNode:
		out.kind = sequence
		for _, v := range n.Values {
			item, err := convert(v, depth+1)
			if err != nil {
				return nil, err
			}
			out.items = append(out.items, item)
		}
	case *ast.AnchorNode, *ast.AliasNode:
		return nil, problemAt(n, "anchors and aliases are not supported: write the value out, or use ${NAME}")
	case *ast.TagNode:
		return nil, problemAt(n, "tags such as %s are not supported", n.Start.Value)
	default:
		return nil, problemAt(n, "this form of YAML is not supported")
	}
	return out, nil
}

// addEntries takes a map's keys. The library has refused a key that stands twice.
func (out *node) addEntries(values []*ast.MappingValueNode, depth int) *Problem {
	out.kind = mapping
	for i, v := range values {
		key, ok := v.Key.(*ast.StringNode)
		at := positionOf(v.Key.GetToken())
		if !ok {
			return problemAt(v.Key, "a key has to be a plain name")
		}
		if i == 0 {
			// The token of a map is the colon behind its first key.
			out.position = at
		}
		value, err := convert(v.Value, depth+1)
		if err != nil {
			return err
		}
		if value.kind == null {
			value.position = at
		}
		out.entries = append(out.entries, entry{at, key.Value, value})
	}
	return nil
}
