//! What runs as processes of its own, so that it can be killed: the shop, the naive code, and the consumer.

mod cursor_loop;
mod marking_loop;
mod naive_consumer;
mod shop;
mod warehouse;

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};
use redis::aio::MultiplexedConnection;
use tokio::signal::unix::{SignalKind, signal};
use tokio_postgres::{Client, NoTls};

use crate::{Result, order::customer_and_number};
pub use cursor_loop::CURSOR;
pub(crate) use shop::ORDER_FAILED;

/// The group of every consumer.
pub const GROUP: &str = "warehouse";

/// Without a unique key on what is counted.
pub const EFFECTS_TABLE: &str = "CREATE TABLE effects (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, message_key text NOT NULL)";

/// Keys in the order of their effects.
pub const EFFECT_KEYS: &str = "SELECT message_key FROM effects ORDER BY id";

/// The `application_name` of naive code in Postgres.
pub const NAIVE_NAME: &str = "naive";

const INSERT_EFFECT: &str = "INSERT INTO effects (message_key) VALUES ($1)";

/// How long naive code waits before it connects again, and when it found nothing to do.
const PAUSE: Duration = Duration::from_millis(20);

/// A consumer of the user's in the place of ours.
#[derive(Clone, Debug)]
pub struct OwnConsumer {
    /// The program.
    pub program: PathBuf,
    /// Makes its tables.
    pub setup_sql: String,
    /// Returns the message key of each effect, in the order of the effects.
    pub effects_sql: String,
}

/// Flags that name an [`OwnConsumer`].
#[derive(Clone, Debug, Args)]
pub struct OwnConsumerFlags {
    /// Program to run in the place of the suite's consumer. It gets DATABASE_URL (a database with the inbox and what
    /// `--setup-sql` makes), REDIS_URL, CONSUMER_GROUP and CONSUMER_NAME, and consumes the topic `orders`
    #[arg(long, value_name = "PROGRAM", requires = "effects_sql")]
    consumer: Option<PathBuf>,
    /// SQL that makes that consumer's tables
    #[arg(long, value_name = "SQL", requires = "consumer")]
    setup_sql: Option<String>,
    /// Query for the message key of each effect, in the order of the effects
    #[arg(long, value_name = "SQL", requires = "consumer")]
    effects_sql: Option<String>,
}

impl OwnConsumerFlags {
    /// The consumer that is named, if one is.
    #[must_use]
    pub fn own_consumer(self) -> Option<OwnConsumer> {
        Some(OwnConsumer {
            program: self.consumer?,
            setup_sql: self.setup_sql.unwrap_or_default(),
            effects_sql: self.effects_sql?,
        })
    }
}

/// Where a program finds its servers.
#[derive(Clone, Debug, Args)]
pub struct Servers {
    /// The program's Postgres
    #[arg(long, env = "DATABASE_URL", hide_env_values = true)]
    database_url: String,
    /// Redis
    #[arg(long, env = "REDIS_URL", hide_env_values = true)]
    redis_url: String,
}

impl Servers {
    async fn postgres(&self) -> Result<Client> {
        let mut config: tokio_postgres::Config = self.database_url.parse()?;
        connect(config.application_name(NAIVE_NAME)).await
    }

    async fn redis(&self) -> Result<MultiplexedConnection> {
        let client = redis::Client::open(self.redis_url.as_str())?;
        Ok(client.get_multiplexed_async_connection().await?)
    }
}

/// What every consumer does with a message.
#[derive(Clone, Debug, Args)]
struct Handler {
    /// Customer whose orders kill the process that handles them
    #[arg(long)]
    poison: Option<String>,
}

impl Handler {
    async fn pack(
        &self,
        transaction: &tokio_postgres::Transaction<'_>,
        message_key: &str,
    ) -> std::result::Result<(), tokio_postgres::Error> {
        let customer = customer_and_number(message_key).map(|(customer, _)| customer);
        if customer.is_some() && customer == self.poison.as_deref() {
            std::process::abort();
        }
        transaction
            .execute(INSERT_EFFECT, &[&message_key])
            .await
            .map(drop)
    }
}

async fn connect(config: &tokio_postgres::Config) -> Result<Client> {
    let (client, connection) = config.connect(NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// A program of the suite.
#[derive(Clone, Debug, Subcommand)]
pub enum Program {
    /// Places orders from several connections until SIGTERM
    Shop(shop::Shop),
    /// A naive relay that marks what it has sent
    MarkingLoop(marking_loop::MarkingLoop),
    /// A naive relay that remembers the last id
    CursorLoop(cursor_loop::CursorLoop),
    /// A consumer without an inbox
    NaiveConsumer(naive_consumer::NaiveConsumer),
    /// A consumer as the library's documentation has it
    Warehouse(warehouse::Warehouse),
}

impl Program {
    /// Runs it until SIGTERM.
    ///
    /// # Errors
    ///
    /// What the program cannot get over.
    pub async fn run(self) -> Result {
        match self {
            Program::Shop(shop) => shop.run(terminated()?).await,
            Program::MarkingLoop(naive) => until_terminated(naive.run()).await,
            Program::CursorLoop(naive) => until_terminated(naive.run()).await,
            Program::NaiveConsumer(naive) => until_terminated(naive.run()).await,
            Program::Warehouse(warehouse) => warehouse.run(terminated()?).await,
        }
    }
}

fn terminated() -> Result<impl Future<Output = ()> + Send + 'static> {
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        terminate.recv().await;
    })
}

async fn until_terminated(program: impl Future<Output = Result>) -> Result {
    let terminated = terminated()?;
    tokio::select! {
        ended = program => ended,
        () = terminated => Ok(()),
    }
}

/// Does the same again and again, as naive code does: `again` says whether there was something to do. After an error
/// it connects anew.
async fn endlessly<S, C, W>(connect: C, mut work: W) -> Result
where
    C: AsyncFn() -> Result<S>,
    W: AsyncFnMut(&mut S) -> Result<bool>,
{
    loop {
        let mut session = match connect().await {
            Ok(session) => session,
            Err(e) => {
                tracing::warn!(error = %e, "connecting again");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        loop {
            match work(&mut session).await {
                Ok(true) => {}
                Ok(false) => tokio::time::sleep(PAUSE).await,
                Err(e) => {
                    tracing::warn!(error = %e, "beginning again");
                    tokio::time::sleep(PAUSE).await;
                    break;
                }
            }
        }
    }
}
