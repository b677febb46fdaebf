//! What a relay costs that has nothing to do.

use outbox_testkit::Redis;

use crate::{
    Error,
    figures::{Outcome, Target},
    log_role::{counted_url, statements},
    producers::Producer,
    rows::{ONE_TOPIC, row},
    stage::Stage,
};

/// The bound of 30 s; a shorter run has its part of it.
const CPU_S_MAX: f64 = 0.15;
const OF_S: f64 = 30.0;

pub(crate) async fn take(stage: &Stage) -> Result<Outcome, Error> {
    let database = stage.fresh_outbox().await?;
    let url = counted_url(stage, &database).await?;
    let producer = Producer::open(stage, &database).await?;
    let idle_s = stage.sizes.idle.as_secs_f64();
    let (mut cpu, mut per_s, mut redis_per_s) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..stage.sizes.repeats {
        stage.round("idle", round);
        let redis = Redis::start().await?;
        let mut connection = redis.connect().await?;
        let relay = stage.relay(&url, &redis, &[])?;
        let id = producer.write(&row(round as u64 + 1, ONE_TOPIC)).await?;
        relay.published(&mut connection, u64::try_from(id)?).await?;
        // The checkpoint that follows belongs to that message.
        tokio::time::sleep(std::time::Duration::from_secs(2)).await;
        let commands = commands(&mut connection).await?;
        let (cpu_before, before) = (relay.cpu_s()?, statements(stage));
        tokio::time::sleep(stage.sizes.idle).await;
        cpu.push((relay.cpu_s()? - cpu_before) * OF_S / idle_s);
        per_s.push((statements(stage) - before) as f64 / idle_s);
        redis_per_s.push((self::commands(&mut connection).await? - commands) / idle_s);
        relay.stop().await?;
        let backlog = stage.connect(&database).await?;
        backlog.batch_execute("TRUNCATE outbox.checkpoint").await?;
    }
    stage.drop_database(&database).await?;
    Ok(Outcome::default()
        .must("relay CPU in 30 s", "s", &cpu, Target::AtMost(CPU_S_MAX))
        .must("statements", "1/s", &per_s, Target::AtMost(3.0))
        .beside("commands to Redis", "1/s", &redis_per_s))
}

async fn commands(connection: &mut redis::aio::MultiplexedConnection) -> Result<f64, Error> {
    let info: String = redis::cmd("INFO")
        .arg("stats")
        .query_async(connection)
        .await?;
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("total_commands_processed:"));
    Ok(line.unwrap_or_default().trim().parse()?)
}
