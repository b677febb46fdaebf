//! Programs under test as processes of their own: the relay's daemon, consumers, test binaries.

use std::{
    collections::VecDeque,
    ffi::OsString,
    fs,
    io::{BufRead, BufReader, Read},
    path::PathBuf,
    process::{Child, ExitStatus, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use nix::{sys::signal::Signal, unistd::Pid};

use crate::{Error, process_tree, sandbox, supervised::launcher, wait::POLL_INTERVAL};

/// Lines that are kept of a process; beyond that the oldest go.
const LINES_MAX: usize = 100_000;

/// How long the lines of a process may come after its end.
const LAST_LINES: Duration = Duration::from_secs(2);

/// Lines that an error shows.
const LINES_SHOWN: usize = 30;

/// Which output a line was written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A process that is about to be started; made by [`Process::builder`] and [`relay`](crate::relay).
#[derive(Clone, Debug)]
#[must_use = "nothing starts before `spawn`"]
pub struct ProcessBuilder {
    program: PathBuf,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
}

impl ProcessBuilder {
    /// One more argument.
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// More arguments.
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// One variable in addition to the test's own environment. A later value of the same name wins.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Starts the process.
    ///
    /// # Errors
    ///
    /// The program is missing or cannot be run.
    pub fn spawn(self) -> Result<Process, Error> {
        let program = &self.program;
        // The launcher would report it only through its output.
        if program.components().count() > 1 && !program.is_file() {
            return Err(Error::misuse(format!(
                "there is no program {}",
                program.display()
            )));
        }
        let dir = sandbox::new_dir("process")?;
        let mut child = launcher(&dir, program, &self.args)
            .envs(self.env)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| Error::io(format!("start {}", program.display()), e))?;
        let lines = Arc::new(Mutex::new(VecDeque::new()));
        let stdout = child.stdout.take().expect("stdout was asked to be a pipe");
        let stderr = child.stderr.take().expect("stderr was asked to be a pipe");
        let readers = vec![
            collect(stdout, Output::Stdout, &lines),
            collect(stderr, Output::Stderr, &lines),
        ];
        let pid = child.id();
        let name = program
            .file_name()
            .map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        Ok(Process {
            name,
            dir,
            pid,
            child: Mutex::new(Running {
                child,
                status: None,
            }),
            lines,
            readers,
        })
    }
}

#[derive(Debug)]
struct Running {
    child: Child,
    /// Set once it has ended.
    status: Option<ExitStatus>,
}

type Lines = Arc<Mutex<VecDeque<(Output, String)>>>;

/// A running process whose output is kept. Dropped, it is killed; the same happens when the test process is
/// killed.
#[derive(Debug)]
pub struct Process {
    name: String,
    dir: PathBuf,
    pid: u32,
    child: Mutex<Running>,
    lines: Lines,
    readers: Vec<thread::JoinHandle<()>>,
}

impl Process {
    /// A process to be started. A program without `/` is looked up on PATH.
    pub fn builder(program: impl Into<PathBuf>) -> ProcessBuilder {
        ProcessBuilder {
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
        }
    }

    /// Starts a program with arguments, and variables in addition to the test's own environment.
    ///
    /// # Errors
    ///
    /// The program is missing or cannot be run.
    pub fn spawn<A: Into<OsString>, N: Into<OsString>, V: Into<OsString>>(
        program: impl Into<PathBuf>,
        args: impl IntoIterator<Item = A>,
        env: impl IntoIterator<Item = (N, V)>,
    ) -> Result<Self, Error> {
        let builder = Self::builder(program).args(args);
        env.into_iter()
            .fold(builder, |builder, (name, value)| builder.env(name, value))
            .spawn()
    }

    /// The process id; it stays known after the end.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Every line of both outputs so far, oldest first.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        lock(&self.lines)
            .iter()
            .map(|(_, line)| line.clone())
            .collect()
    }

    /// The lines of one output so far, oldest first.
    #[must_use]
    pub fn lines_of(&self, output: Output) -> Vec<String> {
        let lines = lock(&self.lines);
        lines
            .iter()
            .filter(|(of, _)| *of == output)
            .map(|(_, line)| line.clone())
            .collect()
    }

    /// Waits until a line contains `text`, and returns the first such line. Lines written before the call count.
    ///
    /// # Errors
    ///
    /// The deadline passed, or the process ended without such a line; the message shows its last lines.
    ///
    /// # Cancel safety
    ///
    /// Can be dropped and called again: no line is consumed.
    pub async fn wait_for_line(&self, text: &str, deadline: Duration) -> Result<String, Error> {
        let started = Instant::now();
        loop {
            // Asked first: what it wrote before its end is there when its readers are done.
            let ended =
                self.exit_status().is_some() && self.readers.iter().all(|r| r.is_finished());
            let found = lock(&self.lines)
                .iter()
                .map(|(_, line)| line)
                .find(|l| l.contains(text))
                .cloned();
            if let Some(line) = found {
                return Ok(line);
            }
            if ended || started.elapsed() > deadline {
                let how = if ended { "it ended" } else { "it still runs" };
                return Err(Error::server(
                    format!(
                        "no line of {} contains {text:?} after {:?}; {how}",
                        self.name,
                        started.elapsed()
                    ),
                    self.last_lines(),
                ));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits until the process has ended by itself or by a signal, and its last lines are collected.
    ///
    /// # Errors
    ///
    /// It still runs after `deadline`; the message shows its last lines.
    ///
    /// # Cancel safety
    ///
    /// Can be dropped and called again: the status stays known.
    pub async fn wait(&self, deadline: Duration) -> Result<ExitStatus, Error> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.exit_status() {
                let ended = Instant::now();
                // A child that it left behind may keep its outputs open.
                while !self.readers.iter().all(|reader| reader.is_finished())
                    && ended.elapsed() < LAST_LINES
                {
                    tokio::time::sleep(POLL_INTERVAL).await;
                }
                return Ok(status);
            }
            if started.elapsed() > deadline {
                return Err(Error::server(
                    format!("{} still runs after {deadline:?}", self.name),
                    self.last_lines(),
                ));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// The exit status, once the process has ended.
    #[must_use]
    pub fn exit_status(&self) -> Option<ExitStatus> {
        let mut running = lock(&self.child);
        if running.status.is_none() {
            running.status = running.child.try_wait().ok().flatten();
            if running.status.is_some() {
                // Its number may soon be somebody else's.
                let _ = fs::remove_file(self.dir.join("pid"));
            }
        }
        running.status
    }

    /// Kills (SIGKILL) the process and its children; returns when they are gone.
    pub fn kill9(&self) {
        if self.exit_status().is_none() {
            process_tree::kill9(self.nix_pid());
            let mut running = lock(&self.child);
            // It was killed: waiting cannot block.
            running.status = running.child.wait().ok();
            let _ = fs::remove_file(self.dir.join("pid"));
        }
    }

    /// Asks the process to end (SIGTERM); see [`wait`](Self::wait).
    pub fn terminate(&self) {
        self.signal(Signal::SIGTERM);
    }

    /// Asks the process to end as Ctrl-C does (SIGINT).
    pub fn interrupt(&self) {
        self.signal(Signal::SIGINT);
    }

    /// Stops (SIGSTOP) the process and its children: its connections stay open and nothing answers.
    pub fn pause(&self) {
        if self.exit_status().is_none() {
            process_tree::pause(self.nix_pid());
        }
    }

    /// Lets a paused process go on.
    pub fn resume(&self) {
        if self.exit_status().is_none() {
            process_tree::resume(self.nix_pid());
        }
    }

    /// The most memory the running process ever had resident (VmHWM).
    ///
    /// # Errors
    ///
    /// The process has ended, or this system has no `/proc`.
    pub fn peak_rss_bytes(&self) -> Result<u64, Error> {
        let path = format!("/proc/{}/status", self.pid);
        let status = fs::read_to_string(&path).map_err(|e| Error::io(format!("read {path}"), e))?;
        let kib: Option<u64> = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:"))
            .and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        kib.map(|kib| kib * 1024)
            .ok_or_else(|| Error::misuse(format!("{path} has no VmHWM: the process has ended")))
    }

    fn signal(&self, signal: Signal) {
        if self.exit_status().is_none() {
            process_tree::signal(self.nix_pid(), signal);
        }
    }

    fn nix_pid(&self) -> Pid {
        process_tree::pid_of(self.pid)
    }

    fn last_lines(&self) -> String {
        let lines = lock(&self.lines);
        let skipped = lines.len().saturating_sub(LINES_SHOWN);
        lines
            .iter()
            .skip(skipped)
            .map(|(_, line)| format!("{line}\n"))
            .collect()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill9();
        // What cannot be removed now is removed by the watchdog.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Reads an output to its end on a thread: the process must never block on a full pipe.
fn collect(
    from: impl Read + Send + 'static,
    output: Output,
    lines: &Lines,
) -> thread::JoinHandle<()> {
    let lines = Arc::clone(lines);
    thread::spawn(move || {
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        while matches!(from.read_until(b'\n', &mut line), Ok(1..)) {
            let text = String::from_utf8_lossy(&line)
                .trim_end_matches(['\n', '\r'])
                .to_owned();
            let mut lines = lock(&lines);
            if lines.len() == LINES_MAX {
                lines.pop_front();
            }
            lines.push_back((output, text));
            line.clear();
        }
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change under these locks is a single assignment or push.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
