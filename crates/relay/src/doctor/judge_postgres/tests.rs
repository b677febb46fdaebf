//! What is judged of Postgres.

use super::*;
use crate::doctor::finding::Level;

fn levels(findings: &[Finding]) -> Vec<Level> {
    findings.iter().map(|finding| finding.level).collect()
}

fn writer(age_seconds: f64, prepared: Option<&str>) -> Holder {
    Holder {
        pid: Some(7),
        application: "job".into(),
        age_seconds,
        query: String::new(),
        prepared: prepared.map(str::to_owned),
    }
}

#[test]
fn a_missing_right_outweighs_too_many() {
    let rights = Rights {
        role: "relay".into(),
        reads_stats: true,
        ..Rights::default()
    };
    assert_eq!(levels(&judge_rights(&rights)), [Level::Ok]);
    let lacking = Rights {
        missing: vec!["DELETE on outbox.messages".into()],
        superuser: true,
        ..rights.clone()
    };
    let findings = judge_rights(&lacking);
    assert_eq!(levels(&findings), [Level::Error]);
    assert!(findings[0].found.contains("DELETE on outbox.messages"));
    let writes = Rights {
        writes_messages: true,
        reads_stats: false,
        ..rights
    };
    assert_eq!(levels(&judge_rights(&writes)), [Level::Note, Level::Note]);
}

#[test]
fn settings_that_lose_data_are_told() {
    let with = |name: &str| {
        let on = [
            "fsync",
            "full_page_writes",
            "synchronous_commit",
            "autovacuum",
        ];
        let mut settings: HashMap<_, _> = on.map(|on| (on.to_owned(), "on".to_owned())).into();
        settings.insert(name.to_owned(), "off".to_owned());
        let findings = judge_settings(&settings);
        findings.iter().map(|finding| finding.level).max()
    };
    assert_eq!(with("track_io_timing"), Some(Level::Ok));
    assert_eq!(with("fsync"), Some(Level::Error));
    assert_eq!(with("autovacuum"), Some(Level::Error));
    assert_eq!(with("full_page_writes"), Some(Level::Warning));
    assert_eq!(with("synchronous_commit"), Some(Level::Warning));
    assert_eq!(
        levels(&judge_asynchronous(&["role shop".into()])),
        [Level::Warning]
    );
}

#[test]
fn a_writer_is_old_after_a_minute() {
    assert_eq!(judge_writers(&[]).level, Level::Ok);
    assert_eq!(judge_writers(&[writer(60.0, None)]).level, Level::Ok);
    let found = judge_writers(&[writer(61.0, None), writer(3_700.5, Some("tx"))]);
    assert_eq!(found.level, Level::Warning);
    assert!(
        found.found.contains("\"tx\"") && found.found.contains("1h 1m"),
        "{found:?}"
    );
    assert!(found.remedy.contains("ROLLBACK PREPARED 'tx'"));
}

#[test]
fn ages_and_clocks_have_bounds() {
    let ages = [AGE_WARNING - 1, AGE_WARNING, AGE_ERROR].map(|age| judge_age(age).level);
    assert_eq!(ages, [Level::Ok, Level::Warning, Level::Error]);
    let clock = |ahead, give_or_take| {
        judge_clock(
            check("clock"),
            Clock {
                ahead,
                give_or_take,
            },
        )
        .level
    };
    assert_eq!(clock(-1.9, 0.0), Level::Ok);
    assert_eq!(clock(-2.1, 0.0), Level::Warning);
    assert_eq!(clock(2.5, 0.6), Level::Ok);
}

#[test]
fn tables_slots_and_wiring() {
    let table = |live, dead, autovacuum_off| Table {
        name: "messages".into(),
        live,
        dead,
        autovacuum_off,
    };
    let level = |table| levels(&judge_tables(&[table]));
    assert_eq!(level(table(0, 99_999, false)), [Level::Ok]);
    assert_eq!(level(table(10, 100_001, false)), [Level::Warning]);
    assert_eq!(level(table(10, 0, true)), [Level::Warning]);
    assert_eq!(level(table(200_000, 100_001, false)), [Level::Ok]);
    let slot = ("standby".to_owned(), false, SLOT_BYTES_MAX + 1);
    assert_eq!(judge_slot(Some(&slot)).level, Level::Warning);
    assert_eq!(judge_slot(None).level, Level::Ok);
    assert_eq!(
        levels(&judge_wiring(false, true)),
        [Level::Warning, Level::Error]
    );
    let notified = |ms| judge_notification(Some(Duration::from_millis(ms))).level;
    assert_eq!([notified(1), notified(300)], [Level::Ok, Level::Warning]);
    assert_eq!(judge_notification(None).level, Level::Warning);
}

#[test]
fn what_is_not_seen_is_a_note() {
    let unseen: Seen<i64> = Err("permission denied".into());
    let findings = each(&unseen, "disk", |_| Vec::new());
    assert_eq!(levels(&findings), [Level::Note]);
    assert!(judge_disk(1, 1, None).found.contains("not to be seen"));
}
