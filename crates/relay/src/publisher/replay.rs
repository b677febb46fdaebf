//! What a replay says to Redis: entries of messages that were published before, and how far it has come.

use std::collections::HashMap;
use std::time::Duration;

use redis::Script;
use redis::aio::MultiplexedConnection;
use uuid::Uuid;

use super::entry::created_at;
use super::target::RedisTarget;
use crate::error::{Error, Result};
use crate::postgres::MessageRow;

const REPLAY_LUA: &str = include_str!("replay.lua");

/// Name of the field that only entries of a replay have; its value is the replay's name. What proves that a message was
/// published (tails after a change of history, `verify`) passes over such entries.
pub(crate) const REPLAY_FIELD: &str = "replay";

/// How long it is remembered that a replay is done.
const DONE_KEPT: Duration = Duration::from_secs(30 * 24 * 3_600);

/// How far a replay has come, as it stands in Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReplayProgress {
    /// What it was asked to do, as JSON.
    pub(crate) spec: String,
    /// The ids that it goes through.
    pub(crate) from: i64,
    pub(crate) to: i64,
    /// The bounds of the messages' times, in seconds since 1970 as text; empty for none.
    pub(crate) since: String,
    pub(crate) until: String,
    /// The next id to be looked at.
    pub(crate) next: i64,
    /// Messages that were published again.
    pub(crate) replayed: u64,
    /// All of it is done.
    pub(crate) done: bool,
}

/// One step of a replay.
pub(crate) struct ReplayStep<'a> {
    /// The history that the ids are of.
    pub(crate) outbox_id: Uuid,
    pub(crate) branch: Uuid,
    /// Where it stands; none before its first step.
    pub(crate) before: Option<i64>,
    /// Topics of the entries, with their layouts as the marker has them.
    pub(crate) topics: &'a HashMap<String, String>,
    pub(crate) streams: &'a [String],
    /// The entries: index of the stream, and the message.
    pub(crate) entries: &'a [(usize, &'a MessageRow)],
    pub(crate) after: &'a ReplayProgress,
}

/// What became of a step.
#[derive(Debug)]
pub(crate) enum Stepped {
    /// Entries and progress are in Redis.
    Done,
    /// Nothing was done: the replay stands elsewhere; it was carried on by another process, or Redis fell back.
    Elsewhere,
    /// Nothing was done: a topic is held back.
    Held(String),
    /// Nothing was done: a topic goes over other streams by now.
    OtherLayout,
    /// Nothing was done: a stream refuses entries. Its name, and what Redis said.
    Refused(String),
    /// Nothing was done: Redis has no marker of this outbox.
    NoMarker,
    /// Nothing was done: Postgres has another past by now, or Redis lost its marker.
    OtherHistory,
}

/// A replay by its name.
pub(crate) struct Replayer {
    connection: MultiplexedConnection,
    script: Script,
    name: String,
    marker_key: String,
    progress_key: String,
}

impl Replayer {
    pub(crate) async fn connect(
        target: &RedisTarget,
        prefix: &str,
        name: &str,
        limit: Duration,
    ) -> Result<Self> {
        Ok(Replayer {
            connection: target.connect(limit).await?,
            script: Script::new(REPLAY_LUA),
            name: name.to_owned(),
            marker_key: format!("{prefix}relay:marker"),
            progress_key: format!("{prefix}relay:replay:{name}"),
        })
    }

