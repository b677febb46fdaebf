//! The loop of one member of a group: read, settle, again.

use std::{rc::Rc, sync::Arc, time::Duration};

use redis::Script;
use tokio::time::timeout;
use tracing::{debug, info};

use crate::{
    Error,
    backoff::Backoff,
    builder::Settings,
    decision::{Decision, Fault},
    handler::Apply,
    link::Link,
    message::Source,
    patience::{Halt, Patience},
    queries,
    reader::{Reader, milliseconds},
    trouble::Trouble,
    upkeep::Upkeep,
    worker::Worker,
};

/// How long leaving the group may take, after the grace period.
const LEAVE_MAX: Duration = Duration::from_secs(1);

/// One member of a consumer group, at work.
pub(crate) struct Member<A> {
    group: String,
    name: String,
    sources: Vec<Arc<Source>>,
    claim_after: Duration,
    patience: Patience,
    reader: Reader,
    /// The connection for everything that does not block.
    control: Link,
    worker: Rc<Worker<A>>,
    /// Taken when the work begins.
    upkeep: Option<Upkeep>,
}

impl<A: Apply> Member<A> {
    pub(crate) fn new(settings: Settings, handler: A, patience: Patience) -> Self {
        let timeout = settings.response_timeout;
        Self {
            reader: Reader::new(&settings, patience.counters.clone()),
            control: Link::new(settings.redis.clone(), timeout, timeout),
            worker: Rc::new(Worker::new(&settings, handler, patience.clone())),
            upkeep: Some(Upkeep::new(&settings, patience.clone())),
            group: settings.group,
            name: settings.name,
            sources: settings.sources,
            claim_after: settings.claim_after,
            patience,
        }
    }

    /// Works until the stop signal, which is `Ok`, or until it cannot go on.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point: an open transaction is rolled back, and what was not acknowledged
    /// stays pending.
    pub(crate) async fn work(&mut self) -> Result<(), Error> {
        match self.work_until_halt().await {
            Halt::Stopped => Ok(()),
            Halt::Fatal(error) => Err(error),
        }
    }

    /// The batches, and beside them what has waited in the table of dead letters, and the upkeep. Each finishes what
    /// it is at after the stop signal; if one cannot go on, that stops the others.
    async fn work_until_halt(&mut self) -> Halt {
        if let Err(halt) = self.start().await {
            return halt;
        }
        let Some(mut upkeep) = self.upkeep.take() else {
            return Halt::Stopped;
        };
        if let Err(halt) = upkeep.begin().await {
            return halt;
        }
        let worker = Rc::clone(&self.worker);
        let patience = self.patience.clone();
        let topics: Vec<String> = self
            .sources
            .iter()
            .map(|source| source.topic.clone())
            .collect();
        let claim_after = self.claim_after;
        let (batches, letters, upkeep) = tokio::join!(
            patience.stopping_all(async {
                match self.settle_until_halt().await {
                    Ok(()) => Halt::Stopped,
                    Err(halt) => halt,
                }
            }),
            patience.stopping_all(worker.redeliver(&topics, claim_after)),
            patience.stopping_all(upkeep.go_on()),
        );
        let fatal = [batches, letters, upkeep]
            .into_iter()
            .find(|halt| matches!(halt, Halt::Fatal(_)));
        fatal.unwrap_or(Halt::Stopped)
    }

    async fn settle_until_halt(&mut self) -> Result<(), Halt> {
        info!(group = self.group, member = self.name, "consumer started");
        let mut backoff = self.patience.backoff();
        let mut group_remade = false;
        loop {
            self.patience.go_on()?;
            match self
                .reader
                .next(&mut self.control, &self.patience.stop)
                .await
            {
                Ok(batch) => {
                    self.patience.over("read", &mut backoff);
                    group_remade = false;
                    if let Some(batch) = batch {
                        self.worker.settle(batch, &mut self.control).await?;
                    }
                }
                // A new group, or a stream that went away: no wait, unless that has just been tried.
                Err(trouble) if trouble.decision() == Decision::RemakeGroup && !group_remade => {
                    group_remade = self.make_groups(&mut backoff).await?;
                }
                Err(trouble) => {
                    group_remade = false;
                    self.patience.wait("read", &mut backoff, &trouble).await?;
                }
            }
        }
    }

    /// Waits until both servers are there. What a person must repair ends the start.
    async fn start(&mut self) -> Result<(), Halt> {
        let mut backoff = self.patience.backoff();
        loop {
            match self.worker.inbox().check().await {
                Ok(usable) => break usable.map_err(Halt::Fatal)?,
                Err(trouble) => {
                    self.wait_to_start("Postgres", &mut backoff, &trouble)
                        .await?
                }
            }
        }
        backoff.reset();
        loop {
            match self.control.query(&redis::cmd("PING")).await {
                Ok(_) => return Ok(()),
                Err(trouble) => self.wait_to_start("Redis", &mut backoff, &trouble).await?,
            }
        }
    }

    async fn wait_to_start(
        &self,
        server: &'static str,
        backoff: &mut Backoff,
        trouble: &Trouble,
    ) -> Result<(), Halt> {
        if trouble.fault == Fault::SchemaMissing || trouble.decision() == Decision::Misconfigured {
            return Err(Halt::Fatal(Error::Refused {
                server,
                reason: trouble.text.clone(),
            }));
        }
        self.patience.wait("start", backoff, trouble).await
    }

    /// Makes each group that is missing, from the start of its stream: a group made at the end would never
    /// see what was published before, or what the relay publishes again after a loss. Returns whether it
    /// could; if not, it has waited.
    async fn make_groups(&mut self, backoff: &mut Backoff) -> Result<bool, Halt> {
        for source in &self.sources {
            let mut command = redis::cmd("XGROUP");
            command
                .arg("CREATE")
                .arg(&source.stream)
                .arg(&self.group)
                .arg("0")
                .arg("MKSTREAM");
            match self.control.query(&command).await {
                Ok(_) => info!(
                    group = self.group,
                    stream = source.stream,
                    "group made from the start of the stream"
                ),
                Err(trouble) if trouble.fault == Fault::GroupExists => {}
                Err(trouble) => {
                    self.patience
                        .wait("make the group", backoff, &trouble)
                        .await?;
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Leaves the group after the stop: our name goes if it holds nothing, and what it holds becomes
    /// claimable at once. Without Redis, both is left to the others.
    pub(crate) async fn leave(&mut self) {
        let script = Script::new(queries::LEAVE_GROUP);
        let idle = milliseconds(self.claim_after).to_string();
        let left = timeout(LEAVE_MAX, async {
            for source in &self.sources {
                let arguments = [self.group.as_str(), self.name.as_str(), idle.as_str()];
                match self.control.run_script(&script, &source.stream, &arguments).await {
                    Ok(held) => debug!(stream = source.stream, held, "left the group"),
                    Err(trouble) => debug!(stream = source.stream, error = %trouble, "could not leave the group"),
                }
            }
        })
        .await;
        info!(
            group = self.group,
            member = self.name,
            in_time = left.is_ok(),
            "consumer stopped"
        );
    }
}
