//! Certificates that the relay shows, and the name that it asks for.

use outbox_testkit::{Authority, Certificate, Postgres, ProcessBuilder, Redis, relay};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::pair::{DEADLINE, Pair, STOP, stop};

async fn connects(command: ProcessBuilder) {
    let relay = command.spawn().unwrap();
    relay.wait_for_line("leading;", DEADLINE).await.unwrap();
    stop(&relay).await;
}

/// Refused with this exit code, and in words that name all of this, before anything is tried without TLS.
async fn refused(command: ProcessBuilder, code: i32, says: &[&str]) {
    let relay = command.env("OUTBOX_START_TIMEOUT", "0s").spawn().unwrap();
    let status = relay.wait(STOP).await.unwrap();
    assert_eq!(status.code(), Some(code), "{:#?}", relay.lines());
    let lines = relay.lines().join("\n");
    for text in says {
        assert!(lines.contains(text), "no {text:?} in {lines}");
    }
}

fn shown(certificate: &Certificate) -> (String, String) {
    let Certificate { certificate, key } = certificate;
    (certificate.display().to_string(), key.display().to_string())
}

#[tokio::test]
async fn postgres_is_shown_the_certificate_of_the_relay() {
    let (ours, other) = (Authority::new().unwrap(), Authority::new().unwrap());
    let postgres = Postgres::builder()
        .tls(ours.issue("localhost").unwrap())
        .client_authority(ours.root())
        .hba("hostssl all all 127.0.0.1/32 cert");
    let postgres = postgres.start().await.unwrap();
    let database = postgres.fresh_outbox().await.unwrap();
    let redis = Redis::start().await.unwrap();
    let root = ours.root().display().to_string();
    let run = |query: &str| {
        let port = postgres.port();
        let url =
            format!("postgres://postgres@localhost:{port}/{database}?sslrootcert={root}{query}");
        relay(&url, &redis.url())
    };
    let with = |certificate: &Certificate| {
        let (certificate, key) = shown(certificate);
        run(&format!("&sslcert={certificate}&sslkey={key}"))
    };
    connects(with(&ours.issue("postgres").unwrap())).await;
    refused(run(""), 1, &["certificate", "TLS"]).await;
    // Of the right authority and the wrong role; of the wrong authority.
    refused(with(&ours.issue("nobody").unwrap()), 1, &["TLS"]).await;
    refused(with(&other.issue("postgres").unwrap()), 1, &["TLS"]).await;
    let (certificate, _) = shown(&ours.issue("postgres").unwrap());
    let half = run(&format!("&sslcert={certificate}"));
    refused(half, 64, &["sslcert and sslkey go together"]).await;
}

#[tokio::test]
async fn redis_is_shown_the_certificate_of_the_relay() {
    let (ours, other) = (Authority::new().unwrap(), Authority::new().unwrap());
    let redis = Redis::builder()
        .tls(ours.issue("localhost").unwrap())
        .client_authority(ours.root());
    let pair = Pair::with_redis(redis.start().await.unwrap()).await;
    let root = ours.root().display().to_string();
    let run = |args: &[&str]| {
        let url = format!("rediss://localhost:{}/0", pair.redis.tls_port().unwrap());
        relay(&pair.postgres.url(&pair.database), &url)
            .args(["--redis-ca-file", &root])
            .args(args.iter().copied())
    };
    let (certificate, key) = shown(&ours.issue("relay").unwrap());
    let right = ["--redis-cert-file", &certificate, "--redis-key-file", &key];
    for mode in ["verify-full", "verify-ca", "require"] {
        connects(run(&right).args(["--redis-tls-mode", mode])).await;
    }
    refused(run(&[]), 1, &["TLS"]).await;
    let (theirs, key) = shown(&other.issue("relay").unwrap());
    let wrong = ["--redis-cert-file", &theirs, "--redis-key-file", &key];
    refused(run(&wrong), 1, &["TLS"]).await;
    let half = ["--redis-cert-file", &certificate];
    refused(run(&half), 64, &["--redis-cert-file", "go together"]).await;
}

/// What a client says first to a server with TLS: its name stands there in the clear.
async fn hello(listener: &TcpListener, asks_first: bool) -> Vec<u8> {
    let (mut socket, _) = listener.accept().await.unwrap();
    if asks_first {
        let mut request = [0; 8];
        socket.read_exact(&mut request).await.unwrap();
        socket.write_all(b"S").await.unwrap();
    }
    let mut hello = vec![0; 4096];
    let read = socket.read(&mut hello).await.unwrap();
    hello.truncate(read);
    hello
}

#[tokio::test]
async fn both_servers_are_told_the_name_that_is_asked_for() {
    let pair = Pair::start().await;
    let is_told = |hello: &[u8]| hello.windows(9).any(|window| window == b"localhost");
    for asks_first in [true, false] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let relay = if asks_first {
            let url = format!("postgres://u@localhost:{port}/shop?sslmode=require");
            relay(&url, &pair.redis.url())
        } else {
            let url = format!("rediss://localhost:{port}/0");
            relay(&pair.postgres.url(&pair.database), &url)
        };
        let relay = relay.spawn().unwrap();
        let hello = tokio::time::timeout(DEADLINE, hello(&listener, asks_first));
        assert!(is_told(&hello.await.unwrap()), "asks first: {asks_first}");
        relay.kill9();
    }
}
