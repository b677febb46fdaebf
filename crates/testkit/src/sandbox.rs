//! The directory of this test process, and the watchdog that empties it however the process ends.

use std::{
    env, fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use nix::sys::statvfs::statvfs;

use crate::Error;

/// `sh -c` of this script waits until the pipe from this process closes, then kills and removes.
const WATCHDOG: &str = include_str!("watchdog.sh");

/// Names the directory to keep everything in; goes before everything else.
const BASE_VARIABLE: &str = "OUTBOX_TESTKIT_DIR";

/// A file system in memory on every Linux. Containers usually give it 64 MB, which is not enough.
const MEMORY_DIR: &str = "/dev/shm";

/// A server takes 40 to 200 MB, and a few dozen may run at once.
const MEMORY_BYTES_MIN: u64 = 4 << 30;

struct Sandbox {
    dir: PathBuf,
    /// Never written to. It closes when this process ends, which is what the watchdog waits for.
    _pipe: ChildStdin,
    _watchdog: Child,
}

/// Makes a new empty directory that outlives neither its user nor this process.
pub(crate) fn new_dir(name: &str) -> Result<PathBuf, Error> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let dir = sandbox()?.join(format!("{name}-{number}"));
    fs::create_dir(&dir).map_err(|e| Error::io(format!("create {}", dir.display()), e))?;
    set_mode(&dir, 0o711)?;
    Ok(dir)
}

/// Where everything is kept: the directory that `OUTBOX_TESTKIT_DIR` names, else memory where there is plenty, else
/// the temporary directory.
///
/// A cluster has a thousand files, and making, syncing and removing them is most of what a test waits for. In
/// memory a server loses no more than on disk when it is killed: only an end of the whole system would, and no
/// test can do that.
#[allow(
    clippy::useless_conversion,
    reason = "the counts are narrower on other systems"
)]
pub(crate) fn base_dir() -> &'static Path {
    static BASE: OnceLock<PathBuf> = OnceLock::new();
    BASE.get_or_init(|| {
        let chosen = env::var_os(BASE_VARIABLE).map(PathBuf::from);
        chosen.unwrap_or_else(|| {
            let memory = Path::new(MEMORY_DIR);
            let roomy = statvfs(memory).is_ok_and(|stat| {
                u64::from(stat.blocks_available()) * u64::from(stat.fragment_size())
                    >= MEMORY_BYTES_MIN
            });
            if roomy {
                memory.to_path_buf()
            } else {
                env::temp_dir()
            }
        })
    })
}

fn sandbox() -> Result<&'static Path, Error> {
    static SANDBOX: OnceLock<Result<Sandbox, String>> = OnceLock::new();
    match SANDBOX.get_or_init(|| open().map_err(|e| e.to_string())) {
        Ok(sandbox) => Ok(&sandbox.dir),
        Err(reason) => Err(Error::misuse(reason.clone())),
    }
}

fn open() -> Result<Sandbox, Error> {
    let dir = tempfile::Builder::new()
        .prefix("outbox-testkit-")
        .tempdir_in(base_dir())
        .map_err(|e| Error::io("create a directory for the servers", e))?
        .keep();
    // Postgres runs as another user when we are root, and must be able to walk through.
    set_mode(&dir, 0o711)?;
    let mut watchdog = Command::new("sh")
        .arg("-c")
        .arg(WATCHDOG)
        .arg("watchdog")
        .arg(&dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // Not in our group: what ends the group (Ctrl-C, a test runner's timeout) must not end it.
        .process_group(0)
        .current_dir("/")
        .spawn()
        .map_err(|e| Error::io("start the watchdog (sh)", e))?;
    let pipe = watchdog.stdin.take().expect("stdin was asked to be a pipe");
    Ok(Sandbox {
        dir,
        _pipe: pipe,
        _watchdog: watchdog,
    })
}

pub(crate) fn set_mode(path: &Path, mode: u32) -> Result<(), Error> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(|e| Error::io(format!("set the mode of {}", path.display()), e))
}
