package route

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/outrider-dev/outrider"
)

func event() *outrider.Record {
	return &outrider.Record{Event: outrider.Event{
		Type: "OrderPlaced", AggregateType: "order", AggregateID: "42", Key: "eu 42",
		ContentType: "application/json",
		Headers:     map[string]string{"tenant": "acme", "empty": "", "odd": `a"b\c*,d`},
	}}
}

func TestMatch(t *testing.T) {
	for text, want := range map[string]bool{
		"":                                  true,
		"  ":                                true,
		"type:OrderPlaced":                  true,
		"type:orderplaced":                  false,
		"type:Order":                        false,
		"type:Order+":                       false,
		"type:Order?laced":                  false,
		"type:Order*":                       true,
		"type:*Placed":                      true,
		"type:*":                            true,
		"type:**":                           true,
		"type:O*P*d":                        true,
		"type:*r*r*":                        true,
		"type:*r*r*r*":                      false,
		"type:OrderP*Placed":                false, // the parts must not overlap
		"type:Other,OrderPlaced":            true,
		"type:Other,Order*":                 true,
		"type:Other,Else":                   false,
		"!type:Other":                       true,
		"!type:Other,Order*":                false,
		"aggregate:order":                   true,
		"aggregate_type:order":              true,
		"aggregate_id:42":                   true,
		"content_type:application/json":     true,
		`key:"eu 42"`:                       true,
		`key:eu" "42`:                       true,
		`key:"eu "*`:                        true,
		`key:"eu *"`:                        false, // literal in quotes
		`key:""`:                            false,
		`key:"",eu*`:                        true,
		"header.tenant:acme,beta":           true,
		"header.tenant:beta":                false,
		"header.Tenant:acme":                false, // names are case-sensitive
		"header.absent:*":                   false,
		"!header.absent:*":                  true,
		"header.empty:*":                    true,
		`header.empty:""`:                   true,
		`header.absent:""`:                  false,
		`header.odd:"a\"b\\c*,d"`:           true,
		"type:Order* header.tenant:acme":    true,
		"type:Order* header.tenant:beta":    false,
		"type:Order*\n\t!type:OrderDebug  ": true,
	} {
		m, err := ParseMatch(text)
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		if got := m.Match(event()); got != want {
			t.Errorf("%q: got %v, want %v", text, got, want)
		}
	}
	if !(Match{}).Match(event()) {
		t.Error("the zero Match must pick every event")
	}
}

func TestMatchUnordered(t *testing.T) {
	m, err := ParseMatch(`key:""`)
	if err != nil {
		t.Fatal(err)
	}
	if !m.Match(&outrider.Record{}) {
		t.Error(`key:"" must pick an unordered event`)
	}
}

func TestMatchErrors(t *testing.T) {
	for text, want := range map[string]struct {
		column  int
		reason  string
		nearest string
	}{
		"typ:Order":               {1, "unknown field", "type"},
		"type:A agregate_type:x":  {8, "unknown field", "aggregate_type"},
		"!Type:A":                 {2, "unknown field", "type"},
		"something:A":             {1, "there are type, aggregate_type", ""},
		"Order*":                  {1, "no colon", ""},
		"type:A Order":            {8, "no colon", ""},
		"type:":                   {6, "value is missing", ""},
		"type:A,":                 {8, "value is missing", ""},
		"type:,A":                 {6, "value is missing", ""},
		"header.:A":               {8, "name is missing", ""},
		`key:"abc`:                {5, "not closed", ""},
		`key:"a\n"`:               {7, "backslash", ""},
		":A":                      {1, "unknown field", ""},
		"!":                       {2, "no colon", ""},
		"aggregateid:1":           {1, "unknown field", "aggregate_id"},
		"content-type:text/plain": {1, "unknown field", "content_type"},
	} {
		_, err := ParseMatch(text)
		checkSyntax(t, text, err, want.column, want.reason, want.nearest)
	}
}

func checkSyntax(t *testing.T, text string, err error, column int, reason, near string) {
	t.Helper()
	var se *SyntaxError
	if !errors.As(err, &se) {
		t.Errorf("%q: got %v, want a SyntaxError", text, err)
		return
	}
	if se.Column != column || se.Nearest != near || !strings.Contains(se.Error(), reason) {
		t.Errorf("%q: got %v, want column %d, reason %q, nearest %q", text, err, column, reason, near)
	}
}

