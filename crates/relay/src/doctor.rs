//! `outbox-relay doctor`: is the set-up right? Asks both servers, and says of each finding what it means and what to do.
//!
//! Asking and judging are apart: `ask_*.rs` return facts, `judge_*.rs` turn facts into findings and ask nobody.

mod ask_postgres;
mod ask_redis;
mod finding;
mod judge_postgres;
mod judge_redis;

use std::fmt::Write as _;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

pub use self::finding::{Finding, Level};
use crate::dead_letters::printable;
use crate::error::Result;
use crate::postgres::{PostgresTarget, Session, keeps_backend};
use crate::publisher::RedisTarget;

/// How long one answer may take, as for the other commands that look.
const LIMIT: Duration = Duration::from_secs(5);

/// How the findings are shown.
#[derive(Args, Clone, Debug)]
pub struct DoctorFlags {
    /// As JSON, one object
    #[arg(long)]
    pub json: bool,
}

/// All findings.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct DoctorReport {
    /// The worst level that was found.
    pub worst: Level,
    /// What each check found, Postgres first.
    pub findings: Vec<Finding>,
}

impl DoctorReport {
    fn new(findings: Vec<Finding>) -> Self {
        let levels = findings.iter().map(|finding| finding.level);
        DoctorReport {
            worst: levels.max().unwrap_or(Level::Ok),
            findings,
        }
    }

    /// One line of JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("strings are always valid JSON")
    }

    /// The exit code: 0 where all is well, 2 for a warning, 3 for an error.
    pub fn exit_code(&self) -> u8 {
        match self.worst {
            Level::Ok | Level::Note => 0,
            Level::Warning => 2,
            Level::Error => 3,
        }
    }
}

impl std::fmt::Display for DoctorReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = String::new();
        for finding in &self.findings {
            let level = match finding.level {
                Level::Ok => "ok",
                Level::Note => "note",
                Level::Warning => "WARNING",
                Level::Error => "ERROR",
            };
            let (area, check) = (finding.area, finding.check);
            let found = printable(&finding.found);
            writeln!(out, "{level:<8}{area:<9} {check}: {found}")?;
            if !finding.means.is_empty() {
                writeln!(out, "{:8}means     {}", "", finding.means)?;
            }
            if !finding.remedy.is_empty() {
                writeln!(out, "{:8}do        {}", "", printable(&finding.remedy))?;
            }
        }
        f.write_str(out.trim_end())
    }
}

/// Looks at both servers. Writes nothing but one notification, and waits for no lock of a producer.
///
/// # Errors
///
/// That one of the servers is out of reach, or that the database has no outbox that this role may read.
pub async fn doctor(
    postgres: &PostgresTarget,
    redis: &RedisTarget,
    prefix: &str,
) -> Result<DoctorReport> {
    let mut findings = look_at_postgres(postgres).await?;
    let mut connection = redis.connect(LIMIT).await?;
    findings.extend(judge_redis::judge(
        &ask_redis::ask(&mut connection, prefix).await?,
    ));
    Ok(DoctorReport::new(findings))
}

async fn look_at_postgres(target: &PostgresTarget) -> Result<Vec<Finding>> {
    let (client, doorbell) = target.connect("outbox-relay doctor", LIMIT).await?;
    let kept = keeps_backend(target, &client).await?;
    // The settings of a session would stay on a backend that others use next, so no question is asked there.
    if kept == Some(false) {
        return Ok(vec![judge_postgres::check("pooler").error(
            "the connection goes through a pooler that changes its backend between transactions (pool_mode=transaction)",
            "locks, notifications and settings of a session are lost, so a relay refuses to start; nothing else of Postgres was looked at",
            "point --database-url at Postgres itself, or at a pool with pool_mode=session",
        )]);
    }
    let session = Session::set_up(client, doorbell, LIMIT).await?;
    Ok(judge_postgres::judge(&ask_postgres::ask(&session).await?))
}