    /// How far it has come; none before its first step.
    pub(crate) async fn progress(&mut self) -> Result<Option<ReplayProgress>> {
        let fields: HashMap<String, String> = redis::cmd("HGETALL")
            .arg(&self.progress_key)
            .query_async(&mut self.connection)
            .await
            .map_err(|source| Error::Redis {
                doing: "read the replay's progress",
                source,
            })?;
        if fields.is_empty() {
            return Ok(None);
        }
        let text = |name: &str| fields.get(name).cloned().unwrap_or_default();
        let number = |name: &'static str| {
            text(name).parse().map_err(|_| Error::Setup {
                problem: format!(
                    "{} in Redis is no progress of a replay: {name}",
                    self.progress_key
                ),
                remedy: "choose another --name".into(),
            })
        };
        Ok(Some(ReplayProgress {
            spec: text("spec"),
            from: number("from")?,
            to: number("to")?,
            since: text("since"),
            until: text("until"),
            next: number("next")?,
            replayed: u64::try_from(number("replayed")?).unwrap_or(0),
            done: text("done") == "1",
        }))
    }

    /// Adds the entries and moves the progress.
    ///
    /// A crash before the script leaves neither, and a crash after it both: so the same replay begun again adds nothing
    /// twice. A Redis that loses its tail loses both together.
    ///
    /// # Errors
    ///
    /// Redis is out of reach or refuses the step as a whole; if the reply was lost, the step may have been done, which its
    /// progress says.
    pub(crate) async fn step(&mut self, step: &ReplayStep<'_>) -> Result<Stepped> {
        let mut call = self.script.prepare_invoke();
        call.key(&self.marker_key).key(&self.progress_key);
        for stream in step.streams {
            call.key(stream);
        }
        call.arg(step.outbox_id.to_string())
            .arg(step.branch.to_string())
            .arg(step.before.map_or(String::new(), |id| id.to_string()))
            .arg(step.topics.len());
        for (topic, layout) in step.topics {
            call.arg(topic).arg(layout);
        }
        call.arg(step.entries.len());
        for (stream, row) in step.entries {
            let fields = fields(row, &self.name);
            call.arg(stream + 3).arg(2 * fields.len());
            for (name, value) in &fields {
                call.arg(*name).arg(value.as_slice());
            }
        }
        let after = step.after;
        let progress = [
            ("spec", after.spec.clone()),
            ("from", after.from.to_string()),
            ("to", after.to.to_string()),
            ("since", after.since.clone()),
            ("until", after.until.clone()),
            ("next", after.next.to_string()),
            ("replayed", after.replayed.to_string()),
            ("done", u8::from(after.done).to_string()),
        ];
        call.arg(2 * progress.len());
        for (name, value) in &progress {
            call.arg(*name).arg(value);
        }
        call.arg(if after.done { DONE_KEPT.as_secs() } else { 0 });
        let [what, detail]: [String; 2] =
            call.invoke_async(&mut self.connection)
                .await
                .map_err(|source| Error::Redis {
                    doing: "publish again",
                    source,
                })?;
        Ok(match what.as_str() {
            "done" => Stepped::Done,
            "moved" => Stepped::Elsewhere,
            "held" => Stepped::Held(detail),
            "layout" => Stepped::OtherLayout,
            "refused" => Stepped::Refused(detail),
            "foreign" => Stepped::NoMarker,
            "history" => Stepped::OtherHistory,
            _ => {
                return Err(Error::Invariant(format!(
                    "the replay script replied {what:?}"
                )));
            }
        })
    }
}

/// The fields of an entry, in the order of the contract (`entry.rs`), and the replay's name.
fn fields<'r>(row: &'r MessageRow, replay: &'r str) -> Vec<(&'static str, Vec<u8>)> {
    let text = |text: &str| text.as_bytes().to_vec();
    let mut fields = vec![
        ("id", row.id().to_string().into_bytes()),
        ("message_key", text(row.message_key())),
    ];
    fields.extend(row.ordering_key().map(|key| ("ordering_key", text(key))));
    fields.extend(row.event_type().map(|kind| ("event_type", text(kind))));
    fields.push(("created_at", created_at(row.created_at_us()).to_vec()));
    fields.extend(row.content_type().map(|kind| ("content_type", text(kind))));
    fields.extend(row.headers().map(|headers| ("headers", headers.to_vec())));
    fields.push(("payload", row.payload().to_vec()));
    fields.push((REPLAY_FIELD, text(replay)));
    fields
}
