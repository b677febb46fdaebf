//! An order and its message in one sqlx transaction.
//!
//! Run `outbox-relay migrate` first, then `DATABASE_URL=postgres://… cargo run --example sqlx`.

use sqlx::{Connection, PgConnection, PgTransaction};

/// Places an order and writes its message. Both become facts when the caller commits.
pub(crate) async fn place_order(
    transaction: &mut PgTransaction<'_>,
    customer: &str,
    cents: i64,
) -> Result<i64, sqlx::Error> {
    let order_id: i64 =
        sqlx::query_scalar("INSERT INTO orders (customer, cents) VALUES ($1, $2) RETURNING id")
            .bind(customer)
            .bind(cents)
            .fetch_one(&mut **transaction)
            .await?;
    sqlx::query(
        "SELECT outbox.publish('orders', $1::json, ordering_key => $2, message_key => $3, event_type => 'order.placed')",
    )
    .bind(format!(r#"{{"order_id":{order_id},"cents":{cents}}}"#))
    .bind(customer)
    .bind(format!("order-{order_id}-placed"))
    .execute(&mut **transaction)
    .await?;
    Ok(order_id)
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "the example shows what it did")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("DATABASE_URL")
        .map_err(|_| "set DATABASE_URL to a database with an outbox")?;
    let mut connection = PgConnection::connect(&url).await?;
    sqlx::query(
        "CREATE TABLE IF NOT EXISTS orders \
         (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text NOT NULL, cents bigint NOT NULL)",
    )
    .execute(&mut connection)
    .await?;

    let mut transaction = connection.begin().await?;
    let order_id = place_order(&mut transaction, "ada", 1999).await?;
    transaction.commit().await?;
    println!("order {order_id} and its message are committed");
    Ok(())
}
