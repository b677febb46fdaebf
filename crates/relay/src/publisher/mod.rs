//! The only place that talks to Redis: the marker, the pages, and the tails of the streams.

mod entry;
mod marker;
mod target;

use std::collections::HashMap;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncCommands, Cmd, ErrorKind, Script, Value};
use uuid::Uuid;

pub use target::RedisTarget;

use crate::error::{Error, Result, redis_fault};
use crate::postgres::MessageRow;
use crate::protocol::cursor::Step;
use crate::protocol::failure::{Meaning, RedisFault, ReplyCode, of_redis, of_stream};
use crate::protocol::layout::Layout;
use crate::protocol::start::{Blocked, MarkerFound, Place, Suspect};

const PAGE_LUA: &str = include_str!("page.lua");
const TAKE_LUA: &str = include_str!("take.lua");

/// The oldest Redis that knows scripts which are refused as a whole (`#!lua`).
const REDIS_VERSION_MIN: u32 = 7;

/// Clocks of two Redis servers may differ by this much when a stream's tail is searched.
const CLOCK_SKEW_MAX: Duration = Duration::from_secs(60);

/// Entries of a stream's tail that are read in one call.
const TAIL_CHUNK: usize = 1_000;

/// What became of a page.
#[derive(Debug)]
pub(crate) enum Published {
    /// The whole page is in the streams, and the marker says so.
    Done {
        /// Redis' clock, in milliseconds.
        redis_ms: i64,
    },
    /// Nothing was done: one stream refuses entries.
    StreamRefuses {
        /// Its name.
        stream: String,
        /// What Redis said.
        reason: String,
    },
}

/// One page as it goes out.
#[derive(Debug)]
pub(crate) struct PageWrite<'a> {
    /// The epoch that the marker must have.
    pub(crate) epoch: i64,
    /// The page number that the marker must have. The new one is the next.
    pub(crate) page: i64,
    /// The streams of the page.
    pub(crate) streams: &'a [String],
    /// The entries: index of the stream, and the message.
    pub(crate) entries: &'a [(usize, &'a MessageRow)],
    /// The change of the cursor.
    pub(crate) step: &'a Step,
    /// Blocked streams whose cursor changed; none means that the stream is blocked no longer.
    pub(crate) blocked: &'a [(String, Option<Blocked>)],
    /// Topics whose layout changed.
    pub(crate) layouts: &'a [(String, Layout)],
    /// No row is suspect any longer.
    pub(crate) drop_suspect: bool,
}

/// A connection to Redis with the scripts loaded.
#[derive(Debug)]
pub(crate) struct Publisher {
    connection: MultiplexedConnection,
    marker_key: String,
    gaps_key: String,
    page: Script,
    take: Script,
}

/// The keys that the relay uses besides the streams; no topic contains a colon.
fn keys(prefix: &str) -> (String, String) {
    (
        format!("{prefix}relay:marker"),
        format!("{prefix}relay:gaps"),
    )
}

impl Publisher {
    /// Connects, checks that this Redis can carry the streams, and loads the scripts.
    ///
    /// # Errors
    ///
    /// Those of the connection, or [`Error::Setup`] when this Redis may lose entries or cannot run the scripts.
    pub(crate) async fn connect(
        target: &RedisTarget,
        prefix: &str,
        limit: Duration,
    ) -> Result<Self> {
        let connection = target.connect(limit).await?;
        let (marker_key, gaps_key) = keys(prefix);
        let mut publisher = Publisher {
            connection,
            marker_key,
            gaps_key,
            page: Script::new(PAGE_LUA),
            take: Script::new(TAKE_LUA),
        };
        publisher.check_server().await?;
        publisher.load_scripts().await?;
        Ok(publisher)
    }

