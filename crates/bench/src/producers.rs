//! Producers: those that keep a pace, and those that are as fast as they can be.

use std::time::{Duration, Instant};

use futures_util::future::join;
use tokio::task::JoinSet;
use tokio_postgres::{Client, Statement, types::ToSql};

use crate::{
    Error,
    rows::{ONE_TOPIC, Row, row},
    stage::Stage,
};

/// As the producer crate writes it, but prepared: the load generator shares the processors with what it loads.
const INSERT_MESSAGE: &str = "
    INSERT INTO outbox.messages (topic, ordering_key, message_key, event_type, headers, payload)
    VALUES ($1, $2, $3, $4, $5::text::json, $6::text::json) RETURNING id";

/// Several messages of one transaction.
const INSERT_MESSAGES: &str = "
    INSERT INTO outbox.messages (topic, ordering_key, message_key, event_type, headers, payload)
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[]::json[], $6::text[]::json[])";

/// A connection that writes messages.
pub(crate) struct Producer {
    pub(crate) client: Client,
    one: Statement,
    many: Statement,
}

impl Producer {
    pub(crate) async fn open(stage: &Stage, database: &str) -> Result<Self, Error> {
        Self::open_on(stage, database, "outbox.messages").await
    }

    /// The same for another table with these columns.
    pub(crate) async fn open_on(stage: &Stage, database: &str, table: &str) -> Result<Self, Error> {
        let client = stage.connect(database).await?;
        let one = client
            .prepare(&INSERT_MESSAGE.replace("outbox.messages", table))
            .await?;
        let many = client
            .prepare(&INSERT_MESSAGES.replace("outbox.messages", table))
            .await?;
        Ok(Self { client, one, many })
    }

    /// One message in a transaction of its own; returns its id once it is committed.
    pub(crate) async fn write(&self, row: &Row) -> Result<i64, Error> {
        let params: [&(dyn ToSql + Sync); 6] = [
            &row.topic,
            &row.ordering_key,
            &row.message_key,
            &row.event_type,
            &row.headers,
            &row.payload,
        ];
        Ok(self.client.query_one(&self.one, &params).await?.get(0))
    }

    /// The same as BEGIN, INSERT and then COMMIT; `committing` is called right before the last is sent.
    pub(crate) async fn write_then(
        &self,
        row: &Row,
        committing: impl FnOnce(),
    ) -> Result<i64, Error> {
        let (begun, id) = join(self.client.batch_execute("BEGIN"), self.write(row)).await;
        begun?;
        let id = id?;
        committing();
        self.client.batch_execute("COMMIT").await?;
        Ok(id)
    }

    /// Several messages in one transaction.
    pub(crate) async fn write_many(&self, numbers: std::ops::Range<u64>) -> Result<(), Error> {
        let rows: Vec<Row> = numbers.map(|number| row(number, ONE_TOPIC)).collect();
        let column = |of: fn(&Row) -> &str| rows.iter().map(of).collect::<Vec<_>>();
        let columns = [
            column(|row| &row.topic),
            column(|row| &row.ordering_key),
            column(|row| &row.message_key),
            column(|row| row.event_type),
            column(|row| &row.headers),
            column(|row| &row.payload),
        ];
        let params: Vec<&(dyn ToSql + Sync)> = columns.iter().map(|column| column as _).collect();
        self.client.execute(&self.many, &params).await?;
        Ok(())
    }
}

/// Calls `work` at a pace: task `t` of `tasks` does number `t`, `t + tasks`, and so on, each at its time. One that is
/// late does not wait. Returns when all `count` are done.
pub(crate) async fn paced<W, F>(
    workers: Vec<W>,
    per_s: f64,
    count: u64,
    work: impl Fn(std::sync::Arc<W>, u64) -> F + Clone + Send + 'static,
) -> Result<(), Error>
where
    W: Send + Sync + 'static,
    F: Future<Output = Result<(), Error>> + Send,
{
    let tasks = workers.len() as u64;
    let begin = tokio::time::Instant::now() + Duration::from_millis(20);
    let mut set = JoinSet::new();
    for (task, worker) in workers.into_iter().enumerate() {
        let (worker, work) = (std::sync::Arc::new(worker), work.clone());
        set.spawn(async move {
            let mut number = task as u64;
            while number < count {
                tokio::time::sleep_until(begin + Duration::from_secs_f64(number as f64 / per_s))
                    .await;
                work(std::sync::Arc::clone(&worker), number).await?;
                number += tasks;
            }
            Ok::<(), Error>(())
        });
    }
    while let Some(ended) = set.join_next().await {
        ended??;
    }
    Ok(())
}

/// Has every worker do `work` over and over for a time; returns how often all of them did it, per second.
pub(crate) async fn busy<W, F>(
    workers: Vec<W>,
    time: Duration,
    work: impl Fn(std::sync::Arc<W>, u64) -> F + Clone + Send + 'static,
) -> Result<f64, Error>
where
    W: Send + Sync + 'static,
    F: Future<Output = Result<(), Error>> + Send,
{
    let tasks = workers.len() as u64;
    let begun = Instant::now();
    let mut set = JoinSet::new();
    for (task, worker) in workers.into_iter().enumerate() {
        let (worker, work) = (std::sync::Arc::new(worker), work.clone());
        set.spawn(async move {
            let mut done = 0_u64;
            while begun.elapsed() < time {
                work(std::sync::Arc::clone(&worker), task as u64 + done * tasks).await?;
                done += 1;
            }
            Ok::<u64, Error>(done)
        });
    }
    let mut done = 0;
    while let Some(ended) = set.join_next().await {
        done += ended??;
    }
    Ok(done as f64 / begun.elapsed().as_secs_f64())
}
