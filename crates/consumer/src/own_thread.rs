//! A thread for what handlers run in, so that their futures need not be `Send`.

use std::{future::poll_fn, pin::pin, time::Duration};

use tokio::{
    runtime::{self, Handle},
    sync::oneshot,
    time::{Instant, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, Span, instrument::WithSubscriber as _};

use crate::Error;

/// How late the end of a limit is noticed on a thread that nobody blocks, at the most.
const LATE: Duration = Duration::from_millis(10);

/// Runs work on a thread of its own, with the I/O and timers of the runtime this is called in. Whether the future of
/// an async closure is `Send` cannot be written down in stable Rust, and this way it need not be.
///
/// `make` is given two tokens: the first is cancelled when `shutdown` is done, the second when the returned future is
/// dropped. And it is given the runtime of the thread itself: what belongs to that one ends with the work.
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
    M: FnOnce(CancellationToken, CancellationToken, Handle) -> W + Send + 'static,
    W: Future<Output = Result<(), Error>>,
{
    let stop = CancellationToken::new();
    let abandoned = CancellationToken::new();
    let _abandon_on_drop = abandoned.clone().drop_guard();
    let (done, mut ended) = oneshot::channel();
    let caller = Handle::current();
    let span = Span::current();
    let dispatch = tracing::dispatcher::get_default(Clone::clone);
    let thread_stop = stop.clone();
    std::thread::Builder::new()
        .name("outbox-consumer".to_owned())
        .spawn(move || {
            let here = runtime::Builder::new_current_thread().enable_all().build();
            let result = here.map_err(Error::Thread).and_then(|here| {
                let work = make(thread_stop, abandoned, here.handle().clone());
                let work = work.instrument(span).with_subscriber(dispatch);
                here.block_on(driven_by(&caller, work))
            });
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

/// Does work as if on another runtime: what it opens, spawns or waits for belongs to that one.
pub(crate) async fn driven_by<T>(runtime: &Handle, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    poll_fn(|context| {
        let _entered = runtime.enter();
        work.as_mut().poll(context)
    })
    .await
}

/// The result of work if it comes in time. Where a handler was blocking this thread when the time was over, nothing could
/// be sent or read, and the time begins anew.
pub(crate) async fn in_time<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    loop {
        let end = Instant::now() + limit;
        match timeout_at(end, &mut work).await {
            Ok(done) => return Some(done),
            Err(_) if end.elapsed() < LATE => return None,
            Err(_) => {}
        }
    }
}
