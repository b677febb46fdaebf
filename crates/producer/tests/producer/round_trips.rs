//! How often a write waits for the server, and what a dropped write leaves.

use outbox_producer::{Message, Outcome, Result, limits, write, write_all, write_once};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_postgres::{Client, Config, NoTls};

use crate::database::{DEADLINE, Database, eventually};

fn ordered(key: &str) -> Message {
    Message::raw_json("t", "1").ordering_key(key).ordered()
}

/// Connects through a relay of bytes that keeps the server's replies back while the gate says `false`.
async fn connect_through_gate(database: &Database) -> (Client, watch::Sender<bool>) {
    let config: Config = database.url().parse().unwrap();
    let server_port = config.get_ports()[0];
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = database.url_via(listener.local_addr().unwrap().port());
    let (gate, mut open) = watch::channel(true);
    tokio::spawn(async move {
        let (near, _) = listener.accept().await.unwrap();
        let far = TcpStream::connect(("127.0.0.1", server_port))
            .await
            .unwrap();
        let (mut from_client, mut to_client) = near.into_split();
        let (mut from_server, mut to_server) = far.into_split();
        tokio::spawn(async move { copy(&mut from_client, &mut to_server).await });
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(length @ 1..) = from_server.read(&mut buffer).await {
            if open.wait_for(|open| *open).await.is_err()
                || to_client.write_all(&buffer[..length]).await.is_err()
            {
                break;
            }
        }
    });
    let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
    tokio::spawn(connection);
    (client, gate)
}

/// Runs `write` without any reply of the server until `ids` were drawn in all: what draws them was sent
/// before the first reply, hence in one round trip.
async fn in_one_round_trip<T>(
    gate: &watch::Sender<bool>,
    database: &Database,
    ids: i64,
    write: impl Future<Output = Result<T>>,
) -> T {
    gate.send(false).unwrap();
    let observer = database.client().await;
    let drawn = eventually(DEADLINE, "ids drawn without a reply", || async {
        let last =
            "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM outbox.messages_id_seq";
        let last: i64 = observer.query_one(last, &[]).await.unwrap().get(0);
        if last == ids { Ok(()) } else { Err(last) }
    });
    let (written, ()) = tokio::join!(write, async {
        drawn.await.unwrap();
        gate.send(true).unwrap();
    });
    written.unwrap()
}

#[tokio::test]
async fn each_form_of_writing_takes_one_round_trip_with_its_locks() {
    let database = Database::outbox().await;
    let (mut client, gate) = connect_through_gate(&database).await;
    let transaction = client.transaction().await.unwrap();
    let many: Vec<Message> = (0..limits::STATEMENT_ROWS_MAX)
        .map(|n| ordered(&format!("key-{}", n % 50)))
        .collect();

    in_one_round_trip(
        &gate,
        &database,
        1,
        write(&transaction, &Message::raw_json("t", "1")),
    )
    .await;
    in_one_round_trip(&gate, &database, 2, write(&transaction, &ordered("a"))).await;
    let outcome =
        in_one_round_trip(&gate, &database, 3, write_once(&transaction, &ordered("b"))).await;
    assert!(matches!(outcome, Outcome::Written(written) if written.id == 3));
    let ids = 3 + i64::try_from(many.len()).unwrap();
    let written = in_one_round_trip(&gate, &database, ids, write_all(&transaction, &many)).await;
    assert_eq!(written.last().unwrap().id, ids);
}

#[tokio::test]
async fn a_dropped_write_leaves_nothing_once_its_transaction_is_dropped() {
    let database = Database::outbox().await;
    let (mut one, mut two) = (database.client().await, database.client().await);
    let first = one.transaction().await.unwrap();
    write(&first, &ordered("k").message_key("first"))
        .await
        .unwrap();

    let second = two.transaction().await.unwrap();
    let waits = ordered("k");
    tokio::select! {
        _ = write(&second, &waits) => panic!("the first writer holds the key"),
        () = database.sessions_wait_for_locks(1) => {}
    }
    drop(second);
    first.commit().await.unwrap();

    let third = two.transaction().await.unwrap();
    write(&third, &ordered("k").message_key("third"))
        .await
        .unwrap();
    third.commit().await.unwrap();
    let rows = one
        .query("SELECT message_key FROM outbox.messages ORDER BY id", &[])
        .await
        .unwrap();
    assert_eq!(
        rows.iter()
            .map(|row| row.get::<_, &str>(0))
            .collect::<Vec<_>>(),
        ["first", "third"]
    );
}
