//! Finding out that the consumer's database was set back, and delivering again what it has forgotten.
//!
//! Redis knows what a group has acknowledged, and the database what it has applied. When the database is restored from a
//! backup, or a standby that lagged takes over, the acknowledged messages whose effects it lost would never come again.
//! So the group keeps a mark in both, and sets itself back when they do not fit any more.

use std::collections::BTreeMap;

use deadpool_postgres::Object;
use redis::Cmd;
use tokio_postgres::{
    IsolationLevel, Row,
    types::{Json, ToSql},
};
use tracing::warn;
use uuid::Uuid;

use crate::{
    inbox::Inbox,
    link::Link,
    queries,
    survey::{EntryId, Survey, ask},
    trouble::Trouble,
};

/// The group is set back by this more than what the database is known to have lost.
const SAFETY_WINDOW_MS: u64 = 5 * 60 * 1_000;

/// Where a group keeps what it knows of its database.
pub(crate) struct History {
    group: String,
    /// The hash in Redis.
    key: String,
}

/// A past of the database, as far as it can be told from another one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Past {
    system_id: i64,
    timeline: i64,
    /// Changes each time the database was found set back.
    branch: Uuid,
    /// Counts up while the group works.
    mark: i64,
}

/// What the database itself says.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Own {
    past: Past,
    /// The clock of Redis, and how far each stream was settled, when the mark was set.
    redis_ms: i64,
    positions: BTreeMap<String, EntryId>,
}

/// What the comparison says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Same,
    /// Redis knows nothing: a new group, or a Redis that lost everything, and the group's position with it.
    New,
    SetBack(&'static str),
}

fn compare(known: Option<&Past>, own: Option<&Past>) -> Verdict {
    let Some(known) = known else {
        return Verdict::New;
    };
    match own {
        None => Verdict::SetBack("it knows nothing of this group"),
        Some(own) if own.system_id != known.system_id => Verdict::SetBack("it is another cluster"),
        Some(own) if own.branch != known.branch => Verdict::SetBack("it has another branch"),
        Some(own) if own.mark < known.mark => Verdict::SetBack("its mark is older"),
        // What an asynchronous standby has lost may be less than a mark.
        Some(own) if own.timeline != known.timeline => Verdict::SetBack("a standby took over"),
        Some(_) => Verdict::Same,
    }
}

/// Where to set a stream back to. What the database had settled when its mark was set, it still has; but never less
/// than the safety window before that, and never forward.
fn target(own: Option<&Own>, stream: &str, last_delivered: EntryId) -> Option<EntryId> {
    let target = own.map_or(EntryId::default(), |own| {
        let settled = own.positions.get(stream).copied().unwrap_or_default();
        let marked_ms = u64::try_from(own.redis_ms).unwrap_or(0);
        settled.min(EntryId::before_ms(
            marked_ms.saturating_sub(SAFETY_WINDOW_MS),
        ))
    });
    (target < last_delivered).then_some(target)
}

impl History {
    pub(crate) fn new(stream_prefix: &str, group: &str) -> Self {
        Self {
            group: group.to_owned(),
            key: format!("{stream_prefix}group:{group}:history"),
        }
    }

    /// Compares both sides. Where they fit, the mark moves on; where the database was set back, so is the group.
    /// `streams` must be all of the group's. Returns false, and does nothing, while another member is at it.
    ///
    /// A crash in between sets the group back once more, which the inbox absorbs.
    pub(crate) async fn keep(
        &self,
        inbox: &Inbox,
        link: &Link,
        streams: &[String],
    ) -> Result<bool, Trouble> {
        let mut connection = inbox.connect().await?;
        match self.mark(inbox, link, streams, &mut connection).await {
            Ok(Some(past)) => {
                self.tell(link, &past).await?;
                Ok(true)
            }
            Ok(None) => Ok(false),
            Err(trouble) => {
                inbox.give_up(connection, &trouble);
                Err(trouble)
            }
        }
    }

