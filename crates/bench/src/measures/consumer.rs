//! What an effect costs that takes place once, beside the same effect written by a program that counts on nothing.

use std::time::{Duration, Instant};

use deadpool_postgres::Pool;
use futures_util::future::{OptionFuture, join};
use outbox_consumer::Consumer;
use outbox_testkit::Redis;
use tokio::sync::oneshot;
use tokio_postgres::types::ToSql;

use crate::{
    Error,
    effects::{
        CREATE_EFFECTS, INSERT_NOTES, INSERT_ORDER, INSERT_ORDERS, apply_notes, apply_order,
        apply_orders, fill_stream, pool,
    },
    figures::{Outcome, Target},
    rows::{ONE_TOPIC, Row, row, topic},
    stage::Stage,
    stats::quotients,
};

/// Messages of one transaction: the batch handler's, and the consumer's default for the other.
const BATCH: usize = 1_000;
const BATCH_ONE_BY_ONE: usize = 100;

/// Transactions at a time, in the arm beside the default of one.
const LANES: usize = 3;

/// What a consumer cannot do without: the keys, with the effects.
const TAKE_KEYS: &str = "
    INSERT INTO inbox.applied (consumer_group, topic, message_key)
    SELECT 'bench', 'orders-00', k FROM unnest($1::text[]) AS k";

const POLL_INTERVAL: Duration = Duration::from_millis(1);
const STALL_DEADLINE: Duration = Duration::from_secs(300);

/// What is done with the messages.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Handler {
    /// One insert of the orders of a batch.
    Batch,
    /// One insert for each order.
    OneByOne,
    /// One insert of the least that can be written.
    Least,
}

impl Handler {
    fn batch(self) -> usize {
        match self {
            Handler::Batch | Handler::Least => BATCH,
            Handler::OneByOne => BATCH_ONE_BY_ONE,
        }
    }

    fn insert(self) -> &'static str {
        match self {
            Handler::Batch => INSERT_ORDERS,
            Handler::OneByOne => INSERT_ORDER,
            Handler::Least => INSERT_NOTES,
        }
    }
}

pub(crate) async fn take(stage: &Stage) -> Result<Outcome, Error> {
    let mut outcome = Outcome::default();
    let arms = [
        (Handler::Batch, "batch handler", stage.sizes.consumed),
        (Handler::OneByOne, "one by one", stage.sizes.consumed / 4),
    ];
    for (handler, name, count) in arms {
        let (mut ours, mut bare, mut bound) = (Vec::new(), Vec::new(), Vec::new());
        let mut in_lanes = Vec::new();
        for round in 0..stage.sizes.repeats {
            stage.round(&format!("{name}, inserts alone"), round);
            bare.push(inserts(stage, handler, None, count).await?);
            stage.round(&format!("{name}, inserts and inbox alone"), round);
            bound.push(inserts(stage, handler, Some(TAKE_KEYS), count).await?);
            stage.round(&format!("{name}, the consumer"), round);
            ours.push(consume(stage, handler, 1, count).await?);
            stage.round(&format!("{name}, the consumer with {LANES} lanes"), round);
            in_lanes.push(consume(stage, handler, LANES, count).await?);
        }
        outcome = outcome
            .must(
                format!("{name} / inserts alone"),
                "",
                &quotients(&ours, &bare),
                Target::AtLeast(0.5),
            )
            .beside(format!("{name}, consumer"), "messages/s", &ours)
            .beside(
                format!("{name}, consumer with {LANES} lanes"),
                "messages/s",
                &in_lanes,
            )
            .beside(format!("{name}, inserts alone"), "messages/s", &bare)
            .beside(
                format!("{name} / inserts and inbox alone"),
                "",
                &quotients(&ours, &bound),
            )
            .beside(
                format!("{name}, inserts and inbox alone"),
                "messages/s",
                &bound,
            );
    }
    let (mut ours, mut bare) = (Vec::new(), Vec::new());
    for round in 0..stage.sizes.repeats {
        stage.round("the least effect", round);
        bare.push(inserts(stage, Handler::Least, None, stage.sizes.consumed).await?);
        ours.push(consume(stage, Handler::Least, 1, stage.sizes.consumed).await?);
    }
    Ok(outcome
        .beside(
            "the least effect, in batches / inserts alone",
            "",
            &quotients(&ours, &bare),
        )
        .beside("the least effect, consumer", "messages/s", &ours)
        .beside("the least effect, inserts alone", "messages/s", &bare))
}

