//! The application: orders and their messages, from several connections at once.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use clap::Args;
use rand::Rng;
use tokio::{sync::watch, task::JoinSet, time::MissedTickBehavior};
use tokio_postgres::Client;

use super::{PAUSE, Servers, connect};
use crate::{
    Result,
    order::{End, Queue, Way, place},
};

/// What the log says of each order that failed, in one line.
pub(crate) const ORDER_FAILED: &str = "an order failed";

/// Places orders from several connections until SIGTERM.
#[derive(Clone, Debug, Args)]
pub struct Shop {
    #[command(flatten)]
    servers: Servers,
    /// How an order's message gets on its way
    #[arg(long)]
    way: Way,
    /// File to which the key of each order is appended once it is acknowledged
    #[arg(long)]
    acknowledged: PathBuf,
    /// Connections that place orders at the same time
    #[arg(long, default_value_t = 8)]
    writers: u32,
    /// Customers; the orders of one are in order
    #[arg(long, default_value_t = 50)]
    customers: u32,
    /// Orders per second of all writers together, at most
    #[arg(long, default_value_t = 1_500)]
    per_second: u32,
    /// How many of a hundred orders are rolled back at the end of their transaction
    #[arg(long, default_value_t = 10)]
    rollback_percent: u32,
    /// `synchronous_commit` of the shop's sessions
    #[arg(long, default_value = "on")]
    synchronous_commit: String,
}

impl Shop {
    pub(super) async fn run(self, stop: impl Future<Output = ()>) -> Result {
        let file = OpenOptions::new()
            .append(true)
            .create(true)
            .open(&self.acknowledged)?;
        let file = Arc::new(file);
        let (stopping, stopped) = watch::channel(false);
        let mut writers = JoinSet::new();
        for _ in 0..self.writers {
            let writer = Writer {
                shop: self.clone(),
                file: Arc::clone(&file),
                stopped: stopped.clone(),
            };
            writers.spawn(writer.run());
        }
        stop.await;
        stopping.send_replace(true);
        while let Some(ended) = writers.join_next().await {
            ended??;
        }
        Ok(())
    }
}

struct Writer {
    shop: Shop,
    file: Arc<File>,
    stopped: watch::Receiver<bool>,
}

impl Writer {
    /// Goes on after every error, as an application does, with another order.
    async fn run(self) -> Result {
        let each = Duration::from_secs(u64::from(self.shop.writers)) / self.shop.per_second.max(1);
        let mut pace = tokio::time::interval(each);
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut queue = Queue::new(&self.shop.servers.redis_url);
        while !*self.stopped.borrow() {
            match self.connect().await {
                Ok(mut client) => {
                    while !*self.stopped.borrow() {
                        pace.tick().await;
                        if let Err(e) = self.place_one(&mut client, &mut queue).await {
                            tracing::warn!(error = %e, "{ORDER_FAILED}");
                            break;
                        }
                    }
                }
                Err(e) => tracing::warn!(error = %e, "connecting again"),
            }
            if !*self.stopped.borrow() {
                tokio::time::sleep(PAUSE).await;
            }
        }
        Ok(())
    }

    async fn connect(&self) -> Result<Client> {
        // Not a statement: what runs on the connection is what a fault waits for.
        let options = format!(
            "-c synchronous_commit={} -c statement_timeout=20s",
            self.shop.synchronous_commit
        );
        let mut config: tokio_postgres::Config = self.shop.servers.database_url.parse()?;
        connect(config.options(options)).await
    }

    async fn place_one(&self, client: &mut Client, queue: &mut Queue) -> Result {
        let (customer, percent) = {
            let mut random = rand::rng();
            (
                random.random_range(0..self.shop.customers),
                random.random_range(0..100),
            )
        };
        let end = if percent < self.shop.rollback_percent {
            End::RollBack
        } else {
            End::Commit
        };
        let customer = format!("c{customer}");
        let key = place(client, queue, self.shop.way, &customer, end).await?;
        if end == End::Commit {
            // One call, so that the line is whole whenever the process is killed.
            (&*self.file).write_all(format!("{key}\n").as_bytes())?;
        }
        Ok(())
    }
}
