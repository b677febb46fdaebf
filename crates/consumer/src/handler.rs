//! The application's handler, per message or per batch, as the inbox calls it.

use std::{any::Any, marker::PhantomData, panic::AssertUnwindSafe};

use deadpool_postgres::Transaction;
use futures_util::FutureExt as _;

use crate::{
    HandlerError, Message,
    decision::{Fault, Origin},
    trouble::Trouble,
};

/// Applies fresh messages inside the transaction that records their keys.
pub(crate) trait Apply {
    /// A panic is caught and becomes trouble like an error.
    async fn apply(&self, transaction: &Transaction<'_>, fresh: &[Message]) -> Result<(), Trouble>;
}

/// A handler that takes the messages one after the other.
pub(crate) struct PerMessage<F, E>(F, PhantomData<fn() -> E>);

/// A handler that takes all fresh messages of a batch at once.
pub(crate) struct PerBatch<F, E>(F, PhantomData<fn() -> E>);

impl<F, E> PerMessage<F, E> {
    pub(crate) fn new(handler: F) -> Self {
        Self(handler, PhantomData)
    }
}

impl<F, E> PerBatch<F, E> {
    pub(crate) fn new(handler: F) -> Self {
        Self(handler, PhantomData)
    }
}

impl<F, E> Apply for PerMessage<F, E>
where
    F: AsyncFn(&Transaction<'_>, &Message) -> Result<(), E>,
    E: Into<HandlerError>,
{
    async fn apply(&self, transaction: &Transaction<'_>, fresh: &[Message]) -> Result<(), Trouble> {
        for message in fresh {
            caught(async { (self.0)(transaction, message).await }).await?;
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
        caught(async { (self.0)(transaction, fresh).await }).await
    }
}

/// Unwinding leaves nothing half done that outlives it: the transaction is rolled back.
async fn caught<E: Into<HandlerError>>(
    run: impl Future<Output = Result<(), E>>,
) -> Result<(), Trouble> {
    match AssertUnwindSafe(run).catch_unwind().await {
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

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    if let Some(text) = panic.downcast_ref::<&'static str>() {
        text
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text
    } else {
        "without a text"
    }
}
