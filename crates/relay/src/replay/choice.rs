//! Which messages a replay is about.

use std::time::Duration;

use outbox_redis_address::hash_tag;
use serde_json::json;
use uuid::Uuid;

use super::ReplayFlags;
use crate::error::{Error, Result};
use crate::postgres::{Session, operator_sql};
use crate::publisher::ReplayProgress;
use crate::rewind::Since;

/// Message keys that may be named.
const KEYS_MAX: usize = 1_000;

/// Ids from the first to the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) first: i64,
    pub(super) last: i64,
}

/// The messages that are meant.
#[derive(Debug)]
pub(super) struct Choice {
    /// What was asked, to know it again.
    spec: String,
    pub(super) from: i64,
    pub(super) to: i64,
    /// The only ids, ascending, where message keys were named.
    ids: Option<Vec<i64>>,
    pub(super) topics: Option<Vec<String>>,
    pub(super) ordering_key: Option<String>,
    /// Seconds since 1970.
    pub(super) since: Option<f64>,
    pub(super) until: Option<f64>,
}

/// Refuses what cannot be meant.
pub(super) fn check(flags: &ReplayFlags, prefix: &str) -> Result<()> {
    let bad = |field, problem: &str| {
        Err(Error::Config {
            field,
            problem: problem.to_owned(),
        })
    };
    if let Some(name) = &flags.name {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if name.is_empty() || name.len() > 100 || !name.bytes().all(allowed) {
            return bad(
                "--name",
                "must be 1 to 100 of the characters A-Z a-z 0-9 . _ -",
            );
        }
    }
    let chosen = flags.from_id.is_some()
        || flags.to_id.is_some()
        || flags.since.is_some()
        || flags.until.is_some()
        || !flags.topics.is_empty()
        || flags.ordering_key.is_some()
        || !flags.message_keys.is_empty();
    if chosen == flags.all {
        return bad(
            "replay",
            "say which messages, by --from-id --to-id --since --until --topic --ordering-key --message-key, or --all; one of \
             the two",
        );
    }
    if let (Some(from), Some(to)) = (flags.from_id, flags.to_id)
        && from > to
    {
        return bad("--from-id", &format!("{from} is above --to-id {to}"));
    }
    if flags.message_keys.len() > KEYS_MAX {
        return bad("--message-key", "may be given up to 1000 times");
    }
    let Some(stream) = &flags.stream else {
        return Ok(());
    };
    if stream.is_empty() || stream.len() > 500 || !stream.bytes().all(|b| b.is_ascii_graphic()) {
        return bad(
            "--stream",
            "must be 1 to 500 printable ASCII characters without spaces",
        );
    }
    if stream.starts_with(&format!("{prefix}relay:")) {
        return bad("--stream", "must not be one of the relay's own keys");
    }
    match hash_tag(prefix) {
        Some(tag) if hash_tag(stream) != Some(tag) => bad(
            "--stream",
            &format!(
                "must contain {{{tag}}}, the hash tag of --stream-prefix, so that it is in one slot with the marker"
            ),
        ),
        _ => Ok(()),
    }
}

/// That a name is taken.
pub(super) fn other_flags(before: &ReplayProgress) -> Error {
    Error::Config {
        field: "--name",
        problem: format!(
            "a replay of that name was begun with other flags: {}; repeat these, or choose another name",
            crate::dead_letters::printable(&before.spec)
        ),
    }
}

/// Which outbox this is.
pub(super) async fn outbox_id(session: &Session) -> Result<Uuid> {
    let nothing: Option<f64> = None;
    let row = session
        .one(
            "read the outbox's id",
            operator_sql::REPLAY_BOUNDS,
            &[&nothing, &nothing, &nothing, &nothing],
        )
        .await?;
    Ok(row.get(0))
}

impl Choice {
    /// What is meant now, or what was meant when an earlier run of the same name began.
    pub(super) async fn of(
        session: &Session,
        flags: &ReplayFlags,
        high: i64,
        before: Option<&ReplayProgress>,
    ) -> Result<Self> {
        let spec = spec(flags);
        let mut choice = Choice {
            spec: spec.clone(),
            from: flags.from_id.unwrap_or(1).max(1),
            to: flags.to_id.unwrap_or(high).min(high),
            ids: None,
            topics: (!flags.topics.is_empty()).then(|| flags.topics.clone()),
            ordering_key: flags.ordering_key.clone(),
            since: None,
            until: None,
        };
        if let Some(before) = before {
            if before.spec != spec {
                return Err(other_flags(before));
            }
            (choice.from, choice.to) = (before.from, before.to);
            choice.since = before.since.parse().ok();
            choice.until = before.until.parse().ok();
        } else {
            choice.resolve(session, flags).await?;
        }
        if !flags.message_keys.is_empty() {
            choice.look_up(session, flags).await?;
        }
        Ok(choice)
    }

