//! The keys of a group's inbox in Redis.

use redis::{Cmd, Value};

use super::Settings;
use crate::{
    Message,
    decision::{Fault, Origin},
    link::Link,
    reader::milliseconds,
    trouble::Trouble,
};

const BEGIN: &str = include_str!("begin.lua");
const DONE: &str = include_str!("done.lua");
const SET_ASIDE: &str = include_str!("set_aside.lua");

/// What is known of a message when it is to be handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Begun {
    /// It is ours now; this is the number of the attempt.
    Attempt(u32),
    Handled,
    /// Another member is at it.
    Elsewhere,
}

/// The keys, and who we are among those that set them.
pub(super) struct Store {
    link: Link,
    prefix: String,
    group: String,
    /// Different for each run of a process: a key that an earlier run holds is not ours.
    token: String,
    lease_ms: u64,
    retention_ms: u64,
}

impl Store {
    pub(super) fn new(settings: &Settings, link: Link) -> Self {
        Self {
            link,
            prefix: format!("{}group:{}:", settings.stream_prefix, settings.group),
            group: settings.group.clone(),
            token: uuid::Uuid::new_v4().to_string(),
            lease_ms: milliseconds(settings.claim_after),
            retention_ms: milliseconds(settings.retention),
        }
    }

    /// Takes the key and counts the attempt, before the handler runs.
    pub(super) async fn begin(&self, message: &Message) -> Result<Begun, Trouble> {
        let mut command = script(BEGIN, &self.keys(message));
        command
            .arg(&self.token)
            .arg(self.lease_ms)
            .arg(self.retention_ms);
        match self.link.query(&command).await? {
            Value::Int(0) => Ok(Begun::Handled),
            Value::Int(attempt) => {
                Ok(u32::try_from(attempt).map_or(Begun::Elsewhere, Begun::Attempt))
            }
            other => {
                let text = format!("unexpected reply to EVAL: {other:?}");
                Err(Trouble::new(Origin::Library, Fault::OtherRedis, text))
            }
        }
    }

    /// Keeps key and entry ours while the handler runs.
    pub(super) async fn renew(&self, member: &str, message: &Message) -> Result<(), Trouble> {
        let [key, _] = self.keys(message);
        self.link
            .query(redis::cmd("PEXPIRE").arg(key).arg(self.lease_ms))
            .await?;
        let mut claim = redis::cmd("XCLAIM");
        claim
            .arg(message.stream())
            .arg(&self.group)
            .arg(member)
            .arg(0)
            .arg(message.entry_id());
        self.link.query(claim.arg("JUSTID")).await.map(drop)
    }

    /// The handler has returned. A crash before this step handles the message again; after it, never.
    pub(super) async fn done(&self, message: &Message) -> Result<(), Trouble> {
        let [key, attempts] = self.keys(message);
        let mut command = script(DONE, &[key, attempts, message.stream().to_owned()]);
        command
            .arg(self.retention_ms)
            .arg(&self.group)
            .arg(message.entry_id());
        self.link.query(&command).await.map(drop)
    }

    /// Gives the message up: its entry is acknowledged, and it stands among the dead letters.
    pub(super) async fn set_aside(
        &self,
        message: &Message,
        attempts: u32,
        reason: &str,
    ) -> Result<(), Trouble> {
        let [key, attempts_key] = self.keys(message);
        let mut command = self.letter([key, attempts_key], message.stream(), message.entry_id());
        command
            .arg("id")
            .arg(message.id())
            .arg("message_key")
            .arg(message.message_key());
        for (name, value) in [
            ("ordering_key", message.ordering_key()),
            ("event_type", message.event_type()),
            ("content_type", message.explicit_content_type()),
            ("headers", message.headers_text()),
        ] {
            if let Some(value) = value {
                command.arg(name).arg(value);
            }
        }
        command
            .arg("payload")
            .arg(message.payload())
            .arg("reason")
            .arg(reason)
            .arg("attempts")
            .arg(attempts);
        self.link.query(&command).await.map(drop)
    }

    /// Gives an entry up that is no message, with all its fields as JSON.
    pub(super) async fn set_aside_malformed(
        &self,
        stream: &str,
        entry_id: &str,
        fields: &str,
        reason: &str,
    ) -> Result<(), Trouble> {
        // Nothing has these keys: no message key is empty.
        let keys = ["inbox", "attempts"].map(|kind| format!("{}{kind}::", self.prefix));
        let mut command = self.letter(keys, stream, entry_id);
        command
            .arg("fields")
            .arg(fields)
            .arg("reason")
            .arg(reason)
            .arg("attempts")
            .arg(0);
        self.link.query(&command).await.map(drop)
    }

    /// The beginning of what sets an entry aside; the fields of the dead letter follow.
    fn letter(&self, [key, attempts]: [String; 2], stream: &str, entry_id: &str) -> Cmd {
        let letters = format!("{}dead-letters", self.prefix);
        let mut command = script(SET_ASIDE, &[key, attempts, stream.to_owned(), letters]);
        command.arg(&self.group).arg(entry_id);
        command
            .arg("stream")
            .arg(stream)
            .arg("entry_id")
            .arg(entry_id);
        command
    }

    fn keys(&self, message: &Message) -> [String; 2] {
        let (prefix, topic, key) = (&self.prefix, message.topic(), message.message_key());
        [
            format!("{prefix}inbox:{topic}:{key}"),
            format!("{prefix}attempts:{topic}:{key}"),
        ]
    }
}

fn script(text: &str, keys: &[String]) -> Cmd {
    let mut command = redis::cmd("EVAL");
    command.arg(text).arg(keys.len()).arg(keys);
    command
}
