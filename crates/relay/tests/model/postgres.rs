//! Postgres: transactions that draw ids and end late, snapshots, and a past that can change.

use std::collections::BTreeMap;

use outbox_relay::protocol::log::{Listed, Question, Writer};
use outbox_relay::protocol::place::Place;

/// A message, known by its id and by the history that gave the id out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Message {
    pub(crate) id: i64,
    /// Ids are given out again in a later history, to other messages.
    pub(crate) history: u8,
    /// Its ordering key; 0 for none.
    pub(crate) ordering: u8,
}

impl Message {
    pub(crate) fn message_key(&self) -> String {
        format!("{}.{}", self.id, self.history)
    }

    pub(crate) fn ordering_key(&self) -> Option<&'static str> {
        [None, Some("one"), Some("two")][usize::from(self.ordering)]
    }
}

/// A transaction that writes messages.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Transaction {
    /// Its virtual transaction id.
    pub(crate) number: u32,
    pub(crate) xid: Option<u32>,
    /// It holds the table's row-exclusive lock.
    pub(crate) locked: bool,
    pub(crate) ordering: u8,
    /// Ids of the messages it wrote.
    pub(crate) ids: Vec<i64>,
    /// It has drawn an id, also if the message is gone with a savepoint.
    pub(crate) drew: bool,
    pub(crate) prepared: bool,
}

/// The server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Postgres {
    pub(crate) timeline: u32,
    /// Number of the history, which names the messages.
    pub(crate) history: u8,
    /// Committed rows.
    pub(crate) rows: BTreeMap<i64, Message>,
    /// The last id that the sequence gave out.
    pub(crate) last_value: i64,
    /// Open transactions, in the order in which they began.
    pub(crate) open: Vec<Transaction>,
    pub(crate) checkpoint: Option<Place>,
    /// The rows that a crash leaves, when it does not leave all.
    flushed_rows: Option<Vec<i64>>,
    /// The `last_value` that a crash leaves; not kept where nothing crashes.
    flushed_value: i64,
    pub(crate) next_number: u32,
    next_xid: u32,
    /// One above the latest transaction id that ended.
    xmax: u32,
}

impl Postgres {
    /// An empty database.
    pub(crate) fn new() -> Self {
        Postgres {
            timeline: 1,
            next_xid: 1,
            xmax: 1,
            ..Postgres::default()
        }
    }

    /// A transaction begins: with its table lock, or (`early`) with a row elsewhere, which gives it an xid.
    pub(crate) fn begin(&mut self, ordering: u8, early: bool) {
        let xid = early.then(|| self.draw_xid());
        self.open.push(Transaction {
            number: self.next_number,
            xid,
            locked: !early,
            ordering,
            ids: Vec::new(),
            drew: false,
            prepared: false,
        });
        self.next_number += 1;
    }

    fn draw_xid(&mut self) -> u32 {
        self.next_xid += 1;
        self.next_xid - 1
    }

    pub(crate) fn draw(&mut self, at: usize, with_xids: bool) {
        self.last_value += 1;
        let id = self.last_value;
        let needs_xid = with_xids && self.open[at].xid.is_none();
        let xid = needs_xid.then(|| self.draw_xid());
        let transaction = &mut self.open[at];
        transaction.xid = transaction.xid.or(xid);
        transaction.ids.push(id);
        transaction.drew = true;
    }

    /// Ends a transaction. What it wrote becomes visible, and in the same step its lock is gone.
    ///
    /// A crash takes back what was not flushed since.
    pub(crate) fn end(&mut self, at: usize, commit: bool, lazily: bool) {
        if commit && lazily && self.flushed_rows.is_none() {
            self.flushed_rows = Some(self.rows.keys().copied().collect());
        }
        let ended = self.open.remove(at);
        if let Some(xid) = ended.xid {
            self.xmax = self.xmax.max(xid + 1);
        }
        if commit {
            let message = |id: &i64| Message {
                id: *id,
                history: self.history,
                ordering: ended.ordering,
            };
            let messages: Vec<Message> = ended.ids.iter().map(message).collect();
            self.rows.extend(messages.into_iter().map(|m| (m.id, m)));
        }
    }

    /// Flushes all that was written.
    pub(crate) fn flush(&mut self) {
        self.flushed_rows = None;
        self.flushed_value = self.last_value;
    }

    /// Rolls back to a savepoint before the table lock: what was written is gone, and the lock with it.
    pub(crate) fn rollback_to_savepoint(&mut self, at: usize) {
        let transaction = &mut self.open[at];
        transaction.ids.clear();
        transaction.locked = false;
    }

    /// `L`.
    pub(crate) fn writers(&self) -> Vec<Listed> {
        let listed = |t: &Transaction| Listed {
            writer: Writer {
                id: format!("{}{}", if t.prepared { "-1/" } else { "3/" }, t.number),
                prepared: t.prepared,
            },
            xid: t.xid,
        };
        self.open.iter().filter(|t| t.locked).map(listed).collect()
    }

    /// Ids of the transactions that `pg_current_snapshot()` lists as open.
    pub(crate) fn listed_in_snapshot(&self) -> Vec<u32> {
        let open = self.open.iter().filter_map(|t| t.xid);
        open.filter(|xid| *xid < self.xmax).collect()
    }

    /// `pg_current_snapshot()`.
    pub(crate) fn snapshot(&self) -> String {
        let listed = self.listed_in_snapshot();
        let xmin = listed.iter().min().unwrap_or(&self.xmax);
        let names: Vec<String> = listed.iter().map(u32::to_string).collect();
        format!("{xmin}:{}:{}", self.xmax, names.join(","))
    }

    /// `R`: the rows in the gaps.
    pub(crate) fn late_rows(&self, question: &Question, limit: usize) -> Vec<Message> {
        let gaps = question.gaps_lo.iter().zip(&question.gaps_hi);
        gaps.flat_map(|(lo, hi)| self.rows.range(lo..=hi))
            .map(|(_, row)| *row)
            .take(limit)
            .collect()
    }

    /// `Q`: the rows above `high`.
    pub(crate) fn new_rows(&self, question: &Question, limit: usize) -> Vec<Message> {
        let limit = if question.read_ahead { limit } else { 0 };
        let above = self.rows.range(question.high + 1..);
        above.map(|(_, row)| *row).take(limit).collect()
    }

    /// What is on the disk of another: without the open transactions.
    pub(crate) fn copied(&self) -> Postgres {
        Postgres {
            rows: self.rows.clone(),
            last_value: self.last_value,
            checkpoint: self.checkpoint.clone(),
            ..Postgres::default()
        }
    }

    /// Crashes and comes back: open transactions and commits that were not flushed are gone.
    pub(crate) fn crash(&mut self, history: u8) {
        self.open.clear();
        if let Some(rows) = self.flushed_rows.take() {
            self.rows.retain(|id, _| rows.contains(id));
        }
        self.last_value = self.flushed_value;
        self.history = history;
    }

    /// Goes back to an earlier state: a standby that lacked the latest transactions is promoted, or a snapshot of
    /// the storage is put back, which keeps the timeline.
    pub(crate) fn fall_back_to(&mut self, earlier: &Postgres, history: u8, promoted: bool) {
        let before = std::mem::take(self);
        *self = Postgres {
            timeline: before.timeline + u32::from(promoted),
            history,
            rows: earlier.rows.clone(),
            last_value: earlier.last_value,
            checkpoint: earlier.checkpoint.clone(),
            next_number: before.next_number,
            next_xid: before.next_xid,
            xmax: before.next_xid,
            ..Postgres::default()
        };
    }
}
