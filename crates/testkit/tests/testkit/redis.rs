use outbox_testkit::{Fsync, Persistence, Proxy, Redis, eventually};
use redis::{AsyncCommands, Client, RedisResult, aio::MultiplexedConnection};

use crate::{DEADLINE, QUIET};

async fn add(redis: &Redis, payload: &str) {
    let mut connection = redis.connect().await.unwrap();
    let _: String = connection
        .xadd("s", "*", &[("payload", payload)])
        .await
        .unwrap();
}

async fn len(redis: &Redis) -> usize {
    redis.connect().await.unwrap().xlen("s").await.unwrap()
}

#[tokio::test]
async fn without_persistence_it_comes_back_empty() {
    let redis = Redis::start().await.unwrap();
    let port = redis.port();
    add(&redis, "a").await;
    redis.save().await.unwrap();
    redis.kill9().await.unwrap();
    assert!(!redis.is_running());
    assert!(redis.connect().await.is_err());
    redis.start_again().await.unwrap();
    assert_eq!(redis.port(), port);
    assert_eq!(len(&redis).await, 0);
    add(&redis, "a").await;
    redis.stop().await.unwrap();
    redis.start_again().await.unwrap();
    assert_eq!(len(&redis).await, 0);
}

#[tokio::test]
async fn an_append_only_file_survives_kill_9() {
    for fsync in [Fsync::Always, Fsync::EverySecond] {
        let aof = Persistence::Aof(fsync);
        let redis = Redis::builder().persistence(aof).start().await.unwrap();
        add(&redis, "a").await;
        redis.kill9().await.unwrap();
        redis.start_again().await.unwrap();
        assert_eq!(len(&redis).await, 1, "{fsync:?}");
    }
}

#[tokio::test]
async fn a_dump_has_what_was_saved_and_a_stop_saves() {
    let redis = Redis::builder()
        .persistence(Persistence::Rdb)
        .start()
        .await
        .unwrap();
    add(&redis, "a").await;
    redis.save().await.unwrap();
    add(&redis, "b").await;
    redis.kill9().await.unwrap();
    redis.start_again().await.unwrap();
    assert_eq!(len(&redis).await, 1);
    add(&redis, "c").await;
    redis.stop().await.unwrap();
    redis.start_again().await.unwrap();
    assert_eq!(len(&redis).await, 2);
}

#[tokio::test]
async fn an_old_dump_is_put_back() {
    let redis = Redis::start().await.unwrap();
    add(&redis, "a").await;
    redis.save().await.unwrap();
    let snapshot = redis.snapshot().await.unwrap();
    add(&redis, "b").await;
    assert_eq!(len(&redis).await, 2);
    redis.restore(&snapshot).await.unwrap();
    assert_eq!(len(&redis).await, 1);
}

#[tokio::test]
async fn keys_are_set_back_without_a_disconnect() {
    let redis = Redis::start().await.unwrap();
    let mut client = redis.connect().await.unwrap();
    let id: i64 = redis::cmd("CLIENT")
        .arg("ID")
        .query_async(&mut client)
        .await
        .unwrap();
    add(&redis, "a").await;
    let _: () = client.xgroup_create("s", "g", "0").await.unwrap();
    let _: () = client.set_ex("short", "lived", 1000).await.unwrap();
    let keys = redis.keys().await.unwrap();
    add(&redis, "b").await;
    let _: () = client.set("later", "1").await.unwrap();
    redis.set_back(&keys).await.unwrap();
    assert_eq!(len(&redis).await, 1);
    assert_eq!(client.exists("later").await, Ok(false));
    let life: i64 = client.ttl("short").await.unwrap();
    assert!((1..=1000).contains(&life), "{life}");
    let groups: Vec<redis::Value> = redis::cmd("XINFO")
        .arg("GROUPS")
        .arg("s")
        .query_async(&mut client)
        .await
        .unwrap();
    assert_eq!(groups.len(), 1);
    assert_eq!(
        redis::cmd("CLIENT")
            .arg("ID")
            .query_async(&mut client)
            .await,
        Ok(id)
    );
}

#[tokio::test]
async fn a_paused_server_answers_nothing_and_then_everything() {
    let redis = Redis::start().await.unwrap();
    let url = redis.url();
    redis.pause().await.unwrap();
    let answer = tokio::spawn(async move {
        let mut connection = patient(&url).await?;
        connection.incr("n", 1).await as RedisResult<i64>
    });
    tokio::time::sleep(QUIET).await;
    assert!(!answer.is_finished());
    redis.resume().await.unwrap();
    assert_eq!(answer.await.unwrap(), Ok(1));
}

/// A connection without the client's short default time-outs.
async fn patient(url: &str) -> RedisResult<MultiplexedConnection> {
    let config = redis::AsyncConnectionConfig::new()
        .set_connection_timeout(Some(DEADLINE))
        .set_response_timeout(Some(DEADLINE));
    Client::open(url)?
        .get_multiplexed_async_connection_with_config(&config)
        .await
}

