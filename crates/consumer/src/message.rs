//! A stream entry as a message, by the contract of the stream's fields.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use serde::de::DeserializeOwned;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{
    entry::{Entry, Place},
    headers::{self, Headers},
};

/// The content type of a message whose entry names none.
const CONTENT_TYPE_DEFAULT: &str = "application/json";
/// What the outbox allows, and what the inbox's index can hold.
const MESSAGE_KEY_BYTES_MAX: usize = 512;

/// A stream that is consumed: one partition of a topic, during one term of its owner.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) topic: String,
    pub(crate) stream: String,
    /// The lease's number of owners so far, ourselves included; none where members share a stream.
    pub(crate) epoch: Option<i64>,
}

/// A message as it was published, with its place in the stream and the number of this attempt.
#[derive(Debug, Clone)]
pub struct Message {
    source: Arc<Source>,
    entry_id: String,
    place: Place,
    id: i64,
    message_key: String,
    ordering_key: Option<String>,
    event_type: Option<String>,
    created_at: OffsetDateTime,
    content_type: Option<String>,
    headers: Headers,
    payload: Bytes,
    attempts_before: u32,
}

/// A message as a row of the dead letters has it.
pub(crate) struct Stored {
    pub(crate) source: Arc<Source>,
    pub(crate) entry_id: String,
    pub(crate) id: Option<i64>,
    pub(crate) message_key: String,
    pub(crate) ordering_key: Option<String>,
    pub(crate) event_type: Option<String>,
    pub(crate) created_at: Option<OffsetDateTime>,
    pub(crate) content_type: Option<String>,
    pub(crate) headers_text: Option<String>,
    pub(crate) payload: Bytes,
    pub(crate) attempts_before: u32,
}

/// Why an entry is no message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Malformed(pub(crate) String);

impl Message {
    /// The position in the outbox, which only grows; it is unique within one outbox.
    #[must_use]
    pub fn id(&self) -> i64 {
        self.id
    }

    /// The identity of the message: an effect is applied once for each key, topic and group.
    #[must_use]
    pub fn message_key(&self) -> &str {
        &self.message_key
    }

    /// The key whose messages keep their order, if the producer gave one.
    #[must_use]
    pub fn ordering_key(&self) -> Option<&str> {
        self.ordering_key.as_deref()
    }

    /// What kind of event this is, if the producer said so.
    #[must_use]
    pub fn event_type(&self) -> Option<&str> {
        self.event_type.as_deref()
    }

    /// When the producer's transaction began, in UTC, to the microsecond.
    #[must_use]
    pub fn created_at(&self) -> OffsetDateTime {
        self.created_at
    }

    /// The time since [`created_at`](Self::created_at) by this machine's clock; zero if that is ahead.
    #[must_use]
    pub fn age(&self) -> Duration {
        (OffsetDateTime::now_utc() - self.created_at)
            .try_into()
            .unwrap_or_default()
    }

    /// The media type of the payload; `application/json` unless the producer wrote bytes of another.
    #[must_use]
    pub fn content_type(&self) -> &str {
        self.content_type.as_deref().unwrap_or(CONTENT_TYPE_DEFAULT)
    }

    /// The headers by name.
    #[must_use]
    pub fn headers(&self) -> &BTreeMap<String, String> {
        self.headers.by_name()
    }

