//! With the rights that `outbox-relay grants` prints, producer, relay and consumer do their work, and nothing else.

use outbox_consumer::{HandlerError, Message, Transaction};
use outbox_producer::{Message as Outgoing, write_all, write_once};
use outbox_testkit::{Process, relay_binary};
use tokio_postgres::error::SqlState;

use crate::estate::*;
use crate::world::{DEADLINE, STREAM};

#[tokio::test]
async fn everybody_does_its_work_with_the_rights_that_are_printed() {
    let mut estate = Estate::open().await;
    let shop = estate.postgres.connect(&estate.shop).await.unwrap();
    let warehouse = estate.postgres.connect(&estate.warehouse).await.unwrap();

    let mut producer = estate.client("producer", &estate.shop).await;
    for key in ["order-1", "bad"] {
        place(&mut producer, key).await;
    }
    let transaction = producer.transaction().await.unwrap();
    let repeated = Outgoing::raw_json("orders", "{}").message_key("order-1");
    write_once(&transaction, &repeated).await.unwrap();
    let more = [
        Outgoing::raw_json("orders", "{}")
            .message_key("order-2")
            .ordering_key("k")
            .ordered(),
        Outgoing::binary("orders", b"x".to_vec(), "text/plain").message_key("order-3"),
    ];
    write_all(&transaction, &more).await.unwrap();
    transaction.commit().await.unwrap();
    let publish = "SELECT outbox.publish('orders', '{}', message_key => 'order-4', headers => '{\"a\":\"b\"}'),
        outbox.publish_binary('orders', 'x', 'text/plain', message_key => 'order-5')";
    producer.batch_execute(publish).await.unwrap();

    let first = estate.relay("first").spawn().unwrap();
    first.wait_for_line("leading", DEADLINE).await.unwrap();
    let second = estate.relay("second").spawn().unwrap();
    second.wait_for_line("standing by", DEADLINE).await.unwrap();

    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let handler = async |tx: &Transaction<'_>, message: &Message| {
        tx.execute("INSERT INTO effects VALUES ($1)", &[&message.message_key()])
            .await?;
        match message.message_key() {
            "bad" => Err(HandlerError::from("not this one")),
            _ => Ok(()),
        }
    };
    let consumer = tokio::spawn(estate.consumer().run(handler, async move {
        let _ = stopped.await;
    }));
    count_is(&warehouse, "SELECT count(*) FROM effects", 5).await;
    count_is(&warehouse, "SELECT count(*) FROM inbox.dead_letters", 1).await;

    // A leader that is frozen keeps its session until the standby ends it.
    first.pause();
    place(&mut producer, "order-6").await;
    count_is(&warehouse, "SELECT count(*) FROM effects", 6).await;
    second.wait_for_line("leading", DEADLINE).await.unwrap();
    first.resume();
    first.wait_for_line("standing by", DEADLINE).await.unwrap();
    // The row at the cursor stays.
    count_is(&shop, "SELECT count(*) FROM outbox.messages", 1).await;
    let status = Process::builder(relay_binary())
        .arg("status")
        .env("DATABASE_URL", estate.url("relay", &estate.shop))
        .env("REDIS_URL", estate.redis_url("relay"));
    let status = output(status).await;
    assert!(status[0].contains("second"), "{status:?}");
    for command in ["pause", "resume"] {
        let command = Process::builder(relay_binary()).arg(command);
        output(command.env("DATABASE_URL", estate.url("relay", &estate.shop))).await;
    }

    for relay in [&first, &second] {
        relay.terminate();
        assert!(relay.wait(DEADLINE).await.unwrap().success());
        let refused: Vec<String> = relay
            .lines()
            .into_iter()
            .filter(|line| line.contains("NOPERM") || line.contains("permission denied"))
            .collect();
        assert!(refused.is_empty(), "{refused:?}");
    }
    stop.send(()).unwrap();
    consumer.await.unwrap().unwrap();
    let log = ["ACL", "LOG"].map(str::to_owned);
    let refused = call(&mut estate.admin, &log).await.unwrap();
    assert_eq!(refused, redis::Value::Array(vec![]));
}

/// A table that a migration adds is not forgotten.
#[tokio::test]
async fn each_table_is_somebody_s() {
    let estate = Estate::open().await;
    for (database, schema, party) in [
        (&estate.shop, "outbox", "relay"),
        (&estate.warehouse, "inbox", "consumer"),
    ] {
        let admin = estate.postgres.connect(database).await.unwrap();
        let sql = "SELECT relname::text FROM pg_class WHERE relnamespace = $1::text::regnamespace AND relkind IN ('r', 'v')
            AND NOT has_table_privilege($2, oid, 'SELECT')";
        let rows = admin.query(sql, &[&schema, &estate.role(party)]).await;
        let forgotten: Vec<String> = rows.unwrap().iter().map(|row| row.get(0)).collect();
        assert!(forgotten.is_empty(), "{forgotten:?}");
    }
}

