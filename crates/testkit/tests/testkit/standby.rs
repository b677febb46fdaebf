use outbox_testkit::{Postgres, Proxy, Shutdown, eventually};
use tokio_postgres::Client;

use crate::{DEADLINE, QUIET};

async fn primary() -> (Postgres, String, Client) {
    let postgres = Postgres::start().await.unwrap();
    let database = postgres.fresh_database().await.unwrap();
    let client = postgres.connect(&database).await.unwrap();
    client
        .batch_execute("CREATE TABLE t (n int)")
        .await
        .unwrap();
    (postgres, database, client)
}

async fn rows(client: &Client) -> i64 {
    client
        .query_one("SELECT count(*) FROM t", &[])
        .await
        .unwrap()
        .get(0)
}

async fn timeline(client: &Client) -> String {
    let sql = "SELECT substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)";
    client.query_one(sql, &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn a_promoted_standby_loses_what_it_had_not_received() {
    let (primary, database, client) = primary().await;
    let standby = primary.standby().await.unwrap();
    client
        .batch_execute("INSERT INTO t VALUES (1)")
        .await
        .unwrap();
    standby.caught_up_with(&primary).await.unwrap();
    let replica = standby.connect(&database).await.unwrap();
    assert_eq!(rows(&replica).await, 1);

    standby.stop_receiving().await.unwrap();
    client
        .batch_execute("INSERT INTO t VALUES (2), (3)")
        .await
        .unwrap();
    assert_eq!(rows(&client).await, 3);
    assert_eq!(rows(&replica).await, 1);

    standby.promote().await.unwrap();
    replica
        .batch_execute("INSERT INTO t VALUES (4)")
        .await
        .unwrap();
    assert_eq!(rows(&replica).await, 2);
    assert_eq!(rows(&client).await, 3);
    assert_eq!(timeline(&client).await, "00000001");
    assert_eq!(timeline(&replica).await, "00000002");
}

#[tokio::test]
async fn a_standby_that_lagged_catches_up() {
    let (primary, database, client) = primary().await;
    let standby = primary.standby().await.unwrap();
    standby.stop_receiving().await.unwrap();
    client
        .batch_execute("INSERT INTO t VALUES (1)")
        .await
        .unwrap();
    standby.receive_again().await.unwrap();
    standby.caught_up_with(&primary).await.unwrap();
    assert_eq!(rows(&standby.connect(&database).await.unwrap()).await, 1);
}

#[tokio::test]
async fn a_standby_survives_its_own_crash_and_that_of_the_primary() {
    let (primary, database, client) = primary().await;
    let standby = primary.standby().await.unwrap();
    standby.kill9().await.unwrap();
    client
        .batch_execute("INSERT INTO t VALUES (1)")
        .await
        .unwrap();
    standby.start_again().await.unwrap();
    standby.caught_up_with(&primary).await.unwrap();
    primary.kill9().await.unwrap();
    standby.promote().await.unwrap();
    assert_eq!(rows(&standby.connect(&database).await.unwrap()).await, 1);
}

#[tokio::test]
async fn a_commit_waits_for_a_synchronous_standby() {
    let (primary, _, client) = primary().await;
    let standby = primary
        .standby_builder()
        .name("partner")
        .synchronous()
        .start()
        .await
        .unwrap();
    client
        .batch_execute("INSERT INTO t VALUES (1)")
        .await
        .unwrap();
    standby.stop_receiving().await.unwrap();
    let insert = client.batch_execute("INSERT INTO t VALUES (2)");
    tokio::pin!(insert);
    assert!(tokio::time::timeout(QUIET, &mut insert).await.is_err());
    standby.receive_again().await.unwrap();
    tokio::time::timeout(DEADLINE, insert)
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn a_promoted_standby_of_a_synchronous_primary_takes_writes() {
    let (primary, database, _client) = primary().await;
    let _first = primary
        .standby_builder()
        .synchronous()
        .start()
        .await
        .unwrap();
    let second = primary.standby().await.unwrap();
    second.promote().await.unwrap();
    let client = second.connect(&database).await.unwrap();
    let insert = client.batch_execute("INSERT INTO t VALUES (1)");
    tokio::time::timeout(DEADLINE, insert)
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn a_standby_behind_a_proxy_can_be_cut_off_by_the_network() {
    let (primary, database, client) = primary().await;
    let proxy = Proxy::start(primary.port()).await.unwrap();
    let standby = primary
        .standby_builder()
        .via(proxy.port())
        .start()
        .await
        .unwrap();
    proxy.blackhole_all().await.unwrap();
    client
        .batch_execute("INSERT INTO t VALUES (1)")
        .await
        .unwrap();
    let replica = standby.connect(&database).await.unwrap();
    tokio::time::sleep(QUIET).await;
    assert_eq!(rows(&replica).await, 0);
    proxy.pass().await.unwrap();
    eventually(DEADLINE, "the row on the standby", || async {
        rows(&replica).await == 1
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn only_standbys_are_promoted() {
    let postgres = Postgres::start().await.unwrap();
    let error = postgres.promote().await.unwrap_err();
    assert!(error.to_string().contains("is no standby"), "{error}");
    assert!(postgres.stop_receiving().await.is_err());
}

#[tokio::test]
async fn faults_can_come_from_a_spawned_task() {
    let postgres = Postgres::start().await.unwrap();
    let faults = tokio::spawn(async move {
        let snapshot = postgres.snapshot().await?;
        postgres.restart(Shutdown::Immediate).await?;
        postgres.restore(&snapshot).await?;
        let standby = postgres.standby_builder().synchronous().start().await?;
        standby.caught_up_with(&postgres).await?;
        standby.stop_receiving().await?;
        standby.promote().await?;
        postgres.pause().await?;
        postgres.kill9().await
    });
    faults.await.unwrap().unwrap();
}