    /// One header's value. Names are compared as they are written.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers().get(name).map(String::as_str)
    }

    /// The W3C trace context of the producer, from the header `traceparent`.
    #[must_use]
    pub fn trace_parent(&self) -> Option<&str> {
        self.header("traceparent")
    }

    /// The payload, byte for byte as it was published.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// The payload decoded from JSON.
    ///
    /// # Errors
    ///
    /// The payload is no JSON, or not of this type. The content type is not looked at.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        serde_json::from_slice(&self.payload)
    }

    /// The topic the message was written to.
    #[must_use]
    pub fn topic(&self) -> &str {
        &self.source.topic
    }

    /// The key of the stream it was read from.
    #[must_use]
    pub fn stream(&self) -> &str {
        &self.source.stream
    }

    /// The id of the entry in its stream. A message that is published again gets another one.
    #[must_use]
    pub fn entry_id(&self) -> &str {
        &self.entry_id
    }

    /// The number of this attempt, 1 for the first. Runs that an outage broke off are not counted, nor
    /// is a first run that failed together with the rest of its batch.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempts_before.saturating_add(1)
    }

    pub(crate) fn source(&self) -> &Arc<Source> {
        &self.source
    }

    /// Where its entry stands in the stream. Only of a message that was read from it.
    pub(crate) fn place(&self) -> Place {
        self.place
    }

    pub(crate) fn set_attempts_before(&mut self, attempts: u32) {
        self.attempts_before = attempts;
    }

    pub(crate) fn explicit_content_type(&self) -> Option<&str> {
        self.content_type.as_deref()
    }

    pub(crate) fn headers_text(&self) -> Option<&str> {
        self.headers.text()
    }

    /// A message that was set aside, as it was. Its columns were fields of a message once.
    pub(crate) fn from_stored(stored: Stored) -> Self {
        Self {
            source: stored.source,
            entry_id: stored.entry_id,
            place: Place::default(),
            id: stored.id.unwrap_or_default(),
            message_key: stored.message_key,
            ordering_key: stored.ordering_key,
            event_type: stored.event_type,
            created_at: stored.created_at.unwrap_or(OffsetDateTime::UNIX_EPOCH),
            content_type: stored.content_type,
            headers: Headers::new(stored.headers_text),
            payload: stored.payload,
            attempts_before: stored.attempts_before,
        }
    }

    /// Reads an entry by the contract. Fields the contract does not know are ignored. What is no message comes back
    /// as it was.
    pub(crate) fn from_entry(
        source: &Arc<Source>,
        mut entry: Entry,
    ) -> Result<Self, (Entry, Malformed)> {
        let (id, created_at) = match check(&entry) {
            Ok(checked) => checked,
            Err(malformed) => return Err((entry, malformed)),
        };
        // They were checked to be UTF-8.
        let mut text = |name| {
            entry
                .take(name)
                .and_then(|bytes| String::from_utf8(bytes).ok())
        };
        Ok(Self {
            source: Arc::clone(source),
            id,
            message_key: text("message_key").unwrap_or_default(),
            ordering_key: text("ordering_key"),
            event_type: text("event_type"),
            created_at,
            content_type: text("content_type"),
            headers: Headers::new(text("headers")),
            payload: entry.take("payload").unwrap_or_default().into(),
            entry_id: entry.id,
            place: entry.place,
            attempts_before: 0,
        })
    }
}

/// Whether an entry is a message. Returns what of it is no text: id and time of creation.
fn check(entry: &Entry) -> Result<(i64, OffsetDateTime), Malformed> {
    let id = required(entry, "id")?
        .parse()
        .map_err(|_| Malformed("field id is no number".to_owned()))?;
    let message_key = required(entry, "message_key")?;
    if message_key.is_empty() || message_key.len() > MESSAGE_KEY_BYTES_MAX {
        return Err(Malformed(format!(
            "field message_key has {} bytes",
            message_key.len()
        )));
    }
    optional(entry, "ordering_key")?;
    optional(entry, "event_type")?;
    let created_at = OffsetDateTime::parse(required(entry, "created_at")?, &Rfc3339)
        .map_err(|error| Malformed(format!("field created_at: {error}")))?;
    optional(entry, "content_type")?;
    if let Some(text) = optional(entry, "headers")? {
        headers::check(text).map_err(|error| Malformed(format!("field headers: {error}")))?;
    }
    entry.field("payload").ok_or_else(|| missing("payload"))?;
    Ok((id, created_at))
}

fn required<'e>(entry: &'e Entry, name: &'static str) -> Result<&'e str, Malformed> {
    optional(entry, name)?.ok_or_else(|| missing(name))
}

fn missing(name: &str) -> Malformed {
    Malformed(format!("field {name} is missing"))
}

