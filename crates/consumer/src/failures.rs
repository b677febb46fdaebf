//! Attempts that are counted: those that failed, and those that a crash may have ended.

use tokio_postgres::types::ToSql;

use crate::{Message, inbox::Inbox, queries, trouble::Trouble};

/// What is recorded of a message's attempts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Attempts {
    pub(crate) count: u32,
    pub(crate) last_error: Option<String>,
}

impl Inbox {
    /// Counts one attempt, with its error if it is known yet. Committed by itself: the count stays even
    /// if the process ends in the attempt that follows.
    pub(crate) async fn count_attempt(
        &self,
        message: &Message,
        error: Option<&str>,
    ) -> Result<Attempts, Trouble> {
        let row = self
            .durably_as_owner(message.source(), async |tx| {
                let key = message.message_key();
                tx.query_one(
                    queries::COUNT_ATTEMPT,
                    &[&self.group, &message.topic(), &key, &error],
                )
                .await
            })
            .await?;
        let count: i32 = row.get(0);
        Ok(Attempts {
            count: count.unsigned_abs(),
            last_error: row.get(1),
        })
    }

    /// Adds the error to an attempt that was counted before it ran.
    pub(crate) async fn note_error(&self, message: &Message, error: &str) -> Result<(), Trouble> {
        self.durably_as_owner(message.source(), async |tx| {
            let key = message.message_key();
            tx.execute(
                queries::NOTE_ERROR,
                &[&self.group, &message.topic(), &key, &error],
            )
            .await
            .map(drop)
        })
        .await
    }

    /// Whether a redelivered entry was applied or set aside before it could be acknowledged.
    pub(crate) async fn is_settled(&self, message: &Message) -> Result<bool, Trouble> {
        let connection = self.connect().await?;
        let (key, entry_id) = (message.message_key(), message.entry_id());
        let row = self
            .bounded(async {
                let is_settled = connection.prepare_cached(queries::IS_SETTLED).await?;
                let parameters: [&(dyn ToSql + Sync); 5] = [
                    &self.group,
                    &message.topic(),
                    &key,
                    &message.stream(),
                    &entry_id,
                ];
                connection.query_one(&is_settled, &parameters).await
            })
            .await;
        match row {
            Ok(row) => Ok(row.get(0)),
            Err(trouble) => {
                self.give_up(connection, &trouble);
                Err(trouble)
            }
        }
    }
}
