// Package toy is what the test of bite takes lines out of.
package toy

// Sum adds up.
func Sum(all []int) int {
	sum := 0
	for _, n := range all {
		sum += n
	}
	return sum
}

// Idle is held by no test.
func Idle() int {
	n := 1
	n++
	return n
}

// Turns counts down from n.
func Turns(n int) int {
	turns := 0
	for n > 0 {
		n--
		turns++
	}
	return turns
}
