//! What `verify` says, for people and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

use super::streams::Stream;
use super::tally::{Suspect, Tally};
use crate::dead_letters::printable;

/// What a run of [`crate::verify`] found.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct VerifyReport {
    /// The first id that was compared.
    pub from_id: i64,
    /// The last id that was compared; the range is empty where it is lower than the first.
    pub to_id: i64,
    /// Below this id the outbox has been purged: entries are compared with each other only.
    pub held_from_id: i64,
    /// Streams that were read.
    pub streams: u64,
    /// Rows of the range.
    pub rows: u64,
    /// Stream entries of the range.
    pub entries: u64,
    /// Entries that `outbox-relay replay` added to these streams; they are held against nothing.
    pub replayed: u64,
    /// Rows that have an entry.
    pub published: u64,
    /// Rows that the cursor had not passed when the run began; no finding unless asked for with `complete`.
    pub not_yet_published: Findings,
    /// Of those, how many lie above the cursor.
    pub above_cursor: u64,
    /// Of those, how many lie in its gaps.
    pub in_gaps: u64,
    /// Of those, how many belong to a stream that refuses entries, or a topic that is held back.
    pub held_back: u64,
    /// Rows that the relay set aside in `outbox.dead_letters`.
    pub set_aside: u64,
    /// Rows that were sent and are older than the first entry of their stream, which was trimmed; no finding.
    pub trimmed: Findings,
    /// Rows that were sent and have no entry.
    pub missing: Findings,
    /// Messages with more than one entry.
    pub doubled: Findings,
    /// Entries that came after one of their ordering key with a higher id.
    pub out_of_order: Findings,
    /// Entries without a row.
    pub phantom: Findings,
    /// What the group made of the published messages.
    pub group: Option<GroupReport>,
    /// Whether something is wrong.
    pub wrong: bool,
}

/// What a consumer group made of the messages that stand in the streams it reads.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct GroupReport {
    /// Its name.
    pub group: String,
    /// Streams that it reads.
    pub streams: u64,
    /// Messages whose key is in the inbox.
    pub applied: u64,
    /// Messages that are set aside for it, wait behind one or will be retried.
    pub dead_letters: u64,
    /// Messages that are pending or were not given yet; no finding unless asked for with `complete`.
    pub not_yet_applied: Findings,
    /// Of those, given to a member and not acknowledged.
    pub pending: u64,
    /// Of those, not given to any member.
    pub not_given: u64,
    /// Messages so old that the inbox may have forgotten that it applied them.
    pub beyond_inbox: u64,
    /// Messages that were acknowledged or skipped, and are neither applied nor set aside.
    pub lost_effect: Findings,
}

/// How many of a kind, and some of them.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Findings {
    /// How many.
    pub count: u64,
    /// The first of them.
    pub examples: Vec<Example>,
}

/// One of them.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Example {
    /// The message's id.
    pub id: Option<i64>,
    /// The message's key.
    pub message_key: Option<String>,
    /// The stream.
    pub stream: Option<String>,
    /// The entry in the stream.
    pub entry_id: Option<String>,
    /// What else there is to say.
    pub note: String,
}

impl Findings {
    pub(super) fn new(tally: &Tally, streams: &[Stream], limit: usize) -> Self {
        let examples = tally.kept.iter().take(limit);
        Findings {
            count: tally.count,
            examples: examples.map(|s| Example::new(s, streams)).collect(),
        }
    }
}

impl Example {
    fn new(suspect: &Suspect, streams: &[Stream]) -> Self {
        let name = |index: u32| streams[index as usize].name.clone();
        let mut note = suspect.note.clone();
        if let Some((stream, entry)) = suspect.other {
            note = format!("{note} {entry} in {}", name(stream));
        }
        Example {
            id: suspect.id,
            message_key: suspect.message_key.clone(),
            stream: suspect.stream.map(name),
            entry_id: suspect.entry.map(|entry| entry.to_string()),
            note,
        }
    }
}

impl VerifyReport {
    /// Whether something is wrong; `complete`: also what is on its way still.
    pub(super) fn judge(&mut self, complete: bool) {
        let mut wrong = vec![
            &self.missing,
            &self.doubled,
            &self.out_of_order,
            &self.phantom,
        ];
        if complete {
            wrong.push(&self.not_yet_published);
        }
        if let Some(group) = &self.group {
            wrong.push(&group.lost_effect);
            if complete {
                wrong.push(&group.not_yet_applied);
            }
        }
        self.wrong = wrong.iter().any(|findings| findings.count > 0);
    }