    /// Compares and sets the next mark in one transaction, whose lock makes it one member at a time. All is read
    /// after the lock is taken, and as it is then: a snapshot of before could miss the last mark, which looks like a
    /// database that was set back.
    async fn mark(
        &self,
        inbox: &Inbox,
        link: &Link,
        streams: &[String],
        connection: &mut Object,
    ) -> Result<Option<Past>, Trouble> {
        let begin = connection
            .build_transaction()
            .isolation_level(IsolationLevel::ReadCommitted);
        let tx = inbox.bounded(begin.start()).await?;
        inbox
            .bounded(tx.batch_execute(&inbox.openings.long))
            .await?;
        let locked = inbox
            .bounded(tx.query_one(queries::HISTORY_LOCK, &[&self.group]))
            .await?;
        if !locked.get::<_, bool>(0) {
            return Ok(None);
        }
        let known = self.known(link).await?;
        let row = inbox
            .bounded(tx.query_one(queries::HISTORY, &[&self.group]))
            .await?;
        let own = own(&row)?;
        // What is settled in Redis now was committed here before, so the mark's commit stands for it.
        let survey = Survey::take(link, &self.group, streams).await?;
        let mut positions: BTreeMap<&str, EntryId> = survey
            .streams
            .iter()
            .map(|(stream, standing)| (stream.as_str(), standing.settled))
            .collect();
        let mut branch = own
            .as_ref()
            .map_or_else(Uuid::new_v4, |own| own.past.branch);
        if let Verdict::SetBack(why) = compare(known.as_ref(), own.as_ref().map(|own| &own.past)) {
            self.set_back(link, &survey, own.as_ref(), why, &mut positions)
                .await?;
            branch = Uuid::new_v4();
        }
        let marks = [own.map(|own| own.past.mark), known.map(|known| known.mark)];
        let mark = marks.into_iter().flatten().max().unwrap_or(0) + 1;
        let redis_ms = i64::try_from(survey.redis_ms).unwrap_or(i64::MAX);
        let parameters: [&(dyn ToSql + Sync); 5] =
            [&self.group, &branch, &mark, &redis_ms, &Json(&positions)];
        inbox
            .bounded(tx.execute(queries::SET_MARK, &parameters))
            .await?;
        inbox.bounded(tx.commit()).await?;
        Ok(Some(Past {
            system_id: row.get("system_id"),
            timeline: row.get("timeline"),
            branch,
            mark,
        }))
    }

    /// Tells Redis, after the commit: a crash in between leaves Redis with an older mark, which fits.
    async fn tell(&self, link: &Link, past: &Past) -> Result<(), Trouble> {
        let mut set = redis::cmd("HSET");
        set.arg(&self.key)
            .arg("system_id")
            .arg(past.system_id)
            .arg("timeline")
            .arg(past.timeline);
        set.arg("branch")
            .arg(past.branch.to_string())
            .arg("mark")
            .arg(past.mark);
        link.query(&set).await.map(drop)
    }

    /// What Redis knows; nothing where it is not readable, as if it were lost.
    async fn known(&self, link: &Link) -> Result<Option<Past>, Trouble> {
        let mut get = redis::cmd("HMGET");
        get.arg(&self.key)
            .arg(&["system_id", "timeline", "branch", "mark"]);
        let fields: [Option<String>; 4] = ask(link, &get).await?;
        let [Some(system_id), Some(timeline), Some(branch), Some(mark)] = fields else {
            return Ok(None);
        };
        Ok(
            match (
                system_id.parse(),
                timeline.parse(),
                branch.parse(),
                mark.parse(),
            ) {
                (Ok(system_id), Ok(timeline), Ok(branch), Ok(mark)) => Some(Past {
                    system_id,
                    timeline,
                    branch,
                    mark,
                }),
                _ => None,
            },
        )
    }

