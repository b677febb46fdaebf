use std::{os::unix::process::ExitStatusExt, process::Command, time::Duration};

use outbox_testkit::{Output, Process};

use crate::{DEADLINE, QUIET};

const NO_ENV: [(&str, &str); 0] = [];

/// Whether the process runs; one that only waits to be reaped does not.
pub(crate) fn is_alive(pid: u32) -> bool {
    let output = Command::new("ps")
        .args(["-o", "stat=", "-p", &pid.to_string()])
        .output()
        .unwrap();
    let state = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    !state.is_empty() && !state.starts_with('Z')
}

fn shell(script: &str) -> Process {
    Process::spawn("sh", ["-c", script], NO_ENV).unwrap()
}

#[tokio::test]
async fn lines_of_both_outputs_are_kept() {
    let process = Process::spawn(
        "sh",
        [
            "-c",
            "echo out $WORD; echo err $WORD >&2; printf unfinished; exit 3",
        ],
        [("WORD", "hello")],
    )
    .unwrap();
    assert_eq!(
        process.wait_for_line("err", DEADLINE).await.unwrap(),
        "err hello"
    );
    assert_eq!(
        process.wait_for_line("unfin", DEADLINE).await.unwrap(),
        "unfinished"
    );
    assert_eq!(process.wait(DEADLINE).await.unwrap().code(), Some(3));
    assert_eq!(
        process.lines_of(Output::Stdout),
        ["out hello", "unfinished"]
    );
    assert_eq!(process.lines_of(Output::Stderr), ["err hello"]);
    assert_eq!(process.lines().len(), 3);
}

#[tokio::test]
async fn a_line_that_cannot_come_any_more_is_told_at_once() {
    let process = shell("echo the reason");
    let error = process
        .wait_for_line("never", DEADLINE)
        .await
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("it ended") && error.contains("the reason"),
        "{error}"
    );
}

#[tokio::test]
async fn sigterm_can_be_handled_and_kill_9_cannot() {
    let process = shell("trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.01; done");
    process.wait_for_line("up", DEADLINE).await.unwrap();
    process.terminate();
    assert_eq!(process.wait(DEADLINE).await.unwrap().code(), Some(0));
    process.wait_for_line("bye", DEADLINE).await.unwrap();

    let process = shell("trap '' TERM; echo up; while :; do sleep 0.01; done");
    process.wait_for_line("up", DEADLINE).await.unwrap();
    process.terminate();
    assert!(process.wait(QUIET).await.is_err());
    process.kill9();
    assert_eq!(
        process.wait(Duration::ZERO).await.unwrap().signal(),
        Some(9)
    );
}

#[tokio::test]
async fn a_paused_process_stands_still() {
    let process = shell("i=0; while :; do i=$((i+1)); echo $i; sleep 0.01; done");
    process.wait_for_line("3", DEADLINE).await.unwrap();
    process.pause();
    tokio::time::sleep(QUIET).await;
    let lines = process.lines().len();
    tokio::time::sleep(QUIET).await;
    assert_eq!(process.lines().len(), lines);
    process.resume();
    process
        .wait_for_line(&(lines + 2).to_string(), DEADLINE)
        .await
        .unwrap();
}

#[tokio::test]
async fn a_dropped_process_is_gone_with_its_children() {
    let process = shell("sleep 1000 & echo $!; wait");
    let child = process
        .wait_for_line("", DEADLINE)
        .await
        .unwrap()
        .parse()
        .unwrap();
    let pid = process.pid();
    assert!(is_alive(pid) && is_alive(child));
    drop(process);
    assert!(!is_alive(pid) && !is_alive(child));
}

#[tokio::test]
async fn peak_memory_is_read_from_the_kernel() {
    let process = shell("echo up; sleep 1000");
    process.wait_for_line("up", DEADLINE).await.unwrap();
    let bytes = process.peak_rss_bytes().unwrap();
    assert!((100_000..100_000_000).contains(&bytes), "{bytes}");
    process.kill9();
    assert!(process.peak_rss_bytes().is_err());
}

#[tokio::test]
async fn a_missing_program_is_an_error() {
    let error = Process::spawn("/nonexistent/program", [""; 0], NO_ENV).unwrap_err();
    assert!(
        error.to_string().contains("/nonexistent/program"),
        "{error}"
    );
}
