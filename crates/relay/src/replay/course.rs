//! A replay step by step: reads messages, adds their entries, and goes on from wherever Redis says that it stands.

use std::cell::Cell;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::choice::{self, Choice, Range};
use super::{FIRST_TOLD_AFTER, LIMIT, ReplayFlags, Replayed, TELL_INTERVAL};
use crate::error::{Error, Result};
use crate::postgres::{MessageRow, PostgresTarget, Session, operator_sql, sql};
use crate::protocol::place::Place;
use crate::publisher::{Publisher, RedisTarget, ReplayProgress, ReplayStep, Replayer, Stepped};
use crate::verify::sent::{Passed, Sent};

/// Most messages in one step, and most bytes unless one message is larger.
const STEP_ROWS_MAX: u32 = 1_000;
const STEP_BYTES_MAX: i64 = 4 << 20;

/// Ids that one statement looks through: whatever the filters, it is short.
const STEP_IDS_MAX: i64 = 20_000;

/// Steps in a second where a rate is given.
const STEPS_PER_SECOND: u32 = 5;

/// How often it is looked whether a topic is held back still.
const HELD_RETRY: Duration = Duration::from_millis(500);

/// The connections of a replay that runs.
pub(super) struct Course<'a> {
    flags: &'a ReplayFlags,
    prefix: &'a str,
    pub(super) session: Session,
    publisher: Publisher,
    pub(super) replayer: Replayer,
    outbox_id: Uuid,
}

/// How far it has come, and what it goes by.
struct Stand {
    /// Where it stands in Redis; none before its first step.
    at: Option<i64>,
    progress: ReplayProgress,
    sent: Sent,
    /// When it is told next how far it is.
    tell_at: Instant,
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

impl<'a> Course<'a> {
    pub(super) async fn open(
        postgres: &PostgresTarget,
        redis: &RedisTarget,
        prefix: &'a str,
        flags: &'a ReplayFlags,
    ) -> Result<Self> {
        let session = Session::open(postgres, "outbox-relay replay", LIMIT).await?;
        session.batch("set up the session", sql::BE_SILENT).await?;
        let name = flags.name.as_deref().unwrap_or_default();
        Ok(Course {
            flags,
            prefix,
            publisher: Publisher::connect(redis, prefix, LIMIT).await?,
            replayer: Replayer::connect(redis, prefix, name, LIMIT).await?,
            outbox_id: choice::outbox_id(&session).await?,
            session,
        })
    }

    /// What the marker says was published.
    pub(super) async fn place(&mut self) -> Result<Place> {
        let sent = Sent::read(&mut self.publisher, &self.session, self.outbox_id).await?;
        sent.into_place().ok_or_else(no_marker)
    }

    /// Goes on to the end. `steps` counts.
    pub(super) async fn run(
        &mut self,
        choice: &Choice,
        place: Place,
        before: Option<ReplayProgress>,
        steps: &Cell<u64>,
    ) -> Result<Replayed> {
        let mut stand = Stand {
            at: before.as_ref().map(|before| before.next),
            progress: before.unwrap_or_else(|| choice.progress()),
            sent: Sent::at(place),
            tell_at: Instant::now() + FIRST_TOLD_AFTER,
        };
        while !stand.progress.done {
            let begun = Instant::now();
            let range = choice.range_from(stand.progress.next, STEP_IDS_MAX);
            let step = match range {
                Some(range) => self.read(choice, range).await?,
                None => Step {
                    rows: Vec::new(),
                    next: stand.progress.next,
                },
            };
            let written = self.entries(&stand.sent, &step.rows);
            let after = ReplayProgress {
                next: step.next,
                replayed: stand.progress.replayed + written.entries.len() as u64,
                done: range.is_none(),
                ..stand.progress.clone()
            };
            let place = stand.sent.place().ok_or_else(no_marker)?;
            let write = ReplayStep {
                outbox_id: self.outbox_id,
                branch: place.history.branch,
                before: stand.at,
                topics: &written.topics,
                streams: &written.streams,
                entries: &written.entries,
                after: &after,
            };
            let stepped = self.replayer.step(&write).await?;
            let done = matches!(stepped, Stepped::Done);
            self.go_on(&mut stand, stepped, after).await?;
            if done {
                steps.set(steps.get() + 1);
                self.keep_to_rate(written.entries.len(), begun).await;
            }
        }
        Ok(Replayed::Done {
            messages: stand.progress.replayed,
            ids: (stand.progress.from, stand.progress.to),
        })
    }

    /// Takes in what became of a step.
    async fn go_on(
        &mut self,
        stand: &mut Stand,
        stepped: Stepped,
        after: ReplayProgress,
    ) -> Result<()> {
        let tell = Instant::now() >= stand.tell_at;
        if tell {
            stand.tell_at = Instant::now() + TELL_INTERVAL;
        }
        match stepped {
            Stepped::Done => {
                stand.at = Some(after.next);
                stand.progress = after;
                if tell {
                    let progress = &stand.progress;
                    let (replayed, next, to) = (progress.replayed, progress.next, progress.to);
                    tracing::info!(replayed, next, to, "publishing again");
                }
            }
            Stepped::Elsewhere => {
                let found = self.replayer.progress().await?.ok_or_else(gone)?;
                if found.spec != stand.progress.spec {
                    return Err(choice::other_flags(&found));
                }
                stand.at = Some(found.next);
                stand.progress = found;
            }
            Stepped::Held(topic) => {
                if tell {
                    tracing::info!(topic, "waiting: the topic is held back");
                }
                tokio::time::sleep(HELD_RETRY).await;
                stand.sent = Sent::at(self.place().await?);
            }
            Stepped::OtherLayout => stand.sent = Sent::at(self.place().await?),
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

pub(super) fn gone() -> Error {
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
