//! The rights that the README names are enough.

use std::time::Duration;

use outbox_consumer::{HandlerError, Message, RedisInbox, Transaction};
use outbox_testkit::eventually;
use redis::aio::MultiplexedConnection;

use crate::shop::{DEADLINE, Shop, consumer_at, run, ship};

const README: &str = include_str!("../../README.md");

/// What stands between two marks of the README.
fn between(from: &str, to: &str) -> &'static str {
    let (_, rest) = README.split_once(from).unwrap();
    rest.split_once(to).unwrap().0
}

/// A Redis user with these commands, written as the README writes them, on keys that begin with the prefix.
async fn redis_user(connection: &mut MultiplexedConnection, name: &str, commands: &str) {
    let mut command = redis::cmd("ACL");
    command
        .arg("SETUSER")
        .arg(name)
        .arg(&["on", ">secret", "~outbox:*"]);
    for name in commands.split_whitespace() {
        command.arg(format!("+{}", name.to_lowercase()));
    }
    command.query_async::<()>(connection).await.unwrap();
}

#[tokio::test]
async fn the_rights_that_the_readme_names_are_enough() {
    let shop = Shop::open().await;
    let grants = between("The role needs:\n\n```sql\n", "```");
    let role = format!("shipping_{}", shop.database);
    let sql = format!(
        "CREATE ROLE {role} LOGIN; GRANT INSERT ON effects TO {role}; {}",
        grants.replace("TO shipping", &format!("TO {role}"))
    );
    shop.db.batch_execute(&sql).await.unwrap();
    let mut connection = shop.redis().await;
    let commands = between("The Redis user needs `", "`");
    redis_user(&mut connection, "shipping", commands).await;
    let more = between("for `RedisInbox` also `", "`");
    redis_user(&mut connection, "mailing", &format!("{commands} {more}")).await;
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
