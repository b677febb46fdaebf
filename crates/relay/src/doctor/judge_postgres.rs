//! What the facts of Postgres mean. Pure: no server is asked here.

use std::collections::HashMap;
use std::time::Duration;

use super::ask_postgres::{Clock, PostgresFacts, Rights, Slot, Table};
use super::finding::{Check, Finding, Seen, size};
use crate::status::{Holder, seconds};

/// A transaction that wrote a message and is older than this is worth a look.
const WRITER_AGE_MAX_SECONDS: f64 = 60.0;

/// Dead rows that are no matter, whatever their share.
const DEAD_ROWS_MIN: i64 = 100_000;

/// Age in transactions at which Postgres has long been vacuuming in haste, and at which it does nothing else
/// (`vacuum_failsafe_age`); it stops at two billion.
const AGE_WARNING: i64 = 1_000_000_000;
const AGE_ERROR: i64 = 1_600_000_000;

/// WAL that a slot may keep before it counts as forgotten.
const SLOT_BYTES_MAX: i64 = 10_000_000_000;

/// Clocks that differ by more confuse ages and delays.
pub(super) const SKEW_MAX_SECONDS: f64 = 2.0;

/// A notification that takes longer is no wake-up any more.
const NOTIFY_SLOW: Duration = Duration::from_millis(200);

pub(super) const fn check(name: &'static str) -> Check {
    Check {
        area: "postgres",
        name,
    }
}

/// All findings of a Postgres whose sessions keep their backend.
pub(super) fn judge(facts: &PostgresFacts) -> Vec<Finding> {
    let mut findings = vec![check("pooler").ok("sessions keep their backend")];
    findings.push(match &facts.refusal {
        None => check("schema").ok(
            "of a version that this relay works with; ids come one by one; UTF8; this is the primary",
        ),
        Some((problem, remedy)) => {
            check("schema").error(problem, "a relay refuses to start", remedy)
        }
    });
    findings.extend(each(&facts.rights, "rights", judge_rights));
    findings.extend(each(&facts.settings, "settings", |settings| {
        judge_settings(settings)
    }));
    findings.extend(each(&facts.asynchronous, "synchronous_commit", |roles| {
        judge_asynchronous(roles)
    }));
    findings.extend(each(&facts.tables, "dead rows", |tables| {
        judge_tables(tables)
    }));
    findings.extend(each(&facts.writers, "open writers", |writers| {
        vec![judge_writers(writers)]
    }));
    findings.extend(each(&facts.wraparound, "wraparound", |age| {
        vec![judge_age(*age)]
    }));
    findings.extend(each(&facts.wiring, "trigger", |(trigger, target)| {
        judge_wiring(*trigger, *target)
    }));
    findings.extend(each(&facts.notified, "notification", |took| {
        vec![judge_notification(*took)]
    }));
    findings.extend(each(&facts.clock, "clock", |clock| {
        vec![judge_clock(check("clock"), *clock)]
    }));
    let wal = facts.wal.as_ref().ok().copied();
    findings.extend(each(&facts.sizes, "disk", |(database, messages)| {
        vec![judge_disk(*database, *messages, wal)]
    }));
    findings.extend(each(&facts.slot, "replication slots", |slot| {
        vec![judge_slot(slot.as_ref())]
    }));
    findings
}

/// Judges what was seen; what was not is a finding, too.
pub(super) fn each<T>(
    seen: &Seen<T>,
    name: &'static str,
    judge: impl Fn(&T) -> Vec<Finding>,
) -> Vec<Finding> {
    match seen {
        Ok(facts) => judge(facts),
        Err(why) => vec![check(name).unseen(why)],
    }
}

fn judge_rights(rights: &Rights) -> Vec<Finding> {
    let check = check("rights");
    let role = &rights.role;
    let grants = format!("outbox-relay grants --relay '{role}' prints what it needs and no more");
    let mut findings = Vec::new();
    if !rights.missing.is_empty() {
        findings.push(check.error(
            format!("role {role} lacks {}", rights.missing.join(", ")),
            "the relay stops at the statement that needs it",
            &grants,
        ));
    } else if rights.superuser {
        findings.push(check.note(
            format!("role {role} is a superuser"),
            "whoever gets at the relay's password owns the server",
            &grants,
        ));
    } else if rights.writes_messages {
        findings.push(check.note(
            format!("role {role} can write messages"),
            "a relay need not",
            &grants,
        ));
    } else {
        findings.push(check.ok(format!("role {role} has what the relay needs")));
    }
    if !rights.superuser && !rights.reads_stats {
        findings.push(check.note(
            format!("role {role} is no member of pg_read_all_stats"),
            "age and query of other roles' transactions are hidden from status, metrics and this command",
            "grant it if you want to see them; it shows the statements of all databases",
        ));
    }
    findings
}

