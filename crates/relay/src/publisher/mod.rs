//! The only place that talks to Redis: the marker, the pages, and the tails of the streams.

mod address;
mod cluster;
mod entry;
mod marker;
mod page;
mod replay;
mod report;
mod rights;
mod streams;
mod target;
mod tending;

use std::collections::HashMap;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, Script, Value};
use uuid::Uuid;

pub use address::RedisTls;
pub(crate) use cluster::check_prefix;
pub(crate) use entry::Entries;
pub(crate) use page::{PageWrite, Published, may_be_the_page};
pub(crate) use replay::{REPLAY_FIELD, ReplayProgress, ReplayStep, Replayer, Stepped};
pub(crate) use report::{CareReport, HeldFor, HeldStanding, read_report};
pub(crate) use rights::{RELAY_COMMANDS, consumer_acl, relay_acl};
pub(crate) use streams::tail_from_ms;
pub use target::RedisTarget;
pub(crate) use tending::{Memory, Standing, Tended, Tending, Trim, trimmed_key};

use self::marker::About;

use crate::error::{Error, Result, redis_fault};
use crate::protocol::failure::{RedisFault, ReplyCode};
use crate::protocol::place::{Place, Suspect};
use crate::protocol::start::MarkerFound;

const LONE_LUA: &str = include_str!("lone.lua");
const OPEN_LUA: &str = include_str!("open.lua");
const CLOSE_LUA: &str = include_str!("close.lua");
const TAKE_LUA: &str = include_str!("take.lua");

/// For how long what was published can come again: consumers remember what they applied for longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    /// How long a published row stays in the outbox.
    pub(crate) retention: Duration,
    /// How long an entry stays in its stream at least, if streams are trimmed at all.
    pub(crate) stream_max_age: Option<Duration>,
}

/// The oldest Redis that knows scripts which are refused as a whole (`#!lua`).
const REDIS_VERSION_MIN: u32 = 7;

/// A connection to Redis.
#[derive(Debug)]
pub(crate) struct Publisher {
    connection: MultiplexedConnection,
    marker_key: String,
    gaps_key: String,
    /// What a page's transaction notes for its own end.
    note_key: String,
    lone: Script,
    open: String,
    close: String,
    /// Drawn anew at each take-over: an epoch can come twice when both servers fall back.
    leadership: Uuid,
}

/// The keys that the relay uses besides the streams.
struct Keys {
    marker: String,
    gaps: String,
    note: String,
}

/// No topic contains a colon, so none of these is a stream.
fn keys(prefix: &str) -> Keys {
    let key = |name: &str| format!("{prefix}relay:{name}");
    Keys {
        marker: key("marker"),
        gaps: key("gaps"),
        note: key("page"),
    }
}

impl Publisher {
    /// Connects, and checks that this Redis can carry the streams.
    ///
    /// # Errors
    ///
    /// Those of the connection, or [`Error::Setup`] when this Redis may lose entries or is too old.
    pub(crate) async fn connect(
        target: &RedisTarget,
        prefix: &str,
        limit: Duration,
    ) -> Result<Self> {
        let connection = target.connect(limit).await?;
        let keys = keys(prefix);
        let mut publisher = Publisher {
            connection,
            marker_key: keys.marker,
            gaps_key: keys.gaps,
            note_key: keys.note,
            lone: Script::new(LONE_LUA),
            open: without_comments(OPEN_LUA),
            close: without_comments(CLOSE_LUA),
            leadership: Uuid::nil(),
        };
        publisher.check_server(prefix).await?;
        Ok(publisher)
    }

    async fn check_server(&mut self, prefix: &str) -> Result<()> {
        let info: String = redis::cmd("INFO")
            .query_async(&mut self.connection)
            .await
            .map_err(|source| Error::Redis {
                doing: "read INFO",
                source,
            })?;
        let info: HashMap<&str, &str> = info
            .lines()
            .filter_map(|line| line.trim_end().split_once(':'))
            .collect();
        let value = |name: &str| info.get(name).copied().unwrap_or_default();
        let setup = |problem: String, remedy: &str| {
            Err(Error::Setup {
                problem,
                remedy: remedy.to_owned(),
            })
        };
        let version = value("redis_version");
        if version
            .split('.')
            .next()
            .and_then(|major| major.parse().ok())
            .unwrap_or(0)
            < REDIS_VERSION_MIN
        {
            return setup(
                format!("Redis {version} is too old"),
                "use Redis 7.0 or later, or Valkey",
            );
        }
        if value("cluster_enabled") == "1" {
            cluster::check_prefix(prefix)?;
        }
        let policy = value("maxmemory_policy");
        if !policy.is_empty() && policy != "noeviction" {
            return setup(
                format!(
                    "Redis has maxmemory-policy {policy}, under which it drops whole streams without an error"
                ),
                "set maxmemory-policy noeviction",
            );
        }
        Ok(())
    }

    /// Whether Redis answers at all.
    pub(crate) async fn ping(&mut self) -> Result<()> {
        redis::cmd("PING")
            .query_async(&mut self.connection)
            .await
            .map_err(|source| Error::Redis {
                doing: "ping",
                source,
            })
    }

