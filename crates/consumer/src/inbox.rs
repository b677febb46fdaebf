//! The transaction that makes a message take effect once: its key and the handler's writes, together.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use deadpool_postgres::{Object, Pool, Transaction};
use tokio_postgres::{ToStatement, types::ToSql};

use crate::{
    Error, Message,
    builder::Settings,
    decision::{Fault, Origin},
    gate::{Gate, Sorted},
    handler::Apply,
    message::Source,
    opening::{Keys, Openings, Statements},
    own_connections::OwnConnections,
    own_thread::in_time,
    queries,
    trouble::Trouble,
};

/// The versions of the inbox schema that this crate works with. Versions below 100 only add to the
/// first, so that a schema that was migrated ahead of a rolling upgrade is no reason to refuse.
const SCHEMA_VERSION_MIN: i32 = 1;
const SCHEMA_VERSION_MAX: i32 = 99;

/// How often a handler's connection is asked for a sign of life, at least.
const SIGN_INTERVAL_MAX: Duration = Duration::from_secs(1);

/// The inbox of one group.
pub(crate) struct Inbox {
    pool: Pool,
    pub(crate) group: String,
    /// The member's name, by which it owns leases.
    pub(crate) member: String,
    pub(crate) response_timeout: Duration,
    /// How often a handler's connection is asked for a sign of life.
    pub(crate) sign_interval: Duration,
    pub(crate) gate: Gate,
    pub(crate) openings: Openings,
    /// Whether the last batch had no key that was known. The next is taken to be like it.
    all_new: AtomicBool,
}

/// What became of a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Applied {
    /// Messages whose effect was committed now; they come first.
    pub(crate) fresh: usize,
    /// Messages that must not run, and stand in the table of dead letters now. All others had taken effect before.
    pub(crate) dead: usize,
    pub(crate) waiting: usize,
}

impl Inbox {
    pub(crate) fn new(settings: &Settings) -> Self {
        Self {
            pool: settings.pool.clone(),
            group: settings.group.clone(),
            member: settings.name.clone(),
            response_timeout: settings.response_timeout,
            sign_interval: (settings.claim_after / 3).min(SIGN_INTERVAL_MAX),
            gate: settings.gate,
            openings: Openings::new(settings),
            all_new: AtomicBool::new(false),
        }
    }

    /// Whether the database has an inbox that this crate can use.
    pub(crate) async fn check(&self) -> Result<Result<(), Error>, Trouble> {
        let connection = self.connect().await?;
        let row = self
            .bounded(connection.query_one(queries::SCHEMA_EXISTS, &[]))
            .await?;
        let encoding: String = row.get(0);
        if encoding != "UTF8" {
            return Ok(Err(Error::Encoding(encoding)));
        }
        let found = if row.get(1) {
            self.bounded(connection.query_one(queries::SCHEMA_VERSION, &[]))
                .await?
                .get(0)
        } else {
            0
        };
        if (SCHEMA_VERSION_MIN..=SCHEMA_VERSION_MAX).contains(&found) {
            return Ok(Ok(()));
        }
        Ok(Err(Error::Schema {
            found,
            min: SCHEMA_VERSION_MIN,
            max: SCHEMA_VERSION_MAX,
        }))
    }

    /// Applies messages of one topic in one transaction: all of them, or on trouble none.
    ///
    /// `Ok` says that the effects and the keys are committed and flushed. A crash before that leaves
    /// nothing, and the entries are still pending; a crash after it leaves entries that are delivered
    /// again, found in the inbox and acknowledged without the handler. If the reply to COMMIT is lost,
    /// this reports an outage, and the next try finds out by the keys.
    ///
    /// The messages may be reordered: fresh ones stay in their order, before those already applied.
    /// `forget_attempts` also deletes what is recorded of earlier attempts.
    pub(crate) async fn apply<A: Apply>(
        &self,
        connections: &OwnConnections,
        handler: &A,
        messages: &mut Vec<Message>,
        forget_attempts: bool,
    ) -> Result<Applied, Trouble> {
        let mut connection = connections.get().await?;
        let expected = match self.all_new.load(Ordering::Relaxed) {
            true => Keys::AllNew,
            false => Keys::MayBeKnown,
        };
        let mut result = self
            .apply_on(
                &mut connection,
                handler,
                messages,
                expected,
                forget_attempts,
            )
            .await;
        if expected == Keys::AllNew && result.as_ref().is_err_and(met_a_known_key) {
            // The handler has not run.
            let keys = Keys::MayBeKnown;
            result = self
                .apply_on(&mut connection, handler, messages, keys, forget_attempts)
                .await;
        }
        match &result {
            Ok(_) => connections.put_back(connection),
            Err(trouble) if trouble.decision().blames_the_message() => {
                // A plan that a schema change has made invalid must not fail every further attempt.
                connection.statement_cache.clear();
                connections.put_back(connection);
            }
            Err(trouble) => match verdict(trouble) {
                Verdict::Good => connections.put_back(connection),
                Verdict::Bad => drop(connection),
                Verdict::AllBad => {
                    drop(connection);
                    connections.close_idle();
                    self.pool.retain(|_, _| false);
                }
            },
        }
        result
    }

