//! How a scenario is run: load, the strike while the load goes on, recovery, evidence, verdict.

use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use outbox_testkit::eventually;

use crate::{
    Error, Result,
    evidence::{Column, Counts, Evidence},
    order::{End, Queue, Way, place},
    scenarios,
    stage::{Arm, DEADLINE, Setting, Stage, Suite},
};

/// No scenario has fewer messages than this, at any scale.
const MESSAGES_MIN: usize = 1_000;

/// The naive code of a control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naive {
    /// The application commits and then enqueues.
    CommitThenEnqueue,
    /// The application enqueues within its transaction and then commits.
    EnqueueThenCommit,
    /// `SELECT … FOR UPDATE SKIP LOCKED`, XADD, `UPDATE sent_at`, COMMIT.
    MarkingLoop,
    /// The same without locking what it reads.
    LoopWithoutLock,
    /// `SELECT … WHERE id > cursor`, XADD and the cursor into Redis in one MULTI.
    CursorLoop,
    /// A consumer that acknowledges what it was given and then applies it.
    AckFirst,
    /// A consumer that applies, commits, and then acknowledges, without an inbox.
    NoInbox,
}

impl Naive {
    /// Whether its carrier remembers a last id instead of marking rows.
    pub(crate) fn keeps_cursor(self) -> bool {
        self == Naive::CursorLoop
    }

    pub(crate) fn way(self) -> Way {
        match self {
            Naive::CommitThenEnqueue => Way::CommitThenEnqueue,
            Naive::EnqueueThenCommit => Way::EnqueueThenCommit,
            Naive::MarkingLoop | Naive::LoopWithoutLock | Naive::CursorLoop => Way::Plain,
            Naive::AckFirst | Naive::NoInbox => Way::Outbox,
        }
    }

    /// The program that stands in the relay's place with its flags. Empty: the relay itself. `None`: nothing.
    pub(crate) fn carrier(self) -> Option<&'static [&'static str]> {
        match self {
            Naive::CommitThenEnqueue | Naive::EnqueueThenCommit => None,
            Naive::MarkingLoop => Some(&["marking-loop"]),
            Naive::LoopWithoutLock => Some(&["marking-loop", "--without-lock"]),
            Naive::CursorLoop => Some(&["cursor-loop"]),
            Naive::AckFirst | Naive::NoInbox => Some(&[]),
        }
    }

    /// The flags of the naive consumer; `None` where effects are not what the control is about.
    pub(crate) fn consumer(self) -> Option<&'static [&'static str]> {
        match self {
            Naive::AckFirst => Some(&["--ack-first"]),
            Naive::NoInbox => Some(&[]),
            _ => None,
        }
    }

    /// What the report calls it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Naive::CommitThenEnqueue => "commit, then enqueue",
            Naive::EnqueueThenCommit => "enqueue, then commit",
            Naive::MarkingLoop => "SKIP LOCKED loop",
            Naive::LoopWithoutLock => "two loops without a lock",
            Naive::CursorLoop => "`id >` cursor in Redis",
            Naive::AckFirst => "XACK before the effect",
            Naive::NoInbox => "no inbox",
        }
    }
}

/// A fault that does naive code no harm in so many strikes shows nothing.
const CONTROL_TRIES: usize = 4;

/// After this another order is placed: naive code may lose the first one.
const PROBE_DEADLINE: Duration = Duration::from_secs(3);

/// What a control has to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shows {
    /// More than 0 in this column, else the scenario tests nothing.
    Harm(Column),
    /// This kind of fault is survived by the naive code, too; another variant of the scenario shows what is not.
    Nothing,
    /// There is no control.
    NoControl,
}

/// Which facts Postgres itself may forget in a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forgets {
    /// None.
    Nothing,
    /// Commits with `synchronous_commit = off` that were not flushed. None of them may have been published.
    Unflushed,
    /// What a fall-back to an earlier state takes with it. No relay can take back what it published of that before.
    Published,
}

/// How large the runs are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// For `make test`.
    Short,
    /// For `make failures`.
    Full,
}

impl Scale {
    /// One of two numbers.
    #[must_use]
    pub fn pick<T>(self, short: T, full: T) -> T {
        match self {
            Scale::Short => short,
            Scale::Full => full,
        }
    }

