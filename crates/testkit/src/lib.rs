//! Real servers for tests: Postgres and Redis on private ports, the faults that happen to them, and a TCP
//! proxy for those of the network.
//!
//! The files in reading order:
//!
//! 1. `postgres/` and `redis/`: the servers. `builder` is the set-up, `faults` what can happen to one, `cluster` and
//!    `sentinels` several of Redis together.
//! 2. `proxy/`: the network between them. `hold` stops it at a chosen request, `link` is one connection, `frames` the
//!    Postgres protocol as far as that needs it.
//! 3. `process.rs`, `relay.rs`: the programs under test. `pgbouncer.rs`: a pooler before Postgres.
//! 4. `wait.rs`: waiting for a condition with a deadline.
//! 5. `supervised.rs`, `process_tree.rs`, `sandbox.rs` and `watchdog.sh`: how processes are started and
//!    killed, and why none is left when a test panics or is killed.
//! 6. `binaries.rs`, `identity.rs`, `ports.rs`: where the servers are installed, as whom and on which port
//!    they run.
//! 7. `certificates.rs`: for servers that speak TLS.
//! 8. `error.rs`: what went wrong, with the end of the server's log.
//!
//! Everything belongs to the test process and ends with it, however it ends. Variables that change where the kit
//! looks:
//!
//! | variable | names | default |
//! |---|---|---|
//! | `OUTBOX_POSTGRES_BIN_DIR` | the directory with `initdb` and `postgres` | PATH, then where Debian, Fedora and Homebrew put them, newest first |
//! | `OUTBOX_REDIS_SERVER` | the Redis server | PATH, then the usual directories |
//! | `OUTBOX_PGBOUNCER` | PgBouncer | PATH, then the usual directories |
//! | `OUTBOX_RELAY_BIN` | the relay's binary | `outbox-relay` beside the test's directory |
//! | `OUTBOX_TESTKIT_DIR` | where the servers keep their files | `/dev/shm` with 4 GB free, else the temporary directory |
//!
//! ```no_run
//! # async fn example() -> Result<(), outbox_testkit::Error> {
//! use outbox_testkit::{Postgres, Redis};
//!
//! let postgres = Postgres::shared().await?;
//! let database = postgres.fresh_outbox().await?;
//! let client = postgres.connect(&database).await?;
//! let redis = Redis::start().await?;
//! redis.kill9().await?;
//! redis.start_again().await?;
//! # drop(client);
//! # Ok(())
//! # }
//! ```

mod binaries;
mod certificates;
mod error;
mod identity;
mod pgbouncer;
mod ports;
mod postgres;
mod process;
mod process_tree;
mod proxy;
mod redis;
mod relay;
mod sandbox;
mod snapshot;
mod supervised;
mod wait;

pub use crate::{
    certificates::{Authority, Certificate},
    error::Error,
    pgbouncer::PgBouncer,
    postgres::{Postgres, PostgresBuilder, Shutdown, StandbyBuilder},
    process::{Output, Process, ProcessBuilder},
    proxy::{Direction, Hold, Matcher, Proxy},
    redis::{
        Fsync, Keys, Persistence, Redis, RedisBuilder, RedisCluster, Sentinels, SentinelsBuilder,
    },
    relay::{RelayStep, find_relay_binary, relay, relay_binary},
    snapshot::Snapshot,
    wait::{Probe, eventually},
};
