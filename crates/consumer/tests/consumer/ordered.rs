//! What the tests of order share: keyed messages over partitions, and a handler that notes their sequence.

use std::collections::BTreeMap;

use outbox_consumer::{Builder, HandlerError, Message, Transaction};
use outbox_testkit::eventually;

use crate::shop::{DEADLINE, Shop, entry};

/// `at` orders the effects of one key: they never overlap.
const SEQUENCE_TABLE: &str =
    "CREATE TABLE sequence (at bigserial, grp text, ordering_key text, n bigint)";

/// Writes the message's number, which is its payload, under its key.
pub(crate) async fn note(tx: &Transaction<'_>, message: &Message) -> Result<(), HandlerError> {
    let n: i64 = message.json()?;
    let sql = "INSERT INTO sequence (grp, ordering_key, n) VALUES ('shipping', $1, $2)";
    tx.execute(sql, &[&message.ordering_key(), &n]).await?;
    Ok(())
}

/// The partition of a key as the relay computes it.
pub(crate) fn stream_of(topic: &str, partitions: u32, key: &str) -> String {
    match partitions {
        1 => format!("outbox:{topic}"),
        partitions => format!(
            "outbox:{topic}:{}",
            crc32fast::hash(key.as_bytes()) % partitions
        ),
    }
}

impl Shop {
    pub(crate) async fn keeping_sequence(self) -> Self {
        self.db.batch_execute(SEQUENCE_TABLE).await.unwrap();
        self
    }

    /// What the relay writes into its marker: the count in force, then earlier ones.
    pub(crate) async fn set_partitions(&self, topic: &str, counts: &str) {
        redis::cmd("HSET")
            .arg(&["outbox:relay:marker", &format!("topic:{topic}"), counts])
            .query_async::<i64>(&mut self.redis().await)
            .await
            .unwrap();
    }

    /// Publishes the numbers of this range under each of the keys, one number of all keys after the other.
    pub(crate) async fn publish_keyed(
        &self,
        partitions: u32,
        keys: &[&str],
        numbers: std::ops::Range<i64>,
    ) {
        let mut pipeline = redis::pipe();
        for n in numbers {
            for key in keys {
                let stream = stream_of("orders", partitions, key);
                let mut command = entry(&stream, &format!("{key}-{n}"), &n.to_string());
                command.arg("ordering_key").arg(*key);
                pipeline.add_command(command);
            }
        }
        pipeline
            .query_async::<Vec<String>>(&mut self.redis().await)
            .await
            .unwrap();
    }

    /// The numbers of each key in the order in which they took effect.
    pub(crate) async fn sequences(&self) -> BTreeMap<String, Vec<i64>> {
        let sql = "SELECT ordering_key, n FROM sequence ORDER BY at";
        let mut sequences: BTreeMap<String, Vec<i64>> = BTreeMap::new();
        for row in self.db.query(sql, &[]).await.unwrap() {
            sequences.entry(row.get(0)).or_default().push(row.get(1));
        }
        sequences
    }

    /// Waits until each key has taken effect `count` times, and looks that it did in order, each number once.
    pub(crate) async fn in_order(&self, keys: &[&str], count: i64) {
        let all = count * keys.len() as i64;
        eventually(DEADLINE, "all numbers", || async {
            let noted = self.count("SELECT count(*) FROM sequence").await;
            if noted >= all { Ok(()) } else { Err(noted) }
        })
        .await
        .unwrap();
        let expected: Vec<i64> = (0..count).collect();
        for (key, sequence) in self.sequences().await {
            assert_eq!(sequence, expected, "of {key}");
        }
        assert_eq!(self.count("SELECT count(*) FROM sequence").await, all);
    }

    /// How many streams each member owns, sorted.
    pub(crate) async fn shares(&self) -> Vec<i64> {
        let sql = "SELECT count(*) FROM inbox.leases WHERE expires_at > clock_timestamp() GROUP BY owner ORDER BY 1";
        let rows = self.db.query(sql, &[]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    pub(crate) async fn shares_are(&self, expected: &[i64]) {
        eventually(DEADLINE, "the shares", || async {
            let shares = self.shares().await;
            if shares == expected {
                Ok(())
            } else {
                Err(shares)
            }
        })
        .await
        .unwrap();
    }

    pub(crate) fn named(&self, name: &str) -> Builder {
        self.consumer().name(name)
    }
}
