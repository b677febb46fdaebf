//! With the rights that `outbox-relay grants` prints, producer, relay and consumer do their work, and nothing else.

use std::time::Duration;

use deadpool_postgres::{Manager, Pool};
use outbox_consumer::{Consumer, HandlerError, Message, Transaction};
use outbox_producer::{Message as Outgoing, write, write_all, write_once};
use outbox_testkit::{Postgres, Process, ProcessBuilder, Redis, eventually, relay, relay_binary};
use redis::aio::MultiplexedConnection;
use tokio_postgres::{Client, NoTls, error::SqlState};

use crate::world::{DEADLINE, STREAM};

/// What nobody but the owner has, unless it is given: as on a server where the defaults were tightened.
const TIGHTEN: &str = "REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA {} FROM PUBLIC";

/// Two databases and a Redis whose parties have roles of their own.
struct Estate {
    postgres: &'static Postgres,
    shop: String,
    warehouse: String,
    redis: Redis,
    admin: MultiplexedConnection,
}

impl Estate {
    /// Migrated by their owner, with the rights that the command prints.
    async fn open() -> Self {
        let postgres = Postgres::shared().await.unwrap();
        let redis = Redis::start().await.unwrap();
        let mut estate = Self {
            postgres,
            shop: postgres.fresh_database().await.unwrap(),
            warehouse: postgres.fresh_database().await.unwrap(),
            admin: redis.connect().await.unwrap(),
            redis,
        };
        let admin = postgres.connect("postgres").await.unwrap();
        for party in ["owner", "producer", "relay", "consumer"] {
            let role = estate.role(party);
            admin
                .batch_execute(&format!("CREATE ROLE \"{role}\" LOGIN"))
                .await
                .unwrap();
        }
        let owner = estate.role("owner");
        for database in [&estate.shop, &estate.warehouse] {
            let sql = format!("GRANT CREATE ON DATABASE {database} TO \"{owner}\"");
            admin.batch_execute(&sql).await.unwrap();
        }
        estate.migrate_and_grant().await;
        estate.make_redis_users().await;
        estate
    }

    /// A name that has to be quoted.
    fn role(&self, party: &str) -> String {
        format!("{party} of {}", self.shop)
    }

    fn url(&self, party: &str, database: &str) -> String {
        let role = self.role(party).replace(' ', "%20");
        self.postgres
            .url(database)
            .replace("postgres@", &format!("{role}@"))
    }

    async fn client(&self, party: &str, database: &str) -> Client {
        let url = self.url(party, database);
        let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    }

    fn redis_url(&self, user: &str) -> String {
        let login = format!("redis://{user}:secret@");
        self.redis.url().replace("redis://", &login)
    }

    async fn redis_client(&self, user: &str) -> MultiplexedConnection {
        let client = redis::Client::open(self.redis_url(user)).unwrap();
        client.get_multiplexed_async_connection().await.unwrap()
    }

    async fn migrate_and_grant(&self) {
        let sides = [
            (&self.shop, "outbox", vec![], vec!["producer", "relay"]),
            (&self.warehouse, "inbox", vec!["--inbox"], vec!["consumer"]),
        ];
        for (database, schema, flags, parties) in sides {
            let migrate = Process::builder(relay_binary())
                .arg("migrate")
                .args(flags)
                .env("DATABASE_URL", self.url("owner", database));
            output(migrate).await;
            let mut grants = Process::builder(relay_binary()).arg("grants");
            for party in parties {
                grants = grants.args([format!("--{party}"), self.role(party)]);
            }
            let grants = output(grants).await.join("\n");
            let owner = self.client("owner", database).await;
            owner
                .batch_execute(&TIGHTEN.replace("{}", schema))
                .await
                .unwrap();
            for _ in 0..2 {
                owner.batch_execute(&grants).await.unwrap();
            }
        }
        let (producer, consumer) = (self.role("producer"), self.role("consumer"));
        let business =
            format!("CREATE TABLE orders (key text); GRANT INSERT ON orders TO \"{producer}\"");
        let effects =
            format!("CREATE TABLE effects (key text); GRANT INSERT ON effects TO \"{consumer}\"");
        for (database, sql) in [(&self.shop, business), (&self.warehouse, effects)] {
            let owner = self.postgres.connect(database).await.unwrap();
            owner.batch_execute(&sql).await.unwrap();
        }
    }

    async fn make_redis_users(&mut self) {
        let grants = Process::builder(relay_binary()).arg("grants").args([
            "--redis",
            "--relay=relay",
            "--consumer=packing",
        ]);
        let lines = output(grants).await;
        assert_eq!(lines.len(), 2, "{lines:?}");
        for (line, user) in lines.iter().zip(["relay", "packing"]) {
            call(&mut self.admin, &words(line)).await.unwrap();
            call(
                &mut self.admin,
                &["ACL", "SETUSER", user, ">secret"].map(str::to_owned),
            )
            .await
            .unwrap();
        }
    }

    fn relay(&self, name: &str) -> ProcessBuilder {
        relay(&self.url("relay", &self.shop), &self.redis_url("relay")).args([
            "--name",
            name,
            "--retention",
            "1s",
            "--poll-interval",
            "200ms",
        ])
    }

    fn consumer(&self) -> Consumer {
        let url = self.url("consumer", &self.warehouse);
        let pool = Pool::builder(Manager::new(url.parse().unwrap(), NoTls));
        let redis = redis::Client::open(self.redis_url("packing")).unwrap();
        Consumer::builder(pool.max_size(4).build().unwrap(), redis, "packing")
            .topic("orders")
            .max_attempts(2)
            .retry_backoff(Duration::from_millis(5), Duration::from_millis(20))
            .build()
            .unwrap()
    }
}

/// Runs a command of the relay that succeeds, and returns what it says.
async fn output(command: ProcessBuilder) -> Vec<String> {
    let command = command.spawn().unwrap();
    let status = command.wait(DEADLINE).await.unwrap();
    assert!(status.success(), "{:?}", command.lines());
    command.lines()
}

/// A line of `redis-cli` without escapes.
fn words(line: &str) -> Vec<String> {
    line.split('"')
        .enumerate()
        .flat_map(|(part, text)| match part % 2 {
            0 => text.split_whitespace().map(str::to_owned).collect(),
            _ => vec![text.to_owned()],
        })
        .collect()
}

async fn call(
    connection: &mut MultiplexedConnection,
    words: &[String],
) -> redis::RedisResult<redis::Value> {
    let mut command = redis::cmd(&words[0]);
    command.arg(&words[1..]);
    command.query_async(connection).await
}

async fn place(client: &mut Client, key: &str) {
    let transaction = client.transaction().await.unwrap();
    transaction
        .execute("INSERT INTO orders VALUES ($1)", &[&key])
        .await
        .unwrap();
    let message = Outgoing::raw_json("orders", "{}").message_key(key);
    write(&transaction, &message).await.unwrap();
    transaction.commit().await.unwrap();
}

async fn count(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

async fn count_is(client: &Client, sql: &str, expected: i64) {
    eventually(DEADLINE, sql, || async {
        let found = count(client, sql).await;
        if found == expected {
            Ok(())
        } else {
            Err(found)
        }
    })
    .await
    .unwrap();
}

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