    /// What stands at the marker's key.
    pub(crate) async fn marker(&mut self) -> Result<MarkerFound> {
        let read: redis::RedisResult<(HashMap<String, String>, HashMap<String, String>)> =
            redis::pipe()
                .atomic()
                .hgetall(&self.marker_key)
                .hgetall(&self.gaps_key)
                .query_async(&mut self.connection)
                .await;
        match read {
            Ok((marker, gaps)) => Ok(marker::read(&marker, &gaps)),
            Err(error) if redis_fault(&error) == RedisFault::Reply(ReplyCode::WrongType) => {
                Ok(MarkerFound::Foreign("no hash".to_owned()))
            }
            // Inside MULTI the reply code of one command is wrapped; ask for the type instead.
            Err(error) if !error.is_io_error() => {
                let kind: String = redis::cmd("TYPE")
                    .arg(&self.marker_key)
                    .query_async(&mut self.connection)
                    .await
                    .map_err(|source| Error::Redis {
                        doing: "read the marker",
                        source,
                    })?;
                match kind.as_str() {
                    "none" | "hash" => Err(Error::Redis {
                        doing: "read the marker",
                        source: error,
                    }),
                    other => Ok(MarkerFound::Foreign(format!("a {other}"))),
                }
            }
            Err(source) => Err(Error::Redis {
                doing: "read the marker",
                source,
            }),
        }
    }

    /// Looks cheaply whether the marker is still the one of this leadership, and at this page.
    ///
    /// # Errors
    ///
    /// [`Error::Moved`] when it is not.
    pub(crate) async fn find_marker_at(&mut self, page: i64) -> Result<()> {
        let found: [Option<String>; 3] = redis::cmd("HMGET")
            .arg(&self.marker_key)
            .arg(&["leadership", "page", "epoch"])
            .query_async(&mut self.connection)
            .await
            .map_err(|source| Error::Redis {
                doing: "look at the marker",
                source,
            })?;
        let [leadership, found, epoch] = found.map(Option::unwrap_or_default);
        if (leadership, &found) == (self.leadership.to_string(), &page.to_string()) {
            return Ok(());
        }
        Err(Error::Moved { epoch, page: found })
    }

    /// Takes the leadership: writes a marker of a new epoch in the place of `found`.
    ///
    /// From here on a page of any earlier leadership that is still under way does nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Moved`] when the marker is no longer the one that was found.
    pub(crate) async fn take(
        &mut self,
        found: &MarkerFound,
        outbox_id: Uuid,
        place: &Place,
        suspect: Option<Suspect>,
        kept: Kept,
    ) -> Result<()> {
        let (before, page) = match found {
            MarkerFound::Marker {
                leadership, place, ..
            } => (leadership.to_string(), place.page.to_string()),
            MarkerFound::Missing | MarkerFound::Foreign(_) => (String::new(), String::new()),
        };
        self.leadership = Uuid::new_v4();
        let about = About {
            outbox_id,
            leadership: self.leadership,
            kept,
        };
        let fields = marker::fields(&about, place, suspect);
        let keys = [&self.marker_key, &self.gaps_key, &self.note_key];
        let mut script = script_call(TAKE_LUA, keys);
        script.arg(before).arg(page).arg(fields.len()).arg(fields);
        script.arg(2 * place.cursor.gaps.len());
        for (lo, hi) in place.cursor.gaps.iter() {
            script.arg(lo).arg(hi);
        }
        match self.call("take the leadership", &script).await?.as_slice() {
            [done] if done == "taken" => Ok(()),
            [lacks, command, said] if lacks == "lacks" => Err(Error::Setup {
                problem: format!("this Redis user has no rights to {command} ({said})"),
                remedy: "give it the rights that the README lists".to_owned(),
            }),
            [_, epoch, page] => Err(Error::Moved {
                epoch: epoch.clone(),
                page: page.clone(),
            }),
            other => Err(Error::Invariant(format!(
                "the take script replied {other:?}"
            ))),
        }
    }

    async fn call(&mut self, doing: &'static str, script: &Cmd) -> Result<Vec<String>> {
        let value: Value = script
            .query_async(&mut self.connection)
            .await
            .map_err(|source| Error::Redis { doing, source })?;
        redis::from_redis_value(value).map_err(|e| {
            Error::Invariant(format!("reply of a script that is no list of strings: {e}"))
        })
    }
}

fn script_call<'k>(script: &str, keys: impl IntoIterator<Item = &'k String>) -> Cmd {
    let keys: Vec<&String> = keys.into_iter().collect();
    let mut call = redis::cmd("EVAL");
    call.arg(script).arg(keys.len()).arg(keys);
    call
}

/// A script as it goes with every page: Redis hashes the whole text each time.
fn without_comments(script: &str) -> String {
    let lines = script.lines().filter(|line| !line.starts_with("--"));
    lines.collect::<Vec<_>>().join("\n")
}
