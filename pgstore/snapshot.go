package pgstore

import (
	"fmt"
	"strconv"
	"strings"
)

// snapshot is a pg_snapshot: which transactions had ended when it was taken.
// text is what the database prints and reads.
type snapshot struct {
	text       string
	xmin, xmax uint64
	xip        []uint64 // still open, ascending
}

// parseSnapshot reads the form xmin:xmax:xip,xip,...
func parseSnapshot(text string) (snapshot, error) {
	parts := strings.SplitN(text, ":", 3)
	if len(parts) != 3 {
		return snapshot{}, fmt.Errorf("snapshot %q: want xmin:xmax:xip", text)
	}
	s := snapshot{text: text}
	var err error
	if s.xmin, err = strconv.ParseUint(parts[0], 10, 64); err != nil {
		return snapshot{}, fmt.Errorf("snapshot %q: %w", text, err)
	}
	if s.xmax, err = strconv.ParseUint(parts[1], 10, 64); err != nil {
		return snapshot{}, fmt.Errorf("snapshot %q: %w", text, err)
	}
	if parts[2] == "" {
		return s, nil
	}
	for _, p := range strings.Split(parts[2], ",") {
		x, err := strconv.ParseUint(p, 10, 64)
		if err != nil {
			return snapshot{}, fmt.Errorf("snapshot %q: %w", text, err)
		}
		s.xip = append(s.xip, x)
	}
	return s, nil
}

// xipText is the list of open transactions in the form of a text array's
// elements.
func (s snapshot) xipText() []string {
	out := make([]string, len(s.xip))
	for i, x := range s.xip {
		out[i] = strconv.FormatUint(x, 10)
	}
	return out
}