/// A text field. NUL is refused, since Postgres cannot store it.
fn optional<'e>(entry: &'e Entry, name: &'static str) -> Result<Option<&'e str>, Malformed> {
    let Some(bytes) = entry.field(name) else {
        return Ok(None);
    };
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(Some(text)),
        Ok(_) => Err(Malformed(format!("field {name} contains NUL"))),
        Err(_) => Err(Malformed(format!("field {name} is no UTF-8"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source() -> Arc<Source> {
        Arc::new(Source {
            topic: "orders".to_owned(),
            stream: "shop:orders".to_owned(),
            epoch: None,
        })
    }

    fn read(fields: &[(&str, &[u8])]) -> Result<Message, (Entry, Malformed)> {
        Message::from_entry(&source(), Entry::of("5-0", fields))
    }

    const WHOLE: [(&str, &[u8]); 8] = [
        ("id", b"42"),
        ("message_key", b"order-42-placed"),
        ("ordering_key", b"order-42"),
        ("event_type", b"OrderPlaced"),
        ("created_at", b"2026-02-03T04:05:06.789012Z"),
        ("content_type", b"application/json; v=2"),
        ("headers", br#"{"traceparent":"00-ab"}"#),
        ("payload", br#"{"total":1.10}"#),
    ];

    #[test]
    fn every_field_of_the_contract_is_read() {
        let message = read(&WHOLE).unwrap();
        assert_eq!(message.id(), 42);
        assert_eq!(message.message_key(), "order-42-placed");
        assert_eq!(message.ordering_key(), Some("order-42"));
        assert_eq!(message.event_type(), Some("OrderPlaced"));
        assert_eq!(
            message.created_at().unix_timestamp_nanos() % 1_000_000_000,
            789_012_000
        );
        assert_eq!(message.content_type(), "application/json; v=2");
        assert_eq!(message.header("traceparent"), Some("00-ab"));
        assert_eq!(message.payload(), br#"{"total":1.10}"#);
        assert_eq!(
            message.json::<BTreeMap<String, f64>>().unwrap()["total"],
            1.1
        );
        assert_eq!(
            (message.topic(), message.stream(), message.entry_id()),
            ("orders", "shop:orders", "5-0")
        );
        assert_eq!(message.attempt(), 1);
    }

    #[test]
    fn optional_fields_may_be_absent() {
        let needed: Vec<_> = WHOLE
            .into_iter()
            .filter(|(name, _)| ["id", "message_key", "created_at", "payload"].contains(name))
            .collect();
        let message = read(&needed).unwrap();
        assert_eq!(message.content_type(), "application/json");
        assert_eq!((message.ordering_key(), message.event_type()), (None, None));
        assert!(message.headers().is_empty());
    }

    #[test]
    fn an_entry_against_the_contract_is_malformed() {
        let long = "k".repeat(513);
        let cases: [(&str, Option<&[u8]>, &str); 9] = [
            ("id", None, "field id is missing"),
            ("id", Some(b"x"), "field id is no number"),
            ("message_key", Some(b""), "field message_key has 0 bytes"),
            (
                "message_key",
                Some(long.as_bytes()),
                "field message_key has 513 bytes",
            ),
            (
                "message_key",
                Some(b"\xff\xfe"),
                "field message_key is no UTF-8",
            ),
            (
                "ordering_key",
                Some(b"a\0b"),
                "field ordering_key contains NUL",
            ),
            ("created_at", Some(b"yesterday"), "field created_at: "),
            ("headers", Some(b"{\"a\":1}"), "field headers: "),
            ("payload", None, "field payload is missing"),
        ];
        for (name, value, reason) in cases {
            let fields: Vec<_> = WHOLE
                .into_iter()
                .filter_map(|(n, v)| {
                    if n == name {
                        value.map(|value| (n, value))
                    } else {
                        Some((n, v))
                    }
                })
                .collect();
            let (entry, Malformed(text)) = read(&fields).unwrap_err();
            assert_eq!(entry, Entry::of("5-0", &fields));
            assert!(text.starts_with(reason), "{name}: {text}");
        }
    }
}
