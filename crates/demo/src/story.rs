//! What happens in which order: the shop sells, the relay is killed, Redis is killed, and everything settles.

use std::{
    convert::Infallible,
    time::{Duration, Instant},
};

use outbox_testkit::Process;

use crate::{
    Error,
    audit::Audit,
    progress::{LOOK_INTERVAL, Numbers, Progress},
    settings::Settings,
    shop::{CASHIERS, Shop},
    stage::{Stage, Stream},
    warehouse::{Counts, Warehouse},
    with_causes,
};

/// When the faults come, in percent of the orders placed: the relay is gone from the first to the second, Redis
/// from the third to the fourth.
const RELAY_GONE: (u64, u64) = (30, 45);
const REDIS_GONE: (u64, u64) = (60, 75);

/// Longer than anything here takes on a busy machine. Past this nothing will move any more.
const STALL_DEADLINE: Duration = Duration::from_secs(30);

/// How often the story looks whether it is time to go on.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

const LOG_LINES_SHOWN: usize = 20;

/// Plays the whole story, and counts what came of it.
///
/// # Cancel safety
///
/// Dropped, it kills all servers and removes their data.
pub(crate) async fn play(settings: &Settings, progress: &Progress) -> Result<Audit, Error> {
    let orders = settings.orders;
    progress.say("Starting a private Postgres and a private Redis that keeps nothing on disk.");
    let stage = Stage::set().await?;
    progress.say(
        "Two databases, as two services have them; `outbox-relay migrate` brings the schemas:",
    );
    for line in stage.migrate().await? {
        progress.say(&format!("  {line}"));
    }
    let shop = Shop::open(stage.shop_database()?).await?;
    let mut warehouse = Warehouse::open(stage.warehouse_database()?, &stage.redis_url()).await?;
    let mut relay = stage.start_relay()?;
    introduce(progress, orders);

    let started = Instant::now();
    let scene = Scene {
        stage: &stage,
        shop: &shop,
        counts: warehouse.counts(),
        progress,
        orders,
    };
    let outcome = tokio::select! {
        outcome = scene.play(&mut relay) => outcome,
        error = warehouse.failure() => Err(error),
        never = scene.watch() => match never {},
    };
    outcome.map_err(|error| with_log(&error, &relay))?;
    progress.finish();
    progress.say(&format!(
        "Everything has settled, {:.1} s after the shop opened. `outbox-relay status` says:",
        started.elapsed().as_secs_f64()
    ));
    for line in stage.status().await? {
        progress.say(&format!("  {line}"));
    }
    warehouse.close().await?;
    stage.stop_relay(&relay).await?;
    progress
        .say("Consumers and relay were asked to stop, and did. Now both databases are counted.");
    Audit::take(&shop, &warehouse).await
}

/// What the phases of the story share.
struct Scene<'a> {
    stage: &'a Stage,
    shop: &'a Shop,
    counts: Counts,
    progress: &'a Progress,
    orders: u64,
}

impl Scene<'_> {
    /// The shop sells while the faults happen; then everything settles.
    async fn play(&self, relay: &mut Process) -> Result<(), Error> {
        tokio::try_join!(self.shop.take_orders(self.orders), self.faults(relay))?;
        self.progress.say(
            "All orders are placed. What is left: the relay publishes, the warehouse ships the rest.",
        );
        self.settled().await
    }

    async fn faults(&self, relay: &mut Process) -> Result<(), Error> {
        self.placed(RELAY_GONE.0).await;
        relay.kill9();
        self.progress.say(RELAY_KILLED);
        self.placed(RELAY_GONE.1).await;
        *relay = self.stage.start_relay()?;
        self.progress.say("Started the relay again.");

        self.placed(REDIS_GONE.0).await;
        // With something in it: otherwise there would be nothing to lose.
        while self.stage.stream().await.is_ok_and(|s| s.entries == 0) {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        self.stage.kill_redis().await?;
        self.progress.say(REDIS_KILLED);
        self.placed(REDIS_GONE.1).await;
        self.stage.restart_redis().await?;
        self.progress
            .say("Started Redis again. It is empty: streams, consumer group and the relay's marker are gone.");
        Ok(())
    }

    /// Waits until so many percent of the orders are placed. The shop sells all the time, also while a server is
    /// gone: it needs Postgres and nothing else.
    async fn placed(&self, percent: u64) {
        while self.shop.placed() * 100 < self.orders * percent {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits until nothing is under way any more, so that a repeat which is still coming is counted too. When nothing
    /// moves for a while it gives up: the count will say what is missing.
    async fn settled(&self) -> Result<(), Error> {
        let mut moved = Instant::now();
        let mut before = (0, Stream::default(), 0, 0);
        loop {
            let stream = self.stage.stream().await.unwrap_or_default();
            let sent = self.shop.sent().await?;
            let (shipped, absorbed) = (self.counts.shipped(), self.counts.absorbed());
            if sent == self.orders && stream.entries >= self.orders && stream.drained {
                return Ok(());
            }
            let now = (sent, stream, shipped, absorbed);
            if now != before {
                (before, moved) = (now, Instant::now());
            } else if moved.elapsed() > STALL_DEADLINE {
                self.progress.say(&format!(
                    "Nothing has moved for {STALL_DEADLINE:?}: {sent} sent, {} in Redis, {shipped} shipped.",
                    stream.entries
                ));
                return Ok(());
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// Shows the numbers until it is dropped.
    ///
    /// # Cancel safety
    ///
    /// It only looks.
    async fn watch(&self) -> Infallible {
        let mut ticker = self.progress.ticker();
        loop {
            let numbers = Numbers {
                in_redis: self.stage.stream().await.ok().map(|s| s.entries),
                placed: self.shop.placed(),
                shipped: self.counts.shipped(),
                absorbed: self.counts.absorbed(),
            };
            self.progress.show(&mut ticker, numbers);
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }
}

fn introduce(progress: &Progress, orders: u64) {
    progress.say(&format!(
        "The shop opens: {CASHIERS} cashiers place {orders} orders, two consumers in the warehouse ship them.\n\
         Each order and its message are written in one Postgres transaction; some are rolled back at the end, when \
         the card is declined.\n\
         \x20 (Code that enqueues first would ship those although nobody bought them: phantoms.)"
    ));
}

const RELAY_KILLED: &str = "\
Killed the relay (kill -9), wherever it was. The shop goes on.
  (Code that publishes and then marks its rows would send the page under way again; code that marks first would lose
  it. Here a page and the relay's position are written to Redis in one atomic step.)";

const REDIS_KILLED: &str = "\
Killed Redis (kill -9), with everything in it. The shop goes on.
  (Code that enqueues to Redis directly would lose what waits there, and fail or lose each order from now on. Here
  Postgres has every message: the relay publishes again what Redis lost, and the inbox of the warehouse absorbs what
  was shipped before.)";

/// The error with the end of the relay's log, which may tell why.
fn with_log(error: &Error, relay: &Process) -> Error {
    let lines = relay.lines();
    let shown = &lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..];
    format!(
        "{}\nthe end of the relay's log:\n{}",
        with_causes(error),
        shown.join("\n")
    )
    .into()
}
