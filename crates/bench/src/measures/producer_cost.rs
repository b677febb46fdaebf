//! What a message costs the transaction that writes it.

use crate::{
    Error,
    figures::Outcome,
    producers::busy,
    shop::{CLIENTS, CREATE_ORDERS, Clerk},
    stage::Stage,
    stats::quotients,
};

const NO_UNIQUE_KEY: &str =
    "ALTER TABLE outbox.messages DROP CONSTRAINT messages_message_key_unique";

pub(crate) async fn take(stage: &Stage) -> Result<Outcome, Error> {
    let (mut order, mut both, mut not_unique) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..stage.sizes.repeats {
        stage.round("orders alone", round);
        order.push(run(stage, "", false).await?);
        stage.round("orders and messages", round);
        both.push(run(stage, "", true).await?);
        stage.round("orders and messages without the unique key", round);
        not_unique.push(run(stage, NO_UNIQUE_KEY, true).await?);
    }
    Ok(Outcome::default()
        .beside("order and message / order", "", &quotients(&both, &order))
        .beside(
            "the same without the unique key",
            "",
            &quotients(&not_unique, &order),
        )
        .beside("order", "tps", &order)
        .beside("order and message", "tps", &both)
        .beside("order and message, no unique key", "tps", &not_unique))
}

async fn run(stage: &Stage, change: &str, message: bool) -> Result<f64, Error> {
    let database = stage.fresh_outbox().await?;
    let client = stage.connect(&database).await?;
    client.batch_execute(CREATE_ORDERS).await?;
    client.batch_execute(change).await?;
    let clerks = Clerk::open_all(stage, &database, CLIENTS).await?;
    let tps = busy(clerks, stage.sizes.busy, move |clerk, number| async move {
        if message {
            clerk.order_and_message(number).await
        } else {
            clerk.order(number).await
        }
    })
    .await?;
    stage.drop_database(&database).await?;
    Ok(tps)
}
