//! Both sides agree on every limit: the check before the round trip and the constraint of the table.

use std::collections::BTreeSet;

use outbox_producer::{Error, Message, limits};
use tokio_postgres::Client;

use crate::database::Database;

/// One message as the crate sees it and as SQL sees it.
#[derive(Clone)]
struct Fields {
    topic: String,
    ordering_key: Option<String>,
    message_key: String,
    event_type: Option<String>,
    payload: Option<String>,
    payload_binary: Option<(Vec<u8>, String)>,
    headers: Option<Vec<(String, String)>>,
}

impl Fields {
    fn good() -> Self {
        Self {
            topic: "t".to_owned(),
            ordering_key: None,
            message_key: "k".to_owned(),
            event_type: None,
            payload: Some("1".to_owned()),
            payload_binary: None,
            headers: None,
        }
    }

    fn binary(bytes: usize, content_type: &str) -> Self {
        Self {
            payload: None,
            payload_binary: Some((vec![7; bytes], content_type.to_owned())),
            ..Self::good()
        }
    }

    /// The field that the crate names, if it refuses.
    fn refused_here(&self) -> Option<&'static str> {
        let mut message = match &self.payload_binary {
            Some((bytes, content_type)) => {
                Message::binary(&self.topic, bytes.clone(), content_type)
            }
            None => Message::raw_json(&self.topic, self.payload.clone().unwrap()),
        };
        message = message
            .message_key(&self.message_key)
            .headers(self.headers.clone().unwrap_or_default());
        if let Some(key) = &self.ordering_key {
            message = message.ordering_key(key);
        }
        if let Some(event_type) = &self.event_type {
            message = message.event_type(event_type);
        }
        match message.check() {
            Ok(()) => None,
            Err(Error::Invalid { field, .. }) => Some(field),
            Err(other) => panic!("{other}"),
        }
    }

    /// The constraint that the database names, or the SQLSTATE where there is none, if it refuses.
    async fn refused_there(&self, client: &mut Client) -> Option<String> {
        let headers = self.headers.as_ref().map(|headers| {
            let map: std::collections::BTreeMap<_, _> = headers.iter().cloned().collect();
            serde_json::to_string(&map).unwrap()
        });
        let (bytes, content_type) = self.payload_binary.clone().unzip();
        let transaction = client.transaction().await.unwrap();
        let inserted = transaction
            .execute(
                "INSERT INTO outbox.messages (topic, ordering_key, message_key, event_type, payload, payload_binary, \
                                              content_type, headers) \
                 VALUES ($1, $2, $3, $4, $5::text::json, $6, $7, $8::text::json)",
                &[
                    &self.topic, &self.ordering_key, &self.message_key, &self.event_type, &self.payload, &bytes,
                    &content_type, &headers,
                ],
            )
            .await;
        transaction.rollback().await.unwrap();
        let error = inserted.err()?;
        let cause = error.as_db_error().unwrap_or_else(|| panic!("{error}"));
        Some(cause.constraint().unwrap_or(cause.code().code()).to_owned())
    }
}

