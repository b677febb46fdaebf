//! One page as it goes out: its entries and the marker in one atomic step, and what the reply means.

use std::fmt;
use std::task::Poll;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::future::{BoxFuture, FutureExt, ready};
use futures_util::poll;
use redis::{Arg, Cmd, ErrorKind, Pipeline, RedisError, RedisResult, Value};

use super::{Entries, Publisher, marker, script_call};
use crate::error::{Error, Result, redis_fault};
use crate::metric_names as names;
use crate::protocol::cursor::{Cursor, Step};
use crate::protocol::failure::{Meaning, RedisFault, ReplyCode, of_redis, of_stream};
use crate::protocol::layout::Layout;
use crate::protocol::place::Blocked;
use crate::reader::Page;

/// Largest message that goes by a script, in bytes: scripts copy what they are given.
const LONE_BYTES_MAX: i64 = 16 * 1024;

/// Room for the arguments of a lone message's script.
const LONE_ARGUMENTS: usize = 40;

/// Room for the bytes of those besides payload, headers and ordering key.
const LONE_OTHER_BYTES: usize = 1024;

/// Arguments of an XADD before the fields: the command, the stream and the id.
const ENTRY_FIELDS_FROM: usize = 3;

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
pub(crate) struct PageWrite {
    /// The page number that the marker must have. The new one is the next.
    pub(crate) page: i64,
    /// The entries.
    pub(crate) entries: Entries,
    /// The change of the cursor.
    pub(crate) step: Step,
    /// How many ranges of gaps there are after it.
    pub(crate) gaps: usize,
    /// Blocked streams whose cursor changed; none means that the stream is blocked no longer.
    pub(crate) blocked: Vec<(String, Option<Blocked>)>,
    /// Topics whose layout changed.
    pub(crate) layouts: Vec<(String, Layout)>,
    /// No row is suspect any longer.
    pub(crate) drop_suspect: bool,
    /// Its reply, once it has been sent ahead.
    reply: Option<Reply>,
}

/// The reply to a page that has been sent, and since when it is waited for.
struct Reply(BoxFuture<'static, RedisResult<Vec<Value>>>, Instant);

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reply")
    }
}

impl PageWrite {
    /// What adds the entries and moves the cursor from where it is behind the rows of a page and the gaps that died.
    pub(crate) fn new(number: i64, cursor: &Cursor, entries: Entries, page: &Page) -> Self {
        let rows = page.rows.iter().map(|row| (row.id(), row.message_key()));
        let step = cursor.step(rows, &page.dead);
        PageWrite {
            page: number,
            entries,
            gaps: cursor.gap_ranges_after(&step),
            step,
            blocked: Vec::new(),
            layouts: Vec::new(),
            drop_suspect: false,
            reply: None,
        }
    }

    /// The entry of a page that is this one small message and the new `high`, where it changes nothing else.
    fn lone(&self) -> Option<(&Cmd, &(i64, String))> {
        let [add] = self.entries.adds.as_slice() else {
            return None;
        };
        let plain = self.step.set.is_empty()
            && self.step.unset.is_empty()
            && self.blocked.is_empty()
            && self.layouts.is_empty()
            && !self.drop_suspect;
        let high = self.step.high.as_ref()?;
        (plain && self.entries.bytes <= LONE_BYTES_MAX).then_some((add, high))
    }

    /// Fields and values of the marker that each page sets, but for a lone message's, which leaves the gaps as they are; the
    /// script sets the first.
    fn marker_fields(&self) -> Vec<String> {
        let mut fields = vec!["redis_ms".to_owned(), String::new()];
        fields.extend(["page".to_owned(), (self.page + 1).to_string()]);
        fields.extend(["gaps".to_owned(), self.gaps.to_string()]);
        if let Some((high, high_key)) = &self.step.high {
            fields.extend(["high".to_owned(), high.to_string()]);
            fields.extend(["high_key".to_owned(), high_key.clone()]);
        }
        fields
    }
}

impl Publisher {
    /// Publishes one page.
    ///
    /// # Errors
    ///
    /// [`Error::Moved`] when the marker has another leadership or page; [`Error::Redis`] when Redis refuses the
    /// whole page or the reply does not come, in which case the page may be published or not.
    pub(crate) async fn publish(&self, write: &mut PageWrite) -> Result<Published> {
        let mut handed_over = Instant::now();
        let published = match write.reply.take() {
            Some(Reply(reply, since)) => {
                handed_over = since;
                of_reply(write, reply.await)?
            }
            None => match self.publish_lone(write).await? {
                Some(redis_ms) => Published::Done { redis_ms },
                None => {
                    let reply = self.transaction(write).await;
                    of_reply(write, reply)?
                }
            },
        };
        if matches!(published, Published::Done { .. }) {
            count(write, handed_over.elapsed());
            #[cfg(feature = "otlp")]
            crate::traces::published(&mut write.entries.traced, handed_over.elapsed());
        }
        Ok(published)
    }

