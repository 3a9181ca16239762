package relay

import (
	"strconv"
	"strings"
)

// receipts gathers where the messages of a claim went, in few words:
// "orders/3@17", "orders/3@18" ... become "orders/3@17-42".
type receipts struct {
	runs  []run
	open  map[string]int // the latest run of a prefix
	extra int            // what there was no room for
}

// run is a prefix with a range of numbers, or a text (lo < 0).
type run struct {
	prefix string
	lo, hi int64
}

// maxReceipts bounds the runs that are kept of one claim.
const maxReceipts = 64

func (rs *receipts) reset() {
	rs.runs, rs.extra = rs.runs[:0], 0
	clear(rs.open)
}

func (rs *receipts) add(s string) {
	if s == "" {
		return
	}
	prefix, n := split(s)
	if n >= 0 {
		if i, ok := rs.open[prefix]; ok && rs.runs[i].hi == n-1 {
			rs.runs[i].hi = n
			return
		}
	}
	if len(rs.runs) == maxReceipts {
		rs.extra++
		return
	}
	prefix = clean(prefix, maxReceipt)
	if rs.open == nil {
		rs.open = map[string]int{}
	}
	if n >= 0 {
		rs.open[prefix] = len(rs.runs)
	}
	rs.runs = append(rs.runs, run{prefix, n, n})
}

// split takes the number behind the last '@' off; -1: there is none.
func split(s string) (string, int64) {
	i := strings.LastIndexByte(s, '@')
	if i < 0 {
		return s, -1
	}
	n, err := strconv.ParseInt(s[i+1:], 10, 64)
	if err != nil || n < 0 || s[i+1] == '+' {
		return s, -1
	}
	return s[:i], n
}

// list is what was gathered.
func (rs *receipts) list() []string {
	if len(rs.runs) == 0 {
		return nil
	}
	out := make([]string, 0, len(rs.runs)+1)
	for _, r := range rs.runs {
		switch {
		case r.lo < 0:
			out = append(out, r.prefix)
		case r.lo == r.hi:
			out = append(out, r.prefix+"@"+strconv.FormatInt(r.lo, 10))
		default:
			out = append(out, r.prefix+"@"+strconv.FormatInt(r.lo, 10)+"-"+strconv.FormatInt(r.hi, 10))
		}
	}
	if rs.extra > 0 {
		out = append(out, "+"+strconv.Itoa(rs.extra)+" more")
	}
	return out
}
