// Package kafkasink is the sink to Apache Kafka and what speaks its protocol.
//
// # What is sent
//
// One record per message: topic from the rules, key the event's key, value the
// payload byte for byte, timestamp Record.CreatedAt in milliseconds, headers
// as [sink.Headers] lays them out (id, type, aggregate_type, aggregate_id,
// content_type, traceparent, sequence, then the event's own; one of its own
// that bears such a name travels as header.NAME). A message of an unordered
// event has a null key. No record has an empty one, which Kafka would take for
// a key like any other. Records always go with acks=all by an idempotent
// producer. Topics are never created.
//
// # Order
//
// Within a key, records are in the log in the order of their messages, within
// a call and over calls in the order in which they were accepted. Behind a
// message that was refused, nothing of its key is in the log that was accepted
// before the refusal was reported. This stands on the following.
//
// Kafka refuses a batch whose sequence number does not follow the last one of
// its producer and partition. So when it refuses one batch, it refuses those
// that are in flight behind it, and the client library (franz-go) then fails
// everything it holds for the partition. It keeps to one request in flight
// until a first one of the partition has been answered well, since Kafka takes
// any number from a producer it does not know.
//
// The library tells of a failure later than it happens, by a callback, and
// what is handed to it in between would be sent. So the failure is noticed
// where it happens, the hand-over waits for the callbacks, and should a record
// have slipped in all the same, the client is fenced before it can send it,
// and replaced. The first record of a topic is handed over alone until the
// library knows the topic's partitions: those behind it would be buffered by
// the library at a time of its own.
//
// When the answer to a request is lost, the library sends it again under the
// same numbers, and Kafka drops the second copy. After DeliveryTimeout, or when
// the call is cut, the message is reported Unknown. The library goes on with
// it, so that it may yet arrive; until that is settled, later messages of its
// key are answered NotSent, since they could not be told from it. If nothing
// has been answered at all for a whole DeliveryTimeout, the client is given up
// with all it holds and replaced by a new one.
//
// A context is never handed to the library: one that ends would cut requests
// that carry the messages of others.
//
// # Faults of single messages
//
// Kafka answers for a batch, and the library fails the whole partition with it.
// A record that is too large is found before it is sent, by the topic's
// max.message.bytes and segment.bytes, which are read when the topic is first
// used and again every TopicRefresh; reading them takes the ACL operation
// DescribeConfigs on the topic. Its size counts before compression, as in the
// Java client. If a batch is refused for the fault of one of its records (too
// old, without a key in a compacted topic, against a policy), all are answered
// NotSent and each is sent alone when it comes again; the one that is refused
// alone is rejected.
//
// # Statuses
//
//	topic does not exist          Retry    no_target
//	no rule, or a name with holes Reject   no_target
//	larger than the topic takes   Reject   oversize
//	refused alone                 Reject   invalid, refused
//	not allowed to write to topic Retry    auth
//	login refused                 NotSent  auth
//	no broker, nothing was sent   NotSent  unreachable
//	no broker, something was sent Unknown  unreachable
//	no answer in time             Unknown  timeout
//	behind a failure of its key   NotSent  held
//
// The receipt of a delivered message is topic/partition@offset.
package kafkasink
