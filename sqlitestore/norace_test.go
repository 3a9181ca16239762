//go:build !race

package sqlitestore_test

// history is how many events are done in tests of what must not depend on it.
const history = 100_000
