use std::path::Path;

use outbox_testkit::{Authority, Postgres, Process, Redis};

use crate::DEADLINE;

const NO_ENV: [(&str, &str); 0] = [];

/// What libpq says, the client whose words for TLS everybody uses.
async fn psql(postgres: &Postgres, host: &str, mode: &str, root: &Path) -> String {
    let connection = format!(
        "host={host} port={} user=postgres dbname=postgres sslmode={mode} sslrootcert={}",
        postgres.port(),
        root.display()
    );
    let query = "SELECT 'ssl=' || ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
    let program = postgres.bin_dir().join("psql");
    let psql = Process::spawn(program, ["-XAtc", query, &connection], NO_ENV).unwrap();
    // Either the answer or the refusal.
    let line = psql.wait_for_line("ssl=", DEADLINE).await;
    line.unwrap_or_else(|error| error.to_string())
}

#[tokio::test]
async fn postgres_shows_the_certificate_it_was_given() {
    let (ours, other) = (Authority::new().unwrap(), Authority::new().unwrap());
    let postgres = Postgres::builder()
        .tls(ours.issue("localhost").unwrap())
        .hba("hostssl all all 127.0.0.1/32 trust")
        .start()
        .await
        .unwrap();
    let ask = async |host, mode, root: &Authority| psql(&postgres, host, mode, &root.root()).await;
    assert_eq!(ask("localhost", "verify-full", &ours).await, "ssl=true");
    assert_eq!(ask("127.0.0.1", "verify-ca", &ours).await, "ssl=true");
    let wrong_host = ask("127.0.0.1", "verify-full", &ours).await;
    assert!(
        wrong_host.contains("does not match host name"),
        "{wrong_host}"
    );
    let wrong_authority = ask("localhost", "verify-ca", &other).await;
    assert!(
        wrong_authority.contains("certificate verify failed"),
        "{wrong_authority}"
    );
    let plain = ask("localhost", "disable", &ours).await;
    assert!(plain.contains("no encryption"), "{plain}");
}

#[tokio::test]
async fn redis_shows_the_certificate_it_was_given() {
    let (ours, other) = (Authority::new().unwrap(), Authority::new().unwrap());
    let redis = Redis::builder()
        .tls(ours.issue("127.0.0.1").unwrap())
        .start()
        .await
        .unwrap();
    let port = redis.tls_port().unwrap().to_string();
    for (authority, expected) in [(&ours, "PONG"), (&other, "certificate verify failed")] {
        let root = authority.root().display().to_string();
        let args = [
            "-h",
            "127.0.0.1",
            "-p",
            &port,
            "--tls",
            "--cacert",
            &root,
            "PING",
        ];
        let client = Process::spawn("redis-cli", args, NO_ENV).unwrap();
        client.wait_for_line(expected, DEADLINE).await.unwrap();
    }
    // The kit's own way in stays open.
    redis.connect().await.unwrap();
}
