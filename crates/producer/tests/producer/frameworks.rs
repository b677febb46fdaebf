//! The same from deadpool-postgres and from sqlx.

use deadpool_postgres::{Manager, Pool};
use outbox_producer::{Message, Outcome, write, write_all, write_once};
use sqlx::{Connection, PgConnection};
use tokio_postgres::NoTls;

use crate::database::Database;

#[path = "../../examples/sqlx.rs"]
#[allow(dead_code, reason = "the example's own main is not called here")]
mod sqlx_example;

#[tokio::test]
async fn a_transaction_of_deadpool_is_taken_as_it_is() {
    let database = Database::outbox().await;
    let pool = Pool::builder(Manager::new(database.url().parse().unwrap(), NoTls))
        .max_size(2)
        .build()
        .unwrap();
    // In a task of its own: the futures can move between threads.
    tokio::spawn(async move {
        let mut client = pool.get().await.unwrap();
        let transaction = client.transaction().await.unwrap();
        let message = Message::raw_json("t", "1").ordering_key("k").ordered();
        write(&transaction, &message).await.unwrap();
        write_all(&transaction, &[Message::raw_json("t", "2")])
            .await
            .unwrap();
        assert_eq!(
            write_once(&transaction, &message).await.unwrap(),
            Outcome::AlreadyWritten
        );
        transaction.commit().await.unwrap();
    })
    .await
    .unwrap();
    assert_eq!(database.count().await, 2);
}

#[tokio::test]
async fn a_savepoint_takes_its_messages_back() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    let mut transaction = client.transaction().await.unwrap();
    let savepoint = transaction.transaction().await.unwrap();
    write(&savepoint, &Message::raw_json("t", "1").message_key("a"))
        .await
        .unwrap();
    savepoint.rollback().await.unwrap();
    write(&transaction, &Message::raw_json("t", "2").message_key("a"))
        .await
        .unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(database.count().await, 1);
}

#[tokio::test]
async fn the_sqlx_example_commits_the_order_and_its_message_together() {
    let database = Database::outbox().await;
    let client = database.client().await;
    client
        .batch_execute("CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY, customer text, cents bigint)")
        .await
        .unwrap();
    let mut connection = PgConnection::connect(&database.url()).await.unwrap();

    let mut transaction = connection.begin().await.unwrap();
    let order = sqlx_example::place_order(&mut transaction, "ada", 1999)
        .await
        .unwrap();
    transaction.commit().await.unwrap();
    let mut transaction = connection.begin().await.unwrap();
    sqlx_example::place_order(&mut transaction, "bob", 5)
        .await
        .unwrap();
    transaction.rollback().await.unwrap();

    let rows = client
        .query(
            "SELECT m.message_key, m.ordering_key, m.event_type, m.payload::text, o.id \
             FROM outbox.messages AS m FULL JOIN orders AS o ON m.message_key = 'order-' || o.id || '-placed'",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(rows.len(), 1);
    let texts: [&str; 4] = [0, 1, 2, 3].map(|column| rows[0].get(column));
    let payload = format!(r#"{{"order_id":{order},"cents":1999}}"#);
    assert_eq!(
        texts,
        [
            &format!("order-{order}-placed"),
            "ada",
            "order.placed",
            payload.as_str()
        ]
    );
    assert_eq!(rows[0].get::<_, i64>(4), order);
}
