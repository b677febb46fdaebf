//! The progress line: what runs now, on standard error.

use std::{io::IsTerminal, time::Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Where progress goes.
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    started: Instant,
}

impl Progress {
    /// For a number of measures.
    pub(crate) fn new(measures: usize) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style =
                ProgressStyle::with_template("{elapsed_precise} [{bar:14}] {pos}/{len} {msg}")
                    .expect("the template is constant")
                    .progress_chars("=> ");
            ProgressBar::new(measures as u64).with_style(style)
        });
        Self {
            bar,
            started: Instant::now(),
        }
    }

    /// Says what runs now.
    pub(crate) fn step(&self, what: impl AsRef<str>) {
        match &self.bar {
            Some(bar) => bar.set_message(what.as_ref().to_owned()),
            None => eprintln!(
                "{:>6.1} s  {}",
                self.started.elapsed().as_secs_f64(),
                what.as_ref()
            ),
        }
    }

    /// One measure is done.
    pub(crate) fn done(&self) {
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
    }

    /// Takes the line away.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
