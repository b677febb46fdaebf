//! A lane: takes one batch after the other, so that each lane has one transaction open at a time.

use std::rc::Rc;

use tracing::info;

use crate::{
    handler::Apply,
    patience::{Halt, Patience},
    queue::{Batch, Queue},
    worker::Worker,
};

/// One of the lanes of a member.
pub(crate) struct Lane<A> {
    queue: Queue,
    worker: Rc<Worker<A>>,
    patience: Patience,
}

impl<A: Apply> Lane<A> {
    pub(crate) fn new(queue: Queue, worker: Rc<Worker<A>>, patience: Patience) -> Self {
        Self {
            queue,
            worker,
            patience,
        }
    }

    /// Settles batches until it is told to stop, which is [`Halt::Stopped`].
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point: an open transaction is rolled back, and what was not acknowledged stays pending.
    pub(crate) async fn work(&self) -> Halt {
        loop {
            let Batch { items, ticket } = match self.queue.next(&self.patience.stop).await {
                Ok(batch) => batch,
                Err(halt) => return halt,
            };
            match self.worker.settle(&ticket.source, items).await {
                Ok(unsettled) => self.queue.finish(ticket, unsettled),
                Err(Halt::LeaseLost) => {
                    info!(
                        stream = ticket.source.stream,
                        epoch = ticket.source.epoch,
                        "batch dropped: the stream has another owner"
                    );
                    self.queue.finish(ticket, Vec::new());
                }
                Err(halt) => return halt,
            }
        }
    }
}