fn judge_settings(settings: &HashMap<String, String>) -> Vec<Finding> {
    let off = |name: &str| settings.get(name).is_some_and(|value| value == "off");
    let version = settings.get("server_version").map(String::as_str);
    let mut findings = vec![check("version").ok(format!(
        "Postgres {}",
        version.unwrap_or("of unknown version")
    ))];
    if off("fsync") {
        findings.push(check("fsync").error(
            "fsync is off",
            "a crash of the machine can destroy the database, and with it messages that were committed",
            "set fsync = on",
        ));
    }
    if off("full_page_writes") {
        findings.push(check("fsync").warning(
            "full_page_writes is off",
            "a crash of the machine can tear pages, unless the file system excludes that",
            "set full_page_writes = on",
        ));
    }
    findings.push(
        match settings.get("synchronous_commit").map(String::as_str) {
            Some("off") => check("synchronous_commit").warning("off", ASYNCHRONOUS, "set it to on"),
            Some(value) => check("synchronous_commit").ok(value),
            None => check("synchronous_commit").unseen("no such setting"),
        },
    );
    if off("autovacuum") || off("track_counts") {
        findings.push(check("autovacuum").error(
            "autovacuum is off",
            "what the purge deletes is never reclaimed, and transaction ids run out",
            "set autovacuum = on and track_counts = on",
        ));
    } else {
        findings.push(check("autovacuum").ok("on"));
    }
    findings
}

const ASYNCHRONOUS: &str = "a crash of Postgres can forget what it just told a producer was committed: business rows and \
    messages together. The relay publishes only what is flushed";

fn judge_asynchronous(roles: &[String]) -> Vec<Finding> {
    if roles.is_empty() {
        return Vec::new();
    }
    vec![check("synchronous_commit").warning(
        format!("off for {}", roles.join(", ")),
        ASYNCHRONOUS,
        "ALTER ROLE … RESET synchronous_commit, if its business rows must not be lost",
    )]
}

fn judge_tables(tables: &[Table]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for table in tables {
        let (name, live, dead) = (&table.name, table.live, table.dead);
        if table.autovacuum_off {
            findings.push(check("autovacuum").warning(
                format!("autovacuum is off for outbox.{name}"),
                "the space of rows that were deleted is not used again",
                format!("ALTER TABLE outbox.{name} RESET (autovacuum_enabled)"),
            ));
        }
        if dead > DEAD_ROWS_MIN && dead > live {
            findings.push(check("dead rows").warning(
                format!("outbox.{name} has {dead} dead rows and {live} living ones"),
                "vacuum does not keep up, or a long transaction, a prepared one or a replication slot holds it up",
                format!("look for the oldest backend_xmin in pg_stat_activity and pg_replication_slots; then VACUUM outbox.{name}"),
            ));
        }
    }
    if findings.is_empty() {
        let dead: i64 = tables.iter().map(|table| table.dead).sum();
        findings.push(check("dead rows").ok(format!("{dead}, by the statistics")));
    }
    findings
}

fn judge_writers(writers: &[Holder]) -> Finding {
    let check = check("open writers");
    let old = writers
        .iter()
        .filter(|writer| writer.age_seconds > WRITER_AGE_MAX_SECONDS);
    let Some(oldest) = old.max_by(|a, b| a.age_seconds.total_cmp(&b.age_seconds)) else {
        return check.ok(match writers.len() {
            0 => "none".to_owned(),
            open => format!("{open}, none older than a minute that shows its age"),
        });
    };
    let who = match (&oldest.prepared, oldest.pid) {
        (Some(name), _) => format!("prepared transaction {name:?}"),
        (None, Some(pid)) => format!("backend {pid} ({})", oldest.application),
        (None, None) => "a prepared transaction".to_owned(),
    };
    let remedy = match &oldest.prepared {
        Some(name) => format!("COMMIT or ROLLBACK PREPARED '{name}'"),
        None => "end it: commit sooner, or SELECT pg_terminate_backend(pid)".to_owned(),
    };
    check.warning(
        format!(
            "{who} wrote a message and has been open for {}",
            humantime::format_duration(seconds(oldest.age_seconds.floor()))
        ),
        "its own messages wait for it, and the relay remembers the ids of all that rolls back meanwhile",
        remedy,
    )
}

