//! One member of a group: its reader, its lanes and its keeper, from the start until it has left.

use std::{rc::Rc, sync::Arc, time::Duration};

use futures_util::{FutureExt as _, future::join_all};
use redis::Script;
use tokio::{runtime::Handle, task::JoinSet, time::timeout};
use tracing::{debug, info};

use crate::{
    Error,
    backoff::Backoff,
    builder::{Order, Settings},
    decision::{Decision, Fault},
    handler::Apply,
    inbox::Inbox,
    keeper::Keeper,
    lane::Lane,
    link::Link,
    patience::{Halt, Patience},
    queries,
    queue::{Bounds, Queue},
    reader::{Reader, milliseconds},
    trouble::Trouble,
    upkeep::Upkeep,
    worker::Worker,
};

/// How long leaving the group may take, after the grace period.
const LEAVE_MAX: Duration = Duration::from_secs(1);

/// One member of a consumer group, at work.
pub(crate) struct Member<A> {
    settings: Settings,
    patience: Patience,
    queue: Queue,
    reader: Reader,
    lanes: Vec<Lane<A>>,
    /// The connection for everything that does not block.
    control: Link,
    inbox: Arc<Inbox>,
    worker: Rc<Worker<A>>,
    /// Taken when the work begins.
    upkeep: Option<Upkeep>,
}

impl<A: Apply> Member<A> {
    pub(crate) fn new(settings: Settings, handler: A, patience: Patience, here: Handle) -> Self {
        let timeout = settings.response_timeout;
        let control = Link::new(
            settings.redis.clone(),
            &settings.stream_prefix,
            timeout,
            timeout,
        );
        let inbox = Arc::new(Inbox::new(&settings));
        let queue = Queue::new(Bounds {
            batch: settings.batch,
            lanes: settings.lanes,
            claim_after: settings.claim_after,
        });
        let worker = Rc::new(Worker::new(
            &settings,
            Arc::clone(&inbox),
            control.clone(),
            queue.clone(),
            handler,
            patience.clone(),
            here,
        ));
        let lane = |_| Lane::new(queue.clone(), Rc::clone(&worker), patience.clone());
        Self {
            reader: Reader::new(&settings, control.clone(), queue.clone(), patience.clone()),
            lanes: (0..settings.lanes).map(lane).collect(),
            upkeep: Some(Upkeep::new(&settings, patience.clone())),
            settings,
            patience,
            queue,
            control,
            inbox,
            worker,
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
            Halt::Stopped | Halt::LeaseLost => Ok(()),
            Halt::Fatal(error) => Err(error),
        }
    }

    /// The reader and the lanes, and beside them what has waited in the table of dead letters, the upkeep and the
    /// keeper. Each finishes what it is at after the stop signal; if one cannot go on, that stops the others.
    ///
    /// Each is boxed: without optimization, every function on the way has copies of a future on the stack, and a handler
    /// needs room there too.
    async fn work_until_halt(&mut self) -> Halt {
        if let Err(halt) = self.start().boxed_local().await {
            return halt;
        }
        let Some(mut upkeep) = self.upkeep.take() else {
            return Halt::Stopped;
        };
        if let Err(halt) = upkeep.begin().boxed_local().await {
            return halt;
        }
        info!(
            group = self.settings.group,
            member = self.settings.name,
            "consumer started"
        );
        // A task of its own, which ends when this future does.
        let mut keeper = JoinSet::new();
        let keep = Keeper::new(
            &self.settings,
            self.queue.clone(),
            self.control.clone(),
            Arc::clone(&self.inbox),
            self.patience.clone(),
        );
        keeper.spawn(keep.keep());
        let patience = &self.patience;
        let topics = &self.settings.topics;
        let lanes = self
            .lanes
            .iter()
            .map(|lane| patience.stopping_all(lane.work().boxed_local()));
        let letters = self.worker.redeliver(topics, self.settings.claim_after);
        let work = async {
            let (reader, lanes, letters, upkeep) = tokio::join!(
                patience.stopping_all(self.reader.read().boxed_local()),
                join_all(lanes),
                patience.stopping_all(letters.boxed_local()),
                patience.stopping_all(upkeep.go_on().boxed_local()),
            );
            let all = lanes.into_iter().chain([reader, letters, upkeep]);
            all.into_iter()
                .find(|halt| matches!(halt, Halt::Fatal(_)))
                .unwrap_or(Halt::Stopped)
        };
        tokio::select! {
            halt = work => halt,
            kept = keeper.join_next() => match kept {
                Some(Ok(halt)) => halt,
                _ => Halt::Fatal(Error::Ended),
            },
        }
    }

