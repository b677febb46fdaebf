//! `/metrics`, `/healthz` and `/readyz` of a running relay, in the states that probes and dashboards meet.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::TcpStream,
};

use outbox_relay::metric_names;
use outbox_testkit::{Process, Proxy, eventually};

use crate::commands::run_on;
use crate::pair::stop;
use crate::support::{DEADLINE, Outbox, leading};

/// The status and the body of an answer.
type Answer = (u16, String);

/// Asks a relay that listens on any free port and says which.
async fn get(relay: &Process, path: &str) -> Answer {
    let address = address_of(relay).await;
    let path = path.to_owned();
    tokio::task::spawn_blocking(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: relay\r\nConnection: close\r\n\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, body.to_owned())
    })
    .await
    .unwrap()
}

/// Where a relay says that it answers.
pub(crate) async fn address_of(relay: &Process) -> String {
    let line = relay.wait_for_line("answering /metrics", DEADLINE).await;
    let line = line.unwrap();
    let address = line
        .split_whitespace()
        .find_map(|word| word.strip_prefix("address="));
    address.unwrap().to_owned()
}

/// Waits until readiness has this status and its reason contains a text.
pub(crate) async fn becomes(relay: &Process, status: u16, reason: &str) {
    eventually(DEADLINE, &format!("{status} with {reason:?}"), || async {
        let answer = get(relay, "/readyz").await;
        if answer.0 == status && answer.1.contains(reason) {
            Ok(())
        } else {
            Err(answer)
        }
    })
    .await
    .unwrap();
}

/// The value of each metric without labels.
pub(crate) async fn metrics(relay: &Process) -> BTreeMap<String, f64> {
    let (status, body) = get(relay, "/metrics").await;
    assert_eq!(status, 200);
    body.lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_once(' '))
        .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
        .collect()
}

pub(crate) const LISTEN: [&str; 2] = ["--listen", "127.0.0.1:0"];

#[tokio::test]
async fn leader_and_standby_are_ready_and_a_relay_that_is_interrupted_is_not() {
    let outbox = Outbox::open().await;
    let proxy = Proxy::start(outbox.redis.port()).await.unwrap();
    let via = outbox.redis.url_via(proxy.port());
    let relay = outbox.relay_between(&outbox.postgres_url(), &via);
    let leader = leading(relay.args(LISTEN)).await;
    assert_eq!(get(&leader, "/healthz").await, (200, "alive\n".to_owned()));
    becomes(&leader, 200, "leading").await;
    let standby = outbox.relay().args(LISTEN).spawn().unwrap();
    becomes(&standby, 200, "standing by").await;
    drop(standby);

    proxy.refuse().await.unwrap();
    becomes(&leader, 503, "interrupted").await;
    assert_eq!(get(&leader, "/healthz").await.0, 200);
    proxy.pass().await.unwrap();
    becomes(&leader, 200, "leading").await;
}

#[tokio::test]
async fn a_stream_that_is_held_back_is_named_by_a_relay_that_is_ready() {
    let outbox = Outbox::open().await;
    let leader = leading(outbox.relay().args(LISTEN)).await;
    let mut redis = outbox.redis.connect().await.unwrap();
    let foreign: () = redis::cmd("SET")
        .arg(&["outbox:orders", "something else"])
        .query_async(&mut redis)
        .await
        .unwrap();
    let () = foreign;
    outbox.insert("refused").await;
    becomes(&leader, 200, "outbox:orders is held back: WRONGTYPE").await;
    let values = metrics(&leader).await;
    assert_eq!(values["outbox_relay_blocked_streams"], 1.0);
}

#[tokio::test]
async fn metrics_say_what_was_done() {
    let outbox = Outbox::open().await;
    for n in 0..5 {
        outbox.insert(&format!("row-{n}")).await;
    }
    let leader = leading(outbox.relay().args(LISTEN)).await;
    outbox.settles().await;
    let expected = [
        ("outbox_relay_leader", 1.0),
        ("outbox_relay_ready", 1.0),
        ("outbox_relay_epoch", 1.0),
        ("outbox_relay_takeovers_total", 1.0),
        ("outbox_relay_published_messages_total", 5.0),
        ("outbox_relay_published_bytes_total", 10.0),
        ("outbox_relay_backlog_messages", 0.0),
        ("outbox_relay_high_id", 5.0),
        ("outbox_relay_publish_delay_seconds_count", 1.0),
    ];
    // Gauges follow at the next look.
    eventually(DEADLINE, "the values", || async {
        let values = metrics(&leader).await;
        let wrong: Vec<_> = expected
            .iter()
            .filter(|(name, value)| values.get(*name) != Some(value))
            .map(|(name, value)| (*name, *value, values.get(*name).copied()))
            .collect();
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    })
    .await
    .unwrap();
    let (_, body) = get(&leader, "/metrics").await;
    for line in body.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, _) = line.split_once(' ').unwrap();
        assert!(
            metric_names::ALL.iter().any(|metric| metric.name == name),
            "{name} is not documented"
        );
    }
    // A counter that begins with its first event hides that event from a rate.
    let values = metrics(&leader).await;
    for metric in metric_names::ALL
        .iter()
        .filter(|metric| metric.kind == "counter")
    {
        let is_of = |name: &String| name.split('{').next() == Some(metric.name);
        assert!(
            values.keys().any(is_of),
            "{} does not begin at 0",
            metric.name
        );
    }
    for lost in ["tail", "marker", "all"] {
        let name = format!("outbox_relay_redis_losses_total{{lost=\"{lost}\"}}");
        assert_eq!(values[&name], 0.0);
    }
}

#[tokio::test]
async fn an_address_that_is_taken_is_refused() {
    let outbox = Outbox::open().await;
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let relay = outbox.relay().args(["--listen", &address]).spawn().unwrap();
    let status = relay.wait(DEADLINE).await.unwrap();
    assert_eq!(status.code(), Some(64));
    let lines = relay.lines();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(
        lines[0].contains("--listen") && lines[0].contains(&address),
        "{lines:?}"
    );
}

/// What a container's health check runs, which has nothing else to ask with.
#[tokio::test]
async fn a_relay_is_asked_by_its_own_binary() {
    let outbox = Outbox::open().await;
    let relay = leading(outbox.relay().args(LISTEN)).await;
    becomes(&relay, 200, "lead").await;
    let address = address_of(&relay).await;
    let ask = ["ready", "--listen", &address];

    let said = run_on(&outbox, &ask).await.done();
    assert!(said[0].contains("lead"), "{said:?}");
    outbox.redis.pause().await.unwrap();
    becomes(&relay, 503, "").await;
    let said = run_on(&outbox, &ask).await;
    assert_eq!((said.code, said.out.len()), (Some(1), 1), "{said:?}");
    outbox.redis.resume().await.unwrap();
    becomes(&relay, 200, "lead").await;
    stop(&relay).await;
    run_on(&outbox, &ask)
        .await
        .refused(1, &["no relay answers on", "--listen"]);
}