/// Headers whose JSON has exactly this many bytes.
fn headers_of(bytes: usize) -> Vec<(String, String)> {
    vec![("a".to_owned(), "x".repeat(bytes - r#"{"a":""}"#.len()))]
}

fn json_of(bytes: usize) -> String {
    format!("\"{}\"", "x".repeat(bytes - 2))
}

/// (what, passes, is refused on both sides, field, constraint)
fn boundaries() -> Vec<(&'static str, Fields, Fields, &'static str, &'static str)> {
    let good = Fields::good;
    let topic = |topic: String| Fields { topic, ..good() };
    let message_key = |message_key: String| Fields {
        message_key,
        ..good()
    };
    let ordering_key = |key: String| Fields {
        ordering_key: Some(key),
        ..good()
    };
    let event_type = |event_type: String| Fields {
        event_type: Some(event_type),
        ..good()
    };
    let payload = |bytes: usize| Fields {
        payload: Some(json_of(bytes)),
        ..good()
    };
    let headers = |bytes: usize| Fields {
        headers: Some(headers_of(bytes)),
        ..good()
    };
    let x = |length: usize| "x".repeat(length);
    // Two bytes each: what counts is bytes.
    let e = |length: usize| "é".repeat(length / 2);
    vec![
        (
            "longest topic",
            topic(x(limits::TOPIC_CHARS_MAX)),
            topic(x(limits::TOPIC_CHARS_MAX + 1)),
            "topic",
            "messages_topic_check",
        ),
        (
            "shortest topic",
            topic(x(1)),
            topic(x(0)),
            "topic",
            "messages_topic_check",
        ),
        (
            "longest message key",
            message_key(x(limits::MESSAGE_KEY_BYTES_MAX)),
            message_key(x(limits::MESSAGE_KEY_BYTES_MAX + 1)),
            "message_key",
            "messages_message_key_check",
        ),
        (
            "message key in bytes",
            message_key(e(limits::MESSAGE_KEY_BYTES_MAX)),
            message_key(e(limits::MESSAGE_KEY_BYTES_MAX) + "x"),
            "message_key",
            "messages_message_key_check",
        ),
        (
            "shortest message key",
            message_key(x(1)),
            message_key(x(0)),
            "message_key",
            "messages_message_key_check",
        ),
        (
            "longest ordering key",
            ordering_key(x(limits::ORDERING_KEY_BYTES_MAX)),
            ordering_key(x(limits::ORDERING_KEY_BYTES_MAX + 1)),
            "ordering_key",
            "messages_ordering_key_check",
        ),
        (
            "ordering key in bytes",
            ordering_key(e(limits::ORDERING_KEY_BYTES_MAX)),
            ordering_key(e(limits::ORDERING_KEY_BYTES_MAX) + "x"),
            "ordering_key",
            "messages_ordering_key_check",
        ),
        (
            "shortest ordering key",
            ordering_key(x(1)),
            ordering_key(x(0)),
            "ordering_key",
            "messages_ordering_key_check",
        ),
        (
            "longest event type",
            event_type(x(limits::EVENT_TYPE_BYTES_MAX)),
            event_type(x(limits::EVENT_TYPE_BYTES_MAX + 1)),
            "event_type",
            "messages_event_type_check",
        ),
        (
            "event type in bytes",
            event_type(e(limits::EVENT_TYPE_BYTES_MAX)),
            event_type(e(limits::EVENT_TYPE_BYTES_MAX) + "x"),
            "event_type",
            "messages_event_type_check",
        ),
        (
            "shortest event type",
            event_type(x(1)),
            event_type(x(0)),
            "event_type",
            "messages_event_type_check",
        ),
        (
            "longest content type",
            Fields::binary(1, &x(limits::CONTENT_TYPE_CHARS_MAX)),
            Fields::binary(1, &x(limits::CONTENT_TYPE_CHARS_MAX + 1)),
            "content_type",
            "messages_content_type_check",
        ),
        (
            "shortest content type",
            Fields::binary(0, "x"),
            Fields::binary(0, ""),
            "content_type",
            "messages_content_type_check",
        ),
        (
            "largest payload",
            payload(limits::PAYLOAD_BYTES_MAX),
            payload(limits::PAYLOAD_BYTES_MAX + 1),
            "payload",
            "messages_payload_size_check",
        ),
        (
            "largest binary payload",
            Fields::binary(limits::PAYLOAD_BYTES_MAX, "x"),
            Fields::binary(limits::PAYLOAD_BYTES_MAX + 1, "x"),
            "payload",
            "messages_payload_size_check",
        ),
        (
            "largest headers",
            headers(limits::HEADERS_BYTES_MAX),
            headers(limits::HEADERS_BYTES_MAX + 1),
            "headers",
            "messages_headers_check",
        ),
    ]
}

#[tokio::test]
async fn both_sides_agree_at_every_boundary() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    let mut covered: BTreeSet<&str> = BTreeSet::new();
    for (what, passes, refused, field, constraint) in boundaries() {
        assert_eq!(passes.refused_here(), None, "{what}");
        assert_eq!(passes.refused_there(&mut client).await, None, "{what}");
        assert_eq!(refused.refused_here(), Some(field), "{what}");
        assert_eq!(
            refused.refused_there(&mut client).await.as_deref(),
            Some(constraint),
            "{what}"
        );
        covered.insert(constraint);
    }
    // `Message` cannot hold two payloads or none, nor set the time.
    covered.extend(["messages_one_payload_check", "messages_created_at_check"]);
    let constraints = client
        .query("SELECT conname FROM pg_constraint WHERE conrelid = 'outbox.messages'::regclass AND contype = 'c'", &[])
        .await
        .unwrap();
    let constraints: BTreeSet<&str> = constraints.iter().map(|row| row.get(0)).collect();
    assert_eq!(
        constraints, covered,
        "every constraint has a boundary above"
    );
}

#[tokio::test]
async fn both_sides_agree_on_the_characters_of_topic_and_content_type() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    let characters = (0..=0x7f_u8)
        .map(char::from)
        .chain("\u{80}éßÀ１٣µıK\u{feff}😀".chars());
    for character in characters {
        for text in [
            format!("a{character}"),
            format!("{character}a"),
            character.to_string(),
        ] {
            let fields = Fields {
                topic: text.clone(),
                ..Fields::good()
            };
            let there = fields.refused_there(&mut client).await;
            assert_eq!(
                fields.refused_here().is_some(),
                there.is_some(),
                "topic {text:?}: {there:?}"
            );
            let fields = Fields::binary(1, &text);
            let there = fields.refused_there(&mut client).await;
            assert_eq!(
                fields.refused_here().is_some(),
                there.is_some(),
                "content type {text:?}: {there:?}"
            );
        }
    }
}

#[tokio::test]
async fn both_sides_refuse_a_nul_character_outside_a_payload() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    let nul = || "a\0b".to_owned();
    let fields = [
        (
            "message_key",
            Fields {
                message_key: nul(),
                ..Fields::good()
            },
        ),
        (
            "ordering_key",
            Fields {
                ordering_key: Some(nul()),
                ..Fields::good()
            },
        ),
        (
            "event_type",
            Fields {
                event_type: Some(nul()),
                ..Fields::good()
            },
        ),
        (
            "headers",
            Fields {
                headers: Some(vec![(nul(), "b".to_owned())]),
                ..Fields::good()
            },
        ),
        (
            "headers",
            Fields {
                headers: Some(vec![("a".to_owned(), nul())]),
                ..Fields::good()
            },
        ),
    ];
    for (field, fields) in fields {
        assert_eq!(fields.refused_here(), Some(field));
        assert!(fields.refused_there(&mut client).await.is_some(), "{field}");
    }
}

#[tokio::test]
async fn headers_may_have_any_other_name_and_value() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    let pairs = [
        ("", ""),
        ("a b", "\"\\/\n\t\u{1}\u{7f}"),
        ("é😀", "\u{2028}\u{fffe}"),
    ];
    let headers = Some(
        pairs
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .to_vec(),
    );
    let fields = Fields {
        headers,
        ..Fields::good()
    };
    assert_eq!(fields.refused_here(), None);
    assert_eq!(fields.refused_there(&mut client).await, None);
}