    async fn resolve(&mut self, session: &Session, flags: &ReplayFlags) -> Result<()> {
        let (since, since_ago) = parts(flags.since);
        let (until, until_ago) = parts(flags.until);
        let row = session
            .one(
                "look for the bounds",
                operator_sql::REPLAY_BOUNDS,
                &[&since, &since_ago, &until, &until_ago],
            )
            .await?;
        let (purged_to, earlier): (i64, i64) = (row.get(1), row.get(4));
        (self.since, self.until) = (row.get(2), row.get(3));
        if flags.from_id.is_some_and(|from| from <= purged_to) {
            tracing::warn!(purged_to, "messages up to this id may have been purged");
        }
        self.from = self.from.max(purged_to + 1);
        if self.since.is_some() {
            self.from = self.from.max(earlier + 1);
        }
        Ok(())
    }

    async fn look_up(&mut self, session: &Session, flags: &ReplayFlags) -> Result<()> {
        let rows = session
            .all(
                "look for the message keys",
                operator_sql::IDS_OF_KEYS,
                &[&flags.message_keys],
            )
            .await?;
        let mut named = flags.message_keys.clone();
        named.sort_unstable();
        named.dedup();
        if rows.len() < named.len() {
            return Err(Error::Setup {
                problem: format!(
                    "{} of the {} message keys are not in the outbox",
                    named.len() - rows.len(),
                    named.len()
                ),
                remedy: "see `outbox-relay trace` for each of them".into(),
            });
        }
        self.ids = Some(rows.iter().map(|row| row.get(0)).collect());
        Ok(())
    }

    /// The progress of a replay that has not begun.
    pub(super) fn progress(&self) -> ReplayProgress {
        let text = |time: Option<f64>| time.map_or(String::new(), |time| time.to_string());
        ReplayProgress {
            spec: self.spec.clone(),
            from: self.from,
            to: self.to,
            since: text(self.since),
            until: text(self.until),
            next: self.from,
            replayed: 0,
            done: false,
        }
    }

    /// The next ids to look through from `next` on, at most `ids_max`; none at the end.
    pub(super) fn range_from(&self, next: i64, ids_max: i64) -> Option<Range> {
        let first = match &self.ids {
            None => next,
            Some(ids) => *ids.get(ids.partition_point(|id| *id < next))?,
        };
        let last = match &self.ids {
            None => self.to.min(first.saturating_add(ids_max - 1)),
            Some(_) => first,
        };
        (first <= self.to).then_some(Range { first, last })
    }
}

/// Seconds since 1970, or seconds ago.
fn parts(time: Option<Since>) -> (Option<f64>, Option<f64>) {
    match time {
        None => (None, None),
        Some(Since::At(ms)) => (Some(Duration::from_millis(ms).as_secs_f64()), None),
        Some(Since::Ago(ago)) => (None, Some(ago.as_secs_f64().min(1e11))),
    }
}

/// What was asked, but for how fast.
fn spec(flags: &ReplayFlags) -> String {
    let time = |time: Option<Since>| match time {
        None => json!(null),
        Some(Since::At(ms)) => json!({ "at_ms": ms }),
        Some(Since::Ago(ago)) => json!({ "seconds_ago": ago.as_secs_f64() }),
    };
    json!({
        "from_id": flags.from_id,
        "to_id": flags.to_id,
        "since": time(flags.since),
        "until": time(flags.until),
        "topics": flags.topics,
        "ordering_key": flags.ordering_key,
        "message_keys": flags.message_keys,
        "stream": flags.stream,
    })
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(from: i64, to: i64, ids: Option<&[i64]>) -> Choice {
        Choice {
            spec: String::new(),
            from,
            to,
            ids: ids.map(<[i64]>::to_vec),
            topics: None,
            ordering_key: None,
            since: None,
            until: None,
        }
    }

    fn ranges(choice: &Choice) -> Vec<(i64, i64)> {
        let (mut next, mut found) = (choice.from, Vec::new());
        while let Some(range) = choice.range_from(next, 10) {
            found.push((range.first, range.last));
            next = range.last + 1;
        }
        found
    }

    #[test]
    fn ranges_cover_the_ids_once_and_keys_are_looked_at_alone() {
        assert_eq!(ranges(&choice(5, 27, None)), [(5, 14), (15, 24), (25, 27)]);
        assert_eq!(ranges(&choice(5, 4, None)), []);
        let keys = choice(1, 90, Some(&[3, 70, 71, 99]));
        assert_eq!(ranges(&keys), [(3, 3), (70, 70), (71, 71)]);
    }
}
