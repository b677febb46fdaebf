//! The producers' transaction: an order, and the message that belongs to it.

use futures_util::future::{join3, join4};
use tokio_postgres::{Client, Statement, types::ToSql};

use crate::{
    Error,
    rows::{ONE_TOPIC, row},
    stage::Stage,
};

/// Clients that are busy at the same time.
pub(crate) const CLIENTS: usize = 32;

pub(crate) const CREATE_ORDERS: &str = "
    CREATE TABLE orders (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text NOT NULL, cents bigint NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now())";

const INSERT_ORDER: &str = "INSERT INTO orders (customer, cents) VALUES ($1, $2)";

const INSERT_MESSAGE: &str = "
    INSERT INTO outbox.messages (topic, ordering_key, message_key, event_type, headers, payload)
    VALUES ($1, $2, $3, $4, $5::text::json, $6::text::json)";

/// One client.
pub(crate) struct Clerk {
    client: Client,
    order: Statement,
    message: Statement,
}

impl Clerk {
    pub(crate) async fn open(stage: &Stage, database: &str) -> Result<Self, Error> {
        let client = stage.connect(database).await?;
        let order = client.prepare(INSERT_ORDER).await?;
        let message = client.prepare(INSERT_MESSAGE).await?;
        Ok(Self {
            client,
            order,
            message,
        })
    }

    /// So many clients.
    pub(crate) async fn open_all(
        stage: &Stage,
        database: &str,
        count: usize,
    ) -> Result<Vec<Self>, Error> {
        let mut clerks = Vec::new();
        for _ in 0..count {
            clerks.push(Self::open(stage, database).await?);
        }
        Ok(clerks)
    }

    /// The order alone. Sent in one go, so that what is compared is the work of Postgres and not round trips.
    pub(crate) async fn order(&self, number: u64) -> Result<(), Error> {
        let (customer, cents) = (
            format!("customer-{}", number % 1_000),
            500 + i64::try_from(number % 9_500)?,
        );
        let order: [&(dyn ToSql + Sync); 2] = [&customer, &cents];
        let (begun, ordered, committed) = join3(
            self.client.batch_execute("BEGIN"),
            self.client.execute(&self.order, &order),
            self.client.batch_execute("COMMIT"),
        )
        .await;
        begun?;
        ordered?;
        Ok(committed?)
    }

    /// Order and message in one transaction, in the same way.
    pub(crate) async fn order_and_message(&self, number: u64) -> Result<(), Error> {
        let row = row(number + 1, ONE_TOPIC);
        let cents = 500 + i64::try_from(number % 9_500)?;
        let order: [&(dyn ToSql + Sync); 2] = [&row.ordering_key, &cents];
        let message: [&(dyn ToSql + Sync); 6] = [
            &row.topic,
            &row.ordering_key,
            &row.message_key,
            &row.event_type,
            &row.headers,
            &row.payload,
        ];
        let (begun, ordered, written, committed) = join4(
            self.client.batch_execute("BEGIN"),
            self.client.execute(&self.order, &order),
            self.client.execute(&self.message, &message),
            self.client.batch_execute("COMMIT"),
        )
        .await;
        begun?;
        ordered?;
        written?;
        Ok(committed?)
    }
}
