use outbox_testkit::{Postgres, Proxy, Redis, eventually};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use crate::{DEADLINE, QUIET};

/// A client that speaks to Redis without a library in between.
struct Raw(TcpStream);

impl Raw {
    async fn connect(proxy: &Proxy) -> std::io::Result<Self> {
        TcpStream::connect(("127.0.0.1", proxy.port()))
            .await
            .map(Self)
    }

    async fn ask(&mut self, command: &str) -> std::io::Result<String> {
        self.0
            .write_all(format!("{command}\r\n").as_bytes())
            .await?;
        self.answer().await
    }

    async fn answer(&mut self) -> std::io::Result<String> {
        let mut buffer = [0; 1024];
        let read = tokio::time::timeout(DEADLINE, self.0.read(&mut buffer)).await??;
        Ok(String::from_utf8_lossy(&buffer[..read]).trim().to_owned())
    }

    /// Whether nothing comes, neither an answer nor an end.
    async fn is_silent(&mut self) -> bool {
        tokio::time::timeout(QUIET, self.0.readable())
            .await
            .is_err()
    }

    /// Whether nothing comes after a command.
    async fn is_silent_after(&mut self, command: &str) -> bool {
        self.0
            .write_all(format!("{command}\r\n").as_bytes())
            .await
            .unwrap();
        self.is_silent().await
    }

    async fn is_reset(&mut self) -> bool {
        let mut buffer = [0; 16];
        let read = tokio::time::timeout(DEADLINE, self.0.read(&mut buffer))
            .await
            .unwrap();
        read.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset)
    }
}

async fn redis_and_proxy() -> (Redis, Proxy) {
    let redis = Redis::start().await.unwrap();
    let proxy = Proxy::start(redis.port()).await.unwrap();
    (redis, proxy)
}

#[tokio::test]
async fn passes_large_requests_and_replies() {
    let (redis, proxy) = redis_and_proxy().await;
    let client = redis::Client::open(redis.url_via(proxy.port())).unwrap();
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(DEADLINE));
    let mut connection = client
        .get_multiplexed_async_connection_with_config(&config)
        .await
        .unwrap();
    let value: Vec<u8> = (0..=u8::MAX).cycle().take(8 << 20).collect();
    let _: () = redis::cmd("SET")
        .arg("k")
        .arg(&value)
        .query_async(&mut connection)
        .await
        .unwrap();
    let back: Vec<u8> = redis::cmd("GET")
        .arg("k")
        .query_async(&mut connection)
        .await
        .unwrap();
    assert!(back == value);

    let postgres = Postgres::shared().await.unwrap();
    let proxy = Proxy::start(postgres.port()).await.unwrap();
    let url = postgres.url_via(proxy.port(), "postgres");
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls)
        .await
        .unwrap();
    tokio::spawn(connection);
    let row = client
        .query_one("SELECT repeat('x', 8388608)", &[])
        .await
        .unwrap();
    assert_eq!(row.get::<_, &str>(0).len(), 8 << 20);
}

