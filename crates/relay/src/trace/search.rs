//! Finds an entry in a stream without reading all of it: ids of entries are times, and ids of messages rise with them.

use std::time::{Duration, Instant};

use crate::error::Result;
use crate::verify::EntryId;
use crate::verify::streams::Reader;

/// Clocks of Postgres and of Redis may differ by this much.
const CLOCK_SKEW_MS: u64 = 60_000;

/// Entries of one call.
const CHUNK: usize = 1_000;

/// Entries that are read from the place on where the ids pass the wanted one: two pages of the largest size.
const NEAR_MAX: u64 = 20_000;

/// Time for reading forward from the time of the message, for one that was committed late.
const FORWARD_TIME_MAX: Duration = Duration::from_millis(1_000);

/// How often a search that takes longer tells how far it is.
const TELL_INTERVAL: Duration = Duration::from_secs(1);

/// The entry that is wanted.
pub(super) struct Wanted<'m> {
    pub(super) id: i64,
    pub(super) message_key: &'m [u8],
    /// Its transaction began then, by the clock of Postgres.
    pub(super) from_ms: u64,
    /// It was published by then, by that clock; none where that is not known.
    pub(super) to_ms: Option<u64>,
    /// However long it takes.
    pub(super) to_the_end: bool,
}

/// What became of a search.
pub(super) enum Outcome {
    /// It stands there.
    Found(EntryId),
    /// There is no entry in that stream.
    NoStream,
    /// It was not found.
    Not {
        /// Entries that were read.
        read: u64,
        /// Whether that was all of the time in which it can have been published.
        whole: bool,
    },
}

/// Looks for an entry: by halving at first, then forward from the time of the message, for a second unless more is wanted.
pub(super) async fn find(
    reader: &mut Reader,
    stream: &str,
    wanted: &Wanted<'_>,
) -> Result<Outcome> {
    let Some(last) = reader.last_entry(stream).await? else {
        return Ok(Outcome::NoStream);
    };
    let from_ms = wanted.from_ms.saturating_sub(CLOCK_SKEW_MS);
    let to_ms = wanted.to_ms.map_or(last.0, |ms| ms + CLOCK_SKEW_MS);
    let to_ms = to_ms.min(last.0);
    let near = halve(reader, stream, wanted.id, from_ms, to_ms).await?;
    let mut read = 0;
    let (found, _) = forward(reader, stream, wanted, near, to_ms, &mut read, &|read| {
        read < NEAR_MAX
    })
    .await?;
    if let Some(entry) = found {
        return Ok(Outcome::Found(entry));
    }
    let (begun, mut read) = (Instant::now(), 0);
    let go_on = |_| wanted.to_the_end || begun.elapsed() < FORWARD_TIME_MAX;
    let (found, whole) = forward(reader, stream, wanted, from_ms, to_ms, &mut read, &go_on).await?;
    Ok(found.map_or(Outcome::Not { read, whole }, Outcome::Found))
}

/// The first millisecond at which an id not below the wanted one stands, as far as ids rise.
async fn halve(
    reader: &mut Reader,
    stream: &str,
    id: i64,
    from_ms: u64,
    to_ms: u64,
) -> Result<u64> {
    let (mut low, mut high) = (from_ms, to_ms);
    while low < high {
        let middle = low + (high - low) / 2;
        let to = to_ms.to_string();
        let (_, seen) = reader.page(stream, &middle.to_string(), &to, 1, "").await?;
        let published = seen.first().filter(|seen| !seen.replayed);
        match published.and_then(|seen| seen.id) {
            // What stands there begins later than the middle, which spares the way.
            Some(below) if below < id => low = seen[0].entry.0.max(middle) + 1,
            _ => high = middle,
        }
    }
    // Of the entries of one millisecond the first may be below and a later one not.
    Ok(low.saturating_sub(1).max(from_ms))
}

/// Reads forward from a time, for as long as `go_on` says, which is told how many entries were read. Also returns whether
/// the end was reached.
async fn forward(
    reader: &mut Reader,
    stream: &str,
    wanted: &Wanted<'_>,
    from_ms: u64,
    to_ms: u64,
    read: &mut u64,
    go_on: &(dyn Fn(u64) -> bool + Sync),
) -> Result<(Option<EntryId>, bool)> {
    let (mut from, to) = (from_ms.to_string(), to_ms.to_string());
    let mut told = Instant::now();
    while go_on(*read) {
        if told.elapsed() >= TELL_INTERVAL {
            tracing::info!(stream, entries = *read, from, to, "reading on");
            told = Instant::now();
        }
        let (_, page) = reader.page(stream, &from, &to, CHUNK, "").await?;
        let Some(last) = page.last() else {
            return Ok((None, true));
        };
        *read += page.len() as u64;
        let is_it = |seen: &&crate::verify::streams::Seen| {
            !seen.replayed && seen.id == Some(wanted.id) && seen.message_key == wanted.message_key
        };
        if let Some(seen) = page.iter().find(is_it) {
            return Ok((Some(seen.entry), true));
        }
        from = format!("({}", last.entry);
    }
    Ok((None, false))
}
