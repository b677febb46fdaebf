use std::time::Duration;

use outbox_testkit::{Direction, Matcher, Postgres, Proxy, Redis, eventually};
use redis::{
    AsyncCommands, AsyncConnectionConfig, RedisResult, Script, aio::MultiplexedConnection,
};
use tokio_postgres::{Client, NoTls};

use crate::{DEADLINE, QUIET};

async fn redis_through(redis: &Redis, proxy: &Proxy) -> MultiplexedConnection {
    let config = AsyncConnectionConfig::new().set_response_timeout(Some(DEADLINE));
    redis::Client::open(redis.url_via(proxy.port()))
        .unwrap()
        .get_multiplexed_async_connection_with_config(&config)
        .await
        .unwrap()
}

async fn postgres_through(postgres: &Postgres, proxy: &Proxy, database: &str) -> Client {
    let (client, connection) =
        tokio_postgres::connect(&postgres.url_via(proxy.port(), database), NoTls)
            .await
            .unwrap();
    tokio::spawn(connection);
    client
}

fn script() -> Script {
    Script::new("return redis.call('XADD', KEYS[1], '*', 'payload', ARGV[1])")
}

async fn add(mut connection: MultiplexedConnection, payload: String) -> RedisResult<String> {
    script()
        .key("s")
        .arg(payload)
        .invoke_async(&mut connection)
        .await
}

struct RedisCase {
    redis: Redis,
    proxy: Proxy,
    connection: MultiplexedConnection,
}

impl RedisCase {
    /// With the script loaded, so that one EVALSHA does it.
    async fn start() -> Self {
        let redis = Redis::start().await.unwrap();
        let proxy = Proxy::start(redis.port()).await.unwrap();
        let connection = redis_through(&redis, &proxy).await;
        add(connection.clone(), "first".to_owned()).await.unwrap();
        Self {
            redis,
            proxy,
            connection,
        }
    }

    async fn len(&self) -> usize {
        self.redis.connect().await.unwrap().xlen("s").await.unwrap()
    }
}

#[tokio::test]
async fn a_held_request_is_not_executed_until_it_is_released() {
    let case = RedisCase::start().await;
    let hold = case
        .proxy
        .hold(Matcher::redis("EVALSHA"), Direction::Request);
    assert!(!hold.is_reached());
    let answer = tokio::spawn(add(case.connection.clone(), "second".to_owned()));
    hold.reached().await.unwrap();
    assert_eq!(case.len().await, 1);
    // Other connections go on.
    let mut other = redis_through(&case.redis, &case.proxy).await;
    assert_eq!(other.xlen("s").await, Ok(1));
    assert!(!answer.is_finished());
    hold.release();
    answer.await.unwrap().unwrap();
    assert_eq!(case.len().await, 2);
}

#[tokio::test]
async fn a_held_reply_belongs_to_an_executed_request() {
    let case = RedisCase::start().await;
    let hold = case
        .proxy
        .hold(Matcher::bytes(b"EVALSHA"), Direction::Reply);
    let answer = tokio::spawn(add(case.connection.clone(), "second".to_owned()));
    hold.reached().await.unwrap();
    assert_eq!(case.len().await, 2);
    tokio::time::sleep(QUIET).await;
    assert!(!answer.is_finished());
    hold.release();
    answer.await.unwrap().unwrap();
}

#[tokio::test]
async fn dropping_what_is_held_resets_the_client() {
    for (direction, expected) in [(Direction::Request, 1), (Direction::Reply, 2)] {
        let case = RedisCase::start().await;
        let hold = case.proxy.hold(Matcher::redis("EVALSHA"), direction);
        let answer = tokio::spawn(add(case.connection.clone(), "second".to_owned()));
        hold.reached().await.unwrap();
        hold.drop_it();
        assert!(answer.await.unwrap().unwrap_err().is_io_error());
        assert_eq!(case.len().await, expected, "{direction:?}");
    }
}

#[tokio::test]
async fn a_request_of_a_client_that_is_gone_can_arrive_late() {
    let case = RedisCase::start().await;
    let hold = case
        .proxy
        .hold(Matcher::redis("EVALSHA"), Direction::Request);
    let answer = tokio::spawn(add(case.connection.clone(), "late".to_owned()));
    hold.reached().await.unwrap();
    answer.abort();
    let RedisCase {
        redis,
        proxy,
        connection,
    } = case;
    drop(connection);
    hold.release();
    eventually(DEADLINE, "the late entry", || async {
        redis.connect().await.unwrap().xlen::<_, usize>("s").await == Ok(2)
    })
    .await
    .unwrap();
    drop(proxy);
}

#[tokio::test]
async fn the_nth_match_counts_and_a_long_request_is_held_whole() {
    let case = RedisCase::start().await;
    let hold = case
        .proxy
        .hold(Matcher::redis("EVALSHA").nth(3), Direction::Request);
    // Longer than what is read in one go, so that each request comes in many pieces.
    let payload = "x".repeat(1 << 20);
    for _ in 0..2 {
        add(case.connection.clone(), payload.clone()).await.unwrap();
    }
    let answer = tokio::spawn(add(case.connection.clone(), payload));
    hold.reached().await.unwrap();
    assert_eq!(case.len().await, 3);
    hold.release();
    answer.await.unwrap().unwrap();
    assert_eq!(case.len().await, 4);
}

