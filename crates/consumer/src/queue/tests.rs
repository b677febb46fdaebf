use std::{sync::Arc, time::Duration};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::{Message, entry::Entry};

fn source() -> Arc<Source> {
    Arc::new(Source {
        topic: "orders".to_owned(),
        stream: "orders".to_owned(),
        epoch: Some(1),
    })
}

fn item(source: &Arc<Source>, id: &str, ordering_key: Option<&str>) -> Item {
    let mut fields: Vec<(&str, &[u8])> = vec![
        ("id", b"1"),
        ("message_key", id.as_bytes()),
        ("created_at", b"2026-02-03T04:05:06Z"),
        ("payload", b"{}"),
    ];
    fields.extend(ordering_key.map(|key| ("ordering_key", key.as_bytes())));
    let message = Message::from_entry(source, Entry::of(id, &fields)).unwrap();
    Item::message(message, Delivery::First)
}

fn queue(batch: usize, lanes: usize) -> (Queue, Arc<Source>) {
    let queue = Queue::new(Bounds {
        batch,
        lanes,
        claim_after: Duration::from_secs(60),
    });
    let source = source();
    queue.open(Arc::clone(&source));
    (queue, source)
}

fn take(queue: &Queue) -> Option<Batch> {
    queue.lines().take(queue.0.bounds, Instant::now())
}

fn ids(batch: &Batch) -> Vec<&str> {
    fn id(parcel: &Parcel) -> &str {
        match parcel {
            Parcel::Message(message) => message.entry_id(),
            Parcel::Malformed(entry, _) => &entry.id,
        }
    }
    batch.items.iter().map(|item| id(&item.parcel)).collect()
}

#[test]
fn one_key_is_on_one_lane_at_a_time() {
    let (queue, source) = queue(1, 2);
    let items = [("1", "a"), ("2", "a"), ("3", "b")];
    let items = items.map(|(id, key)| item(&source, id, Some(key)));
    queue.add(&source, items.into());
    let first = take(&queue).unwrap();
    let second = take(&queue).unwrap();
    assert_eq!((ids(&first), ids(&second)), (vec!["1"], vec!["3"]));
    assert!(take(&queue).is_none());
    queue.finish(first.ticket, Vec::new());
    assert_eq!(ids(&take(&queue).unwrap()), ["2"]);
}

#[test]
fn what_follows_a_committed_message_of_its_key_need_not_wait_for_its_acknowledgement() {
    let (queue, source) = queue(1, 2);
    let items = ["1", "2", "3"].map(|id| item(&source, id, Some("a")));
    queue.add(&source, items.into());
    let mut first = take(&queue).unwrap();
    assert!(take(&queue).is_none());
    queue.release_keys(&mut first.ticket);
    let second = take(&queue).unwrap();
    assert_eq!(ids(&second), ["2"]);
    // It is still in hand: kept fresh, not taken in again, and no room for another.
    assert_eq!(queue.in_hand()[0].1.len(), 3);
    assert_eq!(queue.room(), 1);
    queue.finish(first.ticket, Vec::new());
    assert_eq!(queue.room(), 2);
    // The key is on the other lane now.
    assert!(take(&queue).is_none());
    queue.finish(second.ticket, Vec::new());
    assert_eq!(ids(&take(&queue).unwrap()), ["3"]);
}

#[test]
fn what_failed_comes_again_before_what_follows_it_and_other_keys_go_on() {
    let (queue, source) = queue(10, 1);
    let items = [("1", "a"), ("2", "a"), ("3", "b")];
    let items = items.map(|(id, key)| item(&source, id, Some(key)));
    queue.add(&source, items.into());
    let Batch { mut items, ticket } = take(&queue).unwrap();
    let soon = Instant::now() + Duration::from_millis(20);
    items.truncate(2);
    let follower = items.pop().unwrap();
    let mut failed = items.pop().unwrap().not_before(soon);
    failed.delivery = Delivery::Failed { recorded: true };
    queue.finish(ticket, vec![failed, follower]);
    queue.add(
        &source,
        vec![item(&source, "4", Some("b")), item(&source, "5", None)],
    );
    let others = take(&queue).unwrap();
    assert_eq!(ids(&others), ["4", "5"]);
    assert!(take(&queue).is_none());
    while Instant::now() < soon {
        std::hint::spin_loop();
    }
    let alone = take(&queue).unwrap();
    assert_eq!(ids(&alone), ["1"]);
    queue.finish(alone.ticket, Vec::new());
    assert_eq!(ids(&take(&queue).unwrap()), ["2"]);
}