    /// Sends a page before the reply to the one before it, so that Redis does not pause between them: it carries them out
    /// in the order in which they were sent. Where it did not publish the first, the second finds another page in the
    /// marker and takes its entries back, as one does that comes late.
    ///
    /// When this returns, whatever is sent later comes later.
    pub(crate) async fn send_ahead(&self, write: &mut PageWrite) {
        let since = Instant::now();
        let mut reply = self.transaction(write).boxed();
        // The first poll hands the request to the connection.
        if let Poll::Ready(reply_now) = poll!(&mut reply) {
            reply = ready(reply_now).boxed();
        }
        write.reply = Some(Reply(reply, since));
    }

    /// Publishes a page that is one small message and no more, by one script, which takes Redis half the time of a
    /// transaction. Returns Redis' clock.
    ///
    /// None where the page is another, or where nothing was done: the transaction then finds out why.
    async fn publish_lone(&self, write: &PageWrite) -> Result<Option<i64>> {
        let Some((add, (high, high_key))) = write.lone() else {
            return Ok(None);
        };
        // Not by `Script::invoke_async`, which copies each argument twice.
        let bytes = usize::try_from(write.entries.bytes).unwrap_or(0) + LONE_OTHER_BYTES;
        let mut call = Cmd::with_capacity(LONE_ARGUMENTS, bytes);
        call.arg("EVALSHA").arg(self.lone.get_hash()).arg(2);
        call.arg(&self.marker_key).arg(&write.entries.streams[0]);
        call.arg(self.leadership.to_string()).arg(write.page);
        call.arg("redis_ms").arg("");
        call.arg("page").arg(write.page + 1);
        call.arg("high").arg(high).arg("high_key").arg(high_key);
        for argument in add.args_iter().skip(ENTRY_FIELDS_FROM) {
            if let Arg::Simple(argument) = argument {
                call.arg(argument);
            }
        }
        let mut connection = self.connection.clone();
        let answer = match call.query_async(&mut connection).await {
            Err(source) if redis_fault(&source) == RedisFault::Reply(ReplyCode::NoScript) => {
                match self.lone.load_async(&mut connection).await {
                    Ok(_) => call.query_async(&mut connection).await,
                    Err(source) => Err(source),
                }
            }
            answer => answer,
        };
        match answer {
            Ok(redis_ms) => Ok(redis_ms),
            Err(source) if matches!(redis_fault(&source), RedisFault::Reply(_)) => Ok(None),
            Err(source) => Err(failed(source)),
        }
    }

    /// A page as a transaction of Redis: `open.lua`, the entries, `close.lua`.
    ///
    /// It runs as a whole or not at all, and its effects reach replicas and the append-only file as one. So after a
    /// crash of either side the page and the marker are both there or both missing, and a reply that was lost is
    /// found out by reading the marker. What a transaction does not do is roll back: its last command, `close.lua`,
    /// compares the marker and what was added, and takes entries back.
    ///
    /// The scripts go as text and not by their hash: one that Redis has forgotten would fail in the middle of the
    /// transaction and leave the rest of it.
    fn transaction(
        &self,
        write: &mut PageWrite,
    ) -> impl Future<Output = RedisResult<Vec<Value>>> + Send + use<> {
        let adds = std::mem::take(&mut write.entries.adds);
        let mut transaction = Pipeline::with_capacity(adds.len() + 2);
        transaction.atomic().ignore_errors();
        let noted = [&self.note_key].into_iter().chain(&write.entries.streams);
        let mut open = script_call(&self.open, noted);
        open.arg(self.leadership.to_string()).arg(write.page);
        transaction.add_command(open);
        for add in adds {
            transaction.add_command(add);
        }
        transaction.add_command(self.close_call(write));
        let mut connection = self.connection.clone();
        async move { transaction.query_async(&mut connection).await }
    }

