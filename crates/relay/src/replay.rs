//! `outbox-relay replay`: messages that were published go out again, on a person's word.
//!
//! It reads rows as the relay does and adds them to the streams itself, with or without a leader beside it. How far it has come
//! is written to Redis in the same atomic step as the entries (`publisher/replay.lua`). `replay/choice.rs` says which messages
//! are meant, `replay/count.rs` counts them for a dry run.

mod choice;
mod count;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use clap::Args;

pub use count::TopicCount;

use self::choice::{Choice, Range};
use crate::error::{Error, Result};
use crate::postgres::{MessageRow, PostgresTarget, Session, operator_sql, sql};
use crate::protocol::place::Place;
use crate::publisher::{Publisher, RedisTarget, ReplayProgress, ReplayStep, Replayer, Stepped};
use crate::rewind::{Since, parse_since};
use crate::verify::sent::{Passed, Sent};

const LIMIT: Duration = Duration::from_secs(10);

/// Most messages in one step, and most bytes unless one message is larger.
const STEP_ROWS_MAX: u32 = 1_000;
const STEP_BYTES_MAX: i64 = 4 << 20;

/// Ids that one statement looks through: whatever the filters, it is short.
const STEP_IDS_MAX: i64 = 20_000;

/// Steps in a second where a rate is given.
const STEPS_PER_SECOND: u32 = 5;

/// How often it is looked whether a topic is held back still, and how often progress is logged.
const HELD_RETRY: Duration = Duration::from_millis(500);
const TELL_INTERVAL: Duration = Duration::from_secs(5);

/// What `replay` is asked to do.
#[derive(Args, Clone, Debug)]
pub struct ReplayFlags {
    /// Name of this replay, up to 100 of A-Z a-z 0-9 . _ -; begun again under the same name it goes on where it stopped, and
    /// what is done is done once. Remembered for 30 days
    #[arg(long, value_name = "NAME", required_unless_present = "dry_run")]
    pub name: Option<String>,

    /// The first id
    #[arg(long, value_name = "ID")]
    pub from_id: Option<i64>,

    /// The last id [default: the last that is published when the replay begins]
    #[arg(long, value_name = "ID")]
    pub to_id: Option<i64>,

    /// Messages whose transaction began at or after this: a time ago such as 2h, or a moment such as 2026-02-03T04:05:06Z
    #[arg(long, value_parser = parse_since, value_name = "TIME")]
    pub since: Option<Since>,

    /// Messages whose transaction began before this
    #[arg(long, value_parser = parse_since, value_name = "TIME")]
    pub until: Option<Since>,

    /// Of this topic; may be given several times
    #[arg(long = "topic", value_name = "TOPIC")]
    pub topics: Vec<String>,

    /// Of this ordering key. There is no index for it: give a range of ids or a time as well, or it reads all that is kept
    #[arg(long, value_name = "KEY")]
    pub ordering_key: Option<String>,

    /// Of this message key; may be given several times
    #[arg(long = "message-key", value_name = "KEY")]
    pub message_keys: Vec<String>,

    /// All that the outbox keeps, if nothing else is said
    #[arg(long)]
    pub all: bool,

    /// Into this stream instead of the messages' own; its whole name, with the hash tag of --stream-prefix if that has one
    #[arg(long, value_name = "STREAM")]
    pub stream: Option<String>,

    /// Messages per second; 0 means as fast as Redis takes them
    #[arg(long, default_value_t = 0, value_name = "ROWS")]
    pub rate: u32,

    /// Publish nothing; count what would be, for each topic
    #[arg(long)]
    pub dry_run: bool,
}

/// What a replay has done.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Replayed {
    /// It is finished by this run.
    Done {
        /// Messages that were published again, by earlier runs too.
        messages: u64,
        /// The first and the last id that were looked at.
        ids: (i64, i64),
    },
    /// It was finished by an earlier run; this one did nothing.
    Before {
        /// Messages that were published again then.
        messages: u64,
    },
    /// It was a dry run.
    Counted(Vec<TopicCount>),
}