    /// The report as JSON, in one line.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers and strings are always valid JSON")
    }

    fn kinds(&self) -> Vec<(&'static str, &Findings)> {
        let mut kinds = vec![
            ("missing", &self.missing),
            ("doubled", &self.doubled),
            ("out of order", &self.out_of_order),
            ("phantom", &self.phantom),
        ];
        if let Some(group) = &self.group {
            kinds.push(("lost effect", &group.lost_effect));
        }
        kinds.push(("not yet published", &self.not_yet_published));
        kinds.push(("trimmed", &self.trimmed));
        if let Some(group) = &self.group {
            kinds.push(("not yet applied", &group.not_yet_applied));
        }
        kinds
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        if self.from_id > self.to_id {
            writeln!(out, "ids                 none")?;
        } else {
            writeln!(
                out,
                "ids                 {} to {}",
                self.from_id, self.to_id
            )?;
        }
        let purged = self.held_from_id.saturating_sub(1).min(self.to_id);
        if self.from_id <= purged {
            writeln!(
                out,
                "purged              {} to {purged}: entries of these are not held against rows",
                self.from_id
            )?;
        }
        writeln!(out, "rows                {}", self.rows)?;
        writeln!(
            out,
            "entries             {} in {} streams",
            self.entries, self.streams
        )?;
        if self.replayed > 0 {
            writeln!(out, "replayed            {}", self.replayed)?;
        }
        writeln!(out, "published           {}", self.published)?;
        writeln!(
            out,
            "not yet published   {} (above the cursor {}, in its gaps {}, held back {})",
            self.not_yet_published.count, self.above_cursor, self.in_gaps, self.held_back
        )?;
        writeln!(out, "set aside           {}", self.set_aside)?;
        writeln!(out, "trimmed             {}", self.trimmed.count)?;
        writeln!(out, "missing             {}", self.missing.count)?;
        writeln!(out, "doubled             {}", self.doubled.count)?;
        writeln!(out, "out of order        {}", self.out_of_order.count)?;
        writeln!(out, "phantom             {}", self.phantom.count)?;
        if let Some(group) = &self.group {
            group.write(out)?;
        }
        for (kind, findings) in self.kinds() {
            findings.write(kind, out)?;
        }
        writeln!(
            out,
            "{}",
            if self.wrong {
                "something is wrong"
            } else {
                "nothing is wrong"
            }
        )
    }
}

impl GroupReport {
    fn write(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "group               {}, which reads {} streams",
            printable(&self.group),
            self.streams
        )?;
        writeln!(out, "applied             {}", self.applied)?;
        writeln!(
            out,
            "not yet applied     {} (pending {}, not given {})",
            self.not_yet_applied.count, self.pending, self.not_given
        )?;
        writeln!(out, "dead letters        {}", self.dead_letters)?;
        writeln!(out, "beyond the inbox    {}", self.beyond_inbox)?;
        writeln!(out, "lost effect         {}", self.lost_effect.count)
    }
}

impl Findings {
    fn write(&self, kind: &str, out: &mut String) -> std::fmt::Result {
        if self.count == 0 || self.examples.is_empty() {
            return Ok(());
        }
        writeln!(out, "\n{kind}:")?;
        for example in &self.examples {
            let or_dash = |text: Option<&str>| text.map_or_else(|| "-".to_owned(), printable);
            writeln!(
                out,
                "  {}\t{}\t{}\t{}\t{}",
                example
                    .id
                    .map_or_else(|| "-".to_owned(), |id| id.to_string()),
                or_dash(example.message_key.as_deref()),
                or_dash(example.stream.as_deref()),
                or_dash(example.entry_id.as_deref()),
                printable(&example.note)
            )?;
        }
        let more = self.count - self.examples.len() as u64;
        if more > 0 {
            writeln!(out, "  and {more} more")?;
        }
        Ok(())
    }
}

impl std::fmt::Display for VerifyReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = String::new();
        self.write(&mut out)?;
        f.write_str(out.trim_end())
    }
}
