//! What `trace` says, for people and as JSON.

use std::fmt::{self, Write};

use serde::Serialize;

use crate::dead_letters::printable;

/// One message on its way.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Trace {
    /// Its key.
    pub message_key: String,
    /// What the outbox has of it; none where it has it no longer.
    pub message: Option<TracedMessage>,
    /// Its entry in Redis.
    pub entry: Option<TracedEntry>,
    /// Why it is not published.
    pub not_published: Option<String>,
    /// Why its entry was not found, although it was published.
    pub entry_unknown: Option<String>,
    /// What the group has made of it, where one was named.
    pub group: Option<GroupTrace>,
}

/// A message as the outbox has it.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct TracedMessage {
    /// Its position.
    pub id: i64,
    /// Its topic.
    pub topic: String,
    /// Its event type.
    pub event_type: Option<String>,
    /// When its transaction began, by the clock of Postgres (RFC 3339, UTC).
    pub created_at: String,
    /// Why it is in `outbox.dead_letters`.
    pub set_aside_because: Option<String>,
    /// Since when.
    pub set_aside_at: Option<String>,
}

/// Its entry.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct TracedEntry {
    /// The stream.
    pub stream: String,
    /// The entry in it.
    pub entry_id: String,
    /// When it was added, by the clock of Redis (RFC 3339, UTC).
    pub published_at: String,
    /// How long after the beginning of its transaction, by the two clocks.
    pub after_seconds: f64,
}

/// What a group has made of it.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct GroupTrace {
    /// The group.
    pub group: String,
    /// `applied`, `dead letter`, `to be retried`, `waiting`, `pending`, `not given yet`, `not read`, `forgotten`, `unknown` or
    /// `acknowledged without effect`.
    pub state: String,
    /// When its effect was committed (RFC 3339, UTC).
    pub applied_at: Option<String>,
    /// Whether the group reads the stream; none where the entry is not known.
    pub reads_stream: Option<bool>,
    /// Whether it was given the entry.
    pub given: Option<bool>,
    /// The consumer that has not acknowledged it.
    pub pending_with: Option<String>,
    /// How often it was delivered.
    pub deliveries: Option<u64>,
    /// How long ago the last time.
    pub idle_seconds: Option<f64>,
    /// Attempts that failed, or were cut off by a crash.
    pub attempts: Option<i32>,
    /// What the last of these said.
    pub last_error: Option<String>,
    /// The number of its dead letter.
    pub dead_letter: Option<i64>,
    /// `dead`, `retry`, or `waiting` behind one of its ordering key.
    pub dead_letter_state: Option<String>,
    /// Why it was set aside.
    pub dead_letter_reason: Option<String>,
    /// When.
    pub set_aside_at: Option<String>,
    /// The inbox may have forgotten what it applied until then.
    pub inbox_forgot_until: Option<String>,
}

impl GroupTrace {
    /// Says in a word what the parts amount to.
    pub(super) fn judge(&mut self) {
        let state = match self.dead_letter_state.as_deref() {
            _ if self.applied_at.is_some() => "applied",
            Some("retry") => "to be retried",
            Some("waiting") => "waiting",
            Some(_) => "dead letter",
            None if self.pending_with.is_some() => "pending",
            None => match (self.reads_stream, self.given) {
                (Some(false), _) => "not read",
                (_, Some(false)) => "not given yet",
                (None, _) => "unknown",
                _ if self.inbox_forgot_until.is_some() => "forgotten",
                _ => "acknowledged without effect",
            },
        };
        self.state = state.to_owned();
    }
}

