//! The application's handler, per message or per batch, as the inbox calls it.

use std::{any::Any, marker::PhantomData, panic::AssertUnwindSafe, time::Instant};

use deadpool_postgres::Transaction;
use futures_util::FutureExt as _;
use tracing::{Instrument as _, Span, info_span};

use crate::{
    HandlerError, Message,
    counters::{Count, Counters},
    decision::{Fault, Origin},
    trouble::Trouble,
};

/// A handler as a type of its own, for [`Consumer::run_handler`](crate::Consumer::run_handler); also implemented by
/// [`Router`](crate::Router). An async closure or function goes to [`Consumer::run`](crate::Consumer::run) instead.
///
/// ```
/// use outbox_consumer::{Handler, HandlerError, Message, Transaction};
///
/// struct Warehouse { site: String }
///
/// impl Handler for Warehouse {
///     async fn handle(&self, tx: &Transaction<'_>, message: &Message) -> Result<(), HandlerError> {
///         let sql = "INSERT INTO shipments (order_key, site) VALUES ($1, $2)";
///         tx.execute(sql, &[&message.message_key(), &self.site]).await?;
///         Ok(())
///     }
/// }
/// ```
pub trait Handler {
    /// Applies one message with the transaction that records it as applied. The future need not be [`Send`].
    ///
    /// # Errors
    ///
    /// What [`HandlerError`] says.
    ///
    /// # Cancel safety
    ///
    /// The future is dropped at an await when the grace period of a stop is over, or when the consumer's own future
    /// is dropped. The transaction is rolled back then, and the message comes again.
    #[allow(
        async_fn_in_trait,
        reason = "handlers run on a thread of their own, so that the future need not be Send"
    )]
    async fn handle(&self, tx: &Transaction<'_>, message: &Message) -> Result<(), HandlerError>;
}

/// Applies fresh messages inside the transaction that records their keys.
pub(crate) trait Apply {
    /// A panic is caught and becomes trouble like an error.
    async fn apply(&self, transaction: &Transaction<'_>, fresh: &[Message]) -> Result<(), Trouble>;
}

/// A handler that takes the messages one after the other.
pub(crate) struct PerMessage<H>(H, Watch);

/// A handler that takes all fresh messages of a batch at once.
pub(crate) struct PerBatch<F, E>(F, Watch, PhantomData<fn() -> E>);

/// An async function or closure as a [`Handler`].
pub(crate) struct Closure<F, E>(F, PhantomData<fn() -> E>);

impl<H: Handler> PerMessage<H> {
    pub(crate) fn new(handler: H, counters: Counters) -> Self {
        Self(handler, Watch(counters))
    }
}

impl<F, E> PerBatch<F, E> {
    pub(crate) fn new(handler: F, counters: Counters) -> Self {
        Self(handler, Watch(counters), PhantomData)
    }
}

impl<F, E> Closure<F, E> {
    pub(crate) fn new(handler: F) -> Self {
        Self(handler, PhantomData)
    }
}

impl<F, E> Handler for Closure<F, E>
where
    F: AsyncFn(&Transaction<'_>, &Message) -> Result<(), E>,
    E: Into<HandlerError>,
{
    async fn handle(&self, tx: &Transaction<'_>, message: &Message) -> Result<(), HandlerError> {
        (self.0)(tx, message).await.map_err(Into::into)
    }
}

impl<H: Handler> Apply for PerMessage<H> {
    async fn apply(&self, transaction: &Transaction<'_>, fresh: &[Message]) -> Result<(), Trouble> {
        for message in fresh {
            let call = self.0.handle(transaction, message);
            self.1.call(std::slice::from_ref(message), call).await?;
        }
        Ok(())
    }
}

impl<F, E> Apply for PerBatch<F, E>
where
    F: AsyncFn(&Transaction<'_>, &[Message]) -> Result<(), E>,
    E: Into<HandlerError>,
{
    async fn apply(&self, transaction: &Transaction<'_>, fresh: &[Message]) -> Result<(), Trouble> {
        self.1.call(fresh, (self.0)(transaction, fresh)).await
    }
}

/// Watches the calls of a handler: how many and how long, with a span around each.
pub(crate) struct Watch(pub(crate) Counters);

impl Watch {
    /// Unwinding leaves nothing half done that outlives it: the transaction is rolled back.
    pub(crate) async fn call<E: Into<HandlerError>>(
        &self,
        messages: &[Message],
        run: impl Future<Output = Result<(), E>>,
    ) -> Result<(), Trouble> {
        let Some(first) = messages.first() else {
            return Ok(());
        };
        let stream = first.stream();
        let again = messages
            .iter()
            .filter(|message| message.attempt() > 1)
            .count();
        self.0.add(stream, Count::Retried, again);
        let in_flight = self.0.begin(stream, messages.len());
        let began = Instant::now();
        let span = span_of(first, messages.len());
        #[cfg(feature = "opentelemetry")]
        crate::trace::continue_in(&span, messages);
        let result = AssertUnwindSafe(run).catch_unwind().instrument(span).await;
        self.0.took(stream, began.elapsed());
        drop(in_flight);
        match result {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => {
                let error: HandlerError = error.into();
                Err(error.into())
            }
            Err(panic) => {
                let text = format!("the handler panicked: {}", panic_text(&*panic));
                Err(Trouble::new(Origin::Handler, Fault::HandlerPanic, text))
            }
        }
    }
}

/// The span around a call: of the message, or of the first one of a batch. `trace_parent` is the W3C header that the
/// producer wrote; with the feature `opentelemetry` the span is a child of that trace.
fn span_of(message: &Message, messages: usize) -> Span {
    info_span!(
        "handle",
        topic = message.topic(),
        message_key = message.message_key(),
        event_type = message.event_type(),
        trace_parent = message.trace_parent(),
        attempt = message.attempt(),
        messages
    )
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    if let Some(text) = panic.downcast_ref::<&'static str>() {
        text
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text
    } else {
        "without a text"
    }
}
