package main

import (
	"bytes"
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrider-dev/outrider/internal/testdb"
)

// TestDepartures runs the program on the sample, or on as many lines of it as
// OUTRIDER_DEPARTURES says.
func TestDepartures(t *testing.T) {
	args := []string{"--db", testdb.Postgres(t), "--kafka", testdb.Kafka(t)}
	if n := os.Getenv("OUTRIDER_DEPARTURES"); n != "" {
		args = append(args, "--lines", n)
	}
	var out bytes.Buffer
	err := run(t.Context(), args, &out)
	defer deleteTopic(t, args[3], out.String())
	t.Log("\n" + out.String())
	if err != nil {
		t.Fatal(err)
	}
	// On a machine that is busy with other things some may come twice.
	want := regexp.MustCompile(`arrived, 0 missing, [0-9]+ twice, 0 problems\n$`)
	if !want.MatchString(out.String()) {
		t.Errorf("the output does not match %q", want)
	}
}

// deleteTopic removes what the run has made.
func deleteTopic(t *testing.T, broker, out string) {
	t.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(broker))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	for _, topic := range regexp.MustCompile(`departures-[0-9a-f-]{36}`).FindAllString(out, 1) {
		if _, err := kadm.NewClient(cl).DeleteTopics(t.Context(), topic); err != nil {
			t.Error(err)
		}
	}
}

// TestCommandLine asks for the usage, and for what cannot be run.
func TestCommandLine(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want string // the error; "": none
	}{
		{[]string{"-h"}, ""},
		{nil, "--db is missing: the DSN of a PostgreSQL database"},
		{[]string{"--db", "x"}, "--kafka is missing: host:port of a broker"},
		{[]string{"--db", "x", "--kafka", "y", "--writers", "0"}, "--writers is 0, want at least 1"},
		{[]string{"--db", "x", "--kafka", "y", "--lines", "-1"}, "--lines is -1, want at least 1, or 0 for all"},
	} {
		var out bytes.Buffer
		err := run(t.Context(), tt.args, &out)
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || err.Error() != tt.want) {
			t.Errorf("%q: %v, want %q", tt.args, err, tt.want)
		}
		if got := strings.Contains(out.String(), "-writers"); got != (tt.want == "") {
			t.Errorf("%q: the usage is shown: %v\n%s", tt.args, got, out.String())
		}
	}
}

// TestCheck shows that the program notices what it is to look for.
func TestCheck(t *testing.T) {
	flights := []flight{{ID: "a", Line: 1, Origin: "ORD"}, {ID: "b", Line: 2, Origin: "ORD"}, {ID: "c", Line: 3, Origin: "LAX"}}
	type message struct {
		id, key string
		number  int64
	}
	a, b, c := message{"a", "ORD", 8}, message{"b", "ORD", 9}, message{"c", "LAX", 1}
	for _, tt := range []struct {
		name     string
		messages []message
		want     string // part of the error
		again    int
	}{
		{"in order", []message{a, c, b}, "", 0},
		{"of an earlier run", []message{a, {"x", "ORD", 5}, c, b}, "", 0},
		{"again", []message{a, b, c, a, b}, "", 2},
		{"missing", []message{a, c}, "1 departures have not arrived", 0},
		{"swapped", []message{b, a, c}, "number 9 comes behind 7", 0},
		{"of another airport", []message{a, {"b", "LAX", 9}, c}, "departure 2 of LAX", 0},
	} {
		check := newCheck(flights, map[string]int64{"ORD": 7, "LAX": 0})
		for _, m := range tt.messages {
			f := flight{}
			for i := range flights {
				if flights[i].ID == m.id {
					f = flights[i]
				}
			}
			f.Number = m.number
			payload, err := json.Marshal(f)
			if err != nil {
				t.Fatal(err)
			}
			check.arrived(m.id, m.key, payload, 0)
		}
		err := check.report(&bytes.Buffer{}, len(flights), time.Second, time.Second)
		switch {
		case tt.want == "" && err != nil, tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
		if check.again != tt.again {
			t.Errorf("%s: %d twice, want %d", tt.name, check.again, tt.again)
		}
	}
}

func TestSample(t *testing.T) {
	flights, err := load("", 0)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(flights); n != 20_000 {
		t.Errorf("the sample has %d departures, want 20,000", n)
	}
}