#[tokio::test]
async fn nobody_does_more_in_postgres() {
    let estate = Estate::open().await;
    let mut producer = estate.client("producer", &estate.shop).await;
    place(&mut producer, "order-1").await;
    let pid = count(&producer, "SELECT pg_backend_pid()::bigint").await;
    let end = format!("SELECT pg_terminate_backend({pid}::integer)");
    let refused: &[(&str, &str, &[&str])] = &[
        (
            "producer",
            &estate.shop,
            &[
                "SELECT payload FROM outbox.messages",
                "INSERT INTO outbox.messages (id, topic, payload) OVERRIDING SYSTEM VALUE VALUES (1, 't', '{}')",
                "INSERT INTO outbox.messages (topic, payload, created_at) VALUES ('t', '{}', now())",
                "COPY outbox.messages (id, topic, payload) FROM STDIN",
                "UPDATE outbox.messages SET topic = 't'",
                "DELETE FROM outbox.messages",
                "TRUNCATE outbox.messages",
                "SELECT setval('outbox.messages_id_seq', 9)",
                "SELECT high FROM outbox.checkpoint",
                "UPDATE outbox.checkpoint SET high = 9",
                "UPDATE outbox.topics SET wanted = 2",
                "SELECT payload FROM outbox.dead_letters",
                "CREATE TABLE outbox.more ()",
                "ALTER TABLE outbox.messages DISABLE TRIGGER ALL",
            ],
        ),
        (
            "relay",
            &estate.shop,
            &[
                "INSERT INTO outbox.messages (topic, payload) VALUES ('t', '{}')",
                "SELECT outbox.publish('t', '{}')",
                "UPDATE outbox.messages SET topic = 't'",
                "TRUNCATE outbox.messages",
                "SELECT setval('outbox.messages_id_seq', 9)",
                "UPDATE outbox.identity SET adopted_from = '{1}'",
                "DELETE FROM outbox.dead_letters",
                "SELECT key FROM orders",
                "INSERT INTO orders VALUES ('mine')",
                "DROP TABLE outbox.checkpoint",
                &end,
            ],
        ),
        (
            "consumer",
            &estate.warehouse,
            &[
                "UPDATE inbox.applied SET message_key = 'other'",
                "TRUNCATE inbox.applied",
                "DELETE FROM inbox.history",
                "INSERT INTO inbox.schema_version VALUES (2)",
                "SELECT key FROM effects",
                "CREATE TABLE inbox.more ()",
            ],
        ),
        (
            "consumer",
            &estate.shop,
            &[
                "SELECT id FROM outbox.messages",
                "SELECT outbox.publish('t', '{}')",
                "SELECT key FROM orders",
            ],
        ),
    ];
    for (party, database, statements) in refused {
        let client = estate.client(party, database).await;
        for sql in *statements {
            let error = client.batch_execute(sql).await;
            let state = error.as_ref().err().and_then(|error| error.code());
            assert_eq!(
                state,
                Some(&SqlState::INSUFFICIENT_PRIVILEGE),
                "{party}: {sql}: {error:?}"
            );
        }
    }
}

#[tokio::test]
async fn nobody_does_more_in_redis() {
    let mut estate = Estate::open().await;
    let add = format!("XADD {STREAM} * a b");
    call(&mut estate.admin, &words(&add)).await.unwrap();
    let refused: &[(&str, &[&str])] = &[
        (
            "relay",
            &[
                "XADD other:orders * a b",
                "SET outbox:x y",
                "DEL outbox:orders",
                "HSET outbox:orders a b",
                "HGETALL outbox:group:packing:history",
                "XGROUP DESTROY outbox:orders packing",
                "XREADGROUP GROUP packing me STREAMS outbox:orders >",
                "KEYS *",
                "CONFIG GET maxmemory",
                "ACL LIST",
                "FLUSHALL",
                "EVAL \"return redis.call('SET', KEYS[1], 1)\" 1 outbox:x",
            ],
        ),
        (
            "packing",
            &[
                "XADD outbox:orders * a b",
                "XDEL outbox:orders 0-1",
                "XTRIM outbox:orders MAXLEN 0",
                "DEL outbox:orders",
                "HSET outbox:relay:marker high 9",
                "DEL outbox:relay:marker",
                "XGROUP DESTROY outbox:orders packing",
                "XREADGROUP GROUP packing me STREAMS other:orders >",
                "SET outbox:group:packing:x y",
                "KEYS *",
                "FLUSHALL",
            ],
        ),
    ];
    for (user, commands) in refused {
        let mut client = estate.redis_client(user).await;
        for line in *commands {
            let error = call(&mut client, &words(line)).await.unwrap_err();
            // What a script runs into has no code of its own in every version.
            let said = format!("{:?} {error}", error.code());
            let refused = ["NOPERM", "can't run", "can't access"]
                .iter()
                .any(|word| said.contains(word));
            assert!(refused, "{user}: {line}: {said}");
        }
    }
}
