//! What consumers do: an insert for each message.

use deadpool_postgres::{Manager, Pool};
use outbox_consumer::{Message, Transaction};
use outbox_testkit::Redis;
use tokio_postgres::NoTls;

use crate::{
    Error,
    bare_redis::BareRedis,
    rows::{ONE_TOPIC, row},
    stage::Stage,
};

pub(crate) const CREATE_EFFECTS: &str = "
    CREATE TABLE effects (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, order_key text NOT NULL, customer text,
        at timestamptz NOT NULL DEFAULT now())";

pub(crate) const INSERT_EFFECT: &str = "INSERT INTO effects (order_key, customer) VALUES ($1, $2)";

pub(crate) const INSERT_EFFECTS: &str =
    "INSERT INTO effects (order_key, customer) SELECT * FROM unnest($1::text[], $2::text[])";

/// Requests that are under way at a time while a stream is filled.
const CHUNK: u64 = 500;

/// A handler that writes the effects of a batch with one statement.
pub(crate) async fn apply_all(
    tx: &Transaction<'_>,
    messages: &[Message],
) -> Result<(), tokio_postgres::Error> {
    let keys: Vec<&str> = messages.iter().map(Message::message_key).collect();
    let customers: Vec<Option<&str>> = messages.iter().map(Message::ordering_key).collect();
    let insert = tx.prepare_cached(INSERT_EFFECTS).await?;
    tx.execute(&insert, &[&keys, &customers]).await.map(drop)
}

/// Connections for a member or two.
pub(crate) fn pool(stage: &Stage, database: &str) -> Result<Pool, Error> {
    let manager = Manager::new(stage.url(database).parse()?, NoTls);
    Ok(Pool::builder(manager).max_size(10).build()?)
}

/// Adds entries 1 to `count`, as the relay would have.
pub(crate) async fn fill_stream(redis: &Redis, count: u64) -> Result<(), Error> {
    let mut bare = BareRedis::connect(redis.port()).await?;
    let mut first = 1;
    while first <= count {
        let last = (first + CHUNK - 1).min(count);
        let mut requests = Vec::new();
        (first..=last).for_each(|number| row(number, ONE_TOPIC).xadd(number, &mut requests));
        bare.send(&requests).await?;
        bare.added(usize::try_from(last - first + 1)?).await?;
        first = last + 1;
    }
    Ok(())
}