    /// Waits until both servers are there. What a person must repair ends the start.
    async fn start(&mut self) -> Result<(), Halt> {
        let mut backoff = self.patience.backoff();
        loop {
            match self.inbox.check().await {
                Ok(usable) => break usable.map_err(Halt::Fatal)?,
                Err(trouble) => {
                    self.wait_to_start("Postgres", &mut backoff, &trouble)
                        .await?
                }
            }
        }
        backoff.reset();
        loop {
            match self.reach_redis().await {
                Ok(()) => break,
                Err(trouble) => self.wait_to_start("Redis", &mut backoff, &trouble).await?,
            }
        }
        backoff.reset();
        if self.settings.order == Order::None {
            return Ok(());
        }
        loop {
            match self.inbox.begin_anew().await {
                Ok(()) => return Ok(()),
                Err(trouble) => {
                    self.wait_to_start("Postgres", &mut backoff, &trouble)
                        .await?
                }
            }
        }
    }

    /// A server that answers, and that has the keys of the outbox in one place.
    async fn reach_redis(&self) -> Result<(), Trouble> {
        self.control.query(&redis::cmd("PING")).await?;
        let prefix = &self.settings.stream_prefix;
        let mut marker = redis::cmd("HMGET");
        marker.arg(format!("{prefix}relay:marker")).arg("version");
        let streams = self.settings.topics.iter().map(|topic| {
            let mut stream = redis::cmd("TYPE");
            stream.arg(format!("{prefix}{topic}"));
            stream
        });
        for probe in [marker].into_iter().chain(streams) {
            match self.control.query(&probe).await {
                Err(trouble) if trouble.fault == Fault::ManySlots => return Err(trouble),
                // What else goes wrong with it goes wrong again, where it is known what it was for.
                _ => {}
            }
        }
        Ok(())
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

    /// Leaves the group after the stop: our leases are free, our name goes if it holds nothing, and what it holds
    /// becomes claimable at once. Where a server is away, its part is left to the others.
    pub(crate) async fn leave(&mut self) {
        let (resigned, left) = tokio::join!(
            timeout(LEAVE_MAX, self.resign()),
            timeout(LEAVE_MAX, self.leave_streams())
        );
        info!(
            group = self.settings.group,
            member = self.settings.name,
            in_time = resigned.is_ok() && left.is_ok(),
            "consumer stopped"
        );
    }

    async fn resign(&self) {
        if self.settings.order == Order::None {
            return;
        }
        if let Err(trouble) = self.inbox.resign().await {
            debug!(error = %trouble, "could not release the leases");
        }
    }

    async fn leave_streams(&self) {
        let script = Script::new(queries::LEAVE_GROUP);
        let (group, name) = (&self.settings.group, &self.settings.name);
        let idle = milliseconds(self.settings.claim_after).to_string();
        for source in self.queue.sources() {
            let arguments = [group, name, &idle].map(String::as_str);
            match self
                .control
                .run_script(&script, &source.stream, &arguments)
                .await
            {
                Ok(held) => debug!(stream = source.stream, held, "left the group"),
                Err(trouble) => {
                    debug!(stream = source.stream, error = %trouble, "could not leave the group")
                }
            }
        }
    }
}
