package config

import (
	"fmt"
	"sort"
	"strings"
)

// Problem is one thing that is wrong with a file.
type Problem struct {
	Line    int    `json:"line"`
	Column  int    `json:"column,omitempty"`
	Path    string `json:"path,omitempty"` // such as destinations[0].kafka.brokers
	Message string `json:"message"`
}

// Error is everything that is wrong with a file, in its order.
type Error struct {
	File     string
	Problems []Problem
}

// Error gives a line per problem.
func (e *Error) Error() string {
	var b strings.Builder
	for i, p := range e.Problems {
		if i > 0 {
			b.WriteByte('\n')
		}
		fmt.Fprintf(&b, "%s:%d: ", e.File, p.Line)
		if p.Path != "" {
			b.WriteString(p.Path + ": ")
		}
		b.WriteString(p.Message)
	}
	return b.String()
}

func (e *Error) sort() {
	sort.SliceStable(e.Problems, func(i, j int) bool {
		a, b := e.Problems[i], e.Problems[j]
		if a.Line != b.Line {
			return a.Line < b.Line
		}
		return a.Column < b.Column
	})
}

// nearest is the name closest to a mistyped one, or "" if none is close enough
// to have been meant.
func nearest(s string, names []string) string {
	best, at := "", max(2, len(s)/3)+1
	for _, n := range names {
		if d := distance(strings.ToLower(s), strings.ToLower(n)); d < at {
			best, at = n, d
		}
	}
	return best
}

// distance is how many bytes are to be inserted, removed or replaced.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
