//! The entries in hand of one stream, in their order.

use std::{
    collections::{HashSet, VecDeque},
    hash::BuildHasher as _,
    sync::Arc,
};

use tokio::time::Instant;

use super::Ticket;
use crate::{
    Message,
    entry::{Entry, Place},
    message::{Malformed, Source},
};

/// An entry that is to be settled.
#[derive(Debug)]
pub(crate) struct Item {
    pub(crate) parcel: Parcel,
    pub(crate) delivery: Delivery,
    not_before: Option<Instant>,
}

/// An entry by its form.
#[derive(Debug)]
pub(crate) enum Parcel {
    Message(Box<Message>),
    Malformed(Entry, Malformed),
}

/// What is known about earlier attempts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// There was none: it may share a transaction with others.
    First,
    /// It was given out before, so that a handler may have died of it: it runs alone, its attempt counted first.
    Again,
    /// Its batch or an attempt of its own has failed: it runs alone. Whether anything is recorded of it is said.
    Failed { recorded: bool },
}

/// Items of one stream for one lane.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) items: Vec<Item>,
    pub(crate) ticket: Ticket,
}

/// The entries in hand of one term of a stream.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) source: Arc<Source>,
    waiting: VecDeque<Item>,
    /// All entries in hand, on a lane or waiting.
    in_hand: HashSet<Place>,
    /// Ordering keys that are on a lane, by their hashes: two keys of one hash do no harm, they wait for each other.
    busy: HashSet<u64>,
    running: usize,
    closed_at: Option<Instant>,
    pub(super) being_read: bool,
    pub(super) refused: bool,
    pub(super) lease_until: Option<Instant>,
    pub(super) bytes: usize,
}

impl Item {
    fn new(parcel: Parcel, delivery: Delivery) -> Self {
        Self {
            parcel,
            delivery,
            not_before: None,
        }
    }

    pub(crate) fn malformed(entry: Entry, malformed: Malformed, delivery: Delivery) -> Self {
        Self::new(Parcel::Malformed(entry, malformed), delivery)
    }

    pub(crate) fn message(message: Message, delivery: Delivery) -> Self {
        Self::new(Parcel::Message(Box::new(message)), delivery)
    }

    /// The same, not to be tried before that time.
    pub(crate) fn not_before(self, time: Instant) -> Self {
        Self {
            not_before: Some(time),
            ..self
        }
    }

    pub(super) fn place(&self) -> Place {
        match &self.parcel {
            Parcel::Message(message) => message.place(),
            Parcel::Malformed(entry, _) => entry.place,
        }
    }

    /// What must not run at the same time; none for an entry that may run at any time.
    pub(crate) fn ordering_key(&self) -> Option<&str> {
        match &self.parcel {
            Parcel::Message(message) => message.ordering_key(),
            Parcel::Malformed(..) => None,
        }
    }

    fn bytes(&self) -> usize {
        match &self.parcel {
            Parcel::Message(message) => message.payload().len(),
            Parcel::Malformed(entry, _) => entry.fields().map(|(n, v)| n.len() + v.len()).sum(),
        }
    }

    fn is_due(&self, now: Instant) -> bool {
        self.not_before.is_none_or(|time| time <= now)
    }
}

impl Line {
    pub(super) fn new(source: Arc<Source>) -> Self {
        Self {
            source,
            waiting: VecDeque::new(),
            in_hand: HashSet::new(),
            busy: HashSet::new(),
            running: 0,
            closed_at: None,
            being_read: false,
            refused: false,
            lease_until: None,
            bytes: 0,
        }
    }

    pub(super) fn add(&mut self, items: Vec<Item>) {
        if self.closed_at.is_some() {
            return;
        }
        for item in items {
            if self.in_hand.insert(item.place()) {
                self.bytes += item.bytes();
                self.waiting.push_back(item);
            }
        }
    }

    /// Takes up to `most` items that may run now. An item that must run alone is a batch by itself; what comes
    /// after an item that has to wait waits too, if it has the same key.
    pub(super) fn take(&mut self, most: usize, now: Instant) -> Option<Batch> {
        let taken = self.runnable(most, now);
        if taken.is_empty() {
            return None;
        }
        let items = self.remove(&taken);
        self.running += items.len();
        let keys = items.iter().filter_map(Item::ordering_key);
        let keys: Vec<u64> = keys.map(|key| self.hash(key)).collect();
        self.busy.extend(&keys);
        let ticket = Ticket {
            source: Arc::clone(&self.source),
            entries: items.iter().map(Item::place).collect(),
            keys,
            began: now,
        };
        Some(Batch { items, ticket })
    }

