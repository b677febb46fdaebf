//! A Redis that fills up: publishing pauses at the ceiling, says so, and goes on by itself.

use outbox_testkit::eventually;

use crate::group::ask;
use crate::http::{LISTEN, becomes, metrics};
use crate::support::{DEADLINE, Outbox, TOPIC, leading};

/// Sets `maxmemory` so that this part of it is used now.
pub(crate) async fn use_percent(outbox: &Outbox<'_>, percent: u64) {
    let info: String = ask(outbox, &["INFO", "memory"]).await;
    let used = info
        .lines()
        .find_map(|line| line.strip_prefix("used_memory:"));
    let used: u64 = used.unwrap().trim_end().parse().unwrap();
    let max = (used * 100 / percent).to_string();
    let _: String = ask(outbox, &["CONFIG", "SET", "maxmemory", &max]).await;
}

#[tokio::test]
async fn publishing_pauses_at_the_ceiling_and_goes_on_below_it() {
    let outbox = Outbox::open().await;
    let relay = leading(outbox.relay().args(LISTEN)).await;
    outbox.insert("before").await;
    outbox.arrives("before").await;

    // Redis itself would still take everything.
    use_percent(&outbox, 94).await;
    becomes(&relay, 200, "publishing is paused until Redis has room").await;
    relay
        .wait_for_line("publishing is paused", DEADLINE)
        .await
        .unwrap();
    for n in 0..20 {
        outbox.insert(&format!("during-{n}")).await;
    }
    eventually(DEADLINE, "the backlog to be seen", || async {
        let values = metrics(&relay).await;
        assert_eq!(outbox.entry_count(TOPIC).await, 1);
        let seen = (
            values["outbox_relay_backlog_messages"],
            values["outbox_relay_paused_for_memory"],
        );
        if seen == (20.0, 1.0) {
            Ok(())
        } else {
            Err(seen)
        }
    })
    .await
    .unwrap();

    use_percent(&outbox, 50).await;
    outbox.arrives("during-19").await;
    becomes(&relay, 200, "leading").await;
    relay
        .wait_for_line("publishing goes on", DEADLINE)
        .await
        .unwrap();
    assert_eq!(outbox.published_exactly_once(TOPIC).await, 21);
    let values = metrics(&relay).await;
    assert_eq!(values["outbox_relay_paused_for_memory"], 0.0);
    let ratio = values["outbox_relay_redis_memory_ratio"];
    assert!((0.3..0.8).contains(&ratio), "{ratio}");
}

#[tokio::test]
async fn a_redis_that_fills_up_is_told_before_anything_pauses() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    use_percent(&outbox, 75).await;
    let line = relay
        .wait_for_line("Redis fills up", DEADLINE)
        .await
        .unwrap();
    assert!(line.contains("maxmemory="), "{line}");
    outbox.insert("published").await;
    outbox.arrives("published").await;
    let lines = relay.lines();
    assert!(
        !lines.iter().any(|line| line.contains("paused")),
        "{lines:#?}"
    );
}
