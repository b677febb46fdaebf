//! The reference that most relays are: lock a batch, publish it, mark or delete it, commit. Written well: one round trip to
//! lock and read, one of pipelined XADDs, one to mark and commit; prepared statements, binary values, an index of what
//! is left.

use std::{fmt::Write as _, time::Instant};

use futures_util::future::join;
use outbox_testkit::Redis;
use time::OffsetDateTime;
use tokio_postgres::{
    Client, Row as PgRow, Statement,
    types::{FromSql, ToSql, Type},
};

use crate::{
    Error,
    backlog::copy_rows,
    bare_redis::BareRedis,
    rows::{ONE_TOPIC, row, stream, xadd},
    stage::Stage,
};

/// Rows of a batch.
const BATCH: i64 = 1_000;

/// The outbox of such a relay: the same columns, and the mark.
const CREATE_TABLE: &str = "
    CREATE TABLE marked (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, topic text NOT NULL, ordering_key text,
        message_key text NOT NULL UNIQUE, event_type text, payload json, payload_binary bytea, content_type text,
        headers json, created_at timestamptz NOT NULL DEFAULT now(), sent_at timestamptz)";

/// Only where rows are marked: those that are deleted need none.
const CREATE_INDEX: &str = "CREATE INDEX unsent ON marked (id) WHERE sent_at IS NULL";

const COPY_ROWS: &str = "COPY marked
    (topic, ordering_key, message_key, event_type, created_at, headers, payload) FROM STDIN";

const SETTLE: &str = "VACUUM (ANALYZE) marked";

const LOCK_UNSENT: &str = "
    SELECT id, topic, ordering_key, message_key, event_type, created_at, headers, payload
    FROM marked WHERE sent_at IS NULL ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED";

const LOCK_ANY: &str = "
    SELECT id, topic, ordering_key, message_key, event_type, created_at, headers, payload
    FROM marked ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED";

const MARK: &str = "UPDATE marked SET sent_at = now() WHERE id = ANY ($1)";
const DELETE: &str = "DELETE FROM marked WHERE id = ANY ($1)";

/// What becomes of a row that was published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    Marked,
    Deleted,
}

/// json as it came over the wire, which is the text.
struct Verbatim<'a>(&'a str);

impl<'a> FromSql<'a> for Verbatim<'a> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Verbatim(std::str::from_utf8(raw)?))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::JSON
    }
}

/// A loop with its two connections.
pub(crate) struct Loop {
    client: Client,
    lock: Statement,
    settle: Statement,
    redis: BareRedis,
    /// Kept from batch to batch.
    requests: Vec<u8>,
    created_at: String,
}

impl Loop {
    /// Opens a loop over the table that [`create_table`] made.
    pub(crate) async fn open(
        stage: &Stage,
        database: &str,
        redis: &Redis,
        sent: Sent,
    ) -> Result<Self, Error> {
        let client = stage.connect_beside(database).await?;
        let (lock, settle) = match sent {
            Sent::Marked => (LOCK_UNSENT, MARK),
            Sent::Deleted => (LOCK_ANY, DELETE),
        };
        Ok(Self {
            lock: client.prepare(lock).await?,
            settle: client.prepare(settle).await?,
            client,
            redis: BareRedis::connect(redis.port()).await?,
            requests: Vec::new(),
            created_at: String::new(),
        })
    }

    /// Publishes one batch; returns how many messages there were.
    pub(crate) async fn turn(&mut self) -> Result<usize, Error> {
        let batch: [&(dyn ToSql + Sync); 1] = [&BATCH];
        let (begun, rows) = join(
            self.client.batch_execute("BEGIN"),
            self.client.query(&self.lock, &batch),
        )
        .await;
        begun?;
        let rows = rows?;
        self.requests.clear();
        for row in &rows {
            self.encode(row)?;
        }
        if !rows.is_empty() {
            self.redis.send(&self.requests).await?;
            self.redis.added(rows.len()).await?;
        }
        let ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        let ids: [&(dyn ToSql + Sync); 1] = [&ids];
        let (settled, committed) = join(
            self.client.execute(&self.settle, &ids),
            self.client.batch_execute("COMMIT"),
        )
        .await;
        settled?;
        committed?;
        Ok(rows.len())
    }

    /// Publishes until nothing is left.
    pub(crate) async fn run_dry(&mut self) -> Result<u64, Error> {
        let mut published = 0;
        loop {
            match self.turn().await? {
                0 => return Ok(published),
                rows => published += rows as u64,
            }
        }
    }

    fn encode(&mut self, row: &PgRow) -> Result<(), Error> {
        let id = row.get::<_, i64>(0).to_string();
        let at: OffsetDateTime = row.get(5);
        self.created_at.clear();
        write!(
            self.created_at,
            "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:06}Z",
            at.year(),
            u8::from(at.month()),
            at.day(),
            at.hour(),
            at.minute(),
            at.second(),
            at.microsecond()
        )?;
        let headers: Option<Verbatim<'_>> = row.get(6);
        let payload: Option<Verbatim<'_>> = row.get(7);
        let fields = [
            Some(("id", id.as_str())),
            row.get::<_, Option<&str>>(3)
                .map(|key| ("message_key", key)),
            row.get::<_, Option<&str>>(2)
                .map(|key| ("ordering_key", key)),
            row.get::<_, Option<&str>>(4)
                .map(|kind| ("event_type", kind)),
            Some(("created_at", self.created_at.as_str())),
            headers.as_ref().map(|headers| ("headers", headers.0)),
            payload.as_ref().map(|payload| ("payload", payload.0)),
        ];
        let mut present = [("", ""); 7];
        let mut count = 0;
        for field in fields.into_iter().flatten() {
            present[count] = field;
            count += 1;
        }
        xadd(&mut self.requests, &stream(row.get(1)), &present[..count]);
        Ok(())
    }
}

/// Makes the table anew and writes messages 1 to `rows`.
pub(crate) async fn create_table(client: &Client, rows: u64, sent: Sent) -> Result<(), Error> {
    client.batch_execute("DROP TABLE IF EXISTS marked").await?;
    client.batch_execute(CREATE_TABLE).await?;
    if sent == Sent::Marked {
        client.batch_execute(CREATE_INDEX).await?;
    }
    if rows > 0 {
        copy_rows(client, COPY_ROWS, 1..=rows, |number| row(number, ONE_TOPIC)).await?;
        client.batch_execute(SETTLE).await?;
    }
    Ok(())
}

/// Rows per second of the loop over `rows` new rows, with a Redis that is new.
pub(crate) async fn drain(
    stage: &Stage,
    database: &str,
    rows: u64,
    sent: Sent,
) -> Result<f64, Error> {
    stage
        .progress
        .step(format!("writing {rows} rows for the loop"));
    let client = stage.connect(database).await?;
    create_table(&client, rows, sent).await?;
    let redis = Redis::start().await?;
    stage.progress.step(format!("the loop drains {rows} rows"));
    let begun = Instant::now();
    let published = Loop::open(stage, database, &redis, sent)
        .await?
        .run_dry()
        .await?;
    let seconds = begun.elapsed().as_secs_f64();
    if published != rows {
        return Err(format!("the loop published {published} of {rows} rows").into());
    }
    Ok(rows as f64 / seconds)
}
