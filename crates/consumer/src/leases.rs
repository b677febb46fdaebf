//! The leases by which each stream has one owner in its group, in the consumer's Postgres and by its clock.

use std::{collections::BTreeMap, time::Duration};

use deadpool_postgres::Transaction;
use tokio_postgres::{IsolationLevel, types::ToSql};

use crate::{inbox::Inbox, queries, spread::Members, trouble::Trouble};

/// A lease that a member has: the stream, and the number of its owners so far.
pub(crate) type Held = BTreeMap<String, i64>;

/// What a member sees when it renews its leases.
#[derive(Debug, Default)]
pub(crate) struct Census {
    /// The streams whose lease is still ours.
    pub(crate) kept: Vec<String>,
    pub(crate) members: Members,
    /// The owner of each stream whose lease has not run out.
    pub(crate) owners: BTreeMap<String, String>,
    /// All streams that have a row.
    known: Vec<String>,
}

impl Inbox {
    /// Reports that this member is alive and could have these streams, renews its leases, and looks who else
    /// is there.
    pub(crate) async fn report(
        &self,
        streams: &[String],
        held: &Held,
        term: Duration,
    ) -> Result<Census, Trouble> {
        let (names, epochs): (Vec<&str>, Vec<i64>) =
            held.iter().map(|(s, epoch)| (s.as_str(), *epoch)).unzip();
        let term_ms = milliseconds(term);
        self.briefly(async |tx| {
            let alive: [&(dyn ToSql + Sync); 4] = [&self.group, &self.member, &streams, &term_ms];
            tx.execute(queries::REPORT_MEMBER, &alive).await?;
            tx.execute(queries::FORGET_MEMBERS, &[&self.group]).await?;
            let renew: [&(dyn ToSql + Sync); 5] =
                [&self.group, &self.member, &names, &epochs, &term_ms];
            let kept = tx.query(queries::RENEW_LEASES, &renew).await?;
            let members = tx.query(queries::LIVE_MEMBERS, &[&self.group]).await?;
            let leases = tx.query(queries::LEASES, &[&self.group]).await?;
            Ok(Census {
                kept: kept.iter().map(|row| row.get(0)).collect(),
                members: members.iter().map(|row| (row.get(0), row.get(1))).collect(),
                owners: leases
                    .iter()
                    .filter(|row| row.get(2))
                    .map(|row| (row.get(0), row.get(1)))
                    .collect(),
                known: leases.iter().map(|row| row.get(0)).collect(),
            })
        })
        .await
    }

    /// Takes those of these streams that are free, and returns them with their new epochs.
    pub(crate) async fn take(
        &self,
        streams: &[&str],
        census: &Census,
        term: Duration,
    ) -> Result<Held, Trouble> {
        let new: Vec<&str> = streams
            .iter()
            .copied()
            .filter(|stream| !census.known.iter().any(|known| known == stream))
            .collect();
        let term_ms = milliseconds(term);
        self.briefly(async |tx| {
            if !new.is_empty() {
                tx.execute(queries::MAKE_LEASES, &[&self.group, &new])
                    .await?;
            }
            let take: [&(dyn ToSql + Sync); 4] = [&self.group, &self.member, &streams, &term_ms];
            let taken = tx.query(queries::TAKE_LEASES, &take).await?;
            Ok(taken.iter().map(|row| (row.get(0), row.get(1))).collect())
        })
        .await
    }

    /// Gives up one stream, of which nothing is in hand any more.
    pub(crate) async fn release(&self, stream: &str, epoch: i64) -> Result<(), Trouble> {
        self.briefly(async |tx| {
            let lease: [&(dyn ToSql + Sync); 4] = [&self.group, &self.member, &stream, &epoch];
            tx.execute(queries::RELEASE_LEASE, &lease).await.map(drop)
        })
        .await
    }

    /// Gives up what an earlier process had under this name.
    pub(crate) async fn begin_anew(&self) -> Result<(), Trouble> {
        self.briefly(async |tx| {
            let me: [&(dyn ToSql + Sync); 2] = [&self.group, &self.member];
            tx.execute(queries::RELEASE_ALL_LEASES, &me).await.map(drop)
        })
        .await
    }

    /// Gives up all streams, and is no member any more.
    pub(crate) async fn resign(&self) -> Result<(), Trouble> {
        self.briefly(async |tx| {
            let me: [&(dyn ToSql + Sync); 2] = [&self.group, &self.member];
            tx.execute(queries::RELEASE_ALL_LEASES, &me).await?;
            tx.execute(queries::DELETE_MEMBER, &me).await.map(drop)
        })
        .await
    }

    /// A short transaction whose loss in a crash of Postgres harms nobody, hence not flushed: an epoch that was
    /// lost is found missing by the batch that names it. At READ COMMITTED, whatever the database's default,
    /// since members that look at each other's rows would only fail each other otherwise.
    async fn briefly<T>(
        &self,
        statements: impl AsyncFnOnce(&Transaction<'_>) -> Result<T, tokio_postgres::Error>,
    ) -> Result<T, Trouble> {
        let mut connection = self.connect().await?;
        let result = self
            .bounded(async {
                let transaction = connection
                    .build_transaction()
                    .isolation_level(IsolationLevel::ReadCommitted)
                    .start()
                    .await?;
                transaction.batch_execute(&self.openings.brief).await?;
                let value = statements(&transaction).await?;
                transaction.commit().await?;
                Ok(value)
            })
            .await;
        if let Err(trouble) = &result {
            self.give_up(connection, trouble);
        }
        result
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}
