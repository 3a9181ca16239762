// Package chaos kills what Outrider is made of, while it works, and then looks
// whether its promises were kept: relays are processes that die by kill -9 at
// chosen and at random moments, on real PostgreSQL and Kafka, which die as
// well, and on SQLite with NATS JetStream. Others are ended by what they send,
// have clocks that are wrong, or a slow disk.
//
// Applications commit meanwhile, through the library. What they committed is in
// the database; what arrived is read from the broker; audit compares the two.
// It is a package of tests only.
package chaos
