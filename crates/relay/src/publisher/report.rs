//! What the leader's caretaker leaves in Redis for `status`: settings that only the running relay knows, and what it saw.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use serde::{Deserialize, Serialize};

use super::Tending;
use crate::error::{Error, Result};

const REPORT_LUA: &str = include_str!("report.lua");

/// A report that is not renewed is forgotten after this time.
pub(crate) const REPORT_LIFE: Duration = Duration::from_secs(60);

/// What the caretaker says. As JSON, to which fields may be added: relay and `status` may be of different versions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct CareReport {
    /// The relay's name.
    pub(crate) relay: String,
    /// `--redis-memory-ceiling`; none for no ceiling.
    pub(crate) memory_ceiling_percent: Option<u32>,
    /// Publishing is paused since the memory is at the ceiling.
    pub(crate) paused_by_ceiling: bool,
    /// What `--hold-until-acked` names, each with what the last round saw.
    pub(crate) holds: Vec<HeldFor>,
    /// Rows above this id stay for them.
    pub(crate) hold_floor_id: Option<i64>,
}

/// A group that rows are held for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct HeldFor {
    pub(crate) group: String,
    /// The topics that it is held to; all where there are none.
    pub(crate) topics: Vec<String>,
    pub(crate) standing: HeldStanding,
}

/// How far such a group has got.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub(crate) enum HeldStanding {
    /// It has acknowledged everything.
    Acknowledged,
    /// The oldest entry that it has not acknowledged.
    Behind { stream: String, oldest_ms: u64 },
    /// A stream has no such group, or cannot be asked.
    Absent { stream: String },
    /// No round over the streams is finished yet, or a newer relay says something else.
    #[default]
    #[serde(other)]
    NotKnown,
}

/// The key of the report.
fn report_key(prefix: &str) -> String {
    format!("{prefix}relay:caretaker")
}

impl Tending {
    /// Leaves a report. A crash on either side leaves the one before, which is forgotten by itself.
    ///
    /// # Errors
    ///
    /// Those of Redis.
    pub(crate) async fn leave_report(&mut self, report: &CareReport) -> Result<()> {
        let report = serde_json::to_string(report).expect("strings and numbers are valid JSON");
        let mut call = redis::cmd("EVAL");
        call.arg(REPORT_LUA).arg(1).arg(report_key(self.prefix()));
        call.arg(report).arg(REPORT_LIFE.as_secs());
        self.ask("leave a report for status", &call).await
    }
}

/// The report of the leader that runs, and when it was left by Redis' clock, in milliseconds; none where none was left
/// within [`REPORT_LIFE`].
///
/// # Errors
///
/// Those of Redis.
pub(crate) async fn read_report(
    connection: &mut MultiplexedConnection,
    prefix: &str,
) -> Result<Option<(CareReport, u64)>> {
    let found: [Option<String>; 2] = redis::cmd("HMGET")
        .arg(report_key(prefix))
        .arg(&["report", "at_ms"])
        .query_async(connection)
        .await
        .map_err(|source| Error::Redis {
            doing: "read the caretaker's report",
            source,
        })?;
    let [Some(report), Some(at_ms)] = found else {
        return Ok(None);
    };
    let report = serde_json::from_str(&report).ok();
    Ok(report.zip(at_ms.parse().ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again_and_what_is_newer_does_no_harm() {
        let report = CareReport {
            relay: "one".into(),
            memory_ceiling_percent: Some(90),
            paused_by_ceiling: true,
            holds: vec![
                HeldFor {
                    group: "packing".into(),
                    topics: vec!["orders".into()],
                    standing: HeldStanding::Behind {
                        stream: "outbox:orders".into(),
                        oldest_ms: 17,
                    },
                },
                HeldFor::default(),
            ],
            hold_floor_id: Some(9),
        };
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<CareReport>(&text).unwrap(), report);
        let newer = r#"{"relay":"two","colour":"red","holds":[{"group":"a","standing":{"state":"asleep","since":1}}]}"#;
        let read: CareReport = serde_json::from_str(newer).unwrap();
        assert_eq!(read.relay, "two");
        assert_eq!(read.holds[0].standing, HeldStanding::NotKnown);
    }
}
