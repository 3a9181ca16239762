//go:build race

package sqlitestore_test

// history is smaller under the race detector, which slows SQLite down a
// hundredfold.
const history = 5_000
