//! A thread for what handlers run in, so that their futures need not be `Send`.

use tokio::{runtime::Handle, sync::oneshot};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, Span, instrument::WithSubscriber as _};

use crate::Error;

/// Runs work on a thread of its own, with the I/O and timers of the runtime this is called in. Whether the future of
/// an async closure is `Send` cannot be written down in stable Rust, and this way it need not be.
///
/// `make` is given two tokens: the first is cancelled when `shutdown` is done, the second when the returned future is
/// dropped.
///
/// # Panics
///
/// If it is not called within a Tokio runtime.
///
/// # Cancel safety
///
/// Dropping the future cancels the second token, and does not wait for the work to end.
pub(crate) async fn on_own_thread<M, W>(
    make: M,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error>
where
    M: FnOnce(CancellationToken, CancellationToken) -> W + Send + 'static,
    W: Future<Output = Result<(), Error>>,
{
    let stop = CancellationToken::new();
    let abandoned = CancellationToken::new();
    let _abandon_on_drop = abandoned.clone().drop_guard();
    let (done, mut ended) = oneshot::channel();
    let runtime = Handle::current();
    let span = Span::current();
    let dispatch = tracing::dispatcher::get_default(Clone::clone);
    let thread_stop = stop.clone();
    std::thread::Builder::new()
        .name("outbox-consumer".to_owned())
        .spawn(move || {
            let work = make(thread_stop, abandoned);
            let result = runtime.block_on(work.instrument(span).with_subscriber(dispatch));
            // Nobody listens any more if the future was dropped.
            let _ = done.send(result);
        })
        .map_err(Error::Thread)?;
    tokio::select! {
        result = &mut ended => return result.unwrap_or(Err(Error::Ended)),
        () = shutdown => stop.cancel(),
    }
    ended.await.unwrap_or(Err(Error::Ended))
}
