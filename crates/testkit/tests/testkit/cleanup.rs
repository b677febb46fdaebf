//! Nothing is left of a test process, however it ends. Each test runs itself once more as the victim.

use std::{
    env,
    io::Write,
    net::{Ipv4Addr, TcpStream},
    path::Path,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use outbox_testkit::{Postgres, Process, Redis, eventually};

use crate::{DEADLINE, process::is_alive};

/// Set in the environment of the victim.
const VICTIM: &str = "OUTBOX_TESTKIT_VICTIM";

#[derive(Debug)]
struct Victim {
    process: Process,
    /// Of the servers it started.
    pids: Vec<u32>,
    ports: Vec<u16>,
    dir: String,
}

/// In the victim: servers and a process, as many tests have them, and word of them to the parent.
async fn start_servers() -> (Postgres, Redis, Process) {
    let postgres = Postgres::start().await.unwrap();
    let redis = Redis::start().await.unwrap();
    let process = Process::spawn("sleep", ["1000"], [("", ""); 0]).unwrap();
    let client = postgres.connect("postgres").await.unwrap();
    let backend: i32 = client
        .query_one("SELECT pg_backend_pid()", &[])
        .await
        .unwrap()
        .get(0);
    let lock = std::fs::read_to_string(postgres.data_dir().join("postmaster.pid")).unwrap();
    let info: String = redis::cmd("INFO")
        .arg("server")
        .query_async(&mut redis.connect().await.unwrap())
        .await
        .unwrap();
    let redis_pid = info
        .lines()
        .find_map(|line| line.strip_prefix("process_id:"))
        .unwrap()
        .trim();
    let dir = postgres.data_dir();
    let sandbox = dir.parent().and_then(Path::parent).unwrap();
    let (port, redis_port, pid) = (postgres.port(), redis.port(), process.pid());
    let postmaster = lock.lines().next().unwrap();
    let told = format!(
        "\nvictim {} {port} {redis_port} {postmaster} {backend} {redis_pid} {pid}\n",
        sandbox.display(),
    );
    std::io::stdout().write_all(told.as_bytes()).unwrap();
    // The backend must not end by itself.
    std::mem::forget(client);
    (postgres, redis, process)
}

async fn run_victim(test: &str) -> Victim {
    let process = Process::builder(env::current_exe().unwrap())
        .args(["--exact", &format!("cleanup::{test}"), "--nocapture"])
        .env(VICTIM, "1")
        .spawn()
        .unwrap();
    let line = process.wait_for_line("victim ", DEADLINE).await.unwrap();
    let words: Vec<&str> = line.split(' ').skip(1).collect();
    let victim = Victim {
        process,
        dir: words[0].to_owned(),
        ports: words[1..3]
            .iter()
            .map(|port| port.parse().unwrap())
            .collect(),
        pids: words[3..].iter().map(|pid| pid.parse().unwrap()).collect(),
    };
    assert_eq!(victim.pids.len(), 4);
    victim
}

impl Victim {
    async fn leaves_nothing(&self) {
        eventually(DEADLINE, "everything to be gone", || async {
            let alive: Vec<_> = self.pids.iter().filter(|pid| is_alive(**pid)).collect();
            let open: Vec<_> = self
                .ports
                .iter()
                .filter(|port| TcpStream::connect((Ipv4Addr::LOCALHOST, **port)).is_ok())
                .collect();
            let dir = Path::new(&self.dir).exists();
            if alive.is_empty() && open.is_empty() && !dir {
                Ok(())
            } else {
                Err(format!(
                    "processes {alive:?}, ports {open:?}, directory {dir}"
                ))
            }
        })
        .await
        .unwrap();
    }
}

fn is_victim() -> bool {
    env::var_os(VICTIM).is_some()
}

#[tokio::test]
async fn a_panic_leaves_nothing() {
    if is_victim() {
        let _servers = start_servers().await;
        panic!("as a failed assertion does");
    }
    let victim = run_victim("a_panic_leaves_nothing").await;
    assert_eq!(
        victim.process.wait(DEADLINE).await.unwrap().code(),
        Some(101)
    );
    victim.leaves_nothing().await;
}

#[tokio::test]
async fn kill_9_leaves_nothing() {
    if is_victim() {
        let _servers = start_servers().await;
        std::future::pending::<()>().await;
    }
    let victim = run_victim("kill_9_leaves_nothing").await;
    assert!(victim.pids.iter().all(|pid| is_alive(*pid)));
    // The process alone: what it started must end without help.
    let pid = Pid::from_raw(i32::try_from(victim.process.pid()).unwrap());
    kill(pid, Signal::SIGKILL).unwrap();
    victim.leaves_nothing().await;
}

#[tokio::test]
async fn servers_that_were_never_dropped_end_with_the_process() {
    if is_victim() {
        let (postgres, redis, process) = start_servers().await;
        // As the shared server, which is in a static.
        std::mem::forget((postgres, redis, process));
        return;
    }
    let victim = run_victim("servers_that_were_never_dropped_end_with_the_process").await;
    assert_eq!(victim.process.wait(DEADLINE).await.unwrap().code(), Some(0));
    victim.leaves_nothing().await;
}

#[tokio::test]
async fn paused_and_killed_servers_leave_nothing() {
    if is_victim() {
        let (postgres, redis, _process) = start_servers().await;
        redis.pause().await.unwrap();
        postgres.pause().await.unwrap();
        panic!("with everything stopped");
    }
    let victim = run_victim("paused_and_killed_servers_leave_nothing").await;
    assert_eq!(
        victim.process.wait(DEADLINE).await.unwrap().code(),
        Some(101)
    );
    victim.leaves_nothing().await;
}
