package outrider

import (
	"crypto/md5"
	"encoding/binary"
)

// Lanes is the number of lanes of a native source. Keys are spread over lanes,
// lanes over relays.
const Lanes = 64

// Lane is the lane of a key: the first 32 bits of its MD5, modulo Lanes. The
// same expression stands in the DDL of every dialect, so that any client that
// can write a row agrees. Unordered events are spread by row id instead.
func Lane(key string) int {
	sum := md5.Sum([]byte(key))
	return int(binary.BigEndian.Uint32(sum[:4]) % Lanes)
}
