package kafkasink

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrider-dev/outrider/sink"
)

type choice struct {
	key          []byte
	n, partition int
}

// javaChoices are made by the Java producer; see testdata/Partitions.java.
func javaChoices(t *testing.T) []choice {
	t.Helper()
	f, err := os.Open("testdata/java-partitions.tsv")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var cs []choice
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var c choice
		columns := strings.Split(lines.Text(), "\t")
		var errs [3]error
		c.key, errs[0] = hex.DecodeString(columns[0])
		c.n, errs[1] = strconv.Atoi(columns[1])
		c.partition, errs[2] = strconv.Atoi(columns[2])
		if err := errors.Join(errs[:]...); err != nil {
			t.Fatalf("%q: %v", lines.Text(), err)
		}
		cs = append(cs, c)
	}
	if len(cs) < 1000 {
		t.Fatalf("%d choices", len(cs))
	}
	return cs
}

func TestPartitionerJava(t *testing.T) {
	tp := partitioners["java"]().ForTopic("t")
	for _, c := range javaChoices(t) {
		if got := tp.Partition(&kgo.Record{Key: c.key}, c.n); got != c.partition {
			t.Errorf("key %x of %d partitions: got %d, the Java producer takes %d", c.key, c.n, got, c.partition)
		}
	}
}

// The values follow from CRC-32 modulo 12 (librdkafka's consistent), and from
// FNV-1a as a signed number, modulo 12, without its sign (Sarama's hash).
func TestPartitionersOfOthers(t *testing.T) {
	for key, want := range map[string]struct{ crc32, fnv int }{
		"a": {3, 0}, "z": {11, 3}, "foobar": {5, 0}, "order-42": {10, 8}, "schlüssel": {6, 9}, "日本語": {1, 1},
	} {
		for name, p := range map[string]int{"crc32": want.crc32, "fnv": want.fnv} {
			if got := partitioners[name]().ForTopic("t").Partition(&kgo.Record{Key: []byte(key)}, 12); got != p {
				t.Errorf("%s of %q: got %d, want %d", name, key, got, p)
			}
		}
	}
}

// Records without a key stay together until their batch is full.
func TestPartitionerWithoutKey(t *testing.T) {
	for name, make := range partitioners {
		tp := make().ForTopic("t")
		first := tp.Partition(&kgo.Record{}, 12)
		for range 100 {
			if got := tp.Partition(&kgo.Record{}, 12); got != first {
				t.Errorf("%s: went from partition %d to %d within a batch", name, first, got)
			}
		}
		if tp.RequiresConsistency(&kgo.Record{}) {
			t.Errorf("%s: a record without a key would wait for a partition that is down", name)
		}
		if !tp.RequiresConsistency(&kgo.Record{Key: []byte("k")}) {
			t.Errorf("%s: a key would move while a partition is down", name)
		}
	}
}

// The whole way: a key is in the partition in which a Java producer looks for
// it, and a message without one has a null key.
func TestKeysLandWhereJavaPutsThem(t *testing.T) {
	bothClusters(t, func(t *testing.T, b []string) {
		topic := newTopic(t, b, 12, nil)
		s := closeLater(t, open(t, Config{Brokers: b}))
		want := map[string]int32{}
		ms := []sink.Message{message(topic, "free", "")}
		for _, c := range javaChoices(t) {
			if c.n == 12 && len(c.key) > 0 {
				want[string(c.key)] = int32(c.partition)
				ms = append(ms, message(topic, fmt.Sprintf("%x", c.key), string(c.key)))
			}
		}
		wantDelivered(t, publish(s, ms...))
		for _, r := range read(t, b, topic, len(ms)) {
			if r.Key == nil {
				continue
			}
			if p, ok := want[string(r.Key)]; !ok || p != r.Partition {
				t.Errorf("key %x is in partition %d, want %d", r.Key, r.Partition, p)
			}
		}
	})
}