fn judge_age(age: i64) -> Finding {
    let check = check("wraparound");
    let found = format!("{age} transactions since the oldest that is not frozen");
    let means = "at two billion Postgres takes no writes any more, so producers stop";
    let remedy = "find what holds vacuum up (long transactions, slots, prepared transactions), then VACUUM FREEZE";
    if age >= AGE_ERROR {
        check.error(found, means, remedy)
    } else if age >= AGE_WARNING {
        check.warning(found, means, remedy)
    } else {
        check.ok(found)
    }
}

fn judge_wiring(trigger: bool, target: bool) -> Vec<Finding> {
    let mut findings = vec![if trigger {
        check("trigger").ok("producers wake the relay")
    } else {
        check("trigger").warning(
            "the trigger wake_relay on outbox.messages is missing or disabled",
            "no message wakes the relay; each waits for the next poll",
            "ALTER TABLE outbox.messages ENABLE TRIGGER wake_relay",
        )
    }];
    if target {
        findings.push(check("logical replication").error(
            "outbox.messages is the target of a subscription",
            "its ids arrive in another order than this database gives them out, and the cursor passes rows unseen",
            "take the table out of the publication",
        ));
    }
    findings
}

fn judge_notification(took: Option<Duration>) -> Finding {
    let check = check("notification");
    let means =
        "messages that are written while the relay sleeps wait, at the longest until the next poll";
    match took {
        None => check.warning(
            "none came back within a second",
            means,
            "is the server overloaded, or something between that holds messages back?",
        ),
        Some(took) if took > NOTIFY_SLOW => check.warning(
            format!("took {} ms", took.as_millis()),
            means,
            "commits of this database wait for the disk or for each other: look at its load",
        ),
        Some(took) => check.ok(format!(
            "came back after {:.1} ms",
            took.as_secs_f64() * 1e3
        )),
    }
}

pub(super) fn judge_clock(check: Check, clock: Clock) -> Finding {
    let ahead = clock.ahead.abs();
    let direction = if clock.ahead < 0.0 {
        "behind"
    } else {
        "ahead of"
    };
    if ahead - clock.give_or_take > SKEW_MAX_SECONDS {
        return check.warning(
            format!("{ahead:.1} s {direction} this machine's"),
            "ages and delays in status, metrics and logs are wrong by as much",
            "let NTP keep all three clocks",
        );
    }
    check.ok(format!(
        "{ahead:.3} s {direction} this machine's, give or take {:.3} s",
        clock.give_or_take
    ))
}

fn judge_disk(database: i64, messages: i64, wal: Option<i64>) -> Finding {
    let show = |bytes: i64| size(u64::try_from(bytes).unwrap_or(0));
    let wal = match wal {
        Some(wal) => format!("WAL {}", show(wal)),
        None => "WAL not to be seen by this role".to_owned(),
    };
    check("disk").ok(format!(
        "database {}, of which outbox.messages {}; {wal}. SQL does not show how much is free",
        show(database),
        show(messages)
    ))
}

fn judge_slot(slot: Option<&Slot>) -> Finding {
    let check = check("replication slots");
    match slot {
        Some((name, active, kept)) if *kept > SLOT_BYTES_MAX => check.warning(
            format!(
                "slot {name} ({}) keeps {} of WAL",
                if *active { "in use" } else { "not in use" },
                size(u64::try_from(*kept).unwrap_or(0))
            ),
            "it grows until the disk is full, and then producers cannot commit",
            "let its consumer catch up, or SELECT pg_drop_replication_slot(name); set max_slot_wal_keep_size",
        ),
        _ => check.ok("none keeps much WAL"),
    }
}

#[cfg(test)]
mod tests;
