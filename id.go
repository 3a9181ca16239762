package outrider

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"
	"sync/atomic"
	"time"
)

// NewID makes an event id: a UUID of version 7 (RFC 9562). Of two calls in one
// process the later one gives the greater id, whatever becomes of the clock.
func NewID() string { return ids.next(time.Now()) }

// ids is one for the process, so that ids ascend over all outboxes in it.
var ids idSource

// idSource makes ids by method 3 of RFC 9562, section 6.2: the 12 bits behind
// the milliseconds are a fraction of a millisecond. Where that doesn't grow,
// because calls come too fast or the clock was set back, it counts on by one.
type idSource struct{ last atomic.Uint64 }

func (s *idSource) next(now time.Time) string {
	const perMilli = uint64(time.Millisecond)
	ns := uint64(now.UnixNano())
	t := ns/perMilli<<12 | ns%perMilli<<12/perMilli
	for {
		last := s.last.Load()
		t = max(t, last+1)
		if s.last.CompareAndSwap(last, t) {
			break
		}
	}
	var u [16]byte
	binary.BigEndian.PutUint64(u[:8], t>>12<<16|0x7000|t&0xfff)
	_, _ = rand.Read(u[8:]) // never fails: the process ends instead
	u[8] = u[8]&0x3f | 0x80
	return formatID(u)
}

func formatID(u [16]byte) string {
	var b [36]byte
	hex.Encode(b[0:8], u[0:4])
	b[8] = '-'
	hex.Encode(b[9:13], u[4:6])
	b[13] = '-'
	hex.Encode(b[14:18], u[6:8])
	b[18] = '-'
	hex.Encode(b[19:23], u[8:10])
	b[23] = '-'
	hex.Encode(b[24:36], u[10:16])
	return string(b[:])
}

// ParseID checks that s is a UUID in its text form of 36 characters, of any
// version, and gives it in lower case as every database shows it. The nil UUID
// is refused: it is what a variable that nobody set looks like, and consumers
// would drop all such events but the first.
func ParseID(s string) (string, error) {
	const want = "a UUID such as 0190163d-8694-739b-aea5-966c26f8ad91 is wanted"
	if len(s) != 36 || s[8] != '-' || s[13] != '-' || s[18] != '-' || s[23] != '-' {
		return "", fmt.Errorf("%.40q is not an id: %s", s, want)
	}
	digits := s[0:8] + s[9:13] + s[14:18] + s[19:23] + s[24:]
	var u [16]byte
	if _, err := hex.Decode(u[:], []byte(digits)); err != nil {
		return "", fmt.Errorf("%.40q is not an id: %s", s, want)
	}
	if u == [16]byte{} {
		return "", fmt.Errorf("the nil UUID identifies nothing: %s", want)
	}
	return strings.ToLower(s), nil
}
