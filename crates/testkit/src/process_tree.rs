//! Signals to a process and everything below it.

use std::{
    fs,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// Killed processes vanish within milliseconds; past this they are stuck in the kernel.
const GONE_DEADLINE: Duration = Duration::from_secs(10);

pub(crate) fn pid_of(raw: u32) -> Pid {
    Pid::from_raw(i32::try_from(raw).expect("the kernel's process ids fit an i32"))
}

/// Sends one signal; a process that is gone already is no error.
pub(crate) fn signal(pid: Pid, signal: Signal) {
    // EPERM cannot happen: we are root or the owner. ESRCH means that there is nobody left to signal.
    let _ = kill(pid, signal);
}

/// Stops (SIGSTOP) the process and all its descendants, the root first so that it makes no new ones.
pub(crate) fn pause(root: Pid) -> Vec<Pid> {
    signal(root, Signal::SIGSTOP);
    let mut stopped = vec![root];
    loop {
        // A child may have forked between the list and its stop, so look until nothing new turns up.
        let fresh: Vec<Pid> = descendants(root)
            .into_iter()
            .filter(|pid| !stopped.contains(pid))
            .collect();
        if fresh.is_empty() {
            break;
        }
        for pid in fresh {
            signal(pid, Signal::SIGSTOP);
            stopped.push(pid);
        }
    }
    let deadline = Instant::now() + GONE_DEADLINE;
    // The signal is delivered asynchronously; whoever pauses a server counts on it being still.
    while Instant::now() < deadline && !stopped.iter().all(|pid| is_still(*pid)) {
        thread::sleep(Duration::from_millis(1));
    }
    stopped
}

/// Lets the process and all its descendants go on (SIGCONT).
pub(crate) fn resume(root: Pid) {
    for pid in descendants(root) {
        signal(pid, Signal::SIGCONT);
    }
    signal(root, Signal::SIGCONT);
}

/// Kills (SIGKILL) the process and all its descendants; returns once they are gone or only wait to be reaped.
pub(crate) fn kill9(root: Pid) {
    let mut all = pause(root);
    all.reverse();
    for pid in &all {
        signal(*pid, Signal::SIGKILL);
    }
    let deadline = Instant::now() + GONE_DEADLINE;
    while Instant::now() < deadline && !all.iter().all(|pid| is_dead(*pid)) {
        thread::sleep(Duration::from_millis(1));
    }
}

fn exists(pid: Pid) -> bool {
    kill(pid, None) != Err(Errno::ESRCH)
}

/// The state letter of /proc, where there is one.
fn state(pid: Pid) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    parse_stat(&stat).map(|(state, _)| state)
}

fn is_still(pid: Pid) -> bool {
    match state(pid) {
        Some(state) => matches!(state, 'T' | 't' | 'Z' | 'X'),
        // No /proc (macOS), or gone.
        None => true,
    }
}

fn is_dead(pid: Pid) -> bool {
    !exists(pid) || matches!(state(pid), Some('Z' | 'X'))
}

fn descendants(root: Pid) -> Vec<Pid> {
    let parents = parents();
    let mut found = vec![root];
    let mut next = 0;
    while next < found.len() {
        let parent = found[next];
        found.extend(
            parents
                .iter()
                .filter(|(_, of)| *of == parent)
                .map(|(child, _)| *child),
        );
        next += 1;
    }
    found.split_off(1)
}

/// (process, parent) of every process of this machine.
fn parents() -> Vec<(Pid, Pid)> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return parents_by_ps();
    };
    entries
        .filter_map(Result::ok)
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
            let (_, parent) = parse_stat(&stat)?;
            Some((Pid::from_raw(pid), Pid::from_raw(parent)))
        })
        .collect()
}

fn parents_by_ps() -> Vec<(Pid, Pid)> {
    let Ok(output) = Command::new("ps")
        .args(["-A", "-o", "pid=", "-o", "ppid="])
        .output()
    else {
        return Vec::new();
    };
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| {
            let mut numbers = line.split_whitespace().map(str::parse);
            Some((
                Pid::from_raw(numbers.next()?.ok()?),
                Pid::from_raw(numbers.next()?.ok()?),
            ))
        })
        .collect()
}

/// State and parent from a line of `/proc/PID/stat`. The name in parentheses may hold spaces and parentheses.
fn parse_stat(stat: &str) -> Option<(char, i32)> {
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?.chars().next()?;
    Some((state, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_spaces_and_parentheses_does_not_confuse_stat() {
        assert_eq!(parse_stat("7 (a) (b c) S 42 7 7 0"), Some(('S', 42)));
    }
}
