//! What Redis can take: XADDs of the same entries from a bare client.

use std::time::Instant;

use outbox_testkit::Redis;

use crate::{
    Error,
    bare_redis::BareRedis,
    rows::{Spread, row},
    stage::redis_cpu_s,
};

/// Requests that are under way at a time.
const DEPTH: u64 = 500;

/// They go in halves, so that Redis has the next while the replies of the one before are read.
const HALF: u64 = DEPTH / 2;

/// What Redis took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    pub(crate) entries_per_s: f64,
    pub(crate) redis_us_per_entry: f64,
}

/// Adds entries 1 to `rows` to a new Redis. They are encoded before the clock starts.
pub(crate) async fn limit(rows: u64, spread: Spread) -> Result<Limit, Error> {
    let mut halves = Vec::new();
    let mut first = 1;
    while first <= rows {
        let last = (first + HALF - 1).min(rows);
        let mut requests = Vec::new();
        (first..=last).for_each(|number| row(number, spread).xadd(number, &mut requests));
        halves.push((requests, usize::try_from(last - first + 1)?));
        first = last + 1;
    }
    let redis = Redis::start().await?;
    let mut connection = redis.connect().await?;
    let mut bare = BareRedis::connect(redis.port()).await?;
    let before = redis_cpu_s(&mut connection).await?;
    let begun = Instant::now();
    let mut under_way = 0;
    for (requests, count) in &halves {
        bare.send(requests).await?;
        if under_way > 0 {
            bare.added(under_way).await?;
        }
        under_way = *count;
    }
    bare.added(under_way).await?;
    let seconds = begun.elapsed().as_secs_f64();
    let cpu_s = redis_cpu_s(&mut connection).await? - before;
    Ok(Limit {
        entries_per_s: rows as f64 / seconds,
        redis_us_per_entry: cpu_s * 1e6 / rows as f64,
    })
}
