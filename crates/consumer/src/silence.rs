//! The health check under a handler: a connection that was cut without a word must not hold a message for ever.

use std::convert::Infallible;

use deadpool_postgres::Transaction;
use tokio::time::sleep;

use crate::{inbox::Inbox, own_thread::in_time, queries, trouble::Trouble};

impl Inbox {
    /// Ends when the connection of a handler's transaction is dead although nothing has closed it; never
    /// otherwise. While the handler computes or waits for something else it keeps the transaction from
    /// being idle: only a frozen process is silent.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it leaves the transaction as it was.
    pub(crate) async fn silence(&self, transaction: &Transaction<'_>, backend: i32) -> Trouble {
        match self.watch(transaction, backend).await {
            Ok(never) => match never {},
            Err(silent) => silent,
        }
    }

    async fn watch(
        &self,
        transaction: &Transaction<'_>,
        backend: i32,
    ) -> Result<Infallible, Trouble> {
        loop {
            sleep(self.sign_interval).await;
            // It is answered after the handler's own statement, if one is under way.
            let sign = transaction.batch_execute("");
            tokio::pin!(sign);
            while in_time(self.response_timeout, &mut sign).await.is_none() {
                // Only a server that answers elsewhere, and knows of no work, proves the connection dead. In an
                // outage the wait goes on until it is over.
                if let Ok(false) = self.is_at_work(backend).await {
                    return Err(Trouble::postgres_silent());
                }
            }
        }
    }

    async fn is_at_work(&self, backend: i32) -> Result<bool, Trouble> {
        let connection = self.connect().await?;
        let row = self
            .bounded(connection.query_opt(queries::IS_AT_WORK, &[&backend]))
            .await;
        match row {
            Ok(row) => Ok(row.is_some_and(|row| row.get(0))),
            Err(trouble) => {
                self.give_up(connection, &trouble);
                Err(trouble)
            }
        }
    }
}
