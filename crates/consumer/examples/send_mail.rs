//! A mailer without Postgres, whose inbox is in Redis: at least once, and rarely twice.
//!
//! `REDIS_URL=redis://… cargo run -p outbox-consumer --example send_mail`. SIGTERM or Ctrl-C stops it.

use std::{env, error::Error};

use outbox_consumer::{HandlerError, Message, RedisAddress, RedisInbox};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// Where a mail would be sent. The message key is what a mail service drops repeats by.
async fn send(message: &Message) -> Result<(), HandlerError> {
    let bytes = message.payload().len();
    tracing::info!(idempotency_key = message.message_key(), bytes, "a mail");
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).init();
    let redis = env::var("REDIS_URL").map_err(|_| "set REDIS_URL to the relay's Redis")?;
    let mut terminate = signal(SignalKind::terminate())?;
    let shutdown = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
    };
    let inbox = RedisInbox::new(RedisAddress::parse(&redis)?, "example-mailing").topic("orders");
    inbox.run(send, shutdown).await?;
    Ok(())
}
