//! How soon after its commit a message is in a reader's hands.
//!
//! The clock starts when the producer sends COMMIT, and stops when XREAD returns with the message. The reference is an
//! application that, with the answer to its COMMIT, sends the XADD itself. What passes after that answer is reported too.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use outbox_testkit::Redis;
use redis::{FromRedisValue as _, aio::MultiplexedConnection, streams::StreamReadReply};

use crate::{
    Error,
    figures::{Outcome, Series, Target},
    producers::{Producer, paced},
    rows::{ONE_TOPIC, Row, number_of, row, stream, topic},
    stage::Stage,
    stats::{percentile, quotients, sorted},
};

const RATES: [u32; 2] = [500, 5_000];

/// Connections of producers.
const WRITERS: usize = 16;

/// How long the last messages may take.
const LAST: Duration = Duration::from_secs(10);

/// Who publishes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Arm {
    Relay,
    Application,
}

pub(crate) async fn take(stage: &Stage) -> Result<Outcome, Error> {
    let mut outcome = Outcome::default();
    let mut series = Vec::new();
    for per_s in RATES {
        let (mut ours, mut app) = (Vec::new(), Vec::new());
        for round in 0..stage.sizes.repeats {
            stage.round(&format!("{per_s}/s, the application publishes"), round);
            app.push(run(stage, per_s, Arm::Application).await?);
            stage.round(&format!("{per_s}/s, the relay publishes"), round);
            ours.push(run(stage, per_s, Arm::Relay).await?);
        }
        for percent in [50.0, 99.0] {
            outcome = figures(outcome, per_s, percent, &ours, &app);
        }
        let from_commit = |runs: &[Latencies]| {
            runs.iter()
                .flat_map(|run| run.from_commit.clone())
                .collect::<Vec<_>>()
        };
        let (ours, app) = (from_commit(&ours), from_commit(&app));
        for (name, runs) in [("relay", ours), ("application that XADDs itself", app)] {
            series.push(distribution(format!("{name}, {per_s}/s"), &runs));
        }
    }
    Ok(outcome.with_series(series))
}

/// The figures of one percentile.
fn figures(
    outcome: Outcome,
    per_s: u32,
    percent: f64,
    ours: &[Latencies],
    app: &[Latencies],
) -> Outcome {
    let of = |runs: &[Latencies], which: fn(&Latencies) -> &Vec<f64>| -> Vec<f64> {
        runs.iter()
            .map(|run| percentile(which(run), percent))
            .collect()
    };
    let (relay, application) = (
        of(ours, |run| &run.from_commit),
        of(app, |run| &run.from_commit),
    );
    let name = format!("p{percent} at {per_s}/s");
    let ratio = quotients(&relay, &application);
    let target = Target::AtMost(if percent == 50.0 { 2.0 } else { 3.0 });
    let outcome = if per_s == RATES[0] {
        outcome.must(format!("{name}, relay / application"), "", &ratio, target)
    } else {
        outcome.beside(format!("{name}, relay / application"), "", &ratio)
    };
    outcome
        .beside(format!("{name}, relay"), "ms", &relay)
        .beside(format!("{name}, application"), "ms", &application)
        .beside(
            format!("{name}, relay, after the answer"),
            "ms",
            &of(ours, |run| &run.from_answer),
        )
        .beside(
            format!("{name}, application, after the answer"),
            "ms",
            &of(app, |run| &run.from_answer),
        )
}

/// Percentiles of all runs: the percent, and the milliseconds.
fn distribution(name: String, samples: &[f64]) -> Series {
    let samples = sorted(samples);
    let percents = (1..200).map(|half| f64::from(half) / 2.0).chain([99.9]);
    let points = percents
        .map(|percent| (percent, percentile(&samples, percent)))
        .collect();
    Series { name, points }
}

/// What each message met, in nanoseconds since `begun`; 0 before it did.
struct Clocks {
    begun: Instant,
    /// COMMIT goes out.
    committing: Vec<AtomicU64>,
    /// Its answer is there.
    committed: Vec<AtomicU64>,
    seen: Vec<AtomicU64>,
}