func TestTemplate(t *testing.T) {
	for text, want := range map[string]string{
		"orders":                       "orders",
		"{aggregate_type}-events":      "order-events",
		"{aggregate}-{aggregate_id}":   "order-42",
		"{type}":                       "OrderPlaced",
		"{type|lower}":                 "orderplaced",
		"{type|kebab}":                 "order-placed",
		"{type|snake}.v1":              "order_placed.v1",
		"{type|dot}":                   "order.placed",
		"{key|kebab}":                  "eu-42",
		"{type|dot|kebab}":             "order-placed",
		"t.{header.tenant}.{type|dot}": "t.acme.order.placed",
		"{{{type}}}":                   "{OrderPlaced}",
		"a{{b}}c":                      "a{b}c",
		"{content_type}":               "application/json",
	} {
		tpl, err := ParseTemplate(text)
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		if got, err := tpl.Expand(event()); err != nil || got != want {
			t.Errorf("%q: got %q, %v, want %q", text, got, err, want)
		}
	}
}

func TestTemplateMissing(t *testing.T) {
	for text, reason := range map[string]string{
		"x.{header.absent}":   "the event has no header.absent",
		"{header.empty}.x":    "header.empty is empty",
		"{header.dash|kebab}": "header.dash is empty",
	} {
		tpl, err := ParseTemplate(text)
		if err != nil {
			t.Fatal(err)
		}
		rec := event()
		rec.Headers["dash"] = "--"
		if got, err := tpl.Expand(rec); err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("%q: got %q, %v, want an error with %q", text, got, err, reason)
		}
	}
}

func TestTemplateErrors(t *testing.T) {
	for text, want := range map[string]struct {
		column  int
		reason  string
		nearest string
	}{
		"":                   {1, "missing", ""},
		"{typ}":              {2, "unknown field", "type"},
		"a-{agregate_type}":  {4, "unknown field", "aggregate_type"},
		"{type|kebap}":       {7, "unknown filter", "kebab"},
		"{type|lower|sname}": {13, "unknown filter", "snake"},
		"{type|capitalise}":  {7, "there are lower, kebab", ""},
		"{}":                 {2, "missing", ""},
		"{type":              {1, "not closed", ""},
		"type}":              {5, "without {", ""},
		"{header.}":          {9, "name is missing", ""},
		"{type|}":            {7, "unknown filter", ""},
	} {
		_, err := ParseTemplate(text)
		checkSyntax(t, text, err, want.column, want.reason, want.nearest)
	}
}

