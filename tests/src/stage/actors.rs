//! The processes of a run: shops, carriers and consumers, each with the network before it.

use std::sync::atomic::Ordering;

use clap::ValueEnum;
use outbox_testkit::{Postgres, Process, ProcessBuilder};

use super::{Arm, DEADLINE, RELAY_NAME, Stage};
use crate::{Result, link::Link, programs::GROUP};

/// Half of what a thread has: the other half is for an application's handler.
const CONSUMER_STACK_BYTES: &str = "1048576";

/// One process with the network before it.
#[derive(Debug)]
pub struct Actor {
    /// What it is called, in Postgres too; no two of a run have the same name.
    pub name: String,
    /// The process.
    pub process: Process,
    /// Its way to the servers.
    pub link: Link,
}

impl Stage {
    /// Starts one more shop that takes orders until it is stopped.
    ///
    /// # Errors
    ///
    /// The process does not start.
    pub async fn start_shop(&mut self) -> Result {
        let name = self.new_name("shop-");
        let link = Link::to_shop(&self.servers).await?;
        let way = self
            .way()
            .to_possible_value()
            .ok_or("a way without a name")?;
        let process = self
            .program("shop", &link)
            .args(["--way", way.get_name()])
            .arg("--acknowledged")
            .arg(self.acknowledged_file())
            .args(self.setting.shop)
            .spawn()?;
        self.shops.push(Actor {
            name,
            process,
            link,
        });
        Ok(())
    }

    /// Stops all shops after the orders that they are at, as a deployment does.
    ///
    /// # Errors
    ///
    /// One does not stop in time.
    pub async fn stop_shops(&mut self) -> Result {
        for shop in self.shops.drain(..) {
            shop.process.terminate();
            let status = shop.process.wait(DEADLINE).await?;
            if !status.success() {
                return Err(failed("the shop", &shop.process).into());
            }
        }
        Ok(())
    }

    /// Kills all shops with SIGKILL.
    pub fn kill_shops(&mut self) {
        for shop in self.shops.drain(..) {
            shop.process.kill9();
        }
    }

    /// Starts one more relay, or what stands in its place; nothing where the naive shop carries its messages itself.
    ///
    /// # Errors
    ///
    /// The process does not start.
    pub async fn start_carrier(&mut self) -> Result {
        let carrier = self.carrier_on(&self.servers.postgres).await?;
        self.carriers.extend(carrier);
        Ok(())
    }

    /// A relay, or what stands in its place, at a server of its own, as somebody starts it who does not know that the
    /// shop's is another by now. The stage does not count it among its carriers.
    ///
    /// # Errors
    ///
    /// The process does not start.
    pub async fn carrier_on(&self, server: &Postgres) -> Result<Option<Actor>> {
        let name = self.new_name(RELAY_NAME);
        let link = Link::to_shop_on(server, &self.servers).await?;
        let builder = match (self.arm, self.naive.carrier()) {
            (Arm::Control, None) => return Ok(None),
            (Arm::Control, Some([program, flags @ ..])) => self.program(program, &link).args(flags),
            (Arm::Control, Some([])) | (Arm::Outbox, _) => {
                outbox_testkit::relay(link.postgres_url(), link.redis_url())
                    .args(["--name", &name])
                    .args(self.setting.relay)
            }
        };
        let process = builder.spawn()?;
        Ok(Some(Actor {
            name,
            process,
            link,
        }))
    }

    /// Starts one more consumer; nothing where the control has none.
    ///
    /// # Errors
    ///
    /// The process does not start.
    pub async fn start_consumer(&mut self) -> Result {
        let name = self.new_name("consumer-");
        self.start_consumer_as(name).await
    }

    async fn start_consumer_as(&mut self, name: String) -> Result {
        let link = Link::to_warehouse(&self.servers).await?;
        let builder = match (self.arm, self.naive.consumer()) {
            (Arm::Control, None) => return Ok(()),
            (Arm::Control, Some(flags)) => self
                .program("naive-consumer", &link)
                .args(flags)
                .args(self.setting.consumer),
            (Arm::Outbox, _) => match &self.suite.own_consumer {
                Some(own) => Process::builder(&own.program)
                    .env("DATABASE_URL", link.postgres_url())
                    .env("REDIS_URL", link.redis_url()),
                None => self
                    .program("warehouse", &link)
                    .args(self.setting.consumer)
                    .env("RUST_MIN_STACK", CONSUMER_STACK_BYTES),
            },
        };
        let process = builder
            .env("CONSUMER_GROUP", GROUP)
            .env("CONSUMER_NAME", &name)
            .spawn()?;
        self.consumers.push(Actor {
            name,
            process,
            link,
        });
        Ok(())
    }

    /// Kills a relay, or what stands in its place, with SIGKILL, and starts another.
    ///
    /// # Errors
    ///
    /// The process does not start.
    pub async fn replace_carrier(&mut self, index: usize) -> Result {
        self.carriers.remove(index).process.kill9();
        self.start_carrier().await
    }

    /// Kills a consumer with SIGKILL and starts it again: under its name, as a supervisor does.
    ///
    /// # Errors
    ///
    /// The process does not start.
    pub async fn replace_consumer(&mut self, index: usize) -> Result {
        let dead = self.consumers.remove(index);
        dead.process.kill9();
        self.start_consumer_as(dead.name).await
    }

    /// The network before every process.
    pub fn links(&self) -> impl Iterator<Item = &Link> {
        let actors = self.shops.iter().chain(&self.carriers);
        actors.chain(&self.consumers).map(|actor| &actor.link)
    }

    /// The last lines of every process that runs, for a run that fails.
    pub(crate) fn last_words(&self) -> String {
        let actors = self.shops.iter().chain(&self.carriers);
        let words = actors.chain(&self.consumers).map(|actor| {
            let Actor { name, process, .. } = actor;
            format!("{name}:\n{}", last_lines(process))
        });
        words.collect::<Vec<_>>().join("\n")
    }

    fn new_name(&self, prefix: &str) -> String {
        let started = self.started.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}{}", started + 1)
    }

    /// A program of this package, with its servers.
    pub(crate) fn program(&self, name: &str, link: &Link) -> ProcessBuilder {
        Process::builder(&self.suite.programs)
            .args(["program", name])
            .env("DATABASE_URL", link.postgres_url())
            .env("REDIS_URL", link.redis_url())
    }
}

/// Says how a process ended, with its last lines.
pub(crate) fn failed(what: &str, process: &Process) -> String {
    let last = last_lines(process);
    format!("{what} ended with {:?}:\n{last}", process.exit_status())
}

fn last_lines(process: &Process) -> String {
    let lines = process.lines();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
