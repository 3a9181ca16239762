package config

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the generated reference")

const referenceFile = "../../docs/CONFIG.md"

// The reference is made of the comments and tags of config.go, so it cannot say
// anything else than the code does.
func TestReference(t *testing.T) {
	want := reference(t)
	if *update {
		if err := os.WriteFile(referenceFile, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(referenceFile)
	if err != nil || string(got) != want {
		t.Fatalf("docs/CONFIG.md is not up to date: go test ./internal/config -run TestReference -update (%v)", err)
	}
}

// The example in the reference is a file that is taken.
func TestReferenceExample(t *testing.T) {
	data, err := os.ReadFile("testdata/example.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Parse("example.yaml", data, func(name string) (string, bool) {
		if name == "KAFKA_BROKER" {
			return "kafka:9092", true
		}
		return "postgres://app@db/shop", true
	}); err != nil {
		t.Error(err)
	}
}

// walk calls f for each field of a file, in its order.
func walk(t reflect.Type, f func(owner reflect.Type, field reflect.StructField)) {
	for i := range t.NumField() {
		field := t.Field(i)
		if field.Tag.Get("yaml") == "" {
			continue
		}
		f(t, field)
		if inner := blockType(field.Type); inner != nil {
			walk(inner, f)
		}
	}
}

// blockType is the struct behind a field that holds a block or a list of them.
func blockType(t reflect.Type) reflect.Type {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if t.Kind() == reflect.Struct && isBlock(t) {
		return t
	}
	return nil
}

// comments are those of the structs and their fields: by type, or type.field.
func comments(t *testing.T) map[string]string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "config.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	ast.Inspect(file, func(n ast.Node) bool {
		decl, ok := n.(*ast.GenDecl)
		if !ok {
			return true
		}
		for _, spec := range decl.Specs {
			ts, ok := spec.(*ast.TypeSpec)
			if !ok {
				continue
			}
			out[ts.Name.Name] = flat(decl.Doc.Text())
			st, ok := ts.Type.(*ast.StructType)
			if !ok {
				continue
			}
			for _, f := range st.Fields.List {
				for _, name := range f.Names {
					out[ts.Name.Name+"."+name.Name] = flat(f.Doc.Text())
				}
			}
		}
		return true
	})
	return out
}

func flat(s string) string { return strings.Join(strings.Fields(s), " ") }

func reference(t *testing.T) string {
	t.Helper()
	example, err := os.ReadFile("testdata/example.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	b.WriteString(intro + "\n```yaml\n" + string(example) + "```\n")
	docs := comments(t)
	section(t, &b, docs, reflect.TypeFor[Config](), "The file", "")
	return b.String()
}

const intro = `# Configuration

Generated from internal/config/config.go; a test keeps it up to date.

One YAML file for ` + "`outrider run -c outrider.yaml`" + `; ` + "`outrider config validate -c outrider.yaml`" + ` tells all that is
wrong with it. An unknown key is an error, with its line and the nearest name. Anchors, aliases and tags are not
supported.

- **Durations** have a unit: ` + "`250ms`, `5s`, `1h30m`" + `. **Sizes** are bytes, or end with ` + "`KiB`, `MiB`, `GiB`" + `.
- **` + "`${NAME}`" + `** in a value is replaced by the environment variable, **` + "`${NAME:-default}`" + `** by the default if that is
  unset or empty; ` + "`$${`" + ` stands for ` + "`${`" + `. What is inserted is always a value, whatever it contains.
- **Secrets** are given as ` + "`{env: NAME}` or `{file: PATH}`" + ` (one line end at the end is taken off). A text is taken too. No
  output shows them.
- Relative paths are relative to the folder of the file.
- The grammar of ` + "`match`, `to` and `routes`" + ` is that of package route: ` + "`go doc github.com/outrider-dev/outrider/route`" + `.
`

// section writes a struct's table, then the sections of its blocks.
func section(t *testing.T, b *strings.Builder, docs map[string]string, typ reflect.Type, title, path string) {
	t.Helper()
	fmt.Fprintf(b, "\n## %s\n\n", title)
	if path != "" {
		fmt.Fprintf(b, "%s\n\n", docs[typ.Name()])
	}
	b.WriteString("| key | default | what it is |\n|---|---|---|\n")
	type inner struct {
		typ         reflect.Type
		title, path string
	}
	var blocks []inner
	for i := range typ.NumField() {
		f := typ.Field(i)
		name := f.Tag.Get("yaml")
		if name == "" {
			continue
		}
		doc := docs[typ.Name()+"."+f.Name]
		if doc == "" {
			t.Errorf("%s.%s has no comment", typ.Name(), f.Name)
		}
		fmt.Fprintf(b, "| `%s` | %s | %s%s |\n", name, defaultText(f), strings.ReplaceAll(doc, "|", `\|`), strings.ReplaceAll(limits(f), "|", `\|`))
		if in := blockType(f.Type); in != nil {
			at := join(path, name)
			if f.Type.Kind() == reflect.Slice {
				at += "[]"
			}
			blocks = append(blocks, inner{in, "`" + at + "`", at})
		}
	}
	for _, in := range blocks {
		section(t, b, docs, in.typ, in.title, in.path)
	}
}

func defaultText(f reflect.StructField) string {
	switch tag := f.Tag; {
	case tag.Get("needed") != "":
		return "**needed**"
	case tag.Get("means") != "":
		return tag.Get("means")
	case tag.Get("default") != "":
		return "`" + tag.Get("default") + "`"
	case f.Type.Kind() == reflect.Struct && blockType(f.Type) != nil:
		return "see below"
	default:
		return "none"
	}
}

// limits are the values that a field takes.
func limits(f reflect.StructField) string {
	var parts []string
	tag := f.Tag
	if list := tag.Get("enum"); list != "" {
		parts = append(parts, "One of `"+strings.ReplaceAll(list, "|", "`, `")+"`.")
	}
	switch low, high := tag.Get("min"), tag.Get("max"); {
	case low != "" && high != "":
		parts = append(parts, fmt.Sprintf("From %s to %s.", low, high))
	case low != "":
		parts = append(parts, fmt.Sprintf("At least %s.", low))
	case high != "":
		parts = append(parts, fmt.Sprintf("At most %s.", high))
	}
	if word, meaning, ok := strings.Cut(tag.Get("special"), ": "); ok {
		parts = append(parts, fmt.Sprintf("`%s`: %s.", word, meaning))
	}
	if len(parts) == 0 {
		return ""
	}
	return " " + strings.Join(parts, " ")
}