func TestWords(t *testing.T) {
	for in, want := range map[string]string{
		"OrderPlaced":     "order-placed",
		"orderPlaced":     "order-placed",
		"order_placed":    "order-placed",
		"Order Placed":    "order-placed",
		"order.placed":    "order-placed",
		"ORDER_PLACED":    "order-placed",
		"HTTPServerError": "http-server-error",
		"UserID":          "user-id",
		"OrderV2Placed":   "order-v2-placed",
		"Order2":          "order2",
		"__order__":       "order",
		"ÄnderungErfasst": "änderung-erfasst",
		"a\xffb":          "a-b",
		"":                "",
	} {
		if got := joinWords(in, '-'); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}

func mustRules(t testing.TB, pairs ...string) Rules {
	t.Helper()
	var rs Rules
	for i := 0; i < len(pairs); i += 2 {
		r, err := ParseRule(pairs[i], pairs[i+1])
		if err != nil {
			t.Fatal(err)
		}
		rs = append(rs, r)
	}
	return rs
}

func TestRules(t *testing.T) {
	rs := mustRules(t,
		"type:Invoice*", "invoices",
		"header.tenant:*", "{header.tenant}-events",
		"type:Order*", "orders",
		"type:Refund", "invoices",
	)
	if got, err := rs.To(event()); err != nil || got != "acme-events" {
		t.Errorf("first match must win: got %q, %v", got, err)
	}
	rec := event()
	delete(rec.Headers, "tenant")
	if got, err := rs.To(rec); err != nil || got != "orders" {
		t.Errorf("got %q, %v, want orders", got, err)
	}
	rec.Type = "Other"
	if got, err := rs.To(rec); !errors.Is(err, ErrNoRule) {
		t.Errorf("got %q, %v, want ErrNoRule", got, err)
	}
	if got := fmt.Sprint(rs.Constants()); got != "[invoices orders]" {
		t.Errorf("constants: got %s", got)
	}
}

func TestTextRoundTrip(t *testing.T) {
	var m Match
	if err := m.UnmarshalText([]byte("type:A !key:b")); err != nil {
		t.Fatal(err)
	}
	if b, _ := m.MarshalText(); string(b) != "type:A !key:b" {
		t.Errorf("match: %s", b)
	}
	if err := m.UnmarshalText([]byte("typ:A")); err == nil || m.String() != "type:A !key:b" {
		t.Errorf("a bad text must leave the Match as it was: %v, %v", err, m)
	}
	var tpl Template
	if err := tpl.UnmarshalText([]byte("{type}")); err != nil {
		t.Fatal(err)
	}
	if b, _ := tpl.MarshalText(); string(b) != "{type}" {
		t.Errorf("template: %s", b)
	}
}

func TestAllocations(t *testing.T) {
	rs := mustRules(t, "type:Refund* header.tenant:acme,beta", "refunds", `type:Order* key:"eu "*,us*`, "orders")
	rec := event()
	if n := testing.AllocsPerRun(100, func() {
		if to, err := rs.To(rec); to != "orders" || err != nil {
			t.Fatal(to, err)
		}
	}); n != 0 {
		t.Errorf("rules with constant names allocate %v times", n)
	}
}

func BenchmarkRules(b *testing.B) {
	rec := event()
	for _, to := range []string{"orders", "{aggregate_type}-events", "{type|kebab}"} {
		rs := mustRules(b, "type:Refund* header.tenant:acme,beta", "refunds", "type:Order* !type:OrderDebug", to)
		b.Run(to, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := rs.To(rec); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// FuzzMatch: no text makes the parser or the compiled Match panic, errors
// point into the text, and a value in quotes matches exactly itself.
func FuzzMatch(f *testing.F) {
	for _, s := range []string{"", "type:Order* key:42", `!key:"a \" \\ b",c*d`, "header.x:*", "typ:", `type:"`} {
		f.Add(s)
	}
	quote := strings.NewReplacer(`\`, `\\`, `"`, `\"`)
	f.Fuzz(func(t *testing.T, s string) {
		m, err := ParseMatch(s)
		var se *SyntaxError
		switch {
		case err == nil:
			m.Match(event())
		case !errors.As(err, &se) || se.Column < 1 || se.Column > len(s)+1:
			t.Errorf("%q: %v", s, err)
		}
		exact, err := ParseMatch(`key:"` + quote.Replace(s) + `"`)
		if err != nil {
			t.Fatalf("quoted %q: %v", s, err)
		}
		rec := event()
		if rec.Key = s; !exact.Match(rec) {
			t.Errorf("quoted %q does not match itself", s)
		}
		if rec.Key = s + "x"; exact.Match(rec) {
			t.Errorf("quoted %q matches more than itself", s)
		}
	})
}

// FuzzTemplate: no text panics, errors point into the text, and escaped text
// makes itself.
func FuzzTemplate(f *testing.F) {
	for _, s := range []string{"", "a{type|kebab}b", "{{}}", "{", "}", "{header.}", "{type|x}"} {
		f.Add(s)
	}
	escape := strings.NewReplacer("{", "{{", "}", "}}")
	f.Fuzz(func(t *testing.T, s string) {
		tpl, err := ParseTemplate(s)
		var se *SyntaxError
		switch {
		case err == nil:
			rec := event()
			rec.Type = s
			_, _ = tpl.Expand(rec)
			joinWords(s, '.')
		case !errors.As(err, &se) || se.Column < 1 || se.Column > len(s)+1:
			t.Errorf("%q: %v", s, err)
		}
		if s == "" {
			return
		}
		lit, err := ParseTemplate(escape.Replace(s))
		if err != nil {
			t.Fatalf("escaped %q: %v", s, err)
		}
		if got, ok := lit.Constant(); !ok || got != s {
			t.Errorf("escaped %q makes %q", s, got)
		}
	})
}

func ExampleRules_To() {
	orders, _ := ParseRule("type:Order* !type:OrderDebug", "{aggregate_type}-events")
	rest, _ := ParseRule("", "{type|kebab}")
	rules := Rules{orders, rest}

	for _, typ := range []string{"OrderPlaced", "InvoiceSent"} {
		topic, err := rules.To(&outrider.Record{Event: outrider.Event{Type: typ, AggregateType: "order"}})
		fmt.Println(topic, err)
	}
	// Output:
	// order-events <nil>
	// invoice-sent <nil>
}

func ExampleParseMatch() {
	_, err := ParseMatch("type:Order* agregate:order")
	fmt.Println(err)
	m, _ := ParseMatch(`header.tenant:acme,beta key:"with space"`)
	fmt.Println(m.Match(&outrider.Record{Event: outrider.Event{
		Key: "with space", Headers: map[string]string{"tenant": "beta"},
	}}))
	// Output:
	// "type:Order* agregate:order", column 13: unknown field "agregate"; did you mean "aggregate"?
	// true
}

func ExampleParseTemplate() {
	_, err := ParseTemplate("{type|kebap}")
	fmt.Println(err)
	// Output:
	// "{type|kebap}", column 7: unknown filter "kebap"; did you mean "kebab"?
}
