//! A consumer group of a test: it is given entries and acknowledges them, step by step.

use crate::support::{Outbox, PREFIX, TOPIC};

/// Runs a command of Redis.
pub(crate) async fn ask<T: redis::FromRedisValue>(outbox: &Outbox<'_>, words: &[&str]) -> T {
    redis::cmd(words[0])
        .arg(&words[1..])
        .query_async(&mut outbox.redis.connect().await.unwrap())
        .await
        .unwrap()
}

/// A group on the stream of [`TOPIC`].
pub(crate) struct Group<'a, 'p> {
    outbox: &'a Outbox<'p>,
    name: &'static str,
    stream: String,
}

impl<'a, 'p> Group<'a, 'p> {
    /// Makes the group, from the start of the stream.
    pub(crate) async fn made(outbox: &'a Outbox<'p>, name: &'static str) -> Self {
        let stream = format!("{PREFIX}{TOPIC}");
        let _: String = ask(outbox, &["XGROUP", "CREATE", &stream, name, "0"]).await;
        Group {
            outbox,
            name,
            stream,
        }
    }

    /// Is given the next entries, and returns their ids.
    pub(crate) async fn reads(&self, count: usize) -> Vec<String> {
        type Entries = Vec<(String, Vec<(String, Vec<u8>)>)>;
        let count = count.to_string();
        let mut words = vec!["XREADGROUP", "GROUP", self.name, "member", "COUNT", &count];
        words.extend(["STREAMS", &self.stream, ">"]);
        let read: Option<Vec<(String, Entries)>> = ask(self.outbox, &words).await;
        let entries = read.into_iter().flatten().flat_map(|(_, entries)| entries);
        entries.map(|(id, _)| id).collect()
    }

    /// Acknowledges entries.
    pub(crate) async fn acknowledges(&self, ids: &[String]) {
        let mut words = vec!["XACK", &self.stream, self.name];
        words.extend(ids.iter().map(String::as_str));
        let done: usize = ask(self.outbox, &words).await;
        assert_eq!(done, ids.len());
    }

    /// Is given the next entries and acknowledges them.
    pub(crate) async fn handles(&self, count: usize) {
        let ids = self.reads(count).await;
        assert_eq!(ids.len(), count);
        self.acknowledges(&ids).await;
    }
}