#[tokio::test]
async fn loading_can_be_seen() {
    let redis = Redis::builder()
        .persistence(Persistence::Aof(Fsync::Always))
        .arg("--key-load-delay", "1000")
        // Otherwise it looks at its sockets only once in a megabyte of the file.
        .arg("--loading-process-events-interval-bytes", "1024")
        .start()
        .await
        .unwrap();
    let mut connection = redis.connect().await.unwrap();
    let mut fill = redis::pipe();
    for n in 0..3000 {
        fill.set(n, "x").ignore();
    }
    let _: () = fill.query_async(&mut connection).await.unwrap();
    redis.kill9().await.unwrap();
    redis.start_again_loading().await.unwrap();
    let error = dbsize(&redis).await.unwrap_err();
    assert_eq!(error.code(), Some("LOADING"), "{error}");
    eventually(DEADLINE, "the end of loading", || dbsize(&redis))
        .await
        .unwrap();
    assert_eq!(dbsize(&redis).await, Ok(3000));
}

async fn dbsize(redis: &Redis) -> RedisResult<usize> {
    let mut connection = patient(&redis.url()).await?;
    redis::cmd("DBSIZE").query_async(&mut connection).await
}

#[tokio::test]
async fn arguments_and_password_reach_the_server() {
    let redis = Redis::builder()
        .arg("--maxmemory", "7mb")
        .password("sesame")
        .start()
        .await
        .unwrap();
    let mut connection = redis.connect().await.unwrap();
    let (_, value): (String, String) = redis::cmd("CONFIG")
        .arg("GET")
        .arg("maxmemory")
        .query_async(&mut connection)
        .await
        .unwrap();
    assert_eq!(value, (7 * 1024 * 1024).to_string());
    let anonymous = Client::open(format!("redis://127.0.0.1:{}", redis.port())).unwrap();
    let mut anonymous = anonymous.get_multiplexed_async_connection().await.unwrap();
    let refused: RedisResult<i64> = anonymous.get("k").await;
    assert_eq!(refused.unwrap_err().code(), Some("NOAUTH"));
    assert!(redis.replica().await.is_ok());
}

#[tokio::test]
async fn a_server_that_does_not_start_shows_its_log() {
    let error = Redis::builder()
        .arg("--maxmemory", "plenty")
        .start()
        .await
        .unwrap_err();
    let shown = format!("{error:?}");
    assert!(shown.contains("did not start"), "{shown}");
    assert!(shown.contains("argument must be a memory value"), "{shown}");
}

#[tokio::test]
async fn a_promoted_replica_has_what_it_received_and_takes_writes() {
    let master = Redis::start().await.unwrap();
    add(&master, "a").await;
    let replica = master.replica().await.unwrap();
    assert_eq!(len(&replica).await, 1);
    add(&master, "b").await;
    replica.caught_up_with(&master).await.unwrap();
    let mut connection = replica.connect().await.unwrap();
    let refused: RedisResult<()> = connection.set("k", "v").await;
    assert_eq!(refused.unwrap_err().code(), Some("READONLY"));

    // Cut off: it follows a port where nobody listens.
    let nowhere = Redis::start().await.unwrap();
    nowhere.kill9().await.unwrap();
    replica.replica_of(nowhere.port()).await.unwrap();
    add(&master, "c").await;
    replica.promote().await.unwrap();
    assert_eq!(len(&replica).await, 2);
    assert_eq!(len(&master).await, 3);
    add(&replica, "d").await;

    master.replica_of(replica.port()).await.unwrap();
    master.in_sync().await.unwrap();
    assert_eq!(len(&master).await, 3);
}

#[tokio::test]
async fn a_restarted_replica_follows_its_master_again() {
    let master = Redis::start().await.unwrap();
    let replica = master.replica().await.unwrap();
    replica.kill9().await.unwrap();
    add(&master, "a").await;
    replica.start_again().await.unwrap();
    replica.in_sync().await.unwrap();
    replica.caught_up_with(&master).await.unwrap();
    assert_eq!(len(&replica).await, 1);
}

#[tokio::test]
async fn a_server_can_be_a_cluster() {
    let redis = Redis::builder()
        .arg("--cluster-enabled", "yes")
        .start()
        .await
        .unwrap();
    let mut connection = redis.connect().await.unwrap();
    let _: () = redis::cmd("CLUSTER")
        .arg("ADDSLOTSRANGE")
        .arg(0)
        .arg(16383)
        .query_async(&mut connection)
        .await
        .unwrap();
    eventually(DEADLINE, "the cluster to be up", || async {
        let mut connection = redis.connect().await.unwrap();
        let set: RedisResult<()> = connection.set("k", "v").await;
        set
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn faults_can_come_from_a_spawned_task() {
    let redis = Redis::start().await.unwrap();
    let proxy = Proxy::start(redis.port()).await.unwrap();
    let faults = tokio::spawn(async move {
        redis.pause().await?;
        redis.resume().await?;
        redis.stop().await?;
        redis.start_again().await?;
        let snapshot = redis.snapshot().await?;
        redis.restore(&snapshot).await?;
        redis.replica().await?.promote().await?;
        proxy.blackhole_all().await?;
        proxy.refuse().await?;
        proxy.pass().await?;
        redis.set_back(&redis.keys().await?).await?;
        redis.kill9().await
    });
    faults.await.unwrap().unwrap();
}
