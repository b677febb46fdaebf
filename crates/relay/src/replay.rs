//! `outbox-relay replay`: messages that were published go out again, on a person's word.
//!
//! It reads rows as the relay does and adds them to the streams itself, with or without a leader beside it. How far it has come
//! is written to Redis in the same atomic step as the entries (`publisher/replay.lua`). `replay/choice.rs` says which messages
//! are meant, `replay/course.rs` publishes them step by step, `replay/count.rs` counts them for a dry run.

mod choice;
mod count;
mod course;

use std::cell::Cell;
use std::time::Duration;

use clap::Args;

pub use count::TopicCount;

use self::choice::Choice;
use self::course::Course;
use crate::error::Result;
use crate::postgres::PostgresTarget;
use crate::protocol::failure::Meaning;
use crate::publisher::RedisTarget;
use crate::rewind::{Since, parse_since};

const LIMIT: Duration = Duration::from_secs(10);

/// How often progress is logged, and how soon for the first time.
const TELL_INTERVAL: Duration = Duration::from_secs(5);
const FIRST_TOLD_AFTER: Duration = Duration::from_secs(1);

/// How often an outage is met by trying again while nothing goes on, and how long it waits each time.
const TRIES_MAX: u32 = 60;
const TRY_AGAIN: Duration = Duration::from_secs(1);

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
/// [`Error::Config`](crate::Error::Config) for flags that contradict each other or an earlier run of that name; a server is out of reach or refuses;
/// no relay has ever led here. Once it has begun, an outage is met by trying again for a minute. After a failover of Redis, and begun
/// again under its name, it goes on where it stands there.
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
    let steps = Cell::new(0_u64);
    let (mut seen, mut tries, mut looked_after) = (0, 0, 0);
    loop {
        let error = match attempt(postgres, redis, prefix, flags, &steps).await {
            Err(error) if steps.get() > 0 && error.meaning() == Meaning::Outage => error,
            // A primary that was replaced still serves those who are connected. What it took is nobody's: so a new
            // connection must find the same end.
            Ok(Replayed::Done { .. }) if steps.get() > looked_after => {
                looked_after = steps.get();
                continue;
            }
            done => return done,
        };
        if steps.get() > seen {
            (seen, tries) = (steps.get(), 0);
        }
        tries += 1;
        if tries > TRIES_MAX {
            return Err(error);
        }
        tracing::warn!(
            error = error.one_line(),
            "the replay is interrupted; trying again"
        );
        tokio::time::sleep(TRY_AGAIN).await;
    }
}

/// Connects, and goes on from where the replay stands in Redis. `steps` counts what this process has done.
async fn attempt(
    postgres: &PostgresTarget,
    redis: &RedisTarget,
    prefix: &str,
    flags: &ReplayFlags,
    steps: &Cell<u64>,
) -> Result<Replayed> {
    let mut course = Course::open(postgres, redis, prefix, flags).await?;
    let place = course.place().await?;
    if flags.dry_run {
        let choice = Choice::of(&course.session, flags, place.cursor.high, None).await?;
        let topics = count::count(&course.session, &choice).await?;
        return Ok(Replayed::Counted(topics));
    }
    let before = course.replayer.progress().await?;
    let choice = Choice::of(&course.session, flags, place.cursor.high, before.as_ref()).await?;
    match before {
        None if steps.get() > 0 => Err(course::gone()),
        Some(before) if before.done && steps.get() == 0 => Ok(Replayed::Before {
            messages: before.replayed,
        }),
        before => course.run(&choice, place, before, steps).await,
    }
}