/// The inserts, in transactions of the same size, without Redis; without inbox too, unless `take_keys` writes to it.
async fn inserts(
    stage: &Stage,
    handler: Handler,
    take_keys: Option<&str>,
    count: u64,
) -> Result<f64, Error> {
    let database = stage.fresh_inbox().await?;
    let client = stage.connect(&database).await?;
    client.batch_execute(CREATE_EFFECTS).await?;
    let insert = client.prepare(handler.insert()).await?;
    let rows: Vec<Row> = (1..=count).map(|number| row(number, ONE_TOPIC)).collect();
    let take_keys = match take_keys {
        Some(sql) => Some(client.prepare(sql).await?),
        None => None,
    };
    let begun = Instant::now();
    for batch in rows.chunks(handler.batch()) {
        let column = |of: fn(&Row) -> &String| batch.iter().map(of).collect::<Vec<_>>();
        let keys = column(|row| &row.message_key);
        let mut begin = Some(client.batch_execute("BEGIN"));
        if let Some(take_keys) = &take_keys {
            let params: [&(dyn ToSql + Sync); 1] = [&keys];
            behind(&mut begin, client.execute(take_keys, &params)).await?;
        }
        if handler == Handler::OneByOne {
            for row in batch {
                let params: [&(dyn ToSql + Sync); 3] =
                    [&row.message_key, &row.ordering_key, &row.payload];
                behind(&mut begin, client.execute(&insert, &params)).await?;
            }
        } else {
            let customers = column(|row| &row.ordering_key);
            let placed = column(|row| &row.payload);
            let params: [&(dyn ToSql + Sync); 3] = [&keys, &customers, &placed];
            let params = &params[..insert.params().len()];
            behind(&mut begin, client.execute(&insert, params)).await?;
        }
        client.batch_execute("COMMIT").await?;
    }
    let per_s = count as f64 / begun.elapsed().as_secs_f64();
    drop(client);
    stage.drop_database(&database).await?;
    Ok(per_s)
}

/// Runs a statement, and in the same round trip the BEGIN that is still to be sent.
async fn behind(
    begin: &mut Option<impl Future<Output = Result<(), tokio_postgres::Error>>>,
    statement: impl Future<Output = Result<u64, tokio_postgres::Error>>,
) -> Result<(), tokio_postgres::Error> {
    let begin: OptionFuture<_> = begin.take().into();
    let (begun, done) = join(begin, statement).await;
    begun.transpose()?;
    done.map(drop)
}

/// One member that applies a stream, from its first message to its last.
async fn consume(stage: &Stage, handler: Handler, lanes: usize, count: u64) -> Result<f64, Error> {
    let database = stage.fresh_inbox().await?;
    stage
        .connect(&database)
        .await?
        .batch_execute(CREATE_EFFECTS)
        .await?;
    let redis = Redis::start().await?;
    fill_stream(&redis, count).await?;
    let pool: Pool = pool(stage, &database)?;
    let consumer = Consumer::builder(pool.clone(), redis::Client::open(redis.url())?, "bench")
        .topic(topic(0))
        .batch(handler.batch())
        .lanes(lanes)
        .build()?;
    let counters = consumer.counters();
    let (stop, stopped) = oneshot::channel::<()>();
    let stopped = async move { stopped.await.unwrap_or_default() };
    let running = match handler {
        Handler::Batch => tokio::spawn(consumer.run_batches(apply_orders, stopped)),
        Handler::OneByOne => tokio::spawn(consumer.run(apply_order, stopped)),
        Handler::Least => tokio::spawn(consumer.run_batches(apply_notes, stopped)),
    };
    let (asked, mut first) = (Instant::now(), None);
    loop {
        let applied = counters.snapshot().applied;
        if applied > 0 {
            let (since, before) = *first.get_or_insert((Instant::now(), applied));
            if applied >= count {
                let per_s = (applied - before) as f64 / since.elapsed().as_secs_f64();
                let _ = stop.send(());
                running.await??;
                pool.close();
                stage.drop_database(&database).await?;
                return Ok(per_s);
            }
        }
        if running.is_finished() || asked.elapsed() > STALL_DEADLINE {
            return Err(format!("the consumer applied {applied} of {count} messages").into());
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
