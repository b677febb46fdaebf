//! `outbox-relay adopt`: the operator says that this cluster takes over for another one.

use std::time::Duration;

use crate::checkpoint;
use crate::error::Result;
use crate::postgres::{PostgresTarget, Session, sql};
use crate::protocol::start::MarkerFound;
use crate::publisher::{Publisher, RedisTarget};

const LIMIT: Duration = Duration::from_secs(5);

/// Accepts the clusters that marker and checkpoint belong to as this cluster's past, and returns their
/// system ids; none when both are this cluster's own.
///
/// The relay then goes on from the lower of the two cursors. It must be the only one that writes to this
/// Redis: the cluster it takes over from must not be used any longer.
///
/// # Errors
///
/// That one of the servers is out of reach, or has no outbox.
pub async fn adopt(
    postgres: &PostgresTarget,
    redis: &RedisTarget,
    prefix: &str,
) -> Result<Vec<u64>> {
    let session = Session::open(postgres, "outbox-relay adopt", LIMIT).await?;
    let own = checkpoint::system_id(
        session
            .one("read the system id", sql::FACTS, &[&0_i64])
            .await?
            .get(2),
    );
    let mut past = Vec::new();
    if let MarkerFound::Marker { place, .. } = Publisher::connect(redis, prefix, LIMIT)
        .await?
        .marker()
        .await?
    {
        past.push(place.history.system_id);
    }
    past.extend(
        checkpoint::read(&session)
            .await?
            .map(|place| place.history.system_id),
    );
    past.retain(|system_id| *system_id != own);
    past.sort_unstable();
    past.dedup();
    let bits: Vec<i64> = past
        .iter()
        .copied()
        .map(checkpoint::system_id_bits)
        .collect();
    session
        .execute("record the adoption", sql::ADOPT, &[&bits])
        .await
        .map_err(|error| error.or_owner("adopt as the owner of the schema"))?;
    Ok(past)
}