    /// Sets the streams back, and the positions with them: what is delivered again is not settled.
    async fn set_back<'s>(
        &self,
        link: &Link,
        survey: &'s Survey,
        own: Option<&Own>,
        why: &str,
        positions: &mut BTreeMap<&'s str, EntryId>,
    ) -> Result<(), Trouble> {
        for (stream, standing) in &survey.streams {
            let Some(target) = target(own, stream, standing.last_delivered) else {
                continue;
            };
            link.query(&set_id(stream, &self.group, target)).await?;
            positions.insert(stream, standing.settled.min(target));
            warn!(
                group = self.group, stream, from = %standing.last_delivered, to = %target, why,
                "the consumer's database was set back; its messages are delivered again"
            );
        }
        Ok(())
    }
}

fn set_id(stream: &str, group: &str, id: EntryId) -> Cmd {
    let mut command = redis::cmd("XGROUP");
    command
        .arg("SETID")
        .arg(stream)
        .arg(group)
        .arg(id.to_string());
    command
}

fn own(row: &Row) -> Result<Option<Own>, Trouble> {
    let Some(branch) = row.get::<_, Option<Uuid>>("branch") else {
        return Ok(None);
    };
    let Json(positions) = row.try_get::<_, Json<BTreeMap<String, EntryId>>>("positions")?;
    Ok(Some(Own {
        past: Past {
            system_id: row.get("system_id"),
            timeline: row.get("timeline"),
            branch,
            mark: row.get("mark"),
        },
        redis_ms: row.get("redis_ms"),
        positions,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn past() -> Past {
        Past {
            system_id: 1,
            timeline: 1,
            branch: Uuid::from_u128(7),
            mark: 10,
        }
    }

    #[test]
    fn a_database_that_was_set_back_is_told_from_one_that_was_not() {
        let other_branch = Past {
            branch: Uuid::from_u128(8),
            ..past()
        };
        let cases = [
            (None, None, true, Verdict::New),
            (None, Some(past()), true, Verdict::New),
            (Some(past()), Some(past()), true, Verdict::Same),
            // The mark was set, and the process died before it told Redis.
            (
                Some(past()),
                Some(Past { mark: 11, ..past() }),
                true,
                Verdict::Same,
            ),
            (
                Some(past()),
                Some(Past { mark: 9, ..past() }),
                false,
                Verdict::Same,
            ),
            (
                Some(past()),
                Some(Past {
                    mark: 99,
                    ..other_branch
                }),
                false,
                Verdict::Same,
            ),
            (
                Some(past()),
                Some(Past {
                    timeline: 2,
                    ..past()
                }),
                false,
                Verdict::Same,
            ),
            (
                Some(past()),
                Some(Past {
                    system_id: 2,
                    ..past()
                }),
                false,
                Verdict::Same,
            ),
            (Some(past()), None, false, Verdict::Same),
        ];
        for (known, own, fits, verdict) in cases {
            let found = compare(known.as_ref(), own.as_ref());
            if fits {
                assert_eq!(found, verdict, "{known:?} {own:?}");
            } else {
                assert!(
                    matches!(found, Verdict::SetBack(_)),
                    "{known:?} {own:?}: {found:?}"
                );
            }
        }
    }

    #[test]
    fn a_stream_is_set_back_to_what_the_database_had_settled_and_a_window_more() {
        let at = |ms| EntryId { ms, sequence: 0 };
        let minute = 60_000;
        let own = Own {
            past: past(),
            redis_ms: 100 * 60_000,
            positions: BTreeMap::from([
                ("behind".to_owned(), at(40 * minute)),
                ("ahead".to_owned(), at(99 * minute)),
            ]),
        };
        let now = at(120 * minute);
        assert_eq!(target(Some(&own), "behind", now), Some(at(40 * minute)));
        assert_eq!(
            target(Some(&own), "ahead", now),
            Some(EntryId::before_ms(95 * minute))
        );
        assert_eq!(target(Some(&own), "new", now), Some(EntryId::default()));
        assert_eq!(target(Some(&own), "behind", at(30 * minute)), None);
        assert_eq!(target(None, "behind", now), Some(EntryId::default()));
    }
}
