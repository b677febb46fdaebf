//! Two databases and a Redis in which each party has the rights that `outbox-relay grants` prints.

use std::time::Duration;

use deadpool_postgres::{Manager, Pool};
use outbox_consumer::Consumer;
use outbox_producer::{Message as Outgoing, write};
use outbox_testkit::{Postgres, Process, ProcessBuilder, Redis, eventually, relay, relay_binary};
use redis::aio::MultiplexedConnection;
use tokio_postgres::{Client, NoTls};

use crate::world::DEADLINE;

/// What nobody but the owner has, unless it is given: as on a server where the defaults were tightened.
pub(crate) const TIGHTEN: &str = "REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA {} FROM PUBLIC";

/// Two databases and a Redis whose parties have roles of their own.
pub(crate) struct Estate {
    pub(crate) postgres: &'static Postgres,
    pub(crate) shop: String,
    pub(crate) warehouse: String,
    pub(crate) redis: Redis,
    pub(crate) admin: MultiplexedConnection,
}

impl Estate {
    /// Migrated by their owner, with the rights that the command prints.
    pub(crate) async fn open() -> Self {
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
    pub(crate) fn role(&self, party: &str) -> String {
        format!("{party} of {}", self.shop)
    }

    pub(crate) fn url(&self, party: &str, database: &str) -> String {
        let role = self.role(party).replace(' ', "%20");
        self.postgres
            .url(database)
            .replace("postgres@", &format!("{role}@"))
    }

    pub(crate) async fn client(&self, party: &str, database: &str) -> Client {
        let url = self.url(party, database);
        let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    }

    pub(crate) fn redis_url(&self, user: &str) -> String {
        let login = format!("redis://{user}:secret@");
        self.redis.url().replace("redis://", &login)
    }

    pub(crate) async fn redis_client(&self, user: &str) -> MultiplexedConnection {
        let client = redis::Client::open(self.redis_url(user)).unwrap();
        client.get_multiplexed_async_connection().await.unwrap()
    }

    pub(crate) async fn migrate_and_grant(&self) {
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

    pub(crate) async fn make_redis_users(&mut self) {
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

    pub(crate) fn relay(&self, name: &str) -> ProcessBuilder {
        relay(&self.url("relay", &self.shop), &self.redis_url("relay")).args([
            "--name",
            name,
            "--retention",
            "1s",
            "--poll-interval",
            "200ms",
        ])
    }

    pub(crate) fn consumer(&self) -> Consumer {
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
pub(crate) async fn output(command: ProcessBuilder) -> Vec<String> {
    let command = command.spawn().unwrap();
    let status = command.wait(DEADLINE).await.unwrap();
    assert!(status.success(), "{:?}", command.lines());
    command.lines()
}

/// A line of `redis-cli` without escapes.
pub(crate) fn words(line: &str) -> Vec<String> {
    line.split('"')
        .enumerate()
        .flat_map(|(part, text)| match part % 2 {
            0 => text.split_whitespace().map(str::to_owned).collect(),
            _ => vec![text.to_owned()],
        })
        .collect()
}

pub(crate) async fn call(
    connection: &mut MultiplexedConnection,
    words: &[String],
) -> redis::RedisResult<redis::Value> {
    let mut command = redis::cmd(&words[0]);
    command.arg(&words[1..]);
    command.query_async(connection).await
}

pub(crate) async fn place(client: &mut Client, key: &str) {
    let transaction = client.transaction().await.unwrap();
    transaction
        .execute("INSERT INTO orders VALUES ($1)", &[&key])
        .await
        .unwrap();
    let message = Outgoing::raw_json("orders", "{}").message_key(key);
    write(&transaction, &message).await.unwrap();
    transaction.commit().await.unwrap();
}

pub(crate) async fn count(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

pub(crate) async fn count_is(client: &Client, sql: &str, expected: i64) {
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
