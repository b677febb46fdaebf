//! A message as its row: checked against the limits, borrowed where possible, ready to be bound.
//!
//! Every check here has its twin among the constraints of `outbox.messages`; it comes first because an
//! error of the database spoils the caller's transaction, and one found here does not.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::error::Error as StdError;

use bytes::BytesMut;
use serde::de::IgnoredAny;
use tokio_postgres::types::{IsNull, ToSql, Type, to_sql_checked};

use crate::error::{Error, Result};
use crate::limits::{
    CONTENT_TYPE_CHARS_MAX, EVENT_TYPE_BYTES_MAX, HEADERS_BYTES_MAX, MESSAGE_KEY_BYTES_MAX,
    ORDERING_KEY_BYTES_MAX, PAYLOAD_BYTES_MAX, TOPIC_CHARS_MAX,
};
use crate::message::{Message, Payload};

/// The columns that a producer sets.
#[derive(Debug)]
pub(crate) struct Row<'a> {
    pub(crate) topic: &'a str,
    pub(crate) ordering_key: Option<&'a str>,
    pub(crate) message_key: &'a str,
    pub(crate) event_type: Option<&'a str>,
    pub(crate) payload: Option<JsonText<'a>>,
    pub(crate) payload_binary: Option<&'a [u8]>,
    pub(crate) content_type: Option<&'a str>,
    pub(crate) headers: Option<JsonText<'a>>,
    /// The ordering key once more, if writers of it have to wait for each other.
    pub(crate) lock: Option<&'a str>,
}

impl<'a> Row<'a> {
    /// The row of `message`, or the first rule it breaks.
    pub(crate) fn checked(message: &'a Message) -> Result<Self> {
        check_topic(&message.topic)?;
        check_text(
            "message_key",
            Some(&message.message_key),
            MESSAGE_KEY_BYTES_MAX,
            "use a shorter key or its hash",
        )?;
        let ordering_key = message.ordering_key.as_deref();
        check_text(
            "ordering_key",
            ordering_key,
            ORDERING_KEY_BYTES_MAX,
            "use a shorter key or its hash",
        )?;
        let event_type = message.event_type.as_deref();
        check_text(
            "event_type",
            event_type,
            EVENT_TYPE_BYTES_MAX,
            "use a shorter name",
        )?;
        if message.ordered && ordering_key.is_none() {
            return Err(Error::invalid(
                "ordering_key",
                "is missing, and `ordered` needs one",
                "set the ordering key or leave `ordered` out",
            ));
        }
        let (payload, payload_binary, content_type) = match &message.payload {
            Payload::Json(text) => (Some(checked_json(text)?), None, None),
            Payload::Binary {
                bytes,
                content_type,
            } => {
                check_content_type(content_type)?;
                check_payload_size(bytes.len())?;
                (None, Some(bytes.as_slice()), Some(content_type.as_str()))
            }
        };
        Ok(Self {
            topic: &message.topic,
            ordering_key,
            message_key: &message.message_key,
            event_type,
            payload,
            payload_binary,
            content_type,
            headers: checked_headers(message)?,
            lock: ordering_key.filter(|_| message.ordered),
        })
    }

    /// What the row adds to the size of its statement, without the short columns.
    pub(crate) fn bytes(&self) -> usize {
        self.payload.as_ref().map_or(0, JsonText::len)
            + self.payload_binary.map_or(0, <[u8]>::len)
            + self.headers.as_ref().map_or(0, JsonText::len)
            + self.ordering_key.map_or(0, str::len)
    }
}

fn check_topic(topic: &str) -> Result<()> {
    const REMEDY: &str = "use 1 to 200 of the characters A-Z a-z 0-9 . _ -";
    if let Some(odd) = topic
        .chars()
        .find(|c| !c.is_ascii_alphanumeric() && !matches!(c, '.' | '_' | '-'))
    {
        return Err(Error::invalid(
            "topic",
            format!("has the character {odd:?}"),
            REMEDY,
        ));
    }
    match topic.len() {
        0 => Err(Error::invalid("topic", "is empty", REMEDY)),
        1..=TOPIC_CHARS_MAX => Ok(()),
        length => Err(Error::invalid(
            "topic",
            past_limit(length, TOPIC_CHARS_MAX),
            REMEDY,
        )),
    }
}

