// Writes java-partitions.tsv: for keys, in hexadecimal, and numbers of
// partitions, the partition that Kafka's own Java producer chooses.
//
//   java -cp kafka-clients-4.1.1.jar:slf4j-api-1.7.36.jar Partitions.java > java-partitions.tsv
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import java.util.Random;
import org.apache.kafka.clients.producer.internals.BuiltInPartitioner;

public class Partitions {
    public static void main(String[] args) {
        List<byte[]> keys = new ArrayList<>();
        for (char c = 'a'; c <= 'z'; c++) {
            keys.add(String.valueOf(c).getBytes(StandardCharsets.UTF_8));
        }
        for (String s : new String[] {"", "21", "foobar", "a-little-bit-long-string",
                "a-little-bit-longer-string", "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8",
                "schlüssel", "日本語", "😀", "order-42", "0190c5f0-7e6a-7000-8000-000000000001", " ", "\u0000"}) {
            keys.add(s.getBytes(StandardCharsets.UTF_8));
        }
        Random random = new Random(1);
        for (int i = 0; i < 200; i++) {
            byte[] key = new byte[random.nextInt(40)];
            random.nextBytes(key);
            keys.add(key);
        }
        for (byte[] key : keys) {
            for (int n : new int[] {1, 2, 3, 12, 64, 1000}) {
                System.out.println(HexFormat.of().formatHex(key) + "\t" + n + "\t"
                        + BuiltInPartitioner.partitionForKey(key, n));
            }
        }
    }
}
