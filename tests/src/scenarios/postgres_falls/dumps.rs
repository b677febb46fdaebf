//! A logical dump restored: the rows and the sequence are as they were when it was made.

use std::{path::Path, time::Instant};

use outbox_testkit::{Postgres, Process, relay_binary};
use tempfile::TempDir;

use super::{entries, ids_given_again, last_state, let_in, publish_orders};
use crate::{
    Result, Stage,
    stage::{Arm, DEADLINE, failed},
};

/// The system id and the timeline stay, and so does the name.
pub(super) async fn into_the_same_cluster(stage: &mut Stage) -> Result {
    let files = TempDir::new()?;
    let dump = files.path().join("dump");
    dump_shop(stage, &dump).await?;
    publish_orders(stage).await?;
    let lost = last_state(stage).await?;
    let admin = stage.servers.postgres.connect("postgres").await?;
    let drop = format!("DROP DATABASE {} WITH (FORCE)", stage.servers.shop);
    admin.batch_execute(&drop).await?;
    restore_shop(stage, &dump, &stage.servers.postgres).await?;
    let_in(&stage.shops).await?;
    ids_given_again(stage, &lost).await?;
    stage.mark_struck();
    let_in(&stage.carriers).await
}

/// The relay refuses the new cluster until somebody says that it takes over.
pub(super) async fn into_a_new_cluster(stage: &mut Stage) -> Result {
    let files = TempDir::new()?;
    let dump = files.path().join("dump");
    dump_shop(stage, &dump).await?;
    publish_orders(stage).await?;
    let lost = last_state(stage).await?;
    let cluster = Postgres::start().await?;
    restore_shop(stage, &dump, &cluster).await?;
    stage.servers.postgres.kill9().await?;
    drop(stage.put_postgres(cluster).await?);
    let_in(&stage.shops).await?;
    let_in(&stage.carriers).await?;
    ids_given_again(stage, &lost).await?;
    if stage.arm == Arm::Outbox {
        refused_and_adopted(stage).await?;
    }
    Ok(())
}

async fn refused_and_adopted(stage: &mut Stage) -> Result {
    let mut redis = stage.servers.redis.connect().await?;
    let before = entries(&mut redis).await?;
    for relay in &stage.carriers {
        let line = relay.process.wait_for_line("cannot work", DEADLINE).await?;
        if !line.contains("outbox-relay adopt") {
            return Err(format!("the refusal does not say what to do: {line}").into());
        }
    }
    if entries(&mut redis).await? != before {
        return Err("something was published from a cluster that nobody had adopted".into());
    }
    let servers = &stage.servers;
    let adopt = Process::builder(relay_binary())
        .arg("adopt")
        .env("DATABASE_URL", servers.postgres.url(&servers.shop))
        .env("REDIS_URL", servers.redis.url())
        .spawn()?;
    let struck = Instant::now();
    succeeds("outbox-relay adopt", &adopt).await?;
    stage.measure_recovery(struck).await
}

async fn dump_shop(stage: &Stage, dump: &Path) -> Result {
    let server = &stage.servers.postgres;
    let process = Process::builder(server.bin_dir().join("pg_dump"))
        .args(["--format=custom", "--file"])
        .arg(dump)
        .arg(server.url(&stage.servers.shop))
        .spawn()?;
    succeeds("pg_dump", &process).await
}

async fn restore_shop(stage: &Stage, dump: &Path, server: &Postgres) -> Result {
    let shop = &stage.servers.shop;
    let admin = server.connect("postgres").await?;
    let create = format!("CREATE DATABASE {shop} TEMPLATE template0");
    admin.batch_execute(&create).await?;
    let process = Process::builder(server.bin_dir().join("pg_restore"))
        .arg("--dbname")
        .arg(server.url(shop))
        .arg(dump)
        .spawn()?;
    succeeds("pg_restore", &process).await
}

async fn succeeds(what: &str, process: &Process) -> Result {
    if process.wait(DEADLINE).await?.success() {
        Ok(())
    } else {
        Err(failed(what, process).into())
    }
}
