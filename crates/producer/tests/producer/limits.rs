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

/// A limit: what just passes, and what is refused on both sides, by the name of its field here and of its
/// constraint there.
struct Boundary {
    what: String,
    passes: Fields,
    refused: Fields,
    field: &'static str,
    constraint: &'static str,
}

impl Boundary {
    fn new(
        what: &str,
        passes: Fields,
        refused: Fields,
        field: &'static str,
        constraint: &'static str,
    ) -> Self {
        let what = format!("{what} {field}");
        Self {
            what,
            passes,
            refused,
            field,
            constraint,
        }
    }
}

/// A text that must not be empty, and is measured in bytes.
fn of_text(
    bytes_max: usize,
    field: &'static str,
    constraint: &'static str,
    set: fn(String) -> Fields,
) -> [Boundary; 3] {
    let new =
        |what, passes, refused| Boundary::new(what, set(passes), set(refused), field, constraint);
    let accents = "é".repeat(bytes_max / 2);
    [
        new("shortest", "x".to_owned(), String::new()),
        new("longest", "x".repeat(bytes_max), "x".repeat(bytes_max + 1)),
        // Two bytes each; the characters are half as many as the limit.
        new("longest non-ASCII", accents.clone(), accents + "x"),
    ]
}

/// The lengths of names that have to be ASCII.
fn of_ascii(
    chars_max: usize,
    field: &'static str,
    constraint: &'static str,
    set: fn(String) -> Fields,
) -> [Boundary; 2] {
    let new =
        |what, passes, refused| Boundary::new(what, set(passes), set(refused), field, constraint);
    [
        new("shortest", "x".to_owned(), String::new()),
        new("longest", "x".repeat(chars_max), "x".repeat(chars_max + 1)),
    ]
}

/// The most bytes that a field may have.
fn of_size(
    bytes_max: usize,
    field: &'static str,
    constraint: &'static str,
    set: fn(usize) -> Fields,
) -> [Boundary; 1] {
    [Boundary::new(
        "largest",
        set(bytes_max),
        set(bytes_max + 1),
        field,
        constraint,
    )]
}

fn boundaries() -> Vec<Boundary> {
    let mut all = Vec::new();
    all.extend(of_ascii(
        limits::TOPIC_CHARS_MAX,
        "topic",
        "messages_topic_check",
        |topic| Fields {
            topic,
            ..Fields::good()
        },
    ));
    all.extend(of_ascii(
        limits::CONTENT_TYPE_CHARS_MAX,
        "content_type",
        "messages_content_type_check",
        |content_type| Fields::binary(1, &content_type),
    ));
    all.extend(of_text(
        limits::MESSAGE_KEY_BYTES_MAX,
        "message_key",
        "messages_message_key_check",
        |message_key| Fields {
            message_key,
            ..Fields::good()
        },
    ));
    all.extend(of_text(
        limits::ORDERING_KEY_BYTES_MAX,
        "ordering_key",
        "messages_ordering_key_check",
        |key| Fields {
            ordering_key: Some(key),
            ..Fields::good()
        },
    ));
    all.extend(of_text(
        limits::EVENT_TYPE_BYTES_MAX,
        "event_type",
        "messages_event_type_check",
        |event_type| Fields {
            event_type: Some(event_type),
            ..Fields::good()
        },
    ));
    all.extend(sizes());
    all
}

fn sizes() -> Vec<Boundary> {
    let mut all = Vec::new();
    let payload_size = "messages_payload_size_check";
    all.extend(of_size(
        limits::PAYLOAD_BYTES_MAX,
        "payload",
        payload_size,
        |bytes| Fields {
            payload: Some(json_of(bytes)),
            ..Fields::good()
        },
    ));
    all.extend(of_size(
        limits::PAYLOAD_BYTES_MAX,
        "payload",
        payload_size,
        |bytes| Fields::binary(bytes, "a/b"),
    ));
    all.extend(of_size(
        limits::HEADERS_BYTES_MAX,
        "headers",
        "messages_headers_check",
        |bytes| Fields {
            headers: Some(headers_of(bytes)),
            ..Fields::good()
        },
    ));
    all
}

#[tokio::test]
async fn both_sides_agree_at_every_boundary() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    let mut covered: BTreeSet<&str> = BTreeSet::new();
    for Boundary {
        what,
        passes,
        refused,
        field,
        constraint,
    } in boundaries()
    {
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
