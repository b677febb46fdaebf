//! Waiting out an outage, and what ends a wait.

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::{
    Error,
    backoff::{Backoff, Pace},
    counters::Counters,
    decision::Decision,
    trouble::Trouble,
};

/// Why work ends before it is done.
#[derive(Debug)]
pub(crate) enum Halt {
    /// The stop signal came; what is unfinished stays pending.
    Stopped,
    /// The stream of this work is another member's now; what is unfinished is pending and found there.
    LeaseLost,
    /// The consumer cannot go on.
    Fatal(Error),
}

/// How this consumer waits.
#[derive(Clone)]
pub(crate) struct Patience {
    pub(crate) pace: Pace,
    pub(crate) stop: CancellationToken,
    pub(crate) counters: Counters,
}

impl Patience {
    pub(crate) fn backoff(&self) -> Backoff {
        Backoff::new(self.pace)
    }

    /// Does something of this crate until it succeeds, waiting between tries, or until the stop signal.
    pub(crate) async fn insist<T>(
        &self,
        doing: &'static str,
        mut operation: impl AsyncFnMut() -> Result<T, Trouble>,
    ) -> Result<T, Halt> {
        let mut backoff = self.backoff();
        loop {
            match operation().await {
                Ok(value) => {
                    self.over(doing, &mut backoff);
                    return Ok(value);
                }
                Err(trouble) => self.wait(doing, &mut backoff, &trouble).await?,
            }
        }
    }

    /// The next wait of an outage.
    pub(crate) async fn wait(
        &self,
        doing: &'static str,
        backoff: &mut Backoff,
        trouble: &Trouble,
    ) -> Result<(), Halt> {
        let wait = self.note(doing, backoff, trouble)?;
        self.pause(wait).await
    }

    /// Counts and logs one try of an outage, and returns how long to wait. Of a long outage only tries 1,
    /// 2, 4, 8 and so on are logged.
    pub(crate) fn note(
        &self,
        doing: &'static str,
        backoff: &mut Backoff,
        trouble: &Trouble,
    ) -> Result<Duration, Halt> {
        if trouble.decision() == Decision::Yield {
            return Err(Halt::LeaseLost);
        }
        self.counters.add_outage();
        let wait = backoff.next_wait();
        let tries = backoff.tries();
        match trouble.decision() {
            Decision::End => return Err(Halt::Fatal(Error::PoolClosed)),
            Decision::Misconfigured if tries.is_power_of_two() => {
                error!(doing, tries, error = %trouble, "refused; trying on");
            }
            Decision::Retry
            | Decision::RemakeGroup
            | Decision::CountAttempt
            | Decision::SetAside
                if tries.is_power_of_two() =>
            {
                warn!(doing, tries, error = %trouble, "outage; trying on");
            }
            Decision::Misconfigured
            | Decision::Retry
            | Decision::RemakeGroup
            | Decision::Yield
            | Decision::CountAttempt
            | Decision::SetAside => {}
        }
        Ok(wait)
    }

    /// An operation has succeeded.
    pub(crate) fn over(&self, doing: &'static str, backoff: &mut Backoff) {
        if backoff.tries() > 0 {
            info!(doing, tries = backoff.tries(), "outage is over");
            backoff.reset();
        }
    }

    /// Sleeps, unless the stop signal comes.
    pub(crate) async fn pause(&self, wait: Duration) -> Result<(), Halt> {
        tokio::select! {
            () = self.stop.cancelled() => Err(Halt::Stopped),
            () = tokio::time::sleep(wait) => Ok(()),
        }
    }

    /// Work beside other work: if it cannot go on, the others stop as at the stop signal.
    pub(crate) async fn stopping_all(&self, work: impl Future<Output = Halt>) -> Halt {
        let halt = work.await;
        if matches!(halt, Halt::Fatal(_)) {
            self.stop.cancel();
        }
        halt
    }

    /// Whether more work may begin.
    pub(crate) fn go_on(&self) -> Result<(), Halt> {
        if self.stop.is_cancelled() {
            Err(Halt::Stopped)
        } else {
            Ok(())
        }
    }
}
