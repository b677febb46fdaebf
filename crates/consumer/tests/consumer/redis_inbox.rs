//! The inbox for handlers without Postgres: at least once, and what keeps it from twice.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use outbox_consumer::{HandlerError, Message, RedisAddress, RedisInbox};
use outbox_testkit::{Redis, eventually};
use redis::aio::MultiplexedConnection;
use tokio::{sync::oneshot, task::JoinHandle};

use crate::shop::{DEADLINE, entry, stream};

const GROUP: &str = "mailing";

fn inbox(redis: &Redis) -> RedisInbox {
    inbox_at(&redis.url())
}

pub(crate) fn inbox_at(url: &str) -> RedisInbox {
    let ms = Duration::from_millis;
    RedisInbox::new(RedisAddress::parse(url).unwrap(), GROUP)
        .topic("orders")
        .claim_after(ms(300))
        .retry_backoff(ms(5), ms(20))
}

/// What was sent, in order, outside of any transaction.
#[derive(Clone, Default)]
pub(crate) struct Mails(Arc<Mutex<Vec<String>>>);

impl Mails {
    fn send(&self, message: &Message) {
        self.0
            .lock()
            .unwrap()
            .push(message.message_key().to_owned());
    }

    pub(crate) fn counts(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for key in self.0.lock().unwrap().iter() {
            *counts.entry(key.clone()).or_default() += 1;
        }
        counts
    }

    pub(crate) async fn are(&self, count: usize) {
        eventually(DEADLINE, "the mails", || async {
            let counts = self.counts();
            if counts.len() == count {
                Ok(())
            } else {
                Err(counts)
            }
        })
        .await
        .unwrap();
    }
}

pub(crate) struct Running {
    stop: oneshot::Sender<()>,
    pub(crate) task: JoinHandle<Result<(), outbox_consumer::Error>>,
}

impl Running {
    pub(crate) async fn stop(self) {
        let _ = self.stop.send(());
        tokio::time::timeout(DEADLINE, self.task)
            .await
            .expect("it stops")
            .unwrap()
            .unwrap();
    }
}

pub(crate) fn run<F>(inbox: RedisInbox, handler: F) -> Running
where
    F: AsyncFn(&Message) -> Result<(), HandlerError> + Send + 'static,
{
    let (stop, stopped) = oneshot::channel::<()>();
    let task = tokio::spawn(inbox.run(handler, async move {
        let _ = stopped.await;
    }));
    Running { stop, task }
}

pub(crate) fn mailer(
    mails: &Mails,
) -> impl AsyncFn(&Message) -> Result<(), HandlerError> + Send + use<> {
    let mails = mails.clone();
    async move |message: &Message| {
        mails.send(message);
        Ok(())
    }
}

async fn publish(connection: &mut MultiplexedConnection, key: &str) {
    entry(&stream("orders"), key, "{}")
        .query_async::<String>(connection)
        .await
        .unwrap();
}

