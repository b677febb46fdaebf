//! What is shown while it runs: bars on a terminal, plain lines elsewhere.

use std::{
    fmt,
    io::{self, IsTerminal, Write},
    time::{Duration, Instant},
};

use indicatif::{MultiProgress, ProgressBar, ProgressState, ProgressStyle};

/// How often the numbers are looked at.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// How often a plain line is written.
const LINE_INTERVAL: Duration = Duration::from_secs(1);

const BAR: &str = "{prefix:>8} [{bar:40.cyan/blue}] {pos:>7}/{len} {rate:>7} {msg}";

/// The numbers at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Numbers {
    /// Orders that were committed.
    pub(crate) placed: u64,
    /// Entries in Redis now; none while it is down.
    pub(crate) in_redis: Option<u64>,
    /// Orders that were shipped.
    pub(crate) shipped: u64,
    /// Repeats that the inbox kept from being shipped again.
    pub(crate) absorbed: u64,
}

/// Where progress and narration go.
pub(crate) struct Progress {
    orders: u64,
    bars: Option<Bars>,
}

struct Bars {
    all: MultiProgress,
    placed: ProgressBar,
    shipped: ProgressBar,
}

/// State of the plain lines.
pub(crate) struct Ticker {
    started: Instant,
    last_line: Instant,
    last: Numbers,
}

impl Progress {
    /// For `orders` orders. Nothing is shown before the first [`show`](Self::show).
    pub(crate) fn new(orders: u64) -> Self {
        let terminal = io::stdout().is_terminal() && io::stderr().is_terminal();
        Self {
            orders,
            bars: terminal.then(|| Bars::new(orders)),
        }
    }

    /// A line of narration, on standard output.
    pub(crate) fn say(&self, line: &str) {
        let write = || {
            // A reader that went away does not stop the story.
            let _ = writeln!(io::stdout(), "{line}");
        };
        match &self.bars {
            Some(bars) => bars.all.suspend(write),
            None => write(),
        }
    }

    /// The clock of the plain lines.
    pub(crate) fn ticker(&self) -> Ticker {
        let now = Instant::now();
        Ticker {
            started: now,
            last_line: now,
            last: Numbers::default(),
        }
    }

    /// Shows the numbers: in the bars, or as a line about once a second.
    pub(crate) fn show(&self, ticker: &mut Ticker, now: Numbers) {
        match &self.bars {
            Some(bars) => bars.show(now),
            None if ticker.last_line.elapsed() >= LINE_INTERVAL => {
                self.say(&ticker.line(now, self.orders));
            }
            None => {}
        }
    }

    /// Takes the bars away and shows no more, so that what is said afterwards stays last.
    pub(crate) fn finish(&self) {
        if let Some(bars) = &self.bars {
            bars.placed.finish_and_clear();
            bars.shipped.finish_and_clear();
        }
    }
}

impl Bars {
    fn new(orders: u64) -> Self {
        let all = MultiProgress::new();
        let style = ProgressStyle::with_template(BAR)
            .expect("the template is constant")
            .with_key("rate", |state: &ProgressState, out: &mut dyn fmt::Write| {
                // A rate that cannot be written is not shown.
                let _ = write!(out, "{:.0}/s", state.per_sec());
            })
            .progress_chars("=> ");
        let bar = |name: &'static str| {
            all.add(ProgressBar::new(orders))
                .with_style(style.clone())
                .with_prefix(name)
        };
        let (placed, shipped) = (bar("placed"), bar("shipped"));
        Self {
            all,
            placed,
            shipped,
        }
    }

    fn show(&self, now: Numbers) {
        self.placed.set_position(now.placed);
        self.placed
            .set_message(format!("in Redis: {}", in_redis(now)));
        self.shipped.set_position(now.shipped);
        self.shipped
            .set_message(format!("repeats absorbed: {}", now.absorbed));
    }
}

impl Ticker {
    fn line(&mut self, now: Numbers, orders: u64) -> String {
        let seconds = self.last_line.elapsed().as_secs_f64();
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        let line = format!(
            "{:>5.1} s  placed {}/{orders} ({:.0}/s)  in Redis {}  shipped {}/{orders} ({:.0}/s)  repeats absorbed {}",
            self.started.elapsed().as_secs_f64(),
            now.placed,
            rate(now.placed, self.last.placed),
            in_redis(now),
            now.shipped,
            rate(now.shipped, self.last.shipped),
            now.absorbed,
        );
        self.last_line = Instant::now();
        self.last = now;
        line
    }
}

fn in_redis(now: Numbers) -> String {
    now.in_redis.map_or("-".to_owned(), |n| n.to_string())
}