/// Publishes messages again that the cursor has passed; all others go out anyway. Holds no transaction open, and no producer
/// waits for it.
///
/// # Errors
///
/// [`Error::Config`] for flags that contradict each other or an earlier run of that name; a server is out of reach or refuses;
/// no relay has ever led here. Begun again under its name, it goes on where it stopped.
///
/// # Cancel safety
///
/// Dropping the future is as safe as killing the process: a step is in Redis as a whole, with the progress, or not at all.
pub async fn replay(
    postgres: &PostgresTarget,
    redis: &RedisTarget,
    prefix: &str,
    flags: &ReplayFlags,
) -> Result<Replayed> {
    choice::check(flags, prefix)?;
    let session = Session::open(postgres, "outbox-relay replay", LIMIT).await?;
    session.batch("set up the session", sql::BE_SILENT).await?;
    let publisher = Publisher::connect(redis, prefix, LIMIT).await?;
    let name = flags.name.as_deref().unwrap_or_default();
    let replayer = Replayer::connect(redis, prefix, name, LIMIT).await?;
    let mut replay = Replay {
        flags,
        prefix,
        publisher,
        replayer,
        outbox_id: choice::outbox_id(&session).await?,
        session,
    };
    let place = replay.place().await?;
    let before = match flags.dry_run {
        true => None,
        false => replay.replayer.progress().await?,
    };
    let choice = Choice::of(&replay.session, flags, place.cursor.high, before.as_ref()).await?;
    if flags.dry_run {
        return Ok(Replayed::Counted(
            count::count(&replay.session, &choice).await?,
        ));
    }
    if let Some(before) = before.as_ref().filter(|before| before.done) {
        return Ok(Replayed::Before {
            messages: before.replayed,
        });
    }
    replay.run(&choice, before).await
}

/// A replay that runs.
struct Replay<'a> {
    flags: &'a ReplayFlags,
    prefix: &'a str,
    session: Session,
    publisher: Publisher,
    replayer: Replayer,
    outbox_id: uuid::Uuid,
}

/// How far it has come, and what it goes by.
struct Course {
    /// Where it stands in Redis; none before its first step.
    at: Option<i64>,
    progress: ReplayProgress,
    sent: Sent,
    told: Instant,
}

/// The messages of one step, and where it leaves the replay.
struct Step {
    rows: Vec<MessageRow>,
    next: i64,
}

/// The messages of a step that were published.
struct Entries<'r> {
    streams: Vec<String>,
    /// Index of the stream, and the message.
    entries: Vec<(usize, &'r MessageRow)>,
    /// Their topics, with the layouts that the streams follow.
    topics: HashMap<String, String>,
}