#[tokio::test]
async fn a_hold_that_is_not_reached_says_what_it_waited_for() {
    let case = RedisCase::start().await;
    let hold = case
        .proxy
        .hold(Matcher::redis("FLUSHALL"), Direction::Request);
    let error = hold
        .reached_within(Duration::from_millis(20))
        .await
        .unwrap_err();
    assert!(
        error.is_timeout() && error.to_string().contains("0 matches"),
        "{error}"
    );
    drop(hold);
    // A hold that went out of scope holds nothing.
    drop(
        case.proxy
            .hold(Matcher::redis("EVALSHA"), Direction::Request),
    );
    add(case.connection.clone(), "second".to_owned())
        .await
        .unwrap();
}

struct PostgresCase {
    proxy: Proxy,
    /// Through the proxy.
    client: Client,
    /// Past it.
    direct: Client,
}

impl PostgresCase {
    async fn start() -> Self {
        let postgres = Postgres::shared().await.unwrap();
        let database = postgres.fresh_database().await.unwrap();
        let direct = postgres.connect(&database).await.unwrap();
        direct
            .batch_execute("CREATE TABLE t (n int); INSERT INTO t VALUES (0)")
            .await
            .unwrap();
        let proxy = Proxy::start(postgres.port()).await.unwrap();
        let client = postgres_through(postgres, &proxy, &database).await;
        Self {
            proxy,
            client,
            direct,
        }
    }

    async fn n(&self) -> i32 {
        self.direct
            .query_one("SELECT n FROM t", &[])
            .await
            .unwrap()
            .get(0)
    }
}

const UPDATE: &str = "UPDATE t SET n = n + $1";

#[tokio::test]
async fn an_update_is_held_when_it_runs_and_not_when_it_is_prepared() {
    let case = PostgresCase::start().await;
    let early = case
        .proxy
        .hold(Matcher::sql("update T"), Direction::Request);
    let update = case.client.prepare(UPDATE).await.unwrap();
    assert!(!early.is_reached());
    let run = case.client.execute(&update, &[&1]);
    let watch = async {
        early.reached().await.unwrap();
        assert_eq!(case.n().await, 0);
        early.release();
    };
    let (updated, ()) = tokio::join!(run, watch);
    assert_eq!(updated.unwrap(), 1);

    // It was prepared before this hold was set, and only its name passes.
    let late = case
        .proxy
        .hold(Matcher::sql("UPDATE t SET"), Direction::Request);
    let run = case.client.execute(&update, &[&1]);
    let watch = async {
        late.reached().await.unwrap();
        assert_eq!(case.n().await, 1);
        late.drop_it();
    };
    let (updated, ()) = tokio::join!(run, watch);
    assert!(updated.unwrap_err().is_closed() || case.client.is_closed());
    assert_eq!(case.n().await, 1);
}

#[tokio::test]
async fn the_held_reply_to_an_update_means_that_it_is_committed() {
    let case = PostgresCase::start().await;
    let hold = case.proxy.hold(Matcher::sql("UPDATE"), Direction::Reply);
    let run = case.client.execute(UPDATE, &[&1]);
    let watch = async {
        hold.reached().await.unwrap();
        assert_eq!(case.n().await, 1);
        hold.release();
    };
    let (updated, ()) = tokio::join!(run, watch);
    assert_eq!(updated.unwrap(), 1);
}

#[tokio::test]
async fn a_transaction_hangs_before_or_after_its_commit() {
    for (direction, expected) in [(Direction::Request, 0), (Direction::Reply, 1)] {
        let mut case = PostgresCase::start().await;
        let hold = case.proxy.hold(Matcher::sql("COMMIT"), direction);
        let transaction = case.client.transaction().await.unwrap();
        transaction.execute(UPDATE, &[&1]).await.unwrap();
        let commit = transaction.commit();
        let watch = async {
            hold.reached().await.unwrap();
            let n: i32 = case
                .direct
                .query_one("SELECT n FROM t", &[])
                .await
                .unwrap()
                .get(0);
            assert_eq!(n, expected, "{direction:?}");
            hold.drop_it();
        };
        let (committed, ()) = tokio::join!(commit, watch);
        assert!(committed.is_err());
        assert_eq!(case.n().await, expected, "{direction:?}");
    }
}

#[tokio::test]
async fn a_notification_is_not_taken_for_the_reply() {
    let case = PostgresCase::start().await;
    case.client.batch_execute("LISTEN news").await.unwrap();
    case.direct
        .batch_execute("BEGIN; LOCK TABLE t")
        .await
        .unwrap();
    let hold = case.proxy.hold(Matcher::sql("UPDATE"), Direction::Reply);
    let run = case.client.execute(UPDATE, &[&1]);
    let watch = async {
        // The update waits for the lock, and what comes meanwhile is only the news.
        assert!(hold.reached_within(QUIET).await.is_err());
        case.direct
            .batch_execute("NOTIFY news; COMMIT")
            .await
            .unwrap();
        hold.reached().await.unwrap();
        assert_eq!(case.n().await, 1);
        hold.release();
    };
    let (updated, ()) = tokio::join!(run, watch);
    assert_eq!(updated.unwrap(), 1);
}
