//! A message, before it becomes a row of `outbox.messages`.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::row::Row;

/// One message for the outbox.
///
/// Its message key is set when the value is made, so that the application knows it before anything is
/// written, and so that writing the same value again is the same message. For a second message make a
/// second value, or give it another [`message_key`](Message::message_key).
#[derive(Clone, PartialEq, Eq)]
pub struct Message {
    pub(crate) topic: String,
    pub(crate) message_key: String,
    pub(crate) ordering_key: Option<String>,
    pub(crate) event_type: Option<String>,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) payload: Payload,
    pub(crate) ordered: bool,
}

#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Payload {
    Json(String),
    Binary {
        bytes: Vec<u8>,
        content_type: String,
    },
}

impl Message {
    /// A message whose payload is `value` as JSON.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the field `payload` when `value` cannot be written as JSON, for example a
    /// map whose keys are not strings.
    pub fn json<T: Serialize + ?Sized>(topic: impl Into<String>, value: &T) -> Result<Self> {
        let text = serde_json::to_string(value).map_err(|error| {
            Error::invalid(
                "payload",
                "cannot be written as JSON",
                "give it a type that JSON can hold",
            )
            .caused_by(error)
        })?;
        Ok(Self::new(topic.into(), Payload::Json(text)))
    }

    /// A message whose payload is JSON text. It goes out byte for byte as given: digits, the order of
    /// keys and white space included.
    ///
    /// That it is JSON is checked when it is written, by the rules of Postgres' type `json`: any depth
    /// and any `\u` escape pass.
    pub fn raw_json(topic: impl Into<String>, text: impl Into<String>) -> Self {
        Self::new(topic.into(), Payload::Json(text.into()))
    }

    /// A message whose payload is `bytes`, for example `application/x-protobuf`.
    pub fn binary(
        topic: impl Into<String>,
        bytes: impl Into<Vec<u8>>,
        content_type: impl Into<String>,
    ) -> Self {
        Self::new(
            topic.into(),
            Payload::Binary {
                bytes: bytes.into(),
                content_type: content_type.into(),
            },
        )
    }

    fn new(topic: String, payload: Payload) -> Self {
        Self {
            topic,
            message_key: Uuid::now_v7().to_string(),
            ordering_key: None,
            event_type: None,
            headers: BTreeMap::new(),
            payload,
            ordered: false,
        }
    }

    /// Messages with the same ordering key reach consumers in the order of their ids. Default: none.
    ///
    /// The order is as good as the locks of the producers: lock or write the business row before the
    /// message, or use [`ordered`](Message::ordered).
    #[must_use]
    pub fn ordering_key(mut self, key: impl Into<String>) -> Self {
        self.ordering_key = Some(key.into());
        self
    }

    /// The identity for deduplication, for example `order-42-placed`. Default: a UUID of version 7.
    #[must_use]
    pub fn message_key(mut self, key: impl Into<String>) -> Self {
        self.message_key = key.into();
        self
    }

    /// What happened, for example `order.placed`. Default: none.
    #[must_use]
    pub fn event_type(mut self, event_type: impl Into<String>) -> Self {
        self.event_type = Some(event_type.into());
        self
    }

    /// Sets one header; one of the same name is replaced. Default: no headers.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name.into(), value.into());
        self
    }

    /// Adds many headers; those of the same name are replaced.
    #[must_use]
    pub fn headers<K: Into<String>, V: Into<String>>(
        mut self,
        headers: impl IntoIterator<Item = (K, V)>,
    ) -> Self {
        self.headers.extend(
            headers
                .into_iter()
                .map(|(name, value)| (name.into(), value.into())),
        );
        self
    }

    /// Makes writers of the same ordering key wait for each other: each takes a lock on the key before
    /// its message gets an id, and keeps it until its transaction ends. So the order of ids is the order
    /// of commits, even where no business row is locked. Default: off.
    ///
    /// It needs an [`ordering_key`](Message::ordering_key). Two keys may share a lock (a hash of 32 bits),
    /// which only makes one wait. A transaction that takes the locks of several keys in several calls can
    /// deadlock with another one; [`write_all`](crate::write_all) sorts them. Each key of a transaction
    /// takes a place in the server's lock table (`max_locks_per_transaction`).
    #[must_use]
    pub fn ordered(mut self) -> Self {
        self.ordered = true;
        self
    }

    /// The message key, given or generated.
    pub fn key(&self) -> &str {
        &self.message_key
    }

    /// Checks everything that a write checks before its round trip.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] that names the field.
    pub fn check(&self) -> Result<()> {
        Row::checked(self).map(|_| ())
    }
}

/// Without the payload and the values of headers: they may be secret, and they are large.
impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("topic", &self.topic)
            .field("message_key", &self.message_key)
            .field("ordering_key", &self.ordering_key)
            .field("event_type", &self.event_type)
            .field("headers", &self.headers.keys())
            .field("payload", &self.payload)
            .field("ordered", &self.ordered)
            .finish()
    }
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(text) => write!(f, "Json({} bytes)", text.len()),
            Self::Binary {
                bytes,
                content_type,
            } => write!(f, "Binary({} bytes of {content_type:?})", bytes.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_knows_its_key_before_it_is_written() {
        let message = Message::raw_json("orders", "{}");
        assert_eq!(Uuid::parse_str(message.key()).unwrap().get_version_num(), 7);
        assert_eq!(message.clone().key(), message.key());
        assert_ne!(Message::raw_json("orders", "{}").key(), message.key());
        assert_eq!(message.message_key("order-1").key(), "order-1");
    }

    #[test]
    fn debug_output_shows_neither_payload_nor_header_values() {
        let message =
            Message::raw_json("orders", r#""hunter2""#).header("authorization", "hunter3");
        let shown = format!("{message:?}");
        assert!(!shown.contains("hunter"), "{shown}");
        assert!(
            shown.contains("authorization") && shown.contains("9 bytes"),
            "{shown}"
        );
    }

    #[test]
    fn a_value_that_json_cannot_hold_names_the_payload() {
        let map = BTreeMap::from([((1, 2), 3)]);
        let error = Message::json("orders", &map).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Invalid {
                    field: "payload",
                    ..
                }
            ),
            "{error}"
        );
        assert!(std::error::Error::source(&error).is_some());
    }
}