impl Clocks {
    fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// The latencies of one run in milliseconds, ascending.
struct Latencies {
    from_commit: Vec<f64>,
    from_answer: Vec<f64>,
}

async fn run(stage: &Stage, per_s: u32, arm: Arm) -> Result<Latencies, Error> {
    let count = u64::from(per_s) * u64::try_from(stage.sizes.paced.as_millis())? / 1_000;
    let database = stage.fresh_outbox().await?;
    let redis = Redis::start().await?;
    let connection = redis.connect().await?;
    let relay = match arm {
        Arm::Relay => Some(stage.relay(&stage.url_beside(&database), &redis, &[])?),
        Arm::Application => None,
    };
    let mut writers = Vec::new();
    for _ in 0..WRITERS {
        let producer = Producer::open(stage, &database).await?;
        writers.push((producer, relay.is_none().then(|| connection.clone())));
    }
    // One message of each writer ahead, after which the relay is up, the stream is there, and no backend has yet to fill
    // its caches.
    let ahead = WRITERS as u64;
    for (writer, number) in writers.iter().zip(count + 1..) {
        publish(writer, &row(number, ONE_TOPIC)).await?;
    }
    if let Some(relay) = &relay {
        relay.published(&mut connection.clone(), ahead).await?;
    }
    let cells = || (0..count).map(|_| AtomicU64::new(0)).collect();
    let clocks = Arc::new(Clocks {
        begun: Instant::now(),
        committing: cells(),
        committed: cells(),
        seen: cells(),
    });
    let reader = Reader::start(&redis, &clocks)?;
    let at_commit = Arc::clone(&clocks);
    paced(writers, f64::from(per_s), count, move |writer, number| {
        let clocks = Arc::clone(&at_commit);
        async move { write_one(&writer, number, &clocks).await }
    })
    .await?;
    reader.finish().await?;
    if let Some(relay) = relay {
        relay.stop().await?;
    }
    stage.drop_database(&database).await?;
    latencies(&clocks)
}

type Writer = (Producer, Option<MultiplexedConnection>);

async fn write_one(writer: &Writer, number: u64, clocks: &Clocks) -> Result<(), Error> {
    let row = row(number, ONE_TOPIC);
    let index = usize::try_from(number)?;
    let committing = || clocks.committing[index].store(clocks.now(), Ordering::Relaxed);
    let id = writer.0.write_then(&row, committing).await?;
    clocks.committed[index].store(clocks.now(), Ordering::Relaxed);
    add(writer, id, &row).await
}

async fn publish(writer: &Writer, row: &Row) -> Result<(), Error> {
    let id = writer.0.write(row).await?;
    add(writer, id, row).await
}

/// The application's own XADD, where it publishes.
async fn add(writer: &Writer, id: i64, row: &Row) -> Result<(), Error> {
    let Some(connection) = &writer.1 else {
        return Ok(());
    };
    let mut xadd = redis::cmd("XADD");
    xadd.arg(stream(&row.topic)).arg("*").arg("id").arg(id);
    xadd.arg("message_key")
        .arg(&row.message_key)
        .arg("ordering_key")
        .arg(&row.ordering_key);
    xadd.arg("event_type")
        .arg(row.event_type)
        .arg("created_at")
        .arg(&row.created_at);
    xadd.arg("headers")
        .arg(&row.headers)
        .arg("payload")
        .arg(&row.payload);
    let _: String = xadd.query_async(&mut connection.clone()).await?;
    Ok(())
}

fn latencies(clocks: &Clocks) -> Result<Latencies, Error> {
    let value = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
    if clocks.seen.iter().any(|cell| value(cell) == 0) {
        return Err("a message was not seen in the stream".into());
    }
    // The relay may be faster than the answer to the commit.
    let since = |from: &[AtomicU64]| {
        let pairs = from.iter().zip(&clocks.seen);
        sorted(
            &pairs
                .map(|(from, seen)| value(seen).saturating_sub(value(from)) as f64 / 1e6)
                .collect::<Vec<_>>(),
        )
    };
    Ok(Latencies {
        from_commit: since(&clocks.committing),
        from_answer: since(&clocks.committed),
    })
}

/// A reader on a thread of its own, so that no work of ours delays it.
struct Reader {
    thread: thread::JoinHandle<Result<(), Error>>,
    stop: Arc<AtomicBool>,
}

impl Reader {
    fn start(redis: &Redis, clocks: &Arc<Clocks>) -> Result<Self, Error> {
        let mut connection = redis::Client::open(redis.url())?.get_connection()?;
        let stop = Arc::new(AtomicBool::new(false));
        let (clocks, stopped) = (Arc::clone(clocks), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            let key = stream(&topic(0));
            let (mut last, mut left) = ("0".to_owned(), clocks.seen.len());
            while left > 0 && !stopped.load(Ordering::Relaxed) {
                let reply = redis::cmd("XREAD")
                    .arg(&["BLOCK", "500", "COUNT", "1000", "STREAMS", &key, &last])
                    .query::<redis::Value>(&mut connection)?;
                let now = clocks.now();
                if reply == redis::Value::Nil {
                    continue;
                }
                for entry in StreamReadReply::from_redis_value(reply)?
                    .keys
                    .into_iter()
                    .flat_map(|key| key.ids)
                {
                    let number = entry
                        .get::<String>("message_key")
                        .and_then(|key| number_of(&key));
                    let cell =
                        number.and_then(|number| clocks.seen.get(usize::try_from(number).ok()?));
                    if let Some(cell) = cell {
                        cell.store(now, Ordering::Relaxed);
                        left -= 1;
                    }
                    last = entry.id;
                }
            }
            Ok(())
        });
        Ok(Self { thread, stop })
    }

    /// Waits until it has seen all.
    async fn finish(self) -> Result<(), Error> {
        let begun = Instant::now();
        while !self.thread.is_finished() && begun.elapsed() < LAST {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.stop.store(true, Ordering::Relaxed);
        let ended = tokio::task::spawn_blocking(|| self.thread.join()).await?;
        ended.map_err(|_| "the reader panicked")?
    }
}
