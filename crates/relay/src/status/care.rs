//! What Redis says of its memory, and what the leader has left there for `status`.

use redis::aio::MultiplexedConnection;

use super::report::{CaretakerShown, MemoryShown};
use super::streams::unless_refused;
use crate::error::{Error, Result};
use crate::publisher::{Memory, read_report};

/// How full Redis is; none where this user may not ask.
pub(super) async fn memory(connection: &mut MultiplexedConnection) -> Result<Option<MemoryShown>> {
    let mut info = redis::cmd("INFO");
    let info = info.arg("memory").query_async::<String>(connection).await;
    let info = unless_refused(info)?;
    Ok(info.map(|info| MemoryShown::new(Memory::parse(&info))))
}

/// What the leader says; none where no leader has said it within a minute, or this user may not read it.
pub(super) async fn caretaker(
    connection: &mut MultiplexedConnection,
    prefix: &str,
    now_ms: u64,
) -> Result<Option<CaretakerShown>> {
    let report = match read_report(connection, prefix).await {
        Err(Error::Redis { source, .. }) => unless_refused(Err(source))?.flatten(),
        read => read?,
    };
    Ok(report.map(|(report, at_ms)| CaretakerShown::new(report, at_ms, now_ms)))
}