#[tokio::test]
async fn passes_the_end_of_a_connection_in_both_directions() {
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = Proxy::start(server.local_addr().unwrap().port())
        .await
        .unwrap();
    let mut client = TcpStream::connect(("127.0.0.1", proxy.port()))
        .await
        .unwrap();
    let (mut accepted, _) = server.accept().await.unwrap();
    client.write_all(b"question").await.unwrap();
    client.shutdown().await.unwrap();
    let mut text = String::new();
    accepted.read_to_string(&mut text).await.unwrap();
    assert_eq!(text, "question");
    // Half of the connection still works.
    accepted.write_all(b"answer").await.unwrap();
    drop(accepted);
    text.clear();
    client.read_to_string(&mut text).await.unwrap();
    assert_eq!(text, "answer");
    eventually(DEADLINE, "the connection to be gone", || async {
        proxy.connections() == 0
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_black_hole_takes_old_connections_and_heals() {
    let (_redis, proxy) = redis_and_proxy().await;
    let mut old = Raw::connect(&proxy).await.unwrap();
    assert_eq!(old.ask("INCR n").await.unwrap(), ":1");
    proxy.blackhole().await.unwrap();
    assert!(old.is_silent_after("INCR n").await);
    let mut new = Raw::connect(&proxy).await.unwrap();
    assert_eq!(new.ask("GET n").await.unwrap(), "$1\r\n1");
    assert_eq!(proxy.connections(), 2);
    proxy.pass().await.unwrap();
    assert_eq!(old.answer().await.unwrap(), ":2");
}

#[tokio::test]
async fn a_black_hole_hides_the_death_of_the_server() {
    let (redis, proxy) = redis_and_proxy().await;
    let mut client = Raw::connect(&proxy).await.unwrap();
    assert_eq!(client.ask("PING").await.unwrap(), "+PONG");
    proxy.blackhole().await.unwrap();
    redis.kill9().await.unwrap();
    assert!(client.is_silent().await);
}

#[tokio::test]
async fn a_full_black_hole_takes_new_connections_too() {
    let (_redis, proxy) = redis_and_proxy().await;
    let mut old = Raw::connect(&proxy).await.unwrap();
    assert_eq!(old.ask("PING").await.unwrap(), "+PONG");
    proxy.blackhole_all().await.unwrap();
    let mut new = Raw::connect(&proxy).await.unwrap();
    assert!(old.is_silent_after("PING").await);
    assert!(new.is_silent_after("PING").await);
    proxy.pass().await.unwrap();
    assert_eq!(old.answer().await.unwrap(), "+PONG");
    assert_eq!(new.answer().await.unwrap(), "+PONG");
}

#[tokio::test]
async fn refused_connections_are_refused_and_old_ones_reset() {
    let (_redis, proxy) = redis_and_proxy().await;
    let mut old = Raw::connect(&proxy).await.unwrap();
    assert_eq!(old.ask("PING").await.unwrap(), "+PONG");
    proxy.refuse().await.unwrap();
    assert!(old.is_reset().await);
    let refused = Raw::connect(&proxy).await.map(drop).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    proxy.pass().await.unwrap();
    let mut new = Raw::connect(&proxy).await.unwrap();
    assert_eq!(new.ask("PING").await.unwrap(), "+PONG");
}

#[tokio::test]
async fn a_cut_reply_leaves_the_request_done() {
    let (_redis, proxy) = redis_and_proxy().await;
    let mut client = Raw::connect(&proxy).await.unwrap();
    assert_eq!(client.ask("INCR n").await.unwrap(), ":1");
    proxy.cut_reply(2).await.unwrap();
    client.0.write_all(b"INCR n\r\n").await.unwrap();
    assert!(client.is_reset().await);
    let mut client = Raw::connect(&proxy).await.unwrap();
    client.0.write_all(b"INCR n\r\n").await.unwrap();
    assert!(client.is_reset().await);
    let mut client = Raw::connect(&proxy).await.unwrap();
    assert_eq!(client.ask("GET n").await.unwrap(), "$1\r\n3");
}

#[tokio::test]
async fn new_connections_go_to_the_new_target() {
    let (one, proxy) = redis_and_proxy().await;
    let other = Redis::start().await.unwrap();
    let mut old = Raw::connect(&proxy).await.unwrap();
    assert_eq!(old.ask("SET name one").await.unwrap(), "+OK");
    proxy.retarget(other.port()).await.unwrap();
    let mut new = Raw::connect(&proxy).await.unwrap();
    assert_eq!(new.ask("GET name").await.unwrap(), "$-1");
    assert_eq!(old.ask("GET name").await.unwrap(), "$3\r\none");
    drop(one);
}

#[tokio::test]
async fn resets_reach_both_sides() {
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = Proxy::start(server.local_addr().unwrap().port())
        .await
        .unwrap();
    let mut client = Raw::connect(&proxy).await.unwrap();
    let (accepted, _) = server.accept().await.unwrap();
    proxy.reset_all().await.unwrap();
    assert!(client.is_reset().await);
    assert!(Raw(accepted).is_reset().await);
    assert_eq!(proxy.connections(), 0);
}

#[tokio::test]
async fn a_server_that_is_down_resets_the_client_until_it_is_back() {
    let (redis, proxy) = redis_and_proxy().await;
    redis.kill9().await.unwrap();
    let mut client = Raw::connect(&proxy).await.unwrap();
    assert!(client.is_reset().await);
    redis.start_again().await.unwrap();
    let mut client = Raw::connect(&proxy).await.unwrap();
    assert_eq!(client.ask("PING").await.unwrap(), "+PONG");
}
