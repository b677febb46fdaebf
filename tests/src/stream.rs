//! What stands in the stream, and how far the group is.

use std::time::{Duration, Instant};

use outbox_testkit::eventually;
use redis::{
    aio::MultiplexedConnection,
    streams::{StreamInfoGroupsReply, StreamPendingCountReply, StreamRangeReply},
};

use crate::{
    Result,
    order::STREAM,
    programs::GROUP,
    stage::{DEADLINE, Stage, until},
};

/// Entries that are read in one go.
const ENTRIES_MAX: usize = 10_000;

/// Milliseconds and number of an entry.
pub(crate) type EntryId = (u64, u64);

fn entry_id(text: &str) -> Result<EntryId> {
    let (milliseconds, number) = text.split_once('-').ok_or("no id of an entry")?;
    Ok((milliseconds.parse()?, number.parse()?))
}

impl Stage {
    /// Waits until a message arrives in the stream.
    ///
    /// # Errors
    ///
    /// None does in time.
    pub(crate) async fn messages_flow(&self) -> Result {
        let before = self.last_entry().await?;
        until(DEADLINE, "a message in the stream", || async {
            Ok(self.last_entry().await? > before)
        })
        .await
    }

    /// The last entry that the group has been given. Waits for the group, which an earlier fault may have taken away.
    ///
    /// # Errors
    ///
    /// There is none in time.
    pub(crate) async fn given(&self) -> Result<EntryId> {
        let given = eventually(DEADLINE, "a group", || async {
            let redis = self.servers.redis.connect().await;
            let mut redis = redis.map_err(|e| e.to_string())?;
            last_given(&mut redis).await.map_err(|e| e.to_string())
        });
        Ok(given.await?)
    }

    /// Waits until the group has acknowledged everything up to an entry.
    ///
    /// # Errors
    ///
    /// Not in time.
    pub(crate) async fn group_passes(&self, entry: EntryId) -> Result {
        until(DEADLINE, "the group to pass an entry", || async {
            self.has_passed(entry).await?;
            Ok(true)
        })
        .await
    }

    /// The group has been given everything up to an entry, and has acknowledged it; the error says how far it is.
    pub(crate) async fn has_passed(&self, entry: EntryId) -> Result {
        let mut redis = self.servers.redis.connect().await?;
        let given = last_given(&mut redis).await?;
        let pending: StreamPendingCountReply = redis::cmd("XPENDING")
            .arg(&[STREAM, GROUP, "-", "+", "1"])
            .query_async(&mut redis)
            .await?;
        let first = pending.ids.first().map(|first| entry_id(&first.id));
        let first = first.transpose()?;
        if given < entry || first.is_some_and(|first| first <= entry) {
            return Err(format!(
                "of what ends with {entry:?} the group was given {given:?}, its oldest pending entry is {first:?}"
            )
            .into());
        }
        Ok(())
    }

    /// How many entries the stream has.
    pub(crate) async fn stream_len(&self) -> Result<i64> {
        let mut redis = self.servers.redis.connect().await?;
        Ok(redis::cmd("XLEN")
            .arg(STREAM)
            .query_async(&mut redis)
            .await?)
    }

    /// The stream's present end.
    pub(crate) async fn last_entry(&self) -> Result<EntryId> {
        let mut redis = self.servers.redis.connect().await?;
        let last: StreamRangeReply = redis::cmd("XREVRANGE")
            .arg(&[STREAM, "+", "-", "COUNT", "1"])
            .query_async(&mut redis)
            .await?;
        last.ids
            .first()
            .map_or(Ok((0, 0)), |entry| entry_id(&entry.id))
    }

    /// Follows the stream from its present end.
    pub(crate) async fn follow(&self) -> Result<Follower> {
        let mut follower = self.follow_from_start().await?;
        let last: StreamRangeReply = redis::cmd("XREVRANGE")
            .arg(&[STREAM, "+", "-", "COUNT", "1"])
            .query_async(&mut follower.redis)
            .await?;
        follower.after = last.ids.first().map(|entry| entry.id.clone());
        Ok(follower)
    }

    pub(crate) async fn follow_from_start(&self) -> Result<Follower> {
        Ok(Follower {
            redis: self.servers.redis.connect().await?,
            after: None,
        })
    }
}

async fn last_given(redis: &mut MultiplexedConnection) -> Result<EntryId> {
    let groups: StreamInfoGroupsReply = redis::cmd("XINFO")
        .arg(&["GROUPS", STREAM])
        .query_async(redis)
        .await?;
    let group = groups.groups.iter().find(|group| group.name == GROUP);
    entry_id(&group.ok_or("there is no group")?.last_delivered_id)
}

/// Reads the stream on and on.
#[derive(Debug)]
pub(crate) struct Follower {
    redis: MultiplexedConnection,
    /// The last entry that was read.
    after: Option<String>,
}

impl Follower {
    /// Message keys of the next entries; none at the present end.
    async fn next(&mut self) -> Result<Vec<String>> {
        let start = self
            .after
            .as_ref()
            .map_or("-".to_owned(), |id| format!("({id}"));
        let page: StreamRangeReply = redis::cmd("XRANGE")
            .arg(&[STREAM, &start, "+", "COUNT", &ENTRIES_MAX.to_string()])
            .query_async(&mut self.redis)
            .await?;
        if let Some(last) = page.ids.last() {
            self.after = Some(last.id.clone());
        }
        let keys = page.ids.iter().map(|entry| entry.get("message_key"));
        keys.map(|key| key.ok_or_else(|| "an entry without a message key".into()))
            .collect()
    }

    /// Message keys of all entries up to the present end.
    pub(crate) async fn rest(&mut self) -> Result<Vec<String>> {
        let mut all = Vec::new();
        loop {
            let page = self.next().await?;
            if page.is_empty() {
                return Ok(all);
            }
            all.extend(page);
        }
    }

    /// Whether a message arrives in time.
    pub(crate) async fn arrives(&mut self, key: &str, deadline: Duration) -> Result<bool> {
        let started = Instant::now();
        while started.elapsed() < deadline {
            if self.next().await?.iter().any(|other| other == key) {
                return Ok(true);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(false)
    }
}