#[test]
fn an_entry_in_hand_is_not_taken_in_again() {
    let (queue, source) = queue(1, 1);
    let twice = || vec![item(&source, "1", None), item(&source, "2", None)];
    queue.add(&source, twice());
    let running = take(&queue).unwrap();
    queue.add(&source, twice());
    let mut entries = ["1", "2", "3"].map(|id| Entry::of(id, &[])).to_vec();
    queue.leave_out_held(&source, &mut entries);
    assert_eq!(entries, [Entry::of("3", &[])]);
    queue.finish(running.ticket, Vec::new());
    let mut settled = vec![Entry::of("1", &[])];
    queue.leave_out_held(&source, &mut settled);
    assert_eq!(settled.len(), 1);
    assert_eq!(ids(&take(&queue).unwrap()), ["2"]);
    assert!(take(&queue).is_none());
}

#[test]
fn a_stream_is_drained_when_nothing_runs_waits_or_is_being_read() {
    let (queue, source) = queue(1, 1);
    queue.add(
        &source,
        vec![item(&source, "1", None), item(&source, "2", None)],
    );
    let running = take(&queue).unwrap();
    queue.begin_read(std::slice::from_ref(&source));
    queue.close("orders");
    queue.add(&source, vec![item(&source, "3", None)]);
    queue.finish(running.ticket, Vec::new());
    assert!(!queue.is_drained("orders"));
    queue.hurry("orders");
    assert!(!queue.is_drained("orders"));
    queue.end_read(std::slice::from_ref(&source));
    assert!(queue.is_drained("orders"));
    assert!(queue.readable().is_empty());
}

#[test]
fn what_follows_a_failure_is_left_to_the_next_owner_with_it() {
    let (queue, source) = queue(2, 1);
    let items = [("1", "a"), ("2", "b"), ("3", "a"), ("4", "b")];
    let items = items.map(|(id, key)| item(&source, id, Some(key)));
    queue.add(&source, items.into());
    let Batch { mut items, ticket } = take(&queue).unwrap();
    queue.close("orders");
    let later = Instant::now() + Duration::from_secs(60);
    let failed = items.remove(0).not_before(later);
    queue.finish(ticket, vec![failed]);
    let rest = take(&queue).unwrap();
    assert_eq!(ids(&rest), ["4"]);
    queue.finish(rest.ticket, Vec::new());
    assert!(queue.is_drained("orders"));
}

#[test]
fn what_is_left_of_an_earlier_term_is_not_mixed_with_the_next() {
    let (queue, old) = queue(1, 1);
    queue.add(&old, vec![item(&old, "1", Some("a"))]);
    let running = take(&queue).unwrap();
    let new = source();
    queue.open(Arc::clone(&new));
    queue.add(&old, vec![item(&old, "2", None)]);
    queue.finish(running.ticket, vec![item(&old, "1", Some("a"))]);
    assert!(take(&queue).is_none());
    queue.add(&new, vec![item(&new, "1", Some("a"))]);
    assert_eq!(ids(&take(&queue).unwrap()), ["1"]);
}

#[test]
fn no_more_is_read_ahead_than_can_start_in_half_the_claim_time() {
    let (queue, source) = queue(100, 1);
    assert_eq!(queue.room(), 200);
    queue.lines().time_per_message = Some(Duration::from_secs(3));
    assert_eq!(queue.room(), 10);
    queue.add(&source, vec![item(&source, "1", None)]);
    assert_eq!(queue.room(), 9);
    // What waits behind a key that must wait itself is not ahead: the others go on.
    let later = Instant::now() + Duration::from_secs(60);
    let blocked = item(&source, "2", Some("a")).not_before(later);
    queue.add(&source, vec![blocked, item(&source, "3", Some("a"))]);
    assert_eq!(queue.room(), 9);
}

#[tokio::test]
async fn a_lane_waits_for_work_and_ends_at_the_stop() {
    let (queue, source) = queue(10, 1);
    let stop = CancellationToken::new();
    let add = async {
        tokio::task::yield_now().await;
        queue.add(&source, vec![item(&source, "1", None)]);
    };
    let (batch, ()) = tokio::join!(queue.next(&stop), add);
    assert_eq!(ids(&batch.unwrap()), ["1"]);
    stop.cancel();
    assert!(matches!(queue.next(&stop).await, Err(Halt::Stopped)));
}