    async fn check_server(&mut self) -> Result<()> {
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
            return setup(
                "this Redis runs in cluster mode, which the relay does not support".into(),
                "use a Redis without cluster mode",
            );
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

    async fn load_scripts(&mut self) -> Result<()> {
        for script in [&self.page, &self.take] {
            script
                .load_async(&mut self.connection)
                .await
                .map_err(|source| Error::Redis {
                    doing: "load the scripts",
                    source,
                })?;
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

    /// Epoch and page of the marker, to see cheaply whether it is still where this relay left it.
    pub(crate) async fn marker_position(&mut self) -> Result<(String, String)> {
        let (epoch, page): (Option<String>, Option<String>) = redis::cmd("HMGET")
            .arg(&self.marker_key)
            .arg(&["epoch", "page"])
            .query_async(&mut self.connection)
            .await
            .map_err(|source| Error::Redis {
                doing: "look at the marker",
                source,
            })?;
        Ok((epoch.unwrap_or_default(), page.unwrap_or_default()))
    }

    /// Takes the leadership: writes a marker of a new epoch in the place of `found`.
    ///
    /// From here on a page of any earlier epoch that is still under way does nothing.
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
        retention: Duration,
    ) -> Result<()> {
        let (epoch, page) = match found {
            MarkerFound::Marker { place, .. } => (place.epoch.to_string(), place.page.to_string()),
            MarkerFound::Missing | MarkerFound::Foreign(_) => (String::new(), String::new()),
        };
        let fields = marker::fields(outbox_id, place, suspect, retention.as_millis());
        let mut script = script_call(&self.take, &[&self.marker_key, &self.gaps_key]);
        script.arg(epoch).arg(page).arg(fields.len()).arg(fields);
        script.arg(2 * place.cursor.gaps.len());
        for (lo, hi) in place.cursor.gaps.iter() {
            script.arg(lo).arg(hi);
        }
        match self.call("take the leadership", &script).await?.as_slice() {
            [done] if done == "taken" => Ok(()),
            [_, epoch, page] => Err(Error::Moved {
                epoch: epoch.clone(),
                page: page.clone(),
            }),
            other => Err(Error::Invariant(format!(
                "the take script replied {other:?}"
            ))),
        }
    }

    /// Publishes one page.
    ///
    /// The script runs as a whole or not at all, and its effects reach replicas and the append-only
    /// file as one transaction. So after a crash of either side the page and the marker are both
    /// there or both missing, and a reply that was lost is found out by reading the marker.
    ///
    /// # Errors
    ///
    /// [`Error::Moved`] when the marker has another epoch or page; [`Error::Redis`] when Redis refuses the
    /// whole page or the reply does not come, in which case the page may be published or not.
    pub(crate) async fn publish(&mut self, write: &PageWrite<'_>) -> Result<Published> {
        let script = self.page_call(write);
        let reply = match self.call("publish a page", &script).await {
            Err(error) if error.meaning() == Meaning::LoadScript => {
                self.load_scripts().await?;
                self.call("publish a page", &script).await?
            }
            Err(Error::Redis { source, doing }) if is_missing_right(&source) => {
                return self
                    .stream_without_rights(write, Error::Redis { source, doing })
                    .await;
            }
            other => other?,
        };
        match reply
            .iter()
            .map(String::as_str)
            .collect::<Vec<_>>()
            .as_slice()
        {
            ["published", redis_ms] => {
                let redis_ms = redis_ms
                    .parse()
                    .map_err(|_| Error::Invariant(format!("Redis' clock is {redis_ms}")))?;
                Ok(Published::Done { redis_ms })
            }
            ["moved", epoch, page] => Err(Error::Moved {
                epoch: (*epoch).to_owned(),
                page: (*page).to_owned(),
            }),
            ["refused", key, reason] => self.refused(write, key, reason),
            other => Err(Error::Invariant(format!(
                "the page script replied {other:?}"
            ))),
        }
    }

    /// Finds the stream that this user may not write to. Redis checks the rights to all keys of a call before it
    /// runs the script, and names none of them; so it is asked about each stream alone. The script does nothing
    /// there, since no marker has an empty epoch.
    async fn stream_without_rights(
        &mut self,
        write: &PageWrite<'_>,
        error: Error,
    ) -> Result<Published> {
        for stream in write.streams {
            let mut probe = script_call(&self.page, &[&self.marker_key, &self.gaps_key, stream]);
            probe.arg("").arg("").arg(0);
            match self
                .call("look for the stream that is refused", &probe)
                .await
            {
                Ok(_) => {}
                Err(Error::Redis { source, .. }) if is_missing_right(&source) => {
                    let said = source.detail().unwrap_or_default();
                    return Ok(Published::StreamRefuses {
                        stream: stream.clone(),
                        reason: format!("NOPERM {said}").chars().take(300).collect(),
                    });
                }
                Err(other) => return Err(other),
            }
        }
        // Not a stream: the marker, the gaps or the script itself.
        Err(error)
    }

    fn refused(&self, write: &PageWrite<'_>, key: &str, reason: &str) -> Result<Published> {
        let stream = key
            .parse::<usize>()
            .ok()
            .and_then(|key| write.streams.get(key.checked_sub(3)?));
        let Some(stream) = stream else {
            return Err(Error::Invariant(format!(
                "the page script refused key {key}"
            )));
        };
        let reason = reason.trim_start_matches('-');
        let code = reason.split_ascii_whitespace().next().unwrap_or_default();
        match of_stream(ReplyCode::parse(code)) {
            Meaning::StreamRefuses => Ok(Published::StreamRefuses {
                stream: stream.clone(),
                reason: reason.chars().take(300).collect(),
            }),
            Meaning::Outage | Meaning::Setup | Meaning::LoadScript => Err(Error::Redis {
                doing: "publish a page",
                source: (ErrorKind::Extension, "a stream refused", reason.to_owned()).into(),
            }),
        }
    }

    fn page_call(&self, write: &PageWrite<'_>) -> Cmd {
        let mut keys = vec![&self.marker_key, &self.gaps_key];
        keys.extend(write.streams);
        let mut script = script_call(&self.page, &keys);
        script
            .arg(write.epoch)
            .arg(write.page)
            .arg(write.entries.len());
        let mut scratch = String::new();
        for (stream, row) in write.entries {
            script.arg(stream + 3);
            entry::put(&mut script, row, &mut scratch);
        }
        let mut fields = vec!["page".to_owned(), (write.page + 1).to_string()];
        if let Some((high, high_key)) = &write.step.high {
            fields.extend([
                "high".to_owned(),
                high.to_string(),
                "high_key".to_owned(),
                high_key.clone(),
            ]);
        }
        let mut dropped = Vec::new();
        for (stream, blocked) in write.blocked {
            match blocked {
                Some(blocked) => fields.extend([
                    marker::blocked_field(stream),
                    marker::blocked_value(blocked),
                ]),
                None => dropped.push(marker::blocked_field(stream)),
            }
        }
        for (topic, layout) in write.layouts {
            fields.extend([marker::layout_field(topic), layout.encode()]);
        }
        if write.drop_suspect {
            dropped.extend(["suspect_until".to_owned(), "suspect_since_ms".to_owned()]);
        }
        script.arg(fields.len()).arg(fields);
        script.arg(dropped.len()).arg(dropped);
        script.arg(write.step.unset.len()).arg(&write.step.unset);
        script.arg(2 * write.step.set.len());
        for (lo, hi) in &write.step.set {
            script.arg(lo).arg(hi);
        }
        script
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

    /// A group that has not acknowledged all of a stream; none when every group has.
    pub(crate) async fn undrained_group(&mut self, stream: &str) -> Result<Option<String>> {
        let failed = |source| Error::Redis {
            doing: "look at a stream's groups",
            source,
        };
        let last: redis::streams::StreamRangeReply = self
            .connection
            .xrevrange_count(stream, "+", "-", 1)
            .await
            .map_err(failed)?;
        let Some(last) = last.ids.first().map(|entry| entry.id.clone()) else {
            return Ok(None);
        };
        let groups: redis::streams::StreamInfoGroupsReply =
            self.connection.xinfo_groups(stream).await.map_err(failed)?;
        let behind = |group: &redis::streams::StreamInfoGroup| {
            group.pending > 0 || stream_id(&group.last_delivered_id) < stream_id(&last)
        };
        Ok(groups
            .groups
            .into_iter()
            .find(behind)
            .map(|group| group.name))
    }

    /// Which of the wanted ids stand in a stream, with their message keys, among the entries that were
    /// added since `since_ms` (less the possible skew of clocks).
    ///
    /// Reads forward, since what was published right after that time is what matters most, and stops
    /// after `entries_max` entries; the second value says whether it reached the end.
    pub(crate) async fn tail(
        &mut self,
        stream: &str,
        since_ms: i64,
        entries_max: usize,
        wanted: impl Fn(i64) -> bool,
    ) -> Result<(HashMap<i64, String>, bool)> {
        let skew_ms = i64::try_from(CLOCK_SKEW_MAX.as_millis()).unwrap_or(i64::MAX);
        let mut from = (since_ms - skew_ms).max(0).to_string();
        let mut found = HashMap::new();
        let mut seen = 0;
        while seen < entries_max {
            let range: redis::RedisResult<redis::streams::StreamRangeReply> = redis::cmd("XRANGE")
                .arg(stream)
                .arg(&from)
                .arg("+")
                .arg("COUNT")
                .arg(TAIL_CHUNK)
                .query_async(&mut self.connection)
                .await;
            let entries = match range {
                Ok(range) => range.ids,
                // A key of another type, or one that we may not read, holds no entry of ours to find.
                Err(error)
                    if matches!(
                        redis_fault(&error),
                        RedisFault::Reply(ReplyCode::WrongType | ReplyCode::NoPerm)
                    ) =>
                {
                    return Ok((found, true));
                }
                Err(source) => {
                    return Err(Error::Redis {
                        doing: "read a stream's tail",
                        source,
                    });
                }
            };
            let Some(last) = entries.last() else {
                return Ok((found, true));
            };
            from = format!("({}", last.id);
            seen += entries.len();
            for entry in &entries {
                let id = entry.get::<i64>("id").filter(|id| wanted(*id));
                if let (Some(id), Some(key)) = (id, entry.get::<String>("message_key")) {
                    found.insert(id, key);
                }
            }
        }
        Ok((found, false))
    }
}

/// Whether a failed publish may be the page's own fault: the socket closed, or an error without a meaning.
pub(crate) fn may_be_the_page(error: &Error) -> bool {
    let Error::Redis { source, .. } = error else {
        return false;
    };
    if source.is_timeout() || source.is_connection_refusal() {
        return false;
    }
    let fault = redis_fault(source);
    matches!(
        fault,
        RedisFault::Connection | RedisFault::Reply(ReplyCode::Err)
    ) && of_redis(fault) == Meaning::Outage
}

fn is_missing_right(error: &redis::RedisError) -> bool {
    redis_fault(error) == RedisFault::Reply(ReplyCode::NoPerm)
}

/// A stream id as two numbers, to be compared.
fn stream_id(id: &str) -> (u64, u64) {
    let (ms, sequence) = id.split_once('-').unwrap_or((id, "0"));
    (ms.parse().unwrap_or(0), sequence.parse().unwrap_or(0))
}

fn script_call(script: &Script, keys: &[&String]) -> Cmd {
    let mut call = redis::cmd("EVALSHA");
    call.arg(script.get_hash()).arg(keys.len()).arg(keys);
    call
}
