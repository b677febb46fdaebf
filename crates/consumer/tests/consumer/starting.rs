//! What keeps a consumer from starting, and what it waits for.

use std::time::Duration;

use outbox_consumer::Error;
use outbox_testkit::{Postgres, Redis};

use crate::shop::{DEADLINE, Shop, consumer_at, run, ship};

async fn error_of(builder: outbox_consumer::Builder) -> Error {
    let consumer = builder.topic("orders").build().unwrap();
    let ended = tokio::time::timeout(DEADLINE, consumer.run(ship, std::future::pending())).await;
    ended.expect("it ends").unwrap_err()
}

#[tokio::test]
async fn a_missing_schema_is_told_with_the_remedy() {
    let postgres = Postgres::shared().await.unwrap();
    let redis = Redis::start().await.unwrap();
    let empty = postgres.fresh_database().await.unwrap();
    let error = error_of(consumer_at(&postgres.url(&empty), &redis.url())).await;
    assert!(matches!(error, Error::Schema { found: 0, .. }), "{error:?}");
    assert!(
        error.to_string().contains("outbox-relay migrate --inbox"),
        "{error}"
    );
}

#[tokio::test]
async fn a_schema_of_the_future_is_refused() {
    let shop = Shop::open().await;
    shop.db
        .batch_execute("INSERT INTO inbox.schema_version VALUES (100)")
        .await
        .unwrap();
    let error = error_of(consumer_at(&shop.postgres_url, &shop.redis.url())).await;
    assert!(
        matches!(error, Error::Schema { found: 100, .. }),
        "{error:?}"
    );
}

#[tokio::test]
async fn a_wrong_database_and_a_wrong_password_end_the_start() {
    let postgres = Postgres::shared().await.unwrap();
    let shop = Shop::open_on(
        postgres,
        Redis::builder().password("right").start().await.unwrap(),
    )
    .await;

    let error = error_of(consumer_at(&postgres.url("nowhere"), &shop.redis.url())).await;
    assert!(
        matches!(
            error,
            Error::Refused {
                server: "Postgres",
                ..
            }
        ),
        "{error:?}"
    );

    for url in [
        shop.redis.url().replace("right", "wrong"),
        shop.redis.url().replace(":right@", ""),
    ] {
        let error = error_of(consumer_at(&shop.postgres_url, &url)).await;
        assert!(
            matches!(
                error,
                Error::Refused {
                    server: "Redis",
                    ..
                }
            ),
            "{error:?}"
        );
    }
}

#[tokio::test]
async fn servers_that_are_down_at_the_start_are_waited_for() {
    let shop = Shop::open().await;
    shop.redis.kill9().await.unwrap();
    let consumer = run(shop.consumer(), ship);
    outbox_testkit::eventually(DEADLINE, "tries", || async {
        consumer.counters.snapshot().outages > 3
    })
    .await
    .unwrap();

    shop.redis.start_again().await.unwrap();
    shop.publish("orders", "a").await;

    shop.effects_are(&["a"]).await;
    consumer.stop().await;
}

#[tokio::test]
async fn the_inbox_migration_may_run_again_and_from_two_places() {
    let postgres = Postgres::shared().await.unwrap();
    let database = postgres.fresh_database().await.unwrap();
    let (one, two) = tokio::join!(
        postgres.migrate(&database, "inbox"),
        postgres.migrate(&database, "inbox")
    );
    one.unwrap();
    two.unwrap();
    postgres.migrate(&database, "inbox").await.unwrap();
    let db = postgres.connect(&database).await.unwrap();
    let versions: i64 = db
        .query_one("SELECT count(*) FROM inbox.schema_version", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(versions, 1);
}

#[tokio::test]
async fn a_settings_error_names_the_setting() {
    let redis = "redis://127.0.0.1:1";
    let builder = consumer_at("postgres://postgres@127.0.0.1:1/none", redis).topic("orders");
    let error = builder.claim_after(Duration::ZERO).build().unwrap_err();
    assert_eq!(
        error.to_string(),
        "setting claim_after: must be 100 ms to 24 h"
    );
}