    async fn apply_on<A: Apply>(
        &self,
        connection: &mut Object,
        handler: &A,
        messages: &mut Vec<Message>,
        keys: Keys,
        forget_attempts: bool,
    ) -> Result<Applied, Trouble> {
        let Some(first) = messages.first() else {
            return Ok(Applied::default());
        };
        let topic = first.topic().to_owned();
        let statements = self.prepare(connection, keys).await?;
        let transaction = self.bounded(connection.transaction()).await?;
        let Sorted { run, dead, waiting } = self.sort_out(&transaction, messages).await?;
        let (transaction, fresh) = self
            .take_effect(transaction, handler, messages, run, &statements)
            .await?;
        self.all_new.store(fresh == run, Ordering::Relaxed);
        if forget_attempts {
            let keys: Vec<&str> = messages.iter().map(Message::message_key).collect();
            self.bounded(
                transaction.execute(queries::FORGET_ATTEMPTS, &[&self.group, &topic, &keys]),
            )
            .await?;
        }
        self.commit(transaction).await?;
        Ok(Applied {
            fresh,
            dead,
            waiting,
        })
    }

    /// Takes the keys of the first `run` messages and calls the handler for those whose key was taken now. They
    /// come first then, and are counted. The transaction is still to be committed, by [`commit`](Self::commit).
    pub(crate) async fn take_effect<'t, A: Apply>(
        &self,
        transaction: Transaction<'t>,
        handler: &A,
        messages: &mut Vec<Message>,
        run: usize,
        statements: &Statements,
    ) -> Result<(Transaction<'t>, usize), Trouble> {
        let Some(first) = messages.first() else {
            return Ok((transaction, 0));
        };
        let (topic, source) = (first.topic().to_owned(), Arc::clone(first.source()));
        let keys: Vec<&str> = messages[..run].iter().map(Message::message_key).collect();
        let parameters: [&(dyn ToSql + Sync); 3] = [&self.group, &topic, &keys];
        // Sent together: one round trip. The lock timeout is for our own statements, not for the handler's.
        let (opened, owned, taken, unlimited) = tokio::join!(
            self.bounded(transaction.batch_execute(&self.openings.long)),
            self.bounded(self.holds_lease(&transaction, &statements.hold_lease, &source)),
            self.bounded(transaction.query_one(&statements.take_keys, &parameters)),
            self.bounded(transaction.batch_execute("SET LOCAL lock_timeout TO DEFAULT")),
        );
        opened?;
        if !owned? {
            return Err(Trouble::lease_lost());
        }
        let taken = taken?;
        unlimited?;

        let (count, keys): (i64, Option<Vec<String>>) = (taken.get(0), taken.get(1));
        let (transaction_id, backend): (String, i32) = (taken.get(2), taken.get(3));
        if count == 0 {
            return Ok((transaction, 0));
        }
        let fresh = match keys {
            Some(keys) => fresh_first(messages, keys.into_iter().collect()),
            None => run,
        };
        let handled = tokio::select! {
            biased;
            handled = handler.apply(&transaction, &messages[..fresh]) => handled,
            silent = self.silence(&transaction, backend) => return Err(silent),
        };
        if let Err(trouble) = handled {
            return Err(self.rolled_back(transaction, trouble).await);
        }
        let now = self
            .bounded(transaction.query_one(&statements.still_ours, &[]))
            .await
            .map_err(Trouble::of_handler)?;
        if now.get::<_, String>(0) != transaction_id {
            let text = "the handler ended the transaction it was given";
            return Err(Trouble::new(Origin::Handler, Fault::HandlerError, text));
        }
        Ok((transaction, fresh))
    }

    /// Commits what the handler did. Deferred constraints are checked here, hence what fails may be its doing.
    pub(crate) async fn commit(&self, transaction: Transaction<'_>) -> Result<(), Trouble> {
        self.bounded(transaction.commit())
            .await
            .map_err(Trouble::of_handler)
    }

    /// Rolls back after a handler's trouble. If even that is not possible, the connection was lost, and
    /// whatever the handler made of it was no failure of the message.
    async fn rolled_back(&self, transaction: Transaction<'_>, trouble: Trouble) -> Trouble {
        match self.bounded(transaction.rollback()).await {
            Ok(()) => trouble,
            Err(lost) => lost,
        }
    }

    /// Runs statements of this crate in a transaction of their own, committed and flushed on `Ok`.
    pub(crate) async fn durably<T>(
        &self,
        statements: impl AsyncFnOnce(&Transaction<'_>) -> Result<T, tokio_postgres::Error>,
    ) -> Result<T, Trouble> {
        let mut connection = self.connect().await?;
        let result = self
            .bounded(async {
                let transaction = connection.transaction().await?;
                transaction.batch_execute(&self.openings.short).await?;
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

    /// The same as [`Inbox::durably`], by the owner of a stream: refused if it is that no more.
    pub(crate) async fn durably_as_owner<T>(
        &self,
        source: &Source,
        statements: impl AsyncFnOnce(&Transaction<'_>) -> Result<T, tokio_postgres::Error>,
    ) -> Result<T, Trouble> {
        self.durably(async |tx| {
            if !self.holds_lease(tx, queries::HOLD_LEASE, source).await? {
                return Ok(None);
            }
            statements(tx).await.map(Some)
        })
        .await?
        .ok_or_else(Trouble::lease_lost)
    }

    /// Whether a stream is ours, and stays so until the end of this transaction. A stream that the members of the
    /// group share belongs to all.
    async fn holds_lease<S: ToStatement + ?Sized>(
        &self,
        transaction: &Transaction<'_>,
        hold_lease: &S,
        source: &Source,
    ) -> Result<bool, tokio_postgres::Error> {
        let Some(epoch) = source.epoch else {
            return Ok(true);
        };
        let parameters: [&(dyn ToSql + Sync); 4] =
            [&self.group, &source.stream, &self.member, &epoch];
        let row = transaction.query_opt(hold_lease, &parameters).await?;
        Ok(row.is_some())
    }

    pub(crate) async fn connect(&self) -> Result<Object, Trouble> {
        match in_time(self.response_timeout, self.pool.get()).await {
            Some(connection) => Ok(connection?),
            None => Err(Trouble::postgres_silent()),
        }
    }

    pub(crate) async fn bounded<T>(
        &self,
        statement: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, Trouble> {
        match in_time(self.response_timeout, statement).await {
            Some(result) => Ok(result?),
            None => Err(Trouble::postgres_silent()),
        }
    }

    /// Closes a connection that met an outage instead of handing it back, so that the next try resolves
    /// the address anew. Where Postgres fell silent, the idle ones of the pool are as suspect.
    pub(crate) fn give_up(&self, connection: Object, trouble: &Trouble) {
        match verdict(trouble) {
            Verdict::Good => {}
            Verdict::Bad => drop(Object::take(connection)),
            Verdict::AllBad => {
                drop(Object::take(connection));
                self.pool.retain(|_, _| false);
            }
        }
    }
}

/// What trouble says of the connection that it was met on.
enum Verdict {
    Good,
    Bad,
    /// And those that nobody uses are as suspect.
    AllBad,
}

fn verdict(trouble: &Trouble) -> Verdict {
    match trouble.fault {
        Fault::Conflict | Fault::UniqueViolation | Fault::LeaseLost => Verdict::Good,
        Fault::PostgresSilent => Verdict::AllBad,
        _ => Verdict::Bad,
    }
}

/// Whether a statement of ours found a key in the inbox that was taken for new.
fn met_a_known_key(trouble: &Trouble) -> bool {
    trouble.origin == Origin::Library && trouble.fault == Fault::UniqueViolation
}

/// Moves the messages whose key was taken now to the front, each key once, and counts them.
fn fresh_first(messages: &mut Vec<Message>, mut taken: HashSet<String>) -> usize {
    let (mut fresh, mut repeated) = (Vec::with_capacity(messages.len()), Vec::new());
    for message in messages.drain(..) {
        if taken.remove(message.message_key()) {
            fresh.push(message);
        } else {
            repeated.push(message);
        }
    }
    let count = fresh.len();
    messages.append(&mut fresh);
    messages.append(&mut repeated);
    count
}
