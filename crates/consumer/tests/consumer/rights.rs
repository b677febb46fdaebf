//! The rights that `outbox-relay grants` prints are enough for all that a consumer does.

use std::{process::Command, time::Duration};

use outbox_consumer::{HandlerError, Message, RedisInbox, Transaction};
use outbox_testkit::{eventually, relay_binary};
use redis::aio::MultiplexedConnection;

use crate::shop::{DEADLINE, Shop, consumer_at, run, ship};

/// What `outbox-relay grants` prints.
fn grants(arguments: &[&str]) -> String {
    let mut command = Command::new(relay_binary());
    let printed = command.arg("grants").args(arguments).output().unwrap();
    assert!(printed.status.success(), "{printed:?}");
    String::from_utf8(printed.stdout).unwrap()
}

/// Makes a Redis user by the line that is printed for it, with a password. What stands in quotes is one word.
async fn redis_user(connection: &mut MultiplexedConnection, arguments: &[&str]) {
    let line = grants(&[&["--redis"], arguments].concat());
    let mut words: Vec<&str> = Vec::new();
    for (index, part) in line.trim().split('"').enumerate() {
        match index % 2 {
            0 => words.extend(part.split_whitespace()),
            _ => words.push(part),
        }
    }
    let mut command = redis::cmd(words[0]);
    command.arg(&words[1..]).arg(">secret");
    command.query_async::<()>(connection).await.unwrap();
}

#[tokio::test]
async fn the_rights_that_are_printed_are_enough() {
    let shop = Shop::open().await;
    let role = format!("shipping_{}", shop.database);
    let sql = format!(
        "CREATE ROLE {role} LOGIN; GRANT INSERT ON effects TO {role}; {}",
        grants(&["--consumer", &role])
    );
    shop.db.batch_execute(&sql).await.unwrap();
    let mut connection = shop.redis().await;
    redis_user(&mut connection, &["--consumer", "shipping"]).await;
    redis_user(&mut connection, &["--redis-inbox", "--consumer", "mailing"]).await;
    for key in ["a", "bad"] {
        shop.publish("orders", key).await;
    }

    let postgres_url = shop.postgres_url.replace("postgres@", &format!("{role}@"));
    let redis_url = |user: &str| {
        shop.redis
            .url()
            .replace("redis://", &format!("redis://{user}:secret@"))
    };
    let builder = consumer_at(&postgres_url, &redis_url("shipping"))
        .topic("orders")
        .max_attempts(2);
    let consumer = run(builder, async |tx: &Transaction<'_>, message: &Message| {
        ship(tx, message).await?;
        if message.message_key() == "bad" && message.attempt() < 3 {
            return Err(HandlerError::from("not now"));
        }
        Ok(())
    });
    shop.dead_letter_count(1).await;
    shop.db
        .batch_execute("UPDATE inbox.dead_letters SET state = 'retry'")
        .await
        .unwrap();
    shop.effects_are(&["a", "bad"]).await;
    eventually(DEADLINE, "a purge", || async {
        shop.count("SELECT count(*) FROM inbox.purged").await == 1
    })
    .await
    .unwrap();
    eventually(DEADLINE, "a second mark", || async {
        shop.count("SELECT coalesce(max(mark), 0) FROM inbox.history")
            .await
            > 1
    })
    .await
    .unwrap();
    let refused: Vec<redis::Value> = redis::cmd("ACL")
        .arg("LOG")
        .query_async(&mut connection)
        .await
        .unwrap();
    assert!(refused.is_empty(), "{refused:?}");
    consumer.stop().await;
    assert!(shop.members().await.is_empty());

    let mailing = RedisInbox::new(
        redis::Client::open(redis_url("mailing")).unwrap(),
        "mailing",
    )
    .topic("orders")
    .claim_after(Duration::from_millis(300))
    .retry_backoff(Duration::from_millis(5), Duration::from_millis(20));
    let counters = mailing.counters();
    let handler = async |message: &Message| match message.message_key() {
        "bad" => Err(HandlerError::from("not now")),
        _ => Ok(()),
    };
    let task = tokio::spawn(mailing.run(handler, std::future::pending()));
    eventually(DEADLINE, "one mail and one dead letter", || async {
        let counts = counters.snapshot();
        if (counts.applied, counts.dead) == (1, 1) {
            Ok(())
        } else {
            Err(counts)
        }
    })
    .await
    .unwrap();
    task.abort();
}
