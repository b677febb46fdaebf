//! Rows stay in the outbox until the groups of `--hold-until-acked` have acknowledged them.

use outbox_testkit::eventually;

use crate::group::{Group, ask};
use crate::http::{LISTEN, metrics};
use crate::purge::{
    RETENTION, a_purge_has_run_over_what_is_published_now, left, only_these_are_left,
};
use crate::support::{DEADLINE, Outbox, leading};

async fn published(outbox: &Outbox<'_>, ids: std::ops::RangeInclusive<i64>) {
    for id in ids {
        assert_eq!(outbox.insert(&format!("row-{id}")).await, id);
    }
    outbox.settles().await;
}

#[tokio::test]
async fn rows_stay_until_the_group_has_acknowledged_them_and_then_go() {
    let outbox = Outbox::open().await;
    let hold = ["--hold-until-acked", "packing"];
    let relay = leading(outbox.relay().args(RETENTION).args(hold).args(LISTEN)).await;
    published(&outbox, 1..=5).await;

    // A group that is not there yet has acknowledged nothing.
    let line = relay
        .wait_for_line("no row is purged", DEADLINE)
        .await
        .unwrap();
    assert!(
        line.contains("packing") && line.contains("outbox:orders"),
        "{line}"
    );
    a_purge_has_run_over_what_is_published_now(&outbox).await;
    assert_eq!(left(&outbox).await, [1, 2, 3, 4, 5]);

    // A point of time lies between these and the next ones.
    let group = Group::made(&outbox, "packing").await;
    let first = group.reads(5).await;
    group.acknowledges(&first[..4]).await;
    a_purge_has_run_over_what_is_published_now(&outbox).await;
    published(&outbox, 6..=10).await;
    let second = group.reads(5).await;
    relay
        .wait_for_line("rows stay in the outbox", DEADLINE)
        .await
        .unwrap();
    a_purge_has_run_over_what_is_published_now(&outbox).await;
    assert_eq!(left(&outbox).await.len(), 10);

    // Given, and not acknowledged: 6 to 10.
    group.acknowledges(&first[4..]).await;
    only_these_are_left(&outbox, &[5, 6, 7, 8, 9, 10]).await;
    a_purge_has_run_over_what_is_published_now(&outbox).await;
    assert_eq!(left(&outbox).await, [5, 6, 7, 8, 9, 10]);
    group.acknowledges(&second).await;
    only_these_are_left(&outbox, &[10]).await;
    eventually(DEADLINE, "the floor to be told", || async {
        metrics(&relay).await["outbox_relay_hold_floor_id"] == 9.0
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_group_is_held_to_the_topics_that_it_reads() {
    let outbox = Outbox::open().await;
    let holds = [
        "--hold-until-acked",
        "packing=orders",
        "--hold-until-acked",
        "billing=invoices",
    ];
    let relay = leading(outbox.relay().args(RETENTION).args(holds)).await;
    let other = "INSERT INTO outbox.messages (topic, payload) VALUES ('mails', '{}')";
    outbox.db.batch_execute(other).await.unwrap();
    published(&outbox, 2..=3).await;
    let group = Group::made(&outbox, "packing").await;
    group.handles(2).await;
    // Nobody reads the mails, and there is no invoice.
    only_these_are_left(&outbox, &[3]).await;
    let mails: usize = ask(&outbox, &["XLEN", "outbox:mails"]).await;
    assert_eq!(mails, 1);
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn all_that_a_group_lacks_goes_out_again_after_a_total_loss() {
    let outbox = Outbox::open().await;
    let hold = ["--hold-until-acked", "packing"];
    let relay = leading(outbox.relay().args(RETENTION).args(hold)).await;
    published(&outbox, 1..=20).await;
    let group = Group::made(&outbox, "packing").await;
    group.handles(10).await;
    a_purge_has_run_over_what_is_published_now(&outbox).await;
    let _: String = ask(&outbox, &["FLUSHALL"]).await;
    relay
        .wait_for_line("goes out again", DEADLINE)
        .await
        .unwrap();
    outbox.arrives("row-20").await;
    let keys = outbox.message_keys("orders").await;
    for id in 11..=20 {
        assert!(keys.contains(&format!("row-{id}")), "row-{id}: {keys:?}");
    }
}