impl Replay<'_> {
    /// What the marker says was published.
    async fn place(&mut self) -> Result<Place> {
        let sent = Sent::read(&mut self.publisher, &self.session, self.outbox_id).await?;
        sent.into_place().ok_or_else(no_marker)
    }

    async fn run(&mut self, choice: &Choice, before: Option<ReplayProgress>) -> Result<Replayed> {
        let mut course = Course {
            at: before.as_ref().map(|before| before.next),
            progress: before.unwrap_or_else(|| choice.progress()),
            sent: Sent::at(self.place().await?),
            told: Instant::now(),
        };
        while !course.progress.done {
            let begun = Instant::now();
            let range = choice.range_from(course.progress.next, STEP_IDS_MAX);
            let step = match range {
                Some(range) => self.read(choice, range).await?,
                None => Step {
                    rows: Vec::new(),
                    next: course.progress.next,
                },
            };
            let written = self.entries(&course.sent, &step.rows);
            let after = ReplayProgress {
                next: step.next,
                replayed: course.progress.replayed + written.entries.len() as u64,
                done: range.is_none(),
                ..course.progress.clone()
            };
            let place = course.sent.place().ok_or_else(no_marker)?;
            let write = ReplayStep {
                outbox_id: self.outbox_id,
                branch: place.history.branch,
                before: course.at,
                topics: &written.topics,
                streams: &written.streams,
                entries: &written.entries,
                after: &after,
            };
            let stepped = self.replayer.step(&write).await?;
            let done = matches!(stepped, Stepped::Done);
            self.go_on(&mut course, stepped, after).await?;
            if done {
                self.keep_to_rate(written.entries.len(), begun).await;
            }
        }
        Ok(Replayed::Done {
            messages: course.progress.replayed,
            ids: (course.progress.from, course.progress.to),
        })
    }

    /// Takes in what became of a step.
    async fn go_on(
        &mut self,
        course: &mut Course,
        stepped: Stepped,
        after: ReplayProgress,
    ) -> Result<()> {
        let tell = course.told.elapsed() >= TELL_INTERVAL;
        if tell {
            course.told = Instant::now();
        }
        match stepped {
            Stepped::Done => {
                course.at = Some(after.next);
                course.progress = after;
                if tell {
                    let progress = &course.progress;
                    let (replayed, next, to) = (progress.replayed, progress.next, progress.to);
                    tracing::info!(replayed, next, to, "publishing again");
                }
            }
            Stepped::Elsewhere => {
                let found = self.replayer.progress().await?.ok_or_else(gone)?;
                if found.spec != course.progress.spec {
                    return Err(choice::other_flags(&found));
                }
                course.at = Some(found.next);
                course.progress = found;
            }
            Stepped::Held(topic) => {
                if tell {
                    tracing::info!(topic, "waiting: the topic is held back");
                }
                tokio::time::sleep(HELD_RETRY).await;
                course.sent = Sent::at(self.place().await?);
            }
            Stepped::OtherLayout => course.sent = Sent::at(self.place().await?),
            Stepped::Refused(what) => return Err(refused(&what)),
            Stepped::NoMarker => return Err(no_marker()),
            Stepped::OtherHistory => return Err(other_history()),
        }
        Ok(())
    }

    /// The next messages, and up to where they are all of them.
    async fn read(&self, choice: &Choice, range: Range) -> Result<Step> {
        let rows_max = match self.flags.rate {
            0 => STEP_ROWS_MAX,
            rate => (rate / STEPS_PER_SECOND).clamp(1, STEP_ROWS_MAX),
        };
        let rows_max = i64::from(rows_max);
        let params: [&(dyn tokio_postgres::types::ToSql + Sync); 8] = [
            &range.first,
            &range.last,
            &rows_max,
            &STEP_BYTES_MAX,
            &choice.topics,
            &choice.ordering_key,
            &choice.since,
            &choice.until,
        ];
        let rows = self
            .session
            .all("read messages", operator_sql::REPLAY_PAGE, &params)
            .await?;
        let rows: Vec<MessageRow> = rows.into_iter().map(MessageRow::from).collect();
        let cut = |last: &MessageRow| {
            rows.len() as i64 >= rows_max || last.running_bytes() >= STEP_BYTES_MAX
        };
        let next = match rows.last().filter(|last| cut(last)) {
            Some(last) => last.id() + 1,
            None => range.last + 1,
        };
        Ok(Step { rows, next })
    }

    /// The entries of those messages that were published. What is still to be published, in a gap or held back, is left to the relay.
    fn entries<'r>(&self, sent: &Sent, rows: &'r [MessageRow]) -> Entries<'r> {
        let mut streams: Vec<String> = Vec::new();
        let mut indexes: HashMap<String, usize> = HashMap::new();
        let mut topics = HashMap::new();
        let mut entries = Vec::new();
        for row in rows
            .iter()
            .filter(|row| sent.passed(row.id()) == Passed::Yes)
        {
            let (topic, key) = (row.topic(), row.message_key());
            let mut own = sent.streams(self.prefix, topic, row.ordering_key(), key);
            let own = own.swap_remove(0);
            if sent.held_back(row.id(), topic, &own).is_some() {
                continue;
            }
            let stream = match &self.flags.stream {
                Some(stream) => stream.clone(),
                None => {
                    topics
                        .entry(topic.to_owned())
                        .or_insert_with(|| sent.layout(topic));
                    own
                }
            };
            let index = *indexes.entry(stream).or_insert_with_key(|stream| {
                streams.push(stream.clone());
                streams.len() - 1
            });
            entries.push((index, row));
        }
        Entries {
            streams,
            entries,
            topics,
        }
    }

    async fn keep_to_rate(&self, rows: usize, begun: Instant) {
        if self.flags.rate > 0 {
            let due = Duration::from_secs_f64(rows as f64 / f64::from(self.flags.rate));
            tokio::time::sleep(due.saturating_sub(begun.elapsed())).await;
        }
    }
}

fn no_marker() -> Error {
    Error::Setup {
        problem: "Redis has no marker of this outbox under this prefix".into(),
        remedy: "check --stream-prefix; after a loss the relay itself publishes again, see --on-redis-loss".into(),
    }
}

fn gone() -> Error {
    Error::Setup {
        problem: "the replay's progress is gone from Redis, which has lost data".into(),
        remedy: "see `outbox-relay status`, and begin it again once the relay has caught up".into(),
    }
}

fn other_history() -> Error {
    Error::Setup {
        problem: "Postgres has another past since the replay began, or the marker was lost".into(),
        remedy: "look at what is missing with `outbox-relay verify`, and begin a replay under another --name".into(),
    }
}

fn refused(what: &str) -> Error {
    Error::Setup {
        problem: format!("a stream refuses entries: {what}"),
        remedy: "mend that and run the same command again; it goes on where it stopped".into(),
    }
}
