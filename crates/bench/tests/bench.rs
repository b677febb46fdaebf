//! The benchmark itself, tiny: it runs, and says what it has to say.

#![allow(
    clippy::unwrap_used,
    reason = "the helpers of a test fail like the test"
)]

use std::time::Duration;

use outbox_testkit::{Process, ProcessBuilder, relay_binary};

/// It takes a second or two; busy machines more.
const DEADLINE: Duration = Duration::from_secs(120);

fn bench() -> ProcessBuilder {
    Process::builder(env!("CARGO_BIN_EXE_outbox-bench")).env("OUTBOX_RELAY_BIN", relay_binary())
}

#[tokio::test]
async fn a_tiny_run_writes_table_results_and_chart() {
    let dir = tempfile::tempdir().unwrap();
    let results = dir.path().join("results.json");
    let run = bench()
        .args(["--tiny", "--only", "drain_vs_limit", "--results"])
        .arg(&results)
        .spawn()
        .unwrap();
    let status = run.wait(DEADLINE).await.unwrap();
    let said = run.lines();
    // A target that is missed is no failure: a tiny run reaches none.
    assert!(status.success(), "{said:#?}");
    assert!(
        said.iter()
            .any(|line| line.contains("relay / limit") && line.contains(">= 0.55")),
        "{said:#?}"
    );

    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&results).unwrap()).unwrap();
    assert_eq!(json["size"], "tiny");
    assert_eq!(json["measures"][0]["name"], "drain_vs_limit");
    let rate = &json["measures"][0]["figures"][1];
    assert_eq!(
        (&rate["name"], &rate["unit"]),
        (&"relay".into(), &"rows/s".into())
    );
    assert!(rate["summary"]["median"].as_f64().unwrap() > 0.0, "{rate}");
    assert!(!json["machine"]["postgres"].as_str().unwrap().is_empty());
    let chart = std::fs::read_to_string(dir.path().join("drain.svg")).unwrap();
    assert!(chart.starts_with("<svg"), "{chart}");
}

#[tokio::test]
async fn an_unknown_measure_is_refused_with_those_that_there_are() {
    let run = bench().args(["--only", "speed"]).spawn().unwrap();
    assert_eq!(run.wait(DEADLINE).await.unwrap().code(), Some(2));
    let said = run.lines().join("\n");
    assert!(
        said.contains("drain_vs_limit") && said.contains("held_xmin"),
        "{said}"
    );
}