impl Trace {
    /// The trace as JSON, in one line.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers and strings are always valid JSON")
    }

    fn write(&self, out: &mut String) -> fmt::Result {
        line(out, "message", printable(&self.message_key))?;
        if let Some(message) = &self.message {
            let text = format!(
                "id {} of topic {}, begun {}",
                message.id, message.topic, message.created_at
            );
            line(out, "committed", text)?;
        }
        if let Some(why) = &self.not_published {
            line(out, "not published", printable(why))?;
        }
        if let Some(why) = &self.entry_unknown {
            line(
                out,
                "published",
                format!("entry not found: {}", printable(why)),
            )?;
        }
        if let Some(entry) = &self.entry {
            let text = format!(
                "{} {}, {}, {:.3} s after",
                printable(&entry.stream),
                entry.entry_id,
                entry.published_at,
                entry.after_seconds
            );
            line(out, "published", text)?;
        }
        if let Some(group) = &self.group {
            let name = format!("group {}", printable(&group.group));
            line(out, &name, group)?;
        }
        Ok(())
    }
}

fn line(out: &mut String, name: &str, value: impl fmt::Display) -> fmt::Result {
    writeln!(out, "{name:<20}{value}")
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = String::new();
        self.write(&mut out)?;
        f.write_str(out.trim_end())
    }
}

impl fmt::Display for GroupTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.state)?;
        match self.state.as_str() {
            "not read" => f.write_str(": no such group on the stream")?,
            "unknown" => {
                f.write_str(": neither applied nor a dead letter, and its entry is not known")?
            }
            "acknowledged without effect" => {
                f.write_str(": neither applied nor a dead letter; see outbox-relay verify")?;
            }
            _ => {}
        }
        if let Some(at) = &self.applied_at {
            write!(f, " {at}")?;
        }
        if self.state == "forgotten"
            && let Some(until) = &self.inbox_forgot_until
        {
            write!(
                f,
                ": acknowledged, and the inbox keeps nothing that was applied before {until}"
            )?;
        }
        if let (Some(consumer), Some(deliveries)) = (&self.pending_with, self.deliveries) {
            let consumer = printable(consumer);
            write!(f, ", delivered {deliveries} times, last to {consumer}")?;
            if let Some(idle) = self.idle_seconds {
                write!(f, " {idle:.1} s ago")?;
            }
        }
        if let Some(number) = self.dead_letter {
            write!(f, ", dead letter {number}")?;
        }
        if let (Some(reason), Some(at)) = (&self.dead_letter_reason, &self.set_aside_at) {
            write!(f, " set aside {at}: {}", printable(reason))?;
        }
        if let Some(attempts) = self.attempts {
            write!(f, ", {attempts} attempts")?;
        }
        match &self.last_error {
            Some(error) => write!(f, ", the last: {}", printable(error)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(of: GroupTrace) -> String {
        let mut of = of;
        of.judge();
        of.state
    }

    #[test]
    fn the_state_is_the_last_thing_that_happened() {
        let some = |text: &str| Some(text.to_owned());
        let given = GroupTrace {
            reads_stream: Some(true),
            given: Some(true),
            ..GroupTrace::default()
        };
        assert_eq!(judged(given.clone()), "acknowledged without effect");
        let forgotten = GroupTrace {
            inbox_forgot_until: some("then"),
            ..given.clone()
        };
        assert_eq!(judged(forgotten), "forgotten");
        let pending = GroupTrace {
            pending_with: some("one"),
            ..given.clone()
        };
        assert_eq!(judged(pending.clone()), "pending");
        let dead = GroupTrace {
            dead_letter_state: some("dead"),
            ..pending.clone()
        };
        assert_eq!(judged(dead), "dead letter");
        let applied = GroupTrace {
            applied_at: some("now"),
            ..pending
        };
        assert_eq!(judged(applied), "applied");
        let early = GroupTrace {
            given: Some(false),
            ..given.clone()
        };
        assert_eq!(judged(early), "not given yet");
        let other = GroupTrace {
            reads_stream: Some(false),
            given: None,
            ..given
        };
        assert_eq!(judged(other), "not read");
        assert_eq!(judged(GroupTrace::default()), "unknown");
    }
}