    /// The indexes of the items of the next batch.
    fn runnable(&self, most: usize, now: Instant) -> Vec<usize> {
        let mut passed: HashSet<&str> = HashSet::new();
        let mut taken: Vec<usize> = Vec::new();
        for (index, item) in self.waiting.iter().enumerate() {
            if taken.len() >= most {
                break;
            }
            let key = item.ordering_key();
            let must_wait = key.is_some_and(|key| self.is_busy(key) || passed.contains(key));
            let alone = item.delivery != Delivery::First || item.is_malformed();
            if must_wait || !item.is_due(now) || (alone && !taken.is_empty()) {
                passed.extend(key);
                continue;
            }
            taken.push(index);
            if alone {
                break;
            }
        }
        taken
    }

    /// Takes the items at these indexes, which ascend.
    fn remove(&mut self, indexes: &[usize]) -> Vec<Item> {
        let leading = indexes.iter().enumerate().all(|(n, index)| n == *index);
        if leading {
            return self.waiting.drain(..indexes.len()).collect();
        }
        let mut next = indexes.iter().copied().peekable();
        let (mut taken, mut left) = (Vec::with_capacity(indexes.len()), VecDeque::new());
        for (index, item) in std::mem::take(&mut self.waiting).into_iter().enumerate() {
            if next.next_if_eq(&index).is_some() {
                taken.push(item);
            } else {
                left.push_back(item);
            }
        }
        self.waiting = left;
        taken
    }

    /// Lets other lanes take messages with these keys.
    pub(super) fn release(&mut self, keys: &[u64]) {
        for key in keys {
            self.busy.remove(key);
        }
    }

    /// Ends a batch. What is unsettled goes to the front: it came before everything that waits with its key.
    pub(super) fn take_back(&mut self, ticket: &Ticket, unsettled: Vec<Item>) {
        self.running -= ticket.entries.len();
        self.release(&ticket.keys);
        for place in &ticket.entries {
            self.in_hand.remove(place);
        }
        for item in unsettled.into_iter().rev() {
            self.in_hand.insert(item.place());
            self.waiting.push_front(item);
        }
        if self.closed_at.is_some() {
            self.let_go_of_what_must_wait(Instant::now());
        }
        self.bytes = self.waiting.iter().map(Item::bytes).sum();
    }

    /// Takes in nothing more, and lets go of what has to wait, with what comes after it.
    pub(super) fn close(&mut self, now: Instant) {
        if self.closed_at.is_some() {
            return;
        }
        self.closed_at = Some(now);
        self.let_go_of_what_must_wait(now);
    }

    /// Leaves to the next owner what is not due, and with it all that comes after it with the same key.
    fn let_go_of_what_must_wait(&mut self, now: Instant) {
        let mut passed: HashSet<String> = HashSet::new();
        let waiting = std::mem::take(&mut self.waiting);
        for item in waiting {
            let key = item.ordering_key();
            if !item.is_due(now) || key.is_some_and(|key| passed.contains(key)) {
                passed.extend(key.map(str::to_owned));
                self.in_hand.remove(&item.place());
            } else {
                self.waiting.push_back(item);
            }
        }
    }

    pub(super) fn clear(&mut self) {
        for item in self.waiting.drain(..) {
            self.in_hand.remove(&item.place());
        }
        self.bytes = 0;
    }

    pub(super) fn is_drained(&self) -> bool {
        self.closed_at.is_some() && self.waiting.is_empty() && self.running == 0 && !self.being_read
    }

    pub(super) fn is_readable(&self, now: Instant) -> bool {
        self.closed_at.is_none() && self.lease_until.is_none_or(|until| now < until)
    }

    pub(super) fn holds(&self, place: Place) -> bool {
        self.in_hand.contains(&place)
    }

    pub(super) fn ids(&self) -> Vec<String> {
        self.in_hand.iter().map(Place::to_string).collect()
    }

    pub(super) fn in_hand(&self) -> usize {
        self.in_hand.len()
    }

    fn hash(&self, key: &str) -> u64 {
        self.busy.hasher().hash_one(key)
    }

    fn is_busy(&self, key: &str) -> bool {
        !self.busy.is_empty() && self.busy.contains(&self.hash(key))
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// How many items wait for a later time, or for one that does; with several lanes also those whose key is on
    /// one of them, since the others could do something else.
    pub(super) fn blocked(&self, lanes: usize, now: Instant) -> usize {
        let mut passed: HashSet<&str> = HashSet::new();
        let busy_counts = lanes > 1 && !self.busy.is_empty();
        let mut blocked = 0;
        for item in &self.waiting {
            if item.is_due(now) && passed.is_empty() && !busy_counts {
                continue;
            }
            let key = item.ordering_key();
            let on_a_lane = |key| busy_counts && self.is_busy(key);
            if !item.is_due(now) || key.is_some_and(|key| passed.contains(key) || on_a_lane(key)) {
                blocked += 1;
                passed.extend(key);
            }
        }
        blocked
    }

    pub(super) fn next_due(&self, now: Instant) -> Option<Instant> {
        let times = self.waiting.iter().filter_map(|item| item.not_before);
        times.filter(|time| *time > now).min()
    }
}

impl Item {
    fn is_malformed(&self) -> bool {
        matches!(self.parcel, Parcel::Malformed(..))
    }
}
