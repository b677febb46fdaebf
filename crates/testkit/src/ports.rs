//! Ports that no other test process takes, also not while their server is down.

use std::{
    fs::{self, File},
    hash::{BuildHasher, Hasher},
    io::ErrorKind,
    net::{Ipv4Addr, TcpListener},
};

use crate::Error;

/// Below what Linux (32768) and macOS (49152) hand out to outgoing connections. A port from that range is not
/// safe while its server is down: a client that tries again and again can be given the very port it
/// calls, connects to itself, and the server cannot come back. It also leaves room for the bus port of Redis
/// Cluster, 10,000 higher.
const FIRST: u16 = 20_000;
const COUNT: u16 = 10_000;

/// Tries before the kit says that there is no free port.
const TRIES_MAX: u16 = 500;

/// A port of 127.0.0.1 that is kept for this process until dropped.
#[derive(Debug)]
pub(crate) struct Port {
    number: u16,
    /// Locked as long as it is open. The kernel lets go of it when the process dies, however it dies.
    _lock: File,
}

impl Port {
    /// Reserves a port on which nothing listens.
    pub(crate) fn reserve() -> Result<Self, Error> {
        let dir =
            std::env::temp_dir().join(format!("outbox-testkit-ports-{}", nix::unistd::geteuid()));
        fs::create_dir_all(&dir).map_err(|e| Error::io(format!("create {}", dir.display()), e))?;
        for _ in 0..TRIES_MAX {
            let number = FIRST + random_below(COUNT);
            let path = dir.join(number.to_string());
            let lock = File::options()
                .create(true)
                .truncate(false)
                .write(true)
                .open(&path)
                .map_err(|e| Error::io(format!("open {}", path.display()), e))?;
            if lock.try_lock().is_err() {
                continue;
            }
            match TcpListener::bind((Ipv4Addr::LOCALHOST, number)) {
                Ok(_) => {
                    return Ok(Self {
                        number,
                        _lock: lock,
                    });
                }
                Err(e) if e.kind() == ErrorKind::AddrInUse => {}
                Err(e) => return Err(Error::io(format!("bind 127.0.0.1:{number}"), e)),
            }
        }
        Err(Error::misuse(format!(
            "no free port among {TRIES_MAX} tried between {FIRST} and {}",
            FIRST + COUNT
        )))
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }
}

/// Random enough to spread parallel processes; each `RandomState` has new keys.
fn random_below(bound: u16) -> u16 {
    let hash = std::hash::RandomState::new().build_hasher().finish();
    u16::try_from(hash % u64::from(bound)).expect("the remainder is below a u16")
}
