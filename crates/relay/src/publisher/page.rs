//! One page as it goes out: the call of the script, and what its reply means.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use redis::{Cmd, ErrorKind};

use super::{Publisher, entry::Parcels, marker, script_call};
use crate::error::{Error, Result, redis_fault};
use crate::metric_names as names;
use crate::postgres::MessageRow;
use crate::protocol::cursor::Step;
use crate::protocol::failure::{Meaning, RedisFault, ReplyCode, of_redis, of_stream};
use crate::protocol::layout::Layout;
use crate::protocol::place::Blocked;

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
    /// The page number that the marker must have. The new one is the next.
    pub(crate) page: i64,
    /// The streams of the page.
    pub(crate) streams: &'a [String],
    /// The entries: index of the stream, and the message.
    pub(crate) entries: &'a [(usize, &'a MessageRow)],
    /// The change of the cursor.
    pub(crate) step: &'a Step,
    /// How many ranges of gaps there are after it.
    pub(crate) gaps: usize,
    /// Blocked streams whose cursor changed; none means that the stream is blocked no longer.
    pub(crate) blocked: &'a [(String, Option<Blocked>)],
    /// Topics whose layout changed.
    pub(crate) layouts: &'a [(String, Layout)],
    /// No row is suspect any longer.
    pub(crate) drop_suspect: bool,
}

impl Publisher {
    /// Publishes one page.
    ///
    /// The script runs as a whole or not at all, and its effects reach replicas and the append-only
    /// file as one transaction. So after a crash of either side the page and the marker are both
    /// there or both missing, and a reply that was lost is found out by reading the marker.
    ///
    /// # Errors
    ///
    /// [`Error::Moved`] when the marker has another leadership or page; [`Error::Redis`] when Redis refuses the
    /// whole page or the reply does not come, in which case the page may be published or not.
    pub(crate) async fn publish(&mut self, write: &PageWrite<'_>) -> Result<Published> {
        let script = self.page_call(write);
        let handed_over = Instant::now();
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
                count(write, handed_over.elapsed());
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
    /// there, since no marker has an empty leadership.
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
        let mut parcels = Parcels::default();
        for (stream, row) in write.entries {
            parcels.add(stream + 3, row);
        }
        script
            .arg(self.leadership.to_string())
            .arg(write.page)
            .arg(parcels.iter().len());
        for (entries, parcel) in parcels.iter() {
            script.arg(entries).arg(parcel);
        }
        let mut fields = vec!["page".to_owned(), (write.page + 1).to_string()];
        fields.extend(["gaps".to_owned(), write.gaps.to_string()]);
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
}

/// Counts a page that was published.
fn count(write: &PageWrite<'_>, took: Duration) {
    let bytes: i64 = write.entries.iter().map(|(_, row)| row.bytes()).sum();
    ::metrics::counter!(names::PAGES).increment(1);
    ::metrics::counter!(names::PUBLISHED).increment(write.entries.len() as u64);
    ::metrics::counter!(names::PUBLISHED_BYTES).increment(u64::try_from(bytes).unwrap_or(0));
    ::metrics::histogram!(names::PAGE_SECONDS).record(took.as_secs_f64());
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    if let (Some((_, first)), Ok(now)) = (write.entries.first(), now) {
        let delay = now.as_secs_f64() - first.created_at_us() as f64 / 1e6;
        ::metrics::histogram!(names::DELAY_SECONDS).record(delay.max(0.0));
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
