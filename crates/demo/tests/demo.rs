//! The demo itself, small: its last line is what it promises.

#![allow(
    clippy::unwrap_used,
    reason = "the helpers of a test fail like the test"
)]

use std::{collections::BTreeMap, time::Duration};

use outbox_testkit::{Output, Process, ProcessBuilder, eventually, relay_binary};

/// A small run takes a few seconds; busy machines more.
const DEADLINE: Duration = Duration::from_secs(120);

fn demo(orders: &str) -> ProcessBuilder {
    Process::builder(env!("CARGO_BIN_EXE_outbox-demo"))
        .env("DEMO_ORDERS", orders)
        .env("OUTBOX_RELAY_BIN", relay_binary())
}

/// `demo: a=1 b=2` as pairs.
fn counts(line: &str) -> BTreeMap<&str, u64> {
    line.strip_prefix("demo: ")
        .unwrap()
        .split(' ')
        .map(|pair| {
            let (name, count) = pair.split_once('=').unwrap();
            (name, count.parse().unwrap())
        })
        .collect()
}

#[tokio::test]
async fn a_small_demo_loses_doubles_and_makes_up_nothing() {
    let demo = demo("500").spawn().unwrap();
    let status = demo.wait(DEADLINE).await.unwrap();
    // The line may still be on its way through the pipe.
    let line = demo.wait_for_line("demo: ", DEADLINE).await.unwrap();
    assert!(status.success(), "{:#?}", demo.lines());
    let said = demo.lines_of(Output::Stdout);
    assert_eq!(said.last(), Some(&line));
    assert_eq!(
        said.iter().filter(|l| l.starts_with("demo: ")).count(),
        1,
        "{said:#?}"
    );

    let counts = counts(&line);
    let expected = [
        ("orders", 500),
        ("rolled_back", 56),
        ("published", 500),
        ("applied", 500),
        ("lost", 0),
        ("doubled", 0),
        ("phantom", 0),
    ];
    assert_eq!(counts, BTreeMap::from(expected), "{line}");

    // Both faults happened, and both servers came back.
    for told in [
        "Killed the relay",
        "Started the relay again",
        "Killed Redis",
        "Started Redis again",
    ] {
        assert!(
            said.iter().any(|l| l.contains(told)),
            "no {told:?} in {said:#?}"
        );
    }
}

#[tokio::test]
async fn a_size_that_is_none_is_refused_in_one_line() {
    let demo = demo("many").spawn().unwrap();
    let status = demo.wait(DEADLINE).await.unwrap();
    let line = demo.wait_for_line("DEMO_ORDERS", DEADLINE).await.unwrap();
    assert_eq!(status.code(), Some(64));
    assert_eq!(demo.lines(), [line]);
}

#[tokio::test]
async fn an_interrupted_demo_leaves_no_server_behind() {
    // Everything it starts keeps its files here, and its servers are started with paths in it.
    let dir = tempfile::tempdir().unwrap();
    // Postgres runs as another user when we are root, and must be able to walk through.
    set_mode_of_passage(dir.path());
    let demo = demo("1000000")
        .env("OUTBOX_TESTKIT_DIR", dir.path())
        .spawn()
        .unwrap();
    demo.wait_for_line("The shop opens", DEADLINE)
        .await
        .unwrap();
    demo.interrupt();
    let status = demo.wait(DEADLINE).await.unwrap();
    assert_eq!(status.code(), Some(130), "{:#?}", demo.lines());
    eventually(DEADLINE, "no process with files there", || async {
        let left = processes_with(&dir.path().to_string_lossy());
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await
    .unwrap();
    eventually(DEADLINE, "no data left", || async {
        let left = data_in(dir.path());
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await
    .unwrap();
}

/// What the servers kept there. Empty clusters, to be copied by the next run, stay.
fn data_in(dir: &std::path::Path) -> Vec<String> {
    std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.starts_with("outbox-testkit-templates-"))
        .collect()
}

fn set_mode_of_passage(dir: &std::path::Path) {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o711)).unwrap();
}

/// The command lines of other processes that name `text`.
fn processes_with(text: &str) -> Vec<String> {
    let output = std::process::Command::new("ps")
        .args(["-A", "-o", "args="])
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter(|line| line.contains(text))
        .map(str::to_owned)
        .collect()
}