    fn close_call(&self, write: &PageWrite) -> Cmd {
        let mut added = vec![0_usize; write.entries.streams.len()];
        for stream in &write.entries.stream_of {
            added[*stream] += 1;
        }
        let keys = [&self.marker_key, &self.gaps_key, &self.note_key];
        let mut script = script_call(&self.close, keys.into_iter().chain(&write.entries.streams));
        script
            .arg(self.leadership.to_string())
            .arg(write.page)
            .arg(added);
        let mut fields = write.marker_fields();
        let mut dropped = Vec::new();
        for (stream, blocked) in &write.blocked {
            match blocked {
                Some(blocked) => fields.extend([
                    marker::blocked_field(stream),
                    marker::blocked_value(blocked),
                ]),
                None => dropped.push(marker::blocked_field(stream)),
            }
        }
        for (topic, layout) in &write.layouts {
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
}

/// What the reply to a page's transaction means.
fn of_reply(write: &PageWrite, reply: RedisResult<Vec<Value>>) -> Result<Published> {
    let mut replies = match reply {
        Ok(replies) => replies,
        Err(source) => return not_run(write, source),
    };
    let verdict = match replies.pop() {
        // What failed before says why.
        Some(Value::ServerError(error)) => {
            let mut errors = replies.into_iter().filter_map(|reply| match reply {
                Value::ServerError(error) => Some(error),
                _ => None,
            });
            return Err(failed(errors.next().unwrap_or(error).into()));
        }
        verdict => verdict.unwrap_or(Value::Nil),
    };
    let verdict: Vec<String> = redis::from_redis_value(verdict)
        .map_err(|error| Error::Invariant(format!("the verdict on a page: {error}")))?;
    match verdict
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
        ["refused"] => {
            let error = replies
                .into_iter()
                .enumerate()
                .find_map(|(command, reply)| match reply {
                    Value::ServerError(error) => Some((command, error)),
                    _ => None,
                });
            let (command, error) = error
                .ok_or_else(|| Error::Invariant("a page was taken back without an error".into()))?;
            refused(write, command, error.into())
        }
        other => Err(Error::Invariant(format!(
            "the verdict on a page is {other:?}"
        ))),
    }
}

/// The transaction was refused before it ran, or no reply came.
fn not_run(write: &PageWrite, source: RedisError) -> Result<Published> {
    let Some(errors) = source.clone().into_server_errors() else {
        return Err(failed(source));
    };
    // The scripts name all streams, so their errors do not tell which one is meant.
    let of_entry = errors
        .iter()
        .find(|(command, _)| stream_of(write, *command).is_some());
    match of_entry.or(errors.first()) {
        Some((command, error)) => refused(write, *command, error.clone().into()),
        None => Err(failed(source)),
    }
}

/// One command of a page was refused, and nothing of the page is left.
fn refused(write: &PageWrite, command: usize, source: RedisError) -> Result<Published> {
    let code = source.code().map_or(ReplyCode::Unknown, ReplyCode::parse);
    match (stream_of(write, command), of_stream(code)) {
        (Some(stream), Meaning::StreamRefuses) => {
            let said = [source.code(), source.detail()].into_iter().flatten();
            let said = said.collect::<Vec<_>>().join(" ");
            Ok(Published::StreamRefuses {
                stream: stream.clone(),
                reason: said.chars().take(300).collect(),
            })
        }
        _ => Err(failed(source)),
    }
}

/// The stream that a command of the page's transaction adds to.
fn stream_of(write: &PageWrite, command: usize) -> Option<&String> {
    let stream = write.entries.stream_of.get(command.checked_sub(1)?)?;
    write.entries.streams.get(*stream)
}

fn failed(source: RedisError) -> Error {
    Error::Redis {
        doing: "publish a page",
        source,
    }
}

/// Counts a page that was published.
fn count(write: &PageWrite, took: Duration) {
    ::metrics::counter!(names::PAGES).increment(1);
    ::metrics::counter!(names::PUBLISHED).increment(write.entries.stream_of.len() as u64);
    ::metrics::counter!(names::PUBLISHED_BYTES)
        .increment(u64::try_from(write.entries.bytes).unwrap_or(0));
    ::metrics::histogram!(names::PAGE_SECONDS).record(took.as_secs_f64());
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    if let (Some(first), Ok(now)) = (write.entries.first_created_us, now) {
        let delay = now.as_secs_f64() - first as f64 / 1e6;
        ::metrics::histogram!(names::DELAY_SECONDS).record(delay.max(0.0));
    }
}

/// Whether a failed publish may be the page's own fault: the socket closed, or an error without a meaning.
pub(crate) fn may_be_the_page(error: &Error) -> bool {
    let Error::Redis { source, .. } = error else {
        return false;
    };
    // The client cannot make sense of a transaction that was discarded as a whole; the connection stands.
    let discarded = source.kind() == ErrorKind::UnexpectedReturnType;
    if discarded || source.is_timeout() || source.is_connection_refusal() {
        return false;
    }
    let fault = redis_fault(source);
    matches!(
        fault,
        RedisFault::Connection | RedisFault::Reply(ReplyCode::Err)
    ) && of_redis(fault) == Meaning::Outage
}
