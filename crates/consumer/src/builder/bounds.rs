//! The bounds of the settings, each named in the documentation of its method.

use std::time::Duration;

use super::{Builder, OnDeadLetter, Order};
use crate::{Error, backoff::Pace};

const NAME_BYTES_MAX: usize = 200;
const BATCH_MAX: usize = 10_000;
const LANES_MAX: usize = 1_000;
const LEASE_MIN: Duration = Duration::from_millis(200);
const LEASE_MAX: Duration = Duration::from_secs(10 * 60);
const FORGET_MEMBERS_MIN: Duration = Duration::from_secs(5);
const FORGET_MEMBERS_MAX: Duration = Duration::from_secs(365 * 24 * 60 * 60);
const CLAIM_AFTER_MIN: Duration = Duration::from_millis(100);
const CLAIM_AFTER_MAX: Duration = Duration::from_secs(24 * 60 * 60);
const RETENTION_MIN: Duration = Duration::from_secs(1);
const RETENTION_MAX: Duration = Duration::from_secs(3_650 * 24 * 60 * 60);

impl Builder {
    pub(super) fn check_bounds(&self) -> Result<(), Error> {
        check(
            "batch",
            (1..=BATCH_MAX).contains(&self.batch),
            "must be 1 to 10,000",
        )?;
        check(
            "claim_after",
            (CLAIM_AFTER_MIN..=CLAIM_AFTER_MAX).contains(&self.claim_after),
            "must be 100 ms to 24 h",
        )?;
        check(
            "lanes",
            (1..=LANES_MAX).contains(&self.lanes),
            "must be 1 to 1,000",
        )?;
        // One connection for each lane, one for dead letters that are tried again, one for the upkeep, and one for the leases; else a long
        // handler would cost the lease.
        let needed = self.lanes + 3;
        check(
            "lanes",
            self.pool.status().max_size >= needed,
            &format!("needs a pool of at least {needed} connections, three more than lanes"),
        )?;
        check(
            "lease",
            (LEASE_MIN..=LEASE_MAX).contains(&self.lease),
            "must be 200 ms to 10 min",
        )?;
        check(
            "forget_members_after",
            (FORGET_MEMBERS_MIN..=FORGET_MEMBERS_MAX).contains(&self.forget_members_after),
            "must be 5 s to 365 days",
        )?;
        check("max_attempts", self.max_attempts >= 1, "must be at least 1")?;
        check_pace("retry_backoff", self.retry)?;
        check_pace("outage_backoff", self.outage)?;
        check(
            "response_timeout",
            !self.response_timeout.is_zero(),
            "must be longer than 0",
        )?;
        // Without one owner of a key, a later message may run while its dead letter is being made.
        check(
            "on_dead_letter",
            self.order == Order::PerKey || self.on_dead_letter == OnDeadLetter::Continue,
            "HoldKey needs Order::PerKey",
        )?;
        for (field, retention) in [
            ("inbox_retention", self.inbox_retention),
            ("dead_letter_retention", self.dead_letter_retention),
        ] {
            check(
                field,
                (RETENTION_MIN..=RETENTION_MAX).contains(&retention),
                "must be 1 s to 10 years",
            )?;
        }
        Ok(())
    }
}

pub(crate) fn refused(field: &'static str, problem: impl Into<String>) -> Error {
    Error::Setting {
        field,
        problem: problem.into(),
    }
}

pub(crate) fn check(field: &'static str, holds: bool, problem: &str) -> Result<(), Error> {
    if holds {
        Ok(())
    } else {
        Err(refused(field, problem))
    }
}

pub(crate) fn check_name(field: &'static str, name: &str) -> Result<(), Error> {
    let fits = (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.chars().any(char::is_control);
    check(
        field,
        fits,
        "must be 1 to 200 bytes without control characters",
    )
}

pub(crate) fn check_topic(topic: &str) -> Result<(), Error> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let fits = (1..=NAME_BYTES_MAX).contains(&topic.len()) && topic.bytes().all(allowed);
    if fits {
        Ok(())
    } else {
        Err(refused(
            "topic",
            format!("{topic:?} must be 1 to 200 of A-Z a-z 0-9 . _ -"),
        ))
    }
}

fn check_pace(field: &'static str, pace: Pace) -> Result<(), Error> {
    check(
        field,
        !pace.initial.is_zero() && pace.initial <= pace.cap,
        "must start above 0 and not above its cap",
    )
}

pub(crate) fn default_name() -> String {
    let host = std::env::var("HOSTNAME")
        .ok()
        .or_else(|| std::fs::read_to_string("/proc/sys/kernel/hostname").ok())
        .unwrap_or_default();
    let host: String = host
        .trim()
        .chars()
        .filter(|c| !c.is_control())
        .take(40)
        .collect();
    let host = if host.is_empty() { "host" } else { &host };
    let random = uuid::Uuid::new_v4().simple().to_string();
    format!("{host}-{}-{}", std::process::id(), &random[..8])
}