    /// Orders that are acknowledged before the strike, and again after it.
    fn orders(self) -> usize {
        self.pick(550, 3_000)
    }
}

/// One kind of fault.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// The family of faults, 1 to 9.
    pub family: u8,
    /// What happens, in a few words.
    pub name: &'static str,
    /// What the outbox is compared with.
    pub naive: Naive,
    /// What that has to show.
    pub shows: Shows,
    /// What Postgres itself may forget.
    pub forgets: Forgets,
    /// How servers and processes are set up.
    pub setting: Setting,
    /// How many relays, or naive programs in their place, there are.
    pub carriers: usize,
    /// How many consumers there are.
    pub consumers: usize,
    /// Whether the soak may strike with it again and again, on servers with default settings.
    pub repeatable: bool,
    /// The fault, from the first blow until it is over. The load goes on meanwhile.
    pub strike: Strike,
}

/// The fault of a scenario. It returns an error only if the fault itself could not be made.
pub type Strike = for<'a> fn(&'a mut Stage) -> BoxFuture<'a, Result>;

/// What came of one scenario.
#[derive(Debug)]
pub struct Outcome {
    /// Which.
    pub scenario: Scenario,
    /// What the naive code left, where there is a control.
    pub control: Option<Result<Counts>>,
    /// What the outbox left.
    pub outbox: Result<Counts>,
}

impl Outcome {
    /// Everything that is not as it has to be, in words; empty when the scenario has passed.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        match &self.outbox {
            Ok(counts) => problems.extend(self.problems_of_outbox(counts)),
            Err(e) => problems.push(format!("outbox: {}", with_causes(e))),
        }
        match (&self.control, self.scenario.shows) {
            (Some(Ok(counts)), Shows::Harm(column)) if counts.get(column).unwrap_or(0) == 0 => {
                problems.push(format!(
                    "control: nothing {column}, so the scenario tests nothing"
                ));
            }
            (Some(Err(e)), _) => problems.push(format!("control: {}", with_causes(e))),
            (Some(Ok(_)) | None, _) => {}
        }
        problems
    }

    fn problems_of_outbox(&self, counts: &Counts) -> Vec<String> {
        let mut problems = Vec::new();
        for column in Column::ALL {
            let allowed =
                column == Column::LostByPostgres && self.scenario.forgets != Forgets::Nothing;
            match counts.get(column) {
                Some(0) => {}
                Some(_) if allowed => {}
                Some(count) => problems.push(format!("outbox: {count} {column}")),
                None => problems.push(format!("outbox: {column} was not counted")),
            }
        }
        if counts.messages < MESSAGES_MIN {
            problems.push(format!("only {} messages", counts.messages));
        }
        if counts.recovery.is_none() {
            problems.push("outbox: no message came through after the fault".to_owned());
        }
        problems
    }
}

