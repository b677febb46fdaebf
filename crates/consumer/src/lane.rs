//! A lane: takes one batch after the other, so that each lane has one transaction open at a time, and acknowledges what
//! is committed.

use std::{rc::Rc, sync::Arc};

use tracing::info;

use crate::{
    handler::Apply,
    patience::{Halt, Patience},
    queue::{Batch, Queue, Ticket},
    worker::{Settled, Worker},
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
    /// While a batch is acknowledged, the next one may run: its transaction begins after the commit of the one before
    /// it. No third one begins before Redis has answered, so that a lane has at most one batch that is committed and
    /// still pending besides the one that runs. A crash delivers both again: what was committed is found in the inbox.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point: an open transaction is rolled back, and what was not acknowledged stays pending.
    pub(crate) async fn work(&self) -> Halt {
        let mut committed = None;
        loop {
            // Not `try_join!`: what is committed is acknowledged also where the next batch halts.
            let (acknowledged, next) =
                tokio::join!(self.acknowledge(committed.take()), self.settle_next());
            match acknowledged.and(next) {
                Ok(next) => committed = next,
                Err(halt) => return halt,
            }
        }
    }

    /// Returns the ticket of a batch that is to be acknowledged.
    async fn settle_next(&self) -> Result<Option<Ticket>, Halt> {
        let Batch { items, mut ticket } = self.queue.next(&self.patience.stop).await?;
        let source = Arc::clone(&ticket.source);
        match self.worker.settle(&source, items).await {
            Ok(Settled::Committed) => {
                // Not before: the next message of a key must see what this one did.
                self.queue.release_keys(&mut ticket);
                return Ok(Some(ticket));
            }
            Ok(Settled::Acknowledged { unsettled }) => self.queue.finish(ticket, unsettled),
            Err(Halt::LeaseLost) => {
                info!(
                    stream = source.stream,
                    epoch = source.epoch,
                    "batch dropped: the stream has another owner"
                );
                self.queue.finish(ticket, Vec::new());
            }
            Err(halt) => return Err(halt),
        }
        Ok(None)
    }

    /// Its entries are in hand until Redis has answered: nobody claims them, the reader does not take them in again,
    /// and their stream is not handed over.
    async fn acknowledge(&self, committed: Option<Ticket>) -> Result<(), Halt> {
        let Some(ticket) = committed else {
            return Ok(());
        };
        let acknowledged = self.worker.acknowledge(&ticket.source, &ticket.entries);
        acknowledged.await?;
        self.queue.finish(ticket, Vec::new());
        Ok(())
    }
}
