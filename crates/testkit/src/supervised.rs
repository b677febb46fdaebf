//! A server process: started by a launcher that the watchdog knows, killed with all its children.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File},
    io::{Read, Seek, SeekFrom},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use nix::{sys::signal::Signal, unistd::Pid};

use crate::{
    Error, identity::Identity, process_tree, sandbox, snapshot::Snapshot, wait::POLL_INTERVAL,
};

/// Writes its own process id where the watchdog looks, and becomes the server unless the watchdog has begun.
/// In this order nothing is left running: either the watchdog finds the id, or the launcher sees its mark.
const LAUNCHER: &str = r#"echo $$ >"$0/pid" && [ ! -e "$0/../ended" ] || exit 1; exec "$@""#;

/// How much of the log an error shows.
const LOG_TAIL_BYTES: u64 = 4_000;

/// Makes a command that the watchdog ends when the test process is gone. `dir` is from [`sandbox::new_dir`]
/// and belongs to the account that the command runs under.
pub(crate) fn launcher(dir: &Path, program: &Path, args: &[OsString]) -> Command {
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(LAUNCHER)
        .arg(dir)
        .arg(program)
        .args(args);
    // Not in our group, so that Ctrl-C on the terminal reaches servers only through us.
    command.process_group(0);
    command
}

/// One server with its directory. Starts, dies and starts again; dropped, both are gone.
#[derive(Debug)]
pub(crate) struct Supervised {
    dir: PathBuf,
    identity: Identity,
    child: Mutex<Option<Child>>,
    /// Stopped by [`pause`](Self::pause), and by nothing else.
    paused: AtomicBool,
}

impl Supervised {
    /// Makes the directory; nothing runs yet.
    pub(crate) fn new(name: &str, identity: Identity) -> Result<Self, Error> {
        let dir = sandbox::new_dir(name)?;
        identity.own(&dir)?;
        Ok(Self {
            dir,
            identity,
            child: Mutex::new(None),
            paused: AtomicBool::new(false),
        })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Starts the program; its output is appended to the log.
    pub(crate) fn spawn(&self, program: &Path, args: &[OsString]) -> Result<(), Error> {
        let mut child = self.lock();
        if child
            .as_mut()
            .is_some_and(|child| matches!(child.try_wait(), Ok(None)))
        {
            return Err(Error::misuse(format!(
                "{} is running already",
                program.display()
            )));
        }
        let open = || {
            File::options()
                .create(true)
                .append(true)
                .open(self.log_path())
                .map_err(|e| Error::io(format!("open {}", self.log_path().display()), e))
        };
        let mut command = launcher(&self.dir, program, args);
        command
            .stdin(Stdio::null())
            .stdout(open()?)
            .stderr(open()?)
            .current_dir(&self.dir);
        self.identity.apply(&mut command);
        *child = Some(
            command
                .spawn()
                .map_err(|e| Error::io(format!("start {}", program.display()), e))?,
        );
        Ok(())
    }

    /// The process, running or ended but not yet noticed.
    pub(crate) fn pid(&self) -> Option<Pid> {
        self.lock()
            .as_ref()
            .map(|child| process_tree::pid_of(child.id()))
    }

    /// The exit status once the process has ended. `None` while it runs, and when none was started.
    pub(crate) fn exit_status(&self) -> Option<ExitStatus> {
        let mut child = self.lock();
        let status = child.as_mut()?.try_wait().ok()??;
        *child = None;
        self.forget_pid();
        Some(status)
    }

    pub(crate) fn is_running(&self) -> bool {
        // Asking for the status notices an end.
        self.exit_status().is_none() && self.pid().is_some()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(pid) = self.pid() {
            process_tree::signal(pid, signal);
        }
    }

    pub(crate) fn pause(&self) {
        if let Some(pid) = self.pid() {
            self.paused.store(true, Ordering::SeqCst);
            process_tree::pause(pid);
        }
    }

    pub(crate) fn resume(&self) {
        self.paused.store(false, Ordering::SeqCst);
        if let Some(pid) = self.pid() {
            process_tree::resume(pid);
        }
    }

    /// A copy of a subdirectory at one moment: processes are stopped while it is made, and stay as they were.
    pub(crate) async fn snapshot(&self, data_dir: &Path) -> Result<Snapshot, Error> {
        if self.paused.load(Ordering::SeqCst) || !self.is_running() {
            return Snapshot::take(data_dir).await;
        }
        self.pause();
        let snapshot = Snapshot::take(data_dir).await;
        self.resume();
        snapshot
    }

    /// SIGKILL to the process and all its descendants; returns when they are gone.
    pub(crate) fn kill9(&self) {
        self.paused.store(false, Ordering::SeqCst);
        if let Some(mut child) = self.lock().take() {
            process_tree::kill9(process_tree::pid_of(child.id()));
            // It was killed: waiting cannot block, and its status says nothing new.
            let _ = child.wait();
            self.forget_pid();
        }
    }

    /// Waits until the process has ended by itself.
    pub(crate) async fn ended(&self, what: &str, deadline: Duration) -> Result<(), Error> {
        let started = Instant::now();
        while self.is_running() {
            if started.elapsed() > deadline {
                return Err(Error::server(
                    format!("waited {deadline:?} for {what}"),
                    self.log_tail(),
                ));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    pub(crate) fn log_path(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// How long the log is now: what comes after belongs to the next start.
    pub(crate) fn log_len(&self) -> u64 {
        fs::metadata(self.log_path()).map_or(0, |meta| meta.len())
    }

    /// The log from a position on. Empty when there is none.
    pub(crate) fn log_from(&self, position: u64) -> String {
        let mut text = Vec::new();
        if let Ok(mut file) = File::open(self.log_path())
            && file.seek(SeekFrom::Start(position)).is_ok()
        {
            // A log that cannot be read is shown as far as it could be.
            let _ = file.read_to_end(&mut text);
        }
        String::from_utf8_lossy(&text).into_owned()
    }

    pub(crate) fn log_tail(&self) -> String {
        self.log_from(self.log_len().saturating_sub(LOG_TAIL_BYTES))
    }

    fn forget_pid(&self) {
        // Before the kernel may give the number to somebody else, or nearly so. Missing is fine.
        let _ = fs::remove_file(self.dir.join("pid"));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Child>> {
        // A panic in another test thread cannot leave the Option half-written.
        self.child
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Drop for Supervised {
    fn drop(&mut self) {
        self.kill9();
        // What cannot be removed now is removed by the watchdog.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Runs a tool to its end on a blocking thread, under `identity`.
pub(crate) async fn run_tool<S: AsRef<OsStr>>(
    identity: &Identity,
    program: &Path,
    args: impl IntoIterator<Item = S>,
) -> Result<String, Error> {
    let mut command = Command::new(program);
    command
        .args(args)
        .env("LC_ALL", "C")
        .current_dir("/")
        .stdin(Stdio::null());
    identity.apply(&mut command);
    let name = program.display().to_string();
    let output = tokio::task::spawn_blocking(move || command.output())
        .await
        .map_err(|e| Error::misuse(format!("run {name}: {e}")))?
        .map_err(|e| Error::io(format!("run {}", program.display()), e))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    Err(Error::command(
        program.display().to_string(),
        format!("failed ({})", output.status),
        format!("{} {}", text(&output.stderr), text(&output.stdout))
            .trim()
            .to_owned(),
    ))
}