/// An error and what caused it: Postgres says what is wrong only in the cause.
fn with_causes(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

impl Scenario {
    /// What most scenarios have in common.
    pub(crate) const fn new(
        family: u8,
        name: &'static str,
        naive: Naive,
        shows: Shows,
        strike: Strike,
    ) -> Self {
        Self {
            family,
            name,
            naive,
            shows,
            forgets: Forgets::Nothing,
            setting: Setting::USUAL,
            carriers: 1,
            consumers: 1,
            repeatable: false,
            strike,
        }
    }

    /// The same where Postgres may forget.
    pub(crate) const fn forgets(mut self, forgets: Forgets) -> Self {
        self.forgets = forgets;
        self
    }

    /// The same with other servers or arguments.
    pub(crate) const fn setting(mut self, setting: Setting) -> Self {
        self.setting = setting;
        self
    }

    /// The same with this many relays.
    pub(crate) const fn carriers(mut self, carriers: usize) -> Self {
        self.carriers = carriers;
        self
    }

    /// The same with this many consumers.
    pub(crate) const fn consumers(mut self, consumers: usize) -> Self {
        self.consumers = consumers;
        self
    }

    /// The same as one of the faults of the soak.
    pub(crate) const fn repeatable(mut self) -> Self {
        self.repeatable = true;
        self
    }

    /// Its number and name.
    #[must_use]
    pub fn title(&self) -> String {
        format!("{}. {}", self.family, self.name)
    }

    /// Runs its arms, one after the other.
    pub async fn run(self, suite: &Suite) -> Outcome {
        Outcome {
            scenario: self,
            control: match self.shows {
                Shows::NoControl => None,
                Shows::Harm(_) | Shows::Nothing if !self.has_control_at(suite.scale) => None,
                Shows::Harm(column) => Some(self.run_control(column, suite).await),
                Shows::Nothing => Some(self.run_arm(Arm::Control, suite).await),
            },
            outbox: self.run_arm(Arm::Outbox, suite).await,
        }
    }

    /// The short form strikes each kind of naive code once in each family, and not where that survives the fault.
    fn has_control_at(self, scale: Scale) -> bool {
        let kind = |scenario: &Scenario| (scenario.family, scenario.naive, scenario.shows);
        let first = scenarios::all()
            .into_iter()
            .find(|other| kind(other) == kind(&self));
        scale == Scale::Full
            || self.shows != Shows::Nothing && first.is_some_and(|first| first.name == self.name)
    }

    /// Strikes the naive code until that does harm: some faults must meet it in the middle of something.
    async fn run_control(self, column: Column, suite: &Suite) -> Result<Counts> {
        for _ in 1..CONTROL_TRIES {
            let counts = self.run_arm(Arm::Control, suite).await?;
            if counts.get(column).unwrap_or(0) > 0 {
                return Ok(counts);
            }
        }
        self.run_arm(Arm::Control, suite).await
    }

    async fn run_arm(self, arm: Arm, suite: &Suite) -> Result<Counts> {
        let mut stage = Stage::open(arm, self.naive, self.setting, suite.clone()).await?;
        for _ in 0..self.carriers {
            stage.start_carrier().await?;
        }
        for _ in 0..self.consumers {
            stage.start_consumer().await?;
        }
        stage.start_shop().await?;
        let orders = suite.scale.orders();
        stage.orders_acknowledged(orders).await?;

        (self.strike)(&mut stage).await?;
        let struck = stage.struck.unwrap_or_else(Instant::now);
        let recovery = match stage.recovery {
            Some(recovery) => Some(recovery),
            None => stage.recovered(struck).await?,
        };

        if stage.shops.is_empty() {
            stage.start_shop().await?;
        }
        stage.orders_acknowledged(orders).await?;
        stage.stop_shops().await?;
        let evidence = Evidence::after_settling(&stage).await?;
        // What was published and then forgotten by Postgres is an entry without a message, for `verify` too.
        if arm == Arm::Outbox && self.forgets != Forgets::Published {
            stage.verified().await?;
        }
        let mut counts = evidence.counts(self.forgets == Forgets::Published);
        counts.recovery = recovery;
        counts.notes = std::mem::take(&mut stage.notes);
        Ok(counts)
    }
}

impl Stage {
    /// The time from the blow until a message that was written after the fault stands in the stream; `None` if none came
    /// through in time, or where the naive application carries its messages itself and has nothing that could recover.
    pub(crate) async fn recovered(&self, struck: Instant) -> Result<Option<Duration>> {
        let way = self.way();
        if matches!(way, Way::CommitThenEnqueue | Way::EnqueueThenCommit) {
            return Ok(None);
        }
        let mut follower = self.follow().await?;
        let started = Instant::now();
        while started.elapsed() < self.arm.patience() {
            let key = eventually(DEADLINE, "an order after the fault", || async {
                let mut client = self.shop_client().await.map_err(|e| e.to_string())?;
                place(&mut client, &mut Queue::new(""), way, "probe", End::Commit)
                    .await
                    .map_err(|e| e.to_string())
            })
            .await?;
            if follower.arrives(&key, PROBE_DEADLINE).await? {
                return Ok(Some(struck.elapsed()));
            }
        }
        Ok(None)
    }

    /// Measures the time to recover in the middle of a strike that goes on, in the place of what is measured after it.
    pub(crate) async fn measure_recovery(&mut self, struck: Instant) -> Result {
        self.recovery = self.recovered(struck).await?;
        Ok(())
    }
}