fn check_text(
    field: &'static str,
    text: Option<&str>,
    bytes_max: usize,
    remedy: &'static str,
) -> Result<()> {
    let Some(text) = text else { return Ok(()) };
    if text.is_empty() {
        return Err(Error::invalid(
            field,
            "is empty",
            "give it at least one character",
        ));
    }
    if text.len() > bytes_max {
        return Err(Error::invalid(
            field,
            past_limit(text.len(), bytes_max),
            remedy,
        ));
    }
    // A length is within its bound, but Postgres' text holds every character except this one.
    if text.contains('\0') {
        return Err(Error::invalid(
            field,
            "has a NUL character",
            "remove it, Postgres cannot store it",
        ));
    }
    Ok(())
}

fn check_content_type(content_type: &str) -> Result<()> {
    const REMEDY: &str =
        "use 1 to 200 characters of printable ASCII, for example application/octet-stream";
    if content_type.is_empty() {
        return Err(Error::invalid("content_type", "is empty", REMEDY));
    }
    if let Some(odd) = content_type.chars().find(|c| !matches!(c, ' '..='~')) {
        return Err(Error::invalid(
            "content_type",
            format!("has the character {odd:?}"),
            REMEDY,
        ));
    }
    if content_type.len() > CONTENT_TYPE_CHARS_MAX {
        return Err(Error::invalid(
            "content_type",
            past_limit(content_type.len(), CONTENT_TYPE_CHARS_MAX),
            REMEDY,
        ));
    }
    Ok(())
}

fn check_payload_size(bytes: usize) -> Result<()> {
    if bytes > PAYLOAD_BYTES_MAX {
        return Err(Error::invalid(
            "payload",
            past_limit(bytes, PAYLOAD_BYTES_MAX),
            "store the document elsewhere and send its address",
        ));
    }
    Ok(())
}

fn checked_json(text: &str) -> Result<JsonText<'_>> {
    check_payload_size(text.len())?;
    // `IgnoredAny` makes serde_json walk the text without recursion and without decoding: documents of
    // any depth, numbers of any length and every `\u` escape pass, as they do in Postgres' type `json`.
    serde_json::from_str::<IgnoredAny>(text).map_err(|error| {
        Error::invalid(
            "payload",
            "is not JSON",
            "give it one JSON document, or use `Message::binary`",
        )
        .caused_by(error)
    })?;
    Ok(JsonText(Cow::Borrowed(text)))
}

fn checked_headers(message: &Message) -> Result<Option<JsonText<'_>>> {
    const REMEDY: &str = "use fewer or shorter headers, or put the data into the payload";
    let as_json = |headers: &BTreeMap<String, String>| {
        serde_json::to_string(headers).map_err(|error| {
            Error::invalid("headers", "cannot be written as JSON", REMEDY).caused_by(error)
        })
    };
    #[cfg(feature = "opentelemetry")]
    if let Cow::Owned(headers) = crate::trace::continued(&message.headers) {
        check_headers(&headers)?;
        let text = as_json(&headers)?;
        // Headers that leave no room for it go without the trace.
        if text.len() <= HEADERS_BYTES_MAX {
            return Ok(Some(JsonText(Cow::Owned(text))));
        }
    }
    if message.headers.is_empty() {
        return Ok(None);
    }
    check_headers(&message.headers)?;
    let text = as_json(&message.headers)?;
    if text.len() > HEADERS_BYTES_MAX {
        let problem = format!(
            "take {} bytes as JSON, past the limit of {HEADERS_BYTES_MAX}",
            text.len()
        );
        return Err(Error::invalid("headers", problem, REMEDY));
    }
    Ok(Some(JsonText(Cow::Owned(text))))
}

fn check_headers(headers: &BTreeMap<String, String>) -> Result<()> {
    let has_nul = |(name, value): (&String, &String)| name.contains('\0') || value.contains('\0');
    if headers.iter().any(has_nul) {
        return Err(Error::invalid(
            "headers",
            "have a NUL character",
            "remove it, not every consumer can decode it",
        ));
    }
    Ok(())
}

fn past_limit(length: usize, max: usize) -> String {
    format!("has {length} bytes, past the limit of {max}")
}

/// JSON text that is bound to a parameter of type `json` as it stands.
///
/// The binary form of Postgres' `json` is the text itself, so the server checks it once and copies it
/// once; `$1::text::json` would go through two conversions there, a `serde_json::Value` through two here.
#[derive(Debug, Clone)]
pub(crate) struct JsonText<'a>(Cow<'a, str>);

impl JsonText<'_> {
    fn len(&self) -> usize {
        self.0.len()
    }
}

impl ToSql for JsonText<'_> {
    fn to_sql(
        &self,
        _: &Type,
        out: &mut BytesMut,
    ) -> Result<IsNull, Box<dyn StdError + Sync + Send>> {
        out.extend_from_slice(self.0.as_bytes());
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::JSON
    }

    to_sql_checked!();
}