async fn nothing_pending(connection: &MultiplexedConnection) {
    eventually(DEADLINE, "no pending entries", || async {
        let mut connection = connection.clone();
        let (count, ..): (usize, redis::Value, redis::Value, redis::Value) = redis::cmd("XPENDING")
            .arg(stream("orders"))
            .arg(GROUP)
            .query_async(&mut connection)
            .await
            .unwrap();
        if count == 0 { Ok(()) } else { Err(count) }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn members_share_the_work_and_repeats_are_dropped() {
    let redis = Redis::start().await.unwrap();
    let mut connection = redis.connect().await.unwrap();
    for n in 0..60 {
        publish(&mut connection, &format!("order-{}", n % 50)).await;
    }
    let mails = Mails::default();
    // Longer than the test takes, so that nothing is taken over from a member that lives.
    let minute = Duration::from_secs(60);
    let members = [(); 3].map(|()| run(inbox(&redis).claim_after(minute), mailer(&mails)));

    mails.are(50).await;
    nothing_pending(&connection).await;
    assert!(
        mails.counts().values().all(|count| *count == 1),
        "{:?}",
        mails.counts()
    );
    for member in members {
        member.stop().await;
    }
    let consumers: Vec<redis::Value> = redis::cmd("XINFO")
        .arg("CONSUMERS")
        .arg(stream("orders"))
        .arg(GROUP)
        .query_async(&mut connection)
        .await
        .unwrap();
    assert!(consumers.is_empty());
}

/// The process dies after the mail and before the acknowledgement: here, its future is dropped.
#[tokio::test]
async fn a_crash_after_the_effect_handles_the_message_again_and_one_before_it_loses_nothing() {
    let redis = Redis::start().await.unwrap();
    let mut connection = redis.connect().await.unwrap();
    publish(&mut connection, "a").await;
    let mails = Mails::default();
    let sent = mails.clone();
    let dying = run(inbox(&redis), async move |message| {
        sent.send(message);
        std::future::pending().await
    });
    mails.are(1).await;
    dying.task.abort();

    let member = run(inbox(&redis), mailer(&mails));

    eventually(DEADLINE, "a second mail", || async {
        mails.counts()["a"] == 2
    })
    .await
    .unwrap();
    nothing_pending(&connection).await;
    member.stop().await;
}

#[tokio::test]
async fn a_handler_that_takes_longer_than_the_claim_time_is_not_joined_by_another_member() {
    let redis = Redis::start().await.unwrap();
    let mut connection = redis.connect().await.unwrap();
    publish(&mut connection, "slow").await;
    let mails = Mails::default();
    let (gate, opened) = oneshot::channel::<()>();
    let opened = tokio::sync::Mutex::new(Some(opened));
    let sent = mails.clone();
    let slow = run(inbox(&redis), async move |message| {
        sent.send(message);
        if let Some(opened) = opened.lock().await.take() {
            let _ = opened.await;
        }
        Ok(())
    });
    mails.are(1).await;
    let other = run(inbox(&redis), mailer(&mails));
    // Five claim times, in which the other member goes on working and looks for idle entries.
    let began = tokio::time::Instant::now();
    let mut quick = 0;
    while began.elapsed() < Duration::from_millis(1_500) {
        publish(&mut connection, &format!("quick-{quick}")).await;
        quick += 1;
        mails.are(quick + 1).await;
    }

    gate.send(()).unwrap();
    nothing_pending(&connection).await;
    assert_eq!(mails.counts()["slow"], 1);
    slow.stop().await;
    other.stop().await;
}

#[tokio::test]
async fn failures_and_malformed_entries_go_to_the_groups_dead_letters() {
    let redis = Redis::start().await.unwrap();
    let mut connection = redis.connect().await.unwrap();
    for key in ["bad", "rejected", "good"] {
        publish(&mut connection, key).await;
    }
    redis::cmd("XADD")
        .arg(stream("orders"))
        .arg(&["*", "foo", "bar"])
        .query_async::<String>(&mut connection)
        .await
        .unwrap();
    let mails = Mails::default();
    let sent = mails.clone();
    let member = run(
        inbox(&redis).max_attempts(3),
        async move |message| match message.message_key() {
            "bad" => Err("no such address".into()),
            "rejected" => Err(HandlerError::reject("never")),
            _ => {
                sent.send(message);
                Ok(())
            }
        },
    );

    mails.are(1).await;
    nothing_pending(&connection).await;
    let letters: redis::streams::StreamRangeReply = redis::cmd("XRANGE")
        .arg("outbox:group:mailing:dead-letters")
        .arg(&["-", "+"])
        .query_async(&mut connection)
        .await
        .unwrap();
    let field = |n: usize, name: &str| letters.ids[n].get::<String>(name).unwrap();
    let ends: Vec<_> = (0..2)
        .map(|n| {
            [
                field(n, "message_key"),
                field(n, "reason"),
                field(n, "attempts"),
            ]
        })
        .collect();
    assert_eq!(
        ends,
        [["bad", "no such address", "3"], ["rejected", "never", "1"]]
    );
    assert_eq!(
        (field(2, "fields").as_str(), letters.ids.len()),
        (r#"[["foo","bar"]]"#, 3)
    );
    member.stop().await;
}

#[tokio::test]
async fn every_partition_of_a_topic_is_read() {
    let redis = Redis::start().await.unwrap();
    let mut connection = redis.connect().await.unwrap();
    redis::cmd("HSET")
        .arg("outbox:relay:marker")
        .arg(&["version", "1", "topic:orders", "2,1"])
        .query_async::<i64>(&mut connection)
        .await
        .unwrap();
    for stream in ["outbox:orders", "outbox:orders:0", "outbox:orders:1"] {
        entry(stream, stream, "{}")
            .query_async::<String>(&mut connection)
            .await
            .unwrap();
    }
    let mails = Mails::default();
    let member = run(inbox(&redis), mailer(&mails));
    mails.are(3).await;
    member.stop().await;
}
